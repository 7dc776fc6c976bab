"""From rows of results to a table: mean ± standard deviation over seeds, 95 % intervals, the paper's value beside ours.

A column is a scenario (with its options, network and number of participants), a row a method. Runs that differ in seed or hardware only
are one cell; where a method was run with several settings, the settings that differ are named in its label.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from emdcfl.core.units import escaped, percent, percent_range
from emdcfl.data.scenarios.plan import PAPER_TRAINING
from emdcfl.methods.base import preset_of
from emdcfl.runs.new_sites.unseen import UNSEEN, mean_accuracy
from emdcfl.runs.store.files import write_file
from emdcfl.runs.store.identity import flat
from emdcfl.runs.verdict.intervals import Interval, SiteScores, difference, over_seeds
from emdcfl.studies.compare import ORDER
from emdcfl.studies.paper_values import Value, measured_value, paper_value
from emdcfl.studies.results import ResultRow

TITLES = {
    "oracle": "Oracle", "emdcfl": "EMD-CFL", "cfl": "CFL", "pacfl": "PACFL", "fedclust": "FedClust", "ifca": "IFCA", "flexcfl": "FlexCFL",
    "fesem": "FeSEM", "cflgp": "CFLGP", "fedem": "FedEM", "fedsoft": "FedSoft", "fedrc": "FedRC", "fedce": "FedCE", "fedavg": "FedAvg",
    "fedprox": "FedProx", "pfedgraph": "pFedGraph", "fedsac": "FedSaC", "local": "Local",
}  # fmt: skip
METRICS = {"mean": "Avg acc", "worst": "Worst acc", "clean": "Clean acc", "backdoor": "Backdoor acc", "ari": "ARI", "seconds": "s/run"}


@dataclass(frozen=True)
class Cell:
    """One number of ours, over ``n`` seeds, the paper's, and ours at the paper's size. The standard deviation is the sample's (ddof = 1).

    ``interval`` is that of an accuracy, as a share: over these sites, their test samples and seeds (``runs.intervals``).
    """

    mean: float
    std: float | None
    n: int
    paper: Value | None = None
    full: Value | None = None
    interval: Interval | None = None

    def text(self, metric: str) -> str:
        digits = 1 if metric == "seconds" else 2
        return f"{self.mean:.{digits}f}" + ("" if self.std is None else f" ± {self.std:.{digits}f}")


@dataclass(frozen=True)
class Column:
    """A scenario and what is measured on it."""

    key: str
    title: str
    metrics: tuple[str, ...]
    smaller: str = ""
    """How these runs differ in size from the paper's; empty where they do not."""


PAPER = "paper"
MARK, FULL = "paper †", "ours †"
"""Head the paper's numbers, and ours at the paper's size, beside runs of another size."""


@dataclass(frozen=True)
class Table:
    """Cells by (row label, column key, metric)."""

    columns: tuple[Column, ...]
    rows: tuple[str, ...]
    cells: Mapping[tuple[str, str, str], Cell]
    methods: Mapping[str, str]
    """Method of each row."""
    against: Mapping[tuple[str, str], Interval] = field(default_factory=dict)
    """(row label, column key) → its accuracy less that of the column's leader, paired by site and seed."""

    @property
    def reference(self) -> set[str]:
        """Rows that know the truth and do not compete."""
        return {label for label, method in self.methods.items() if method == "oracle"}

    def best(self, column: str, metric: str) -> set[str]:
        """Labels whose cell is the best of its column at the precision shown."""
        if metric == "seconds":
            return set()
        shown = {r: round(c.mean, 2) for r in self.rows if r not in self.reference and (c := self.cells.get((r, column, metric)))}
        return {r for r, value in shown.items() if value == max(shown.values())}

    def leader(self, column: Column) -> str | None:
        """Return the row with the best accuracy of a column, with which others are compared."""
        means = {r: c.mean for r in self.rows if r not in self.reference and (c := self.cells.get((r, column.key, column.metrics[0])))}
        return max(means, key=lambda label: means[label], default=None)

    def has_intervals(self, column: Column) -> bool:
        return any(key[1:] == (column.key, column.metrics[0]) and cell.interval is not None for key, cell in self.cells.items())

    def paper_note(self, column: Column) -> str:
        """Say that the paper's numbers beside a column are of runs of another size; empty where they are not, or there are none."""
        beside = column.smaller and any(self.beside(column, metric) for metric in column.metrics)
        return f"† at the paper's size; these runs: {column.smaller}" if beside else ""

    def beside(self, column: Column, metric: str) -> dict[str, str]:
        """Return the heads of the numbers to show beside a metric, and the field of a cell that has them."""
        cells = [cell for key, cell in self.cells.items() if key[1:] == (column.key, metric)]
        shown = {MARK: "paper", FULL: "full"} if column.smaller else {PAPER: "paper"}
        return {head: name for head, name in shown.items() if any(getattr(cell, name) is not None for cell in cells)}


