"""Write a table for people and programs: Markdown, LaTeX, CSV."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from emdcfl.core.units import escaped, spreadsheet_text
from emdcfl.runs.store.files import write_file
from emdcfl.studies.paper_values import Value
from emdcfl.studies.results import ResultRow
from emdcfl.studies.tables import METRICS, UNSEEN_HEADS, Column, Table, build, unseen_cells, unseen_rows


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, text: int = 1) -> str:
    """Write rows as Markdown; the first ``text`` columns are words, the others numbers."""
    lines = [" | ".join(heads), " | ".join(["---"] * text + ["---:"] * (len(heads) - text)), *map(" | ".join, rows)]
    return "\n".join(f"| {line} |" for line in lines) + "\n"


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
        lines = []
        for label in table.labels(column):
            cells = [_markdown_cell(table, label, column.key, metric, name) for metric, name in keys]
            cells += [interval_text(table, label, column), against_text(table, label, column)] if sure else []
            lines.append([_cell_text(label), *cells, str(table.seeds(label, column))])
        blocks.append(f"### {_cell_text(column.title)}\n\n{markdown_table([*heads, 'seeds'], lines).rstrip()}")
        blocks += [_cell_text(note) for note in table.notes(column)]
    return "\n\n".join(blocks) + "\n"


def interval_text(table: Table, label: str, column: Column) -> str:
    """Write the interval of a row's accuracy."""
    cell = table.cells.get((label, column.key, column.metrics[0]))
    return "–" if cell is None or cell.interval is None else cell.interval.range


def against_text(table: Table, label: str, column: Column) -> str:
    """Write how far a row is from the best, in points of accuracy or in R²."""
    found = table.against.get((label, column.key))
    return found.points(unit=False) if found is not None else "best" if label == table.leader(column) else "–"


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


COLUMNS = ("scenario", "method", "metric", "mean", "std", "seeds", "paper_mean", "paper_std", "low", "high")


def records(table: Table) -> list[dict[str, Any]]:
    """Return one record per number; accuracies and their differences in percent, R² as it is."""
    found: list[tuple[Any, ...]] = []
    for column in table.columns:
        for label in table.rows:
            for metric in column.metrics:
                cell = table.cells.get((label, column.key, metric))
                if cell is None:
                    continue
                paper = (None, None) if cell.paper is None else (cell.paper.mean, cell.paper.std)
                numbers = [None if v is None or math.isnan(v) else round(v, 6) for v in (cell.mean, cell.std)]
                scale, interval = 1.0 if cell.interval is None else cell.interval.metric.scale, cell.interval
                ends = (None, None) if interval is None else (round(scale * interval.low, 6), round(scale * interval.high, 6))
                found.append((column.title, label, metric, *numbers, cell.n, *paper, *ends))
            if (other := table.against.get((label, column.key))) is not None:
                mean, *ends_ = (round(other.metric.scale * v, 6) for v in (other.mean, other.low, other.high))
                seeds = table.cells[label, column.key, column.metrics[0]].n
                found.append((column.title, label, "against_best", mean, None, seeds, None, None, *ends_))
    return [dict(zip(COLUMNS, values, strict=True)) for values in found]


def tidy(table: Table) -> str:
    """Write one line per number: CSV that other programs can read."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(COLUMNS)
    for record in records(table):
        writer.writerow([spreadsheet_text(value) if isinstance(value, str) else value for value in record.values()])
    return buffer.getvalue()


def write_tables(results: Sequence[ResultRow], out: Path) -> Table:
    """Write ``table.md``, ``table.tex`` and ``table.csv``, and ``unseen.md`` where sites were held out."""
    if unseen := unseen_rows(results):
        text = markdown_table(UNSEEN_HEADS, [list(map(_cell_text, row)) for row in unseen_cells(unseen)], text=2)
        write_file(out / "unseen.md", [text.encode()])
    table = build(results)
    for name, text in (("table.md", markdown(table)), ("table.tex", latex(table)), ("table.csv", tidy(table))):
        write_file(out / name, [text.encode()])
    return table
