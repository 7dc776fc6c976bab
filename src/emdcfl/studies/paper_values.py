"""The numbers of the paper's tables, with their standard deviations (``paper_values.json``), and ours at its size (``measured.json``).

Accuracies are in percent, as printed there. ``benchmarks/results.py`` makes ``measured.json`` from the rows in ``docs/results/data``.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class Value:
    """A number at the paper's size: the mean of several runs and its standard deviation, where there is one."""

    mean: float
    std: float | None = None

    def text(self, digits: int = 2) -> str:
        """Write it as the paper does."""
        return f"{self.mean:.{digits}f}" + ("" if self.std is None else f" ± {self.std:.{digits}f}")


@dataclass(frozen=True)
class PaperTable:
    """One table: what its columns are (scenario, metric, participants), and its cells by row; ``None`` where it has a dash."""

    label: str
    columns: tuple[dict[str, Any], ...]
    rows: dict[str, tuple[Value | None, ...]]


@functools.cache
def tables() -> dict[str, PaperTable]:
    """Every table of the paper by its label (without ``tab:``)."""
    found = {}
    for label, raw in _stored("paper_values.json").items():
        rows = {name: tuple(None if cell is None else Value(*cell) for cell in cells) for name, cells in raw["rows"].items()}
        found[label] = PaperTable(label, tuple(raw["columns"]), rows)
    return found


def _stored(name: str) -> Any:
    return json.loads(resources.files("emdcfl.studies").joinpath(name).read_text(encoding="utf-8"))


@functools.cache
def _cells() -> dict[tuple[str, str, str, int | None], Value]:
    found: dict[tuple[str, str, str, int | None], Value] = {}
    for table in tables().values():
        for name, cells in table.rows.items():
            for column, value in zip(table.columns, cells, strict=True):
                if value is not None and "scenario" in column:
                    found[column["scenario"], name, column["metric"], column.get("participants")] = value
    return found


def paper_value(scenario: str, method: str, metric: str, participants: int | None = None) -> Value | None:
    """Return what the paper reports of a method on a scenario, or ``None`` where it reports nothing.

    Metrics are ``mean`` and ``worst`` accuracy and ``ari``; on backdoor scenarios ``clean``, ``backdoor`` and ``ari``.

    Examples
    --------
    >>> paper_value("pacs", "emdcfl", "mean").text()
    '92.47 ± 0.32'
    """
    return _cells().get((scenario, method, metric, participants))


@functools.cache
def _measured() -> dict[tuple[str, str, str], Value]:
    return {(scenario, method, metric): Value(*cell) for scenario, method, metric, *cell in _stored("measured.json")}


def measured_value(scenario: str, method: str, metric: str) -> Value | None:
    """Return what this project measured at the paper's size, all clients taking part, or ``None`` where nothing was run."""
    return _measured().get((scenario, method, metric))