def build(results: Sequence[ResultRow]) -> Table:
    """Arrange results: columns in the order they were first run, rows in the paper's order."""
    by_column: dict[str, list[ResultRow]] = {}
    for row in (r for r in results if _held_out(r) is None):  # those are in the table of unseen sites
        by_column.setdefault(json.dumps(_column_settings(row), sort_keys=True), []).append(row)
    titles = _titles({key: (rows[0]["scenario"], flat(json.loads(key))) for key, rows in by_column.items()})
    columns: list[Column] = []
    cells: dict[tuple[str, str, str], Cell] = {}
    methods: dict[str, str] = {}
    runs: dict[tuple[str, str], list[ResultRow]] = {}
    for key, rows in by_column.items():
        metrics = _metrics(rows)
        columns.append(Column(key, titles[key], metrics, _smaller(rows)))
        for label, members in by_label(rows).items():
            runs[label, key] = members
            methods[label] = members[0]["method"]
            for metric in metrics:
                cell = _cell(members, metric)
                if cell is not None:
                    cells[label, key, metric] = cell
    order = sorted(methods, key=lambda label: (ORDER.index(methods[label]) if methods[label] in ORDER else len(ORDER), label))
    table = Table(tuple(columns), tuple(order), cells, methods)
    leaders = {column.key: (column.metrics[0], runs[leader, column.key]) for column in columns if (leader := table.leader(column))}
    compared = {place: found for place, rows in runs.items() if (found := _against(rows, *leaders.get(place[1], ("", [])))) is not None}
    return replace(table, against=compared)


def _smaller(rows: Sequence[ResultRow]) -> str:
    """Say how runs differ in size from the paper's: in scale, rounds, or local epochs."""
    found: dict[str, set[Any]] = {"scale": set(), "rounds": set(), "local epochs": set()}
    for row in rows:
        settings = row["settings"]
        found["scale"].add(settings["scenario"].get("scale", PAPER))
        found["rounds"].add(settings["run"]["rounds"])
        found["local epochs"].add(settings["training"].get("local_epochs", PAPER_TRAINING["local_epochs"]))
    usual = {"scale": PAPER, "rounds": PAPER_TRAINING["rounds"], "local epochs": PAPER_TRAINING["local_epochs"]}
    known = {name: values - {None} for name, values in found.items()}  # rows of early versions do not say
    return ", ".join(f"{name} {', '.join(map(str, sorted(values)))}" for name, values in known.items() if values - {usual[name]})


def _against(rows: Sequence[ResultRow], metric: str, leader: Sequence[ResultRow]) -> Interval | None:
    """Compare runs with the leader's of the same seeds, site by site; None for the leader itself."""
    other = {row["seed"]: row for row in leader}
    if rows is leader:
        return None
    pairs = [(SiteScores.of(_score(r, metric)), SiteScores.of(_score(other[r["seed"]], metric))) for r in rows if r["seed"] in other]
    found = [difference(a, b) for a, b in pairs if a is not None and b is not None]
    return over_seeds([one for one in found if one is not None])


def _score(row: ResultRow, metric: str) -> Mapping[str, Any]:
    """Return the score of a metric's test variant."""
    variants: Mapping[str, Any] = row["accuracy"]["variants"]
    found = variants[metric] if metric in variants else next(iter(variants.values()), {})
    return found if isinstance(found, Mapping) else {}


def _column_settings(row: ResultRow) -> dict[str, Any]:
    settings = row["settings"]
    scenario = {k: v for k, v in settings["scenario"].items() if k != "data_root"}
    return {"scenario": scenario, "model": settings.get("model"), "participants": settings["run"].get("participants")}


