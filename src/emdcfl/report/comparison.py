"""The page of a comparison: a table of methods, and charts of their accuracy and ARI."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from emdcfl.core.errors import StoreError
from emdcfl.core.metric import Metric
from emdcfl.core.units import plural
from emdcfl.report.svg import WIDTH, Axis, chart, mark, shape_path, tag, ticks, visible
from emdcfl.runs.store.files import unsealed
from emdcfl.studies.results import RESULTS, ResultRow, checked
from emdcfl.studies.table_files import against_text
from emdcfl.studies.tables import METRICS, UNSEEN_HEADS, Cell, Column, Table, build, unseen_cells, unseen_rows

STYLES = {"worst": "weak-dot", "backdoor": "weak-dot", "worst_r2": "weak-dot"}
"""How marks of a metric look, where they do not stand out."""


def read_rows(folder: Path) -> tuple[list[ResultRow], int]:
    """Return the rows of ``results.jsonl``, each config once, and the number of lines that ``emdcfl compare`` did not write so."""
    try:
        lines = (folder / RESULTS).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise StoreError(f"{folder / RESULTS}: cannot read: {error.strerror}") from error
    found: dict[str, ResultRow] = {}
    unusable = 0
    for line in filter(str.strip, lines):
        try:
            (row,) = checked([unsealed(json.loads(line), RESULTS)], RESULTS)
            found.setdefault(row["config"], row)
        except (ValueError, TypeError, AttributeError, RecursionError, StoreError):
            unusable += 1
    return list(found.values()), unusable


def comparison_context(folder: Path) -> dict[str, Any]:
    rows, unusable = read_rows(folder)
    table = build(rows)
    blocks = [_block(table, column) for column in table.columns]
    methods, seeds = {r["method"] for r in rows}, {r["seed"] for r in rows}
    versions = list(dict.fromkeys(json.dumps(r["versions"], sort_keys=True) for r in rows if "versions" in r))
    return {
        "title": "Comparison of methods",
        "headline": _headline(table, len(methods)),
        "facts": [
            ("finished runs", str(len(rows))),
            ("methods", str(len(methods))),
            ("scenario" if len(table.columns) == 1 else "scenarios", str(len(table.columns))),
            ("seeds", ", ".join(map(str, sorted(seeds))) if len(seeds) <= 5 else str(len(seeds))),
        ],
        "blocks": blocks,
        "unseen_heads": UNSEEN_HEADS,
        "unseen": unseen_cells(unseen_rows(rows)),
        "total": sum(r["seconds"]["total"] for r in rows),
        "unusable": unusable,
        "hardware": sorted({r["hardware"] for r in rows if r.get("hardware")}),
        "commits": sorted({r["commit"] for r in rows if r.get("commit")}),
        "versions": [json.loads(v) for v in versions],
        "failures": [(r["scenario"], r["method"], r["seed"], r["failures"]) for r in rows if r.get("failures")],
    }


def _listed(labels: Sequence[str]) -> str:
    """Name up to three, as in a sentence.

    Examples
    --------
    >>> _listed(["A"]), _listed(["A", "B", "C"]), _listed(["A", "B", "C", "D"])
    ('A', 'A, B and C', 'A, B, C and 1 more')
    """
    shown = [*labels[:3], *([f"{len(labels) - 3} more"] if len(labels) > 3 else [])]
    return " and ".join(filter(None, [", ".join(shown[:-1]), *shown[-1:]]))


def _headline(table: Table, methods: int) -> str:
    if not table.columns:
        return "No finished run yet"
    if methods == 1:
        return f"{table.rows[0]} on {plural(len(table.columns), 'scenario')}"
    leaders = [(c, sorted(table.best(c.key, c.metrics[0]), key=table.rows.index)) for c in table.columns]
    if len(leaders) == 1:
        column, best = leaders[0]
        named = _listed(best)
        cell = table.cells.get((best[0], column.key, column.metrics[0])) if best else None
        score = "" if cell is None else f" with R² {cell.mean:.2f}" if "r2" in column.metrics else f" with {cell.mean:.1f}%"
        if not best:
            return column.title
        level = [label for label in table.rows if label not in best and _may_be_as_good(table, label, column)]
        doubt = f"; {_listed(level)} may be as good" if 0 < len(level) <= 3 else f"; {len(level)} others may be as good" if level else ""
        return f"{named} {'leads' if len(best) == 1 else 'lead'} on {column.title}{score}{doubt}"
    wins: dict[str, int] = {}
    for _, best in leaders:
        for label in best:
            wins[label] = wins.get(label, 0) + 1
    if not wins:
        return plural(methods, "method")
    top = max(wins, key=lambda label: wins[label])
    return f"{top} is best, alone or with others, on {wins[top]} of {plural(len(leaders), 'scenario')}"


def _may_be_as_good(table: Table, label: str, column: Column) -> bool:
    found = table.against.get((label, column.key))
    return found is not None and found.high >= 0 and label not in table.reference


def _block(table: Table, column: Column) -> dict[str, Any]:
    """One scenario: its rows for the table and its drawings."""
    labels = table.labels(column)
    shown = [m for m in column.metrics if any(_finite(table.cells.get((label, column.key, m))) for label in labels)]
    rows: list[dict[str, Any]] = []
    for label in labels:
        cells = [table.cells.get((label, column.key, m)) for m in shown]
        numbers = [
            {
                "text": cell.text(m) if cell is not None and _finite(cell) else "–",
                "value": cell.mean if cell is not None and _finite(cell) else None,
                "best": label in table.best(column.key, m),
                "paper": None if cell is None or cell.paper is None else cell.paper.text(),
                "interval": None if cell is None or cell.interval is None else cell.interval.range,
            }
            for m, cell in zip(shown, cells, strict=True)
        ]
        row = {"label": label, "reference": label in table.reference, "cells": numbers, "seeds": table.seeds(label, column)}
        rows.append({**row, "against": against_text(table, label, column)})
    scores = [m for m in shown if m in ("mean", "worst", "clean", "backdoor", "r2", "worst_r2")]
    metric = Metric.R2 if "r2" in column.metrics else Metric.ACCURACY
    return {
        "title": column.title,
        "heads": [METRICS.get(m, m) for m in shown],
        "rows": rows,
        "sure": table.has_intervals(column),
        "paper": any(c["paper"] for r in rows for c in r["cells"]),
        "paper_note": table.paper_note(column),
        "thresholds": column.thresholds,
        "metric": metric,
        "scores": _dots(table, column, labels, scores, "" if metric is Metric.R2 else "%", f"{metric.heading} by method"),
        "score_names": [METRICS[m] for m in scores],
        "ari": _dots(table, column, labels, ["ari"], "", "ARI by method") if "ari" in shown else None,
    }


def _finite(cell: Cell | None) -> bool:
    return cell is not None and math.isfinite(cell.mean)


def _ends(cell: Cell) -> tuple[float, float]:
    """Ends of a cell's interval, where it has one; else one standard deviation to both sides."""
    if cell.interval is not None:
        scale = cell.interval.metric.scale
        return scale * cell.interval.low, scale * cell.interval.high
    return cell.mean - (cell.std or 0.0), cell.mean + (cell.std or 0.0)


