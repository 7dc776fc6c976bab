"""Write the HTML page of a run directory, a comparison, or a check of data."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from datetime import date
from importlib.resources import files as resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

import emdcfl
from emdcfl.clustering.pairs import SIGNS
from emdcfl.core.errors import StoreError
from emdcfl.core.metric import Metric, score_of
from emdcfl.core.units import byte_count, percent, plural, quantity, seconds
from emdcfl.data.own.checking.check import FolderReport
from emdcfl.data.own.checking.page import data_page
from emdcfl.paper.merging import merging_line
from emdcfl.report import charts
from emdcfl.report.card import CARD, card
from emdcfl.report.comparison import comparison_context
from emdcfl.report.load_run import Run, read_run
from emdcfl.report.splits import read_splits, split_rows, split_tree
from emdcfl.report.svg import number, shape_path, visible
from emdcfl.runs.new_sites.unseen import UNSEEN, unseen_sentence
from emdcfl.runs.outputs import picture_name
from emdcfl.runs.personal import in_words
from emdcfl.runs.runner import PHASES
from emdcfl.runs.scoring import rests_on
from emdcfl.runs.store.files import write_file
from emdcfl.runs.verdict.advice import BASELINES, scores_of_sites, used, worth_rows
from emdcfl.runs.verdict.findings import in_brief, sentences
from emdcfl.runs.verdict.intervals import row_interval
from emdcfl.runs.verdict.structure import headline
from emdcfl.runs.verdict.trained_with import untrained
from emdcfl.runs.verdict.what_differs import difference_in_words, nothing_differs
from emdcfl.studies.results import RESULTS

NAME = "report.html"
MAX_SAID = 3
"""Sentences of one topic in the verdict, where the rest stands elsewhere."""
ELSEWHERE = {"What differs": "below", "Trained with": "in summary.json"}
MAX_SENTENCE = 400
"""Characters of a sentence on the page."""
LISTED = 1000
"""Most clients in the table by client, and half as many rows in other lists: a page is to stay below 2 MB."""
ACROSS = 12
"""Sites beside each other in a table of columns."""
PHASE_NAMES = {
    "train": "training",
    "embed": "embedding",
    "transport": "distances",
    "evaluate": "testing",
    "decide": "deciding",
    "personalize": "fine-tuning",
}
"""Phases of a run in words."""
MAX_PICTURE, PNG = 1 << 20, b"\x89PNG\r\n\x1a\n"


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Write the page of a run directory or comparison folder and return its path (``report.html`` inside unless ``out`` says otherwise).

    A run directory also gets its model card, ``README.md``.
    """
    found = run_context(read_run(folder)) if (folder / "summary.json").is_file() else None
    text = render(folder) if found is None else render_template("run.html", found)
    place = folder / NAME if out is None else out / NAME if out.is_dir() else out
    if not place.parent.is_dir():
        raise StoreError(f"{place}: the folder {place.parent} does not exist; make it first, or choose another --out")
    write_file(place, [text.encode("utf-8", "replace")])
    if found is not None and out is None:
        write_file(folder / CARD, [card(folder, found).encode("utf-8", "replace")])
    return place


def write_data_page(report: FolderReport, out: Path) -> None:
    """Write the page of ``emdcfl data check``, which stands alone and prints."""
    if not out.parent.is_dir():
        raise StoreError(f"{out}: the folder {out.parent} does not exist; make it first, or choose another --html")
    page = data_page(report, across=ACROSS)
    text = render_template("data.html", {"title": page.title, "page": page, "today": date.today().isoformat()})
    write_file(out, [text.encode("utf-8", "replace")])


def render(folder: Path) -> str:
    """Return the page of a run directory (has ``summary.json``) or of a comparison (has ``results.jsonl``)."""
    if not folder.is_dir():
        raise StoreError(f"{folder}: no such folder; give one that 'emdcfl run --out' or 'emdcfl compare --out' wrote")
    if (folder / RESULTS).is_file() and not (folder / "summary.json").is_file():
        return render_template("comparison.html", comparison_context(folder))
    return render_template("run.html", run_context(read_run(folder)))