def _row_settings(row: ResultRow) -> dict[str, Any]:
    settings = row["settings"]
    tuning = {"personalize": settings["personalize"]} if is_fine_tuned(row) else {}
    return flat({"method": settings["method"], "training": settings["training"], "rounds": settings["run"]["rounds"], **tuning})


def is_fine_tuned(row: ResultRow) -> bool:
    """Whether a row's accuracies are those with fine-tuning at home."""
    return bool(row["settings"].get("personalize", {}).get("mode", "off") != "off")


def sample_key(row: ResultRow) -> str:
    """Return what makes two rows the same sample of the same cell: column, method, settings and seed, whatever they ran on."""
    return json.dumps([_column_settings(row), _row_key(row), row["seed"], _held_out(row)], sort_keys=True)


def _held_out(row: ResultRow) -> Any:
    return row["settings"]["run"].get("hold_out")


def _row_key(row: ResultRow) -> str:
    return json.dumps([row["method"], _row_settings(row)], sort_keys=True)


def by_label(results: Sequence[ResultRow]) -> dict[str, list[ResultRow]]:
    """Group the results of one column by method and settings, one per seed."""
    groups: dict[str, list[ResultRow]] = {}
    for row in results:
        members = groups.setdefault(_row_key(row), [])
        if all(
            (other["seed"], _held_out(other)) != (row["seed"], _held_out(row)) for other in members
        ):  # the same run on other hardware is not a second sample
            members.append(row)
    named = {key: (_title(rows[0]), _row_settings(rows[0])) for key, rows in groups.items()}
    return {title: groups[key] for key, title in _titles(named).items()}


def _title(row: ResultRow) -> str:
    preset = preset_of(str(row["method"]), row["settings"]["method"])
    name = TITLES.get(str(row["method"]), str(row["method"])) + (f", {preset}" if preset else "")
    return name + (" + fine-tuning" if is_fine_tuned(row) else "")


def _titles(named: Mapping[str, tuple[str, Mapping[str, Any]]]) -> dict[str, str]:
    """Name things: their name, and where several share one, the settings in which those differ."""
    titles = {}
    for key, (name, settings) in named.items():
        others = [s for n, s in named.values() if n == name]
        differing = sorted({k for s in others for k in s if any(o.get(k) != s[k] for o in others)})
        shown = [f"{k.rpartition('.')[2]} {settings[k]}" for k in differing if settings.get(k) is not None]
        titles[key] = f"{name} ({', '.join(shown)})" if shown else name
    return titles


def _metrics(rows: Sequence[ResultRow]) -> tuple[str, ...]:
    accuracy = ("clean", "backdoor") if "backdoor" in rows[0]["accuracy"]["variants"] else ("mean", "worst")
    ari = ("ari",) if any(row["ari"] is not None for row in rows) else ()
    return (*accuracy, *ari, "seconds")


def value_of(row: ResultRow, metric: str) -> float | None:
    """Return one metric of a row: accuracies in percent, ARI, seconds."""
    if metric == "ari":
        return None if row["ari"] is None else float(row["ari"])
    if metric == "seconds":
        return float(row["seconds"]["total"])
    accuracy = row["accuracy"]
    value = _score(row, metric)["mean"] if metric in ("clean", "backdoor") else accuracy[metric]
    return None if value is None else 100 * float(value)


def _cell(rows: Sequence[ResultRow], metric: str) -> Cell | None:
    values = [v for row in rows if (v := value_of(row, metric)) is not None]
    if not values:
        return None
    first = rows[0]
    participants = first["settings"]["run"].get("participants")
    paper = None if is_fine_tuned(first) else paper_value(first["scenario"], first["method"], metric, participants)
    spread = statistics.stdev(values) if len(values) > 1 else None
    full = None if is_fine_tuned(first) or participants is not None else measured_value(first["scenario"], first["method"], metric)
    return Cell(statistics.fmean(values), spread, len(values), paper, full, _interval(rows, metric))


