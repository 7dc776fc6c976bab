"""What commands print when they end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from emdcfl.clustering import members_of
from emdcfl.core.metric import metric_of, score_of
from emdcfl.core.units import names, percent, quantity, seconds
from emdcfl.runs.new_sites.unseen import UNSEEN, unseen_sentence
from emdcfl.runs.outputs import read_reading
from emdcfl.runs.personal import in_words
from emdcfl.runs.scoring import MetricsRow, is_tested, rests_on
from emdcfl.runs.verdict.advice import advice, used, worth_rows
from emdcfl.runs.verdict.findings import in_brief, unbalanced
from emdcfl.runs.verdict.structure import one_group_by_benefit, structure
from emdcfl.runs.verdict.trained_with import in_words as trained_with
from emdcfl.runs.verdict.trained_with import untrained
from emdcfl.runs.verdict.what_differs import in_words as what_differs
from emdcfl.runs.watching.progress import terminal

MAX_LINES = 8
"""Lines printed of each kind (clusters, failures, flags, notes); the files of the run hold all."""
GAP = 3
"""Cells between two columns of a table."""


def tell(console: Console, text: str | Text) -> None:
    """Print a sentence: a terminal wraps it between words; in a file it stays one line."""
    console.print(text, soft_wrap=not console.is_terminal)


def draw_table(heads: Sequence[str], rows: Iterable[Sequence[str | Text]], *, left: Sequence[str] = (), title: str | None = None) -> Table:
    """Return a table; the columns in ``left`` (or all, where none is named) hold text, the others numbers."""
    table = Table(title=title, title_justify="left", min_width=cell_len(title or ""), box=box.SIMPLE_HEAD, pad_edge=False)
    cells = list(rows)
    columns = [[str(row[i]) for row in cells] for i in range(len(heads))]
    widths = [max(map(cell_len, words), default=0) for words in columns]
    for lines in range(1, 2 + max(head.count(" ") for head in heads)):  # rich would cut names first
        shown = [_wrapped(head, width, lines) for head, width in zip(heads, widths, strict=True)]
        taken = [max(width, *map(cell_len, head.split("\n"))) for head, width in zip(shown, widths, strict=True)]
        if sum(taken) + GAP * len(taken) <= terminal().width:
            break
    for head, wrapped, words, width in zip(heads, shown, columns, widths, strict=True):
        text = head in (left or heads)
        cut = text or any(" " in word for word in words)  # a number that is cut is another number
        table.add_column(wrapped, justify="left" if text else "right", overflow="fold", min_width=None if cut else width)
    for row in cells:
        table.add_row(*row)
    return table


def _wrapped(head: str, width: int, lines: int) -> str:
    """Return a heading in at most so many lines, where its words allow it, and no wider than its column and that need."""
    narrowest = max([width, *map(len, head.split())])
    texts = (fill(head, i, break_on_hyphens=False) for i in range(narrowest, narrowest + len(head) + 1))
    return next(text for text in texts if text.count("\n") < lines)


def show_result(
    console: Console,
    summary: Mapping[str, Any],
    rows: Sequence[MetricsRow],
    out: Path,
    others: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Print clusters and their members, what to do, scores beside the baselines, what the distances say, and the time by phase."""
    console.print()
    reading = read_reading(out) if summary["clusters"] is not None else None
    if summary["clusters"] is not None:
        console.print(_clusters(summary, rows))
    tell(console, Text(f"{summary['method']} on {summary['scenario']}, seed {summary['seed']}", "bold"))
    for topic, sentence in in_brief(summary, reading, others or {}):
        tell(console, Text.assemble((f"{topic}: ", "bold"), sentence))
    tell(console, _scores(summary))
    if "personalized" in summary:
        tell(console, in_words(summary))
    if (uneven := unbalanced(used(summary))) is not None:
        tell(console, uneven)
    if others:
        _show_worth(console, summary, reading, others)
    if reading is not None:
        for sentence in reading["sentences"]:
            tell(console, f"  {sentence}")
        _list(console, [f"  cluster {k}: {about}" for k, about in reading["clusters"].items() if about], "clusters", "reading.json")
        _doubt(console, reading["doubts"])
    _list(console, [f"differs: {said}" for said in what_differs(summary)], "groups")
    _list(console, [f"trained with: {said}" for said in trained_with(summary)], "models")
    tell(console, _times(summary, others or {}))
    _list(console, _missing(summary["failures"]), "failures")
    quarantined = summary.get("quarantined", [])
    where = "quarantined for the {for}: {client} in round {round} ({task}): {reason}"
    _list(console, [where.format(**entry) for entry in quarantined], "quarantines")
    _list(console, [_flag(flag) for flag in summary.get("flags", [])], "outliers")
    _list(console, [f"note: {note}" for note in summary["notes"]], "notes")
    console.print(f"run directory: {out}", soft_wrap=True)