def render_template(template: str, context: dict[str, Any]) -> str:
    environment = Environment(
        loader=PackageLoader("emdcfl.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"percent": percent, "number": number, "quantity": quantity}
    environment.filters |= {"visible": visible, "keep_options": keep_options, "seconds": seconds, "bytes": byte_count}
    environment.globals |= {"plural": plural, "shape_path": shape_path, "baseline_names": BASELINES}
    folder = resources("emdcfl.report") / "templates"
    style, script = (Markup((folder / name).read_text(encoding="utf-8")) for name in ("style.css", "report.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )
    page = {"style": style, "script": script, "policy": policy, "version": emdcfl.__version__}
    return environment.get_template(template).render(**page, **context) + "\n"


def keep_options(text: str) -> Markup:
    """Return text in which an option of a command stays on one line.

    Examples
    --------
    >>> keep_options("try <more>: --rounds 4")
    Markup('try &lt;more&gt;: <span class="option">--rounds 4</span>')
    """
    return Markup(re.sub(r"--[a-z][a-z-]*(?: [0-9]+)?", r'<span class="option">\g<0></span>', str(escape(text))))


def script_json(value: Any) -> Markup:
    """Return JSON that cannot end the script element around it."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def run_context(run: Run) -> dict[str, Any]:
    s, splits, others = run.summary, read_splits(run), run.others
    drawn: dict[str, Any] = {"map": None, "histogram": None, "rows": None, "heat": None}
    if run.pairs is not None and len(run.pairs.uncompared()) < len(run.clients):
        drawn["map"], drawn["share"] = charts.client_map(run)
        if (run.reading or {}).get("splits") is None:  # links decided
            drawn["histogram"] = charts.pair_histogram(run)
            drawn["rows"], drawn["tight"] = charts.margin_rows(run)
        drawn["heat"] = script_json(charts.heat_data(run))
    return {
        "title": f"{s['method']} on {s['scenario']}",
        "run": run,
        "summary": s,
        "metric": run.metric,
        "numbers": run.metric is Metric.R2,
        "headline": visible(headline(s, run.reading, others), MAX_SENTENCE),
        "brief": [(topic, visible(said, MAX_SENTENCE)) for topic, said in in_brief(s, run.reading, others)[1:]],
        "differs": _differs(run),
        "nothing_differs": nothing_differs(run.metric),
        "sentences": _sentences(run),
        "facts": _facts(run),
        "drawn": drawn,
        "rounds": [(v, drawing) for v in run.variants if (drawing := charts.round_lines(run, v)) is not None],
        "clusters": list(_clusters(run)),
        "splits": split_rows(splits),
        "tree": split_tree(run, splits) if splits else [],
        "table": list(_table(run)),
        "worth": [{"what": what, "score": score, "gain": gain} for what, score, gain in worth_rows(s, others)] if others else [],
        "gains": charts.gain_rows(run),
        "unseen": _unseen(s),
        "cost": _cost(s, others),
        "failures": list(s.get("failures") or []),
        "quarantined": list(s.get("quarantined") or []),
        "flags": list(s.get("flags") or []),
        "notes": [*filter(None, [merging_line(run.path)]), *(str(n) for n in s.get("notes") or [])],
        "most": LISTED // 2,
        "config": {t: v for t, v in run.config.items() if isinstance(v, dict)},
        "pairs": None if run.pairs is None else run.pairs.count(),
    }


def _differs(run: Run) -> list[dict[str, Any]]:
    """Return what sets each group apart, with a picture of its mean image where the run left one."""
    shown = []
    try:
        for i, one in enumerate(run.summary.get("what_differs") or []):
            k = int(one["who"].removeprefix("cluster ")) if one["who"].startswith("cluster ") and len(run.colours) > 1 else None
            rows = [(difference_in_words(found), charts.two_values(found)) for found in one["found"]]
            colour = run.colours.get(k, "kx") if k is not None else "kx"
            shown.append({"who": one["who"], "members": one["members"], "colour": colour, "rows": rows, "picture": _picture(run, i)})
    except (KeyError, TypeError, ValueError, AttributeError):
        return []  # not what a run writes
    return shown


def _picture(run: Run, number: int) -> str | None:
    path = run.path / picture_name(number)
    if not path.is_file() or path.stat().st_size > MAX_PICTURE:
        return None
    data = path.read_bytes()
    return f"data:image/png;base64,{base64.b64encode(data).decode()}" if data.startswith(PNG) else None


def _unseen(summary: dict[str, Any]) -> dict[str, Any] | None:
    """Return the table of sites that were held out; None where there are none, or the file does not hold what it should."""
    try:
        sites = summary["unseen"]["sites"]
        rows = [(str(one["site"]), one["cluster"], [score_of(one)[key] for key in UNSEEN]) for one in sites]
        return {"heads": list(UNSEEN.values()), "rows": rows, "sentence": unseen_sentence(summary["unseen"])} if rows else None
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _sentences(run: Run) -> list[tuple[str, str]]:
    """The run's findings by topic, and how many clients gained over training alone, with the models that they should use."""
    found = sentences(run.summary, run.reading, run.others)
    if (alone := run.baselines.get("local")) is not None:
        own, other = scores_of_sites(used(run.summary)), scores_of_sites(alone.summary)
        if len(own.values) == len(other.values) == len(run.clients):
            pairs = zip(own.values, other.values, own.samples, other.samples, strict=True)
            gains = [a - b for a, b, *tested in pairs if all(tested)]
            better, worse = (sum(sign * gain > 0 for gain in gains) for sign in (1, -1))
            found.append(("Worth it", f"Compared with training alone, {plural(better, 'client')} gained and {worse} lost."))
    if "personalized" in run.summary:
        found.append(("Fine-tuning", f"F{in_words(run.summary)[1:]}."))
    topics: dict[str, list[str]] = {}
    for topic, sentence in found:
        topics.setdefault(topic, []).append(visible(sentence, MAX_SENTENCE))
    if not run.baselines:
        topics["Worth it"] = [
            "Not measured: this run has no baselines ('emdcfl run --baselines' trains them, 'emdcfl compare' any method)."
        ]
    for topic, where in ELSEWHERE.items():
        if len(said := topics.get(topic, [])) > MAX_SAID + 1:
            topics[topic] = [*said[:MAX_SAID], f"{len(said) - MAX_SAID} more {where}."]
    return [(topic, " ".join(said)) for topic, said in topics.items()]


def _facts(run: Run) -> list[tuple[str, str]]:
    s = used(run.summary)
    several = len(run.variants) > 1
    facts = [(("group" if run.clusters is not None else "model") + ("" if s.get("k") == 1 else "s"), str(s.get("k", "–")))]
    for variant in run.variants:
        score, name = score_of(s)["variants"][variant], f"{variant} " if several else ""
        interval = f", {run.metric.range(score['low'], score['high'])}" if score.get("low") is not None else ""
        few = rests_on(s, score)
        facts += [(f"{name}{run.metric.label}{interval}{few and ', ' + few}", run.metric.text(score.get("mean")))]
        facts += [(f"{name}worst client", run.metric.text(score.get("worst")))]
        facts += [(f"{name}RMSE", quantity(score["rmse"]["mean"]))] if "rmse" in score else []
    if s.get("ari") is not None:
        facts.append(("ARI", f"{s['ari']:.2f}"))
    if (s.get("seconds") or {}).get("total") is not None:
        facts.append(("time", seconds(s["seconds"]["total"])))
    return facts


def _clusters(run: Run) -> Iterator[dict[str, Any]]:
    absent = untrained(run.summary)
    members = {k: at for k, at in run.members.items() if run.clients[at[0]] not in absent}
    largest = max(map(len, members.values()), default=0)
    for k, at in members.items():  # none where the method has no clusters
        scores = [a for i in at if (a := run.score_at(run.clients[i], run.variants[0])) is not None]
        yield {
            "k": k,
            "colour": run.colours[k],
            "members": [run.clients[i] for i in at],
            "share": 100 * len(at) / largest,
            "groups": [] if run.groups is None else list(dict.fromkeys(run.groups[i] for i in at)),
            "mean": sum(scores) / len(scores) if scores else None,
            "worst": min(scores, default=None),
            "distances": (run.reading or {"clusters": {}})["clusters"].get(str(k)),
        }


def _table(run: Run) -> Iterator[dict[str, Any]]:
    """One row per client listed, in the order of clusters."""
    rmse = score_of(run.summary)["variants"].get(run.variants[0], {}).get("rmse", {}).get("sites", [])
    absent = untrained(run.summary)
    for i in _listed(run):
        client, row = run.clients[i], run.last.get(run.clients[i])
        interval = None if row is None else row_interval(row, run.variants[0])
        edges = {} if run.pairs is None else {side: run.pairs.edge(i, same=side == "inside") for side in ("inside", "outside")}
        yield {
            "client": client,
            "cluster": None if run.clusters is None else "–" if client in absent else run.clusters[i],
            "colour": "kx" if run.clusters is None else run.colours[run.clusters[i]],
            "group": None if run.groups is None else run.groups[i],
            "score": {v: run.score_at(client, v) for v in run.variants},
            "interval": None if interval is None else interval.range,
            "rmse": rmse[i] if i < len(rmse) else None,
            "fine_tuned": run.fine_tuned.get(client),
            "baselines": {name: b.score_at(client, run.variants[0]) for name, b in run.baselines.items()},
            "samples": None if row is None else (row.get("test_samples") or {}).get(run.variants[0]),
            "loss": None if row is None else row.get("train_loss"),
            **{side: None if edge is None else (SIGNS.get(edge.kind, ""), edge.ratio) for side, edge in edges.items()},
        }


def _listed(run: Run) -> list[int]:
    """Return the clients shown in the table: all, or of every cluster its share, half of them the worst, the others at equal steps."""
    C = len(run.clients)
    if C <= LISTED:
        return run.order
    members: dict[int | None, list[int]] = {}
    for i in run.order:
        members.setdefault(None if run.clusters is None else run.clusters[i], []).append(i)
    chosen: set[int] = set()
    for own in members.values():
        share = max(1, LISTED * len(own) // C)
        scores = {i: run.score_at(run.clients[i], run.variants[0]) for i in own}
        worst = sorted(own, key=lambda i: (scores[i] is None, scores[i]))[: -(-share // 2)]
        rest = sorted(set(own) - set(worst))
        chosen |= {*worst, *_steps(rest, share - len(worst))}
    listed = [i for i in run.order if i in chosen]
    return _steps(listed, LISTED)  # of more clusters than rows, not each has one


def _steps(values: list[int], most: int) -> list[int]:
    """Return at most so many values, at equal steps."""
    return values if len(values) <= most else [values[i * len(values) // most] for i in range(most)]


def _cost(summary: dict[str, Any], others: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return seconds by phase (and of the baselines) and bytes sent, where the run has them."""
    spent = {str(k): float(v) for k, v in (summary.get("seconds") or {}).items() if isinstance(v, int | float)}
    total = max(spent.pop("total", 0.0), sum(spent.values()))
    phases = [(name, spent[name]) for name in (*PHASES, *(n for n in spent if n not in PHASES)) if name in spent]
    phases.append(("other", max(total - sum(v for _, v in phases), 0.0)))
    return {
        "total": total,
        "phases": [(PHASE_NAMES.get(name, name), value, 100 * value / total if total else 0.0) for name, value in phases],
        "baselines": sum(float((others[name].get("seconds") or {}).get("total") or 0) for name in ("fedavg", "local") if name in others),
        "sent": _sent(summary.get("bytes")),
    }


def _sent(counted: Any) -> list[tuple[str, float, float]]:
    """Return (phase, bytes to clients, bytes to the server) of phases that sent anything, and the sum."""
    rows = []
    for phase, ways in counted.items() if isinstance(counted, dict) else ():
        down, up = (float(ways.get(way) or 0) for way in ("to_clients", "to_server")) if isinstance(ways, dict) else (0.0, 0.0)
        if down or up:
            rows.append((str(phase), down, up))
    rows.sort(key=lambda row: PHASES.index(row[0]) if row[0] in PHASES else len(PHASES))
    rows = [(PHASE_NAMES.get(phase, phase), down, up) for phase, down, up in rows]
    return [*rows, ("total", sum(r[1] for r in rows), sum(r[2] for r in rows))] if rows else []