def _interval(rows: Sequence[ResultRow], metric: str) -> Interval | None:
    """Return the interval of a mean accuracy over seeds; None for other metrics, or where a run does not have its own."""
    if metric not in ("mean", "clean", "backdoor"):
        return None
    scores = [score for row in rows if (score := _score(row, metric)).get("mean") is not None]
    ends: list[tuple[Any, Any, Any]] = [(score["mean"], score.get("low"), score.get("high")) for score in scores]
    known = all(isinstance(value, float | int) for three in ends for value in three)
    found = over_seeds([Interval(*three) for three in ends]) if known else None
    return None if found is None else replace(found, low=max(0.0, found.low), high=min(1.0, found.high))  # two seeds say little


def markdown(table: Table, *, leave_out: Sequence[str] = ()) -> str:
    """Write the table for people: one block per scenario, best in bold (Oracle does not compete)."""
    blocks = []
    for column in table.columns:
        heads, keys = ["method"], []
        for metric in (m for m in column.metrics if m not in leave_out):
            heads.append(METRICS[metric])
            keys.append((metric, ""))
            for head, name in table.beside(column, metric).items():
                heads.append(head)
                keys.append((metric, name))
        sure = table.has_intervals(column)
        heads += ["95% interval", "against the best"] if sure else []
        lines = [f"### {_cell_text(column.title)}", "", f"| {' | '.join([*heads, 'seeds'])} |", f"| --- |{' ---: |' * len(heads)}"]
        for label in table.rows:
            own = [table.cells.get((label, column.key, metric)) for metric in column.metrics]
            if not any(own):
                continue
            cells = [_markdown_cell(table, label, column.key, metric, name) for metric, name in keys]
            cells += [interval_text(table, label, column), against_text(table, label, column)] if sure else []
            lines.append(f"| {' | '.join([_cell_text(label), *cells, str(max(c.n for c in own if c))])} |")
        blocks.append("\n".join(lines))
        if note := table.paper_note(column):
            blocks.append(note)
    return "\n\n".join(blocks) + "\n"


def interval_text(table: Table, label: str, column: Column) -> str:
    """Write the interval of a row's accuracy."""
    cell = table.cells.get((label, column.key, column.metrics[0]))
    return "–" if cell is None or cell.interval is None else percent_range(cell.interval.low, cell.interval.high)


def against_text(table: Table, label: str, column: Column) -> str:
    """Write how far a row's accuracy is from the best, in points."""
    found = table.against.get((label, column.key))
    return found.points().replace(" points", "") if found is not None else "best" if label == table.leader(column) else "–"


def _cell_text(text: str) -> str:
    return escaped(text).replace("|", "\\|")


def _markdown_cell(table: Table, label: str, column: str, metric: str, beside: str) -> str:
    cell = table.cells.get((label, column, metric))
    if cell is None:
        return "–"
    if beside:
        value: Value | None = getattr(cell, beside)
        return "–" if value is None else value.text()
    return f"**{cell.text(metric)}**" if label in table.best(column, metric) else cell.text(metric)


def latex(table: Table) -> str:
    """Write the table as a ``tabular`` (booktabs), the paper's value in brackets."""
    shown = [(c, m) for c in table.columns for m in c.metrics if m != "seconds"]
    spans, first = [], 2
    heads = []
    for column in table.columns:
        width = len([m for m in column.metrics if m != "seconds"])
        heads.append(f"\\multicolumn{{{width}}}{{c}}{{{_escape(column.title)}}}")
        spans.append(f"\\cmidrule(lr){{{first}-{first + width - 1}}}")
        first += width
    lines = [
        f"\\begin{{tabular}}{{l{'c' * len(shown)}}}",
        "\\toprule",
        f" & {' & '.join(heads)} \\\\ {' '.join(spans)}",
        f"Method & {' & '.join(METRICS[m] for _, m in shown)} \\\\",
        "\\midrule",
    ]
    for label in table.rows:
        cells = [_latex_cell(table, label, c.key, m) for c, m in shown]
        lines.append(f"{_escape(label)} & {' & '.join(cells)} \\\\")
    notes = [f"% {note}" for column in table.columns if (note := table.paper_note(column))]
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", *notes, ""])


def _latex_cell(table: Table, label: str, column: str, metric: str) -> str:
    cell = table.cells.get((label, column, metric))
    if cell is None:
        return "--"
    text = cell.text(metric).replace(" ± ", "$\\pm$")
    text = f"\\textbf{{{text}}}" if label in table.best(column, metric) else text
    mark = "$^\\dagger$" if any(c.key == column and c.smaller for c in table.columns) else ""
    return text if cell.paper is None else f"{text} ({cell.paper.text().replace(' ± ', '$' + chr(92) + 'pm$')}{mark})"