def _missing(failures: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say who was missing and why, once for each reason: a node that cannot read its files fails at every request."""
    alike: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for failure in failures:
        alike.setdefault((failure["client"], failure["reason"]), []).append(failure)
    lines = []
    for (client, reason), found in alike.items():
        rounds, asked = sorted(f["round"] for f in found), ", ".join(dict.fromkeys(f["task"] for f in found))
        when = f"in round {rounds[0]}" if len(found) == 1 else f"{len(found)} times in rounds {rounds[0]} to {rounds[-1]}"
        lines.append(f"missing: {client} {when} ({asked}): {reason}")
    return lines


def _times(summary: Mapping[str, Any], others: Mapping[str, Mapping[str, Any]]) -> str:
    """Say what each phase took, and the whole with its baselines."""
    spent = summary["seconds"]
    phases = {
        "training": spent.get("train", 0.0),
        "comparing": spent.get("embed", 0.0) + spent.get("transport", 0.0),
        "deciding": spent.get("decide", 0.0),
        "testing": spent.get("evaluate", 0.0),
        "fine-tuning": spent.get("personalize", 0.0),
        "baselines": sum(others[name]["seconds"]["total"] for name in ("fedavg", "local") if name in others),
    }
    total = spent.get("total", 0.0) + phases["baselines"]
    return f"time: {' · '.join(f'{name} {seconds(value)}' for name, value in phases.items() if value)} · total {seconds(total)}"


def _scores(summary: Mapping[str, Any]) -> Text:
    parts = []
    metric, variants = metric_of(summary), score_of(summary)["variants"]
    for variant, score in variants.items():
        name = "" if len(variants) == 1 else f"{variant} "
        interval = "" if score.get("low") is None else f" (95% interval {metric.range(score['low'], score['high'])})"
        mean, few = (metric.text(score["mean"]), "bold"), rests_on(summary, score)
        rmse = f", RMSE {quantity(score['rmse']['mean'])}" if "rmse" in score else ""
        told = f"{interval}, worst client {metric.text(score['worst'])}{rmse}{few and ', ' + few}"
        parts.append(Text.assemble(f"{name}{metric.label} ", mean, told))
    if summary["clusters"] is not None:
        ari = f"ARI = {summary['ari']:.2f}" if summary["ari"] is not None else "no true groups to compare with"
        parts.append(Text(f"K = {summary['k']}, {ari}"))
    return Text("; ").join(parts)


def _doubt(console: Console, doubts: Sequence[str]) -> None:
    for doubt in doubts:
        tell(console, Text.assemble("  ", ("doubt:", "yellow"), f" {doubt}"))


def _flag(flag: Mapping[str, Any]) -> str:
    rounds = f"in {flag['times']} rounds from round {flag['first']} on" if flag["times"] > 1 else f"round {flag['first']}"
    return f"outlier: {flag['what']} of {flag['client']}, {flag['value']:.3g} against a median of {flag['typical']:.3g} ({rounds})"


def _list(console: Console, lines: Sequence[str], what: str, file: str = "summary.json") -> None:
    for line in lines[:MAX_LINES]:
        tell(console, line)
    if len(lines) > MAX_LINES:
        console.print(f"{'  ' if lines[0].startswith('  ') else ''}{len(lines) - MAX_LINES} more {what} in {file}")


def _clusters(summary: Mapping[str, Any], rows: Sequence[MetricsRow]) -> Table:
    metric, variant = metric_of(summary), next(iter(score_of(summary)["variants"]))
    score = {r["client"]: score_of(r)[variant] for r in rows if is_tested(r, variant)}
    known, lines, absent = summary["groups"] is not None, [], untrained(summary)
    for k, at in members_of(summary["clusters"]).items():
        members = [summary["clients"][i] for i in at]
        cells = ["none" if members[0] in absent else str(k), names(members)]
        if known:
            cells.append(", ".join(dict.fromkeys(str(summary["groups"][i]) for i in at)))
        own = [score[n] for n in members if n in score]
        lines.append([*cells, metric.text(sum(own) / len(own) if own else None), metric.text(min(own) if own else None)])
    heads = ("cluster", "clients", *(("true groups",) if known else ()), metric.label, "worst")
    plain = f" ({metric.label} before fine-tuning)" if summary.get("personalized", {}).get("kept") else ""
    return draw_table(heads, lines, left=("clients", "true groups"), title=f"Clusters found{plain}")


def show_unseen(console: Console, unseen: Mapping[str, Any]) -> None:
    """Print how the models do at sites that were held out of training."""
    rows = [
        (one["site"], "–" if one["cluster"] is None else str(one["cluster"]), *(metric_of(one).text(score_of(one)[key]) for key in UNSEEN))
        for one in unseen["sites"]
    ]
    heads = ("site", "nearest cluster", *UNSEEN.values())
    console.print(draw_table(heads, rows, left=("site",), title="Sites held out of training"))
    tell(console, unseen_sentence(unseen))


def _show_worth(
    console: Console, summary: Mapping[str, Any], reading: Mapping[str, Any] | None, others: Mapping[str, Mapping[str, Any]]
) -> None:
    """Print this run beside its baselines, with paired differences, and what speaks against the grouping."""
    metric, own = metric_of(summary), score_of(used(summary))
    uneven, numbers = "balanced" in own, "rmse" in own
    more = ("balanced", "AUC") if uneven else ("RMSE",) if numbers else ()
    sure = () if more else ("95% interval",)  # 80 columns have no room for it beside them; the page does
    heads = ("training", metric.label, *sure, *more, "worst", f"gain in {metric.unit}")
    rows = []
    for what, score, gain in worth_rows(summary, others):
        scores = [metric.text(score["mean"]), *(metric.range(score.get("low"), score.get("high")) for _ in sure)]
        if uneven:
            scores += [percent(score["balanced"]["mean"]), f"{score['auc']['mean']:.3f}"] if "balanced" in score else ["–", "–"]
        if numbers:
            scores.append(quantity(score["rmse"]["mean"]))
        rows.append((what, *scores, metric.text(score["worst"]), gain))
    console.print()
    console.print(draw_table(heads, rows, left=("training",), title="Is grouping worth it?"))
    to_do = advice(summary, others)
    if to_do is None:
        return
    if not one_group_by_benefit(summary, reading):
        tell(console, f"  {structure(summary, reading)}")
    _doubt(console, to_do.doubts)