def _dots(table: Table, column: Column, labels: list[str], metrics: list[str], unit: str, title: str) -> Markup | None:
    """Draw a row per method, a dot per metric with its 95 % interval, or else a bar of one standard deviation."""
    cells: Mapping[tuple[str, str], Cell] = {
        (label, m): cell
        for label in labels
        for m in metrics
        if (cell := table.cells.get((label, column.key, m))) is not None and _finite(cell)
    }
    labels = [label for label in labels if any((label, m) in cells for m in metrics)]
    if not cells:
        return None
    low, high = min(_ends(c)[0] for c in cells.values()), max(_ends(c)[1] for c in cells.values())
    full = 100.0 if unit else 1.0
    room = 0.05 * max(high - low, 0.1 * full)
    bottom = 10 + 18.0 * len(labels)
    x = Axis(low - room if unit else min(low, 0.0), min(high + room, full) if high <= full else high + room, 124.0, WIDTH - 16)
    parts: list[Markup] = []
    for value in ticks(x.low, x.high, 5):
        parts.append(tag("line", x1=x(value), x2=x(value), y1=4, y2=bottom, class_="grid"))
        parts.append(tag("text", f"{value:g}{unit}", x=x(value), y=bottom + 14, class_="small muted middle"))
    for i, label in enumerate(labels):
        y = 10 + 18.0 * i + 9
        parts.append(tag("text", visible(label, 18), x=114, y=y + 3.5, class_="small end"))
        for m in reversed(metrics):
            cell = cells.get((label, m))
            if cell is None:
                continue
            left, right = _ends(cell)
            if right > left:
                parts.append(tag("line", x1=x(left), x2=x(right), y1=y, y2=y, class_="span"))
            tip = f"{visible(label)}\n{METRICS.get(m, m)} {cell.text(m)}{unit}\n{plural(cell.n, 'seed')}"
            parts.append(mark("path", tip, d=shape_path("circle", x(cell.mean), y, 4.2), class_=STYLES.get(m, "strong-dot")))
    return chart(WIDTH, bottom + 22, f"{title}, {visible(column.title)}", *parts)