def _escape(text: str) -> str:
    return re.sub(r"([&%$#_{}])", r"\\\1", escaped(text).replace("\\", "\\textbackslash "))


def _csv_text(text: str) -> str:
    """Text that a spreadsheet shows and does not compute: hidden characters escaped, a formula's first character quoted."""
    shown = escaped(text)
    return f"'{shown}" if shown.startswith(("=", "+", "-", "@")) else shown


COLUMNS = ("scenario", "method", "metric", "mean", "std", "seeds", "paper_mean", "paper_std", "low", "high")


def records(table: Table) -> list[dict[str, Any]]:
    """Return one record per number; accuracies and their differences in percent."""
    found: list[tuple[Any, ...]] = []
    for column in table.columns:
        for label in table.rows:
            for metric in column.metrics:
                cell = table.cells.get((label, column.key, metric))
                if cell is None:
                    continue
                paper = (None, None) if cell.paper is None else (cell.paper.mean, cell.paper.std)
                numbers = [None if v is None or math.isnan(v) else round(v, 6) for v in (cell.mean, cell.std)]
                ends = (None, None) if cell.interval is None else (round(100 * cell.interval.low, 6), round(100 * cell.interval.high, 6))
                found.append((column.title, label, metric, *numbers, cell.n, *paper, *ends))
            if (other := table.against.get((label, column.key))) is not None:
                mean, *ends_ = (round(100 * v, 6) for v in (other.mean, other.low, other.high))
                seeds = table.cells[label, column.key, column.metrics[0]].n
                found.append((column.title, label, "against_best", mean, None, seeds, None, None, *ends_))
    return [dict(zip(COLUMNS, values, strict=True)) for values in found]


def tidy(table: Table) -> str:
    """Write one line per number: CSV that other programs can read."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(COLUMNS)
    for record in records(table):
        writer.writerow([_csv_text(value) if isinstance(value, str) else value for value in record.values()])
    return buffer.getvalue()


def unseen_rows(results: Sequence[ResultRow]) -> list[dict[str, Any]]:
    """Return accuracies at sites that were held out, over sites, folds and seeds: one row per scenario and method."""
    by_column: dict[str, list[ResultRow]] = {}
    for row in (r for r in results if r.get("unseen")):
        by_column.setdefault(json.dumps(_column_settings(row), sort_keys=True), []).append(row)
    titles = _titles({key: (rows[0]["scenario"], flat(json.loads(key))) for key, rows in by_column.items()})
    found = []
    for key, rows in by_column.items():
        for label, members in by_label(rows).items():
            sites = [site for row in members for site in row["unseen"]]
            alike = [site["alike"] for site in sites if site["alike"] is not None]
            found.append(
                {
                    "scenario": titles[key],
                    "method": label,
                    "tested": len(sites),
                    **mean_accuracy(sites),
                    "right": statistics.fmean(share > 0.5 for share in alike) if alike else None,
                }
            )
    return found


def unseen_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Write the table of unseen sites for people."""
    heads = ["scenario", "method", "sites tested", *UNSEEN.values(), "right true group"]
    lines = [f"| {' | '.join(heads)} |", "| --- | --- |" + " ---: |" * (len(heads) - 2)]
    for row in rows:
        cells = [_cell_text(row["scenario"]), _cell_text(row["method"]), str(row["tested"])]
        lines.append(f"| {' | '.join([*cells, *(percent(row[key]) for key in (*UNSEEN, 'right'))])} |")
    return "\n".join(lines) + "\n"


def write_tables(results: Sequence[ResultRow], out: Path) -> Table:
    """Write ``table.md``, ``table.tex`` and ``table.csv``, and ``unseen.md`` where sites were held out."""
    if unseen := unseen_rows(results):
        write_file(out / "unseen.md", [unseen_markdown(unseen).encode()])
    table = build(results)
    for name, text in (("table.md", markdown(table)), ("table.tex", latex(table)), ("table.csv", tidy(table))):
        write_file(out / name, [text.encode()])
    return table
