"""Cells of a result table that are farther from the paper's value than noise explains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from emdcfl.studies.paper_values import Value
from emdcfl.studies.results import ResultRow
from emdcfl.studies.tables import METRICS, Cell, build

PAPER_TRAINING = {"rounds": 10, "local_epochs": 10}
ROUNDING = 0.005
"""Half of the last digit the paper prints."""


@dataclass(frozen=True)
class Difference:
    """A cell of ours and the paper's value, more than ``sigmas`` standard deviations apart."""

    scenario: str
    method: str
    label: str
    metric: str
    ours: Cell
    paper: Value

    @property
    def by(self) -> float:
        """Ours minus the paper's."""
        return self.ours.mean - self.paper.mean

    def text(self) -> str:
        """Write both values and their difference.

        Examples
        --------
        >>> Difference("pacs", "fedavg", "FedAvg", "mean", Cell(84.6, None, 1), Value(86.2, 0.66)).text()
        'FedAvg, Avg acc: 84.60, paper 86.20 ± 0.66 (-1.60)'
        """
        return f"{self.label}, {METRICS[self.metric]}: {self.ours.text(self.metric)}, paper {self.paper.text()} ({self.by:+.2f})"


def full_size(row: ResultRow) -> bool:
    """Return whether a run had the paper's size: all data, 10 rounds of 10 local epochs."""
    settings: Mapping[str, Any] = row["settings"]
    trained = {"rounds": settings["run"].get("rounds"), "local_epochs": settings["training"].get("local_epochs")}
    return settings["scenario"].get("scale", "paper") == "paper" and trained == PAPER_TRAINING


def plain(row: Mapping[str, Any]) -> bool:
    """Return whether all clients took part in every round, and nobody fine-tuned."""
    return row["settings"]["run"].get("participants") is None and "personalize" not in row["settings"]


def differences(results: Sequence[ResultRow], *, sigmas: float = 2.0) -> list[Difference]:
    """List the cells of full-size runs that differ from the paper's by more than ``sigmas`` standard deviations, theirs or ours.

    The larger of the two deviations counts (ours is known from two seeds on), and the rounding of the printed value on top.
    """
    rows = [row for row in results if full_size(row)]
    table, found = build(rows), []
    for column in table.columns:
        for label in table.rows:
            for metric in column.metrics:
                cell = table.cells.get((label, column.key, metric))
                if cell is None or cell.paper is None:
                    continue
                deviation = max(cell.paper.std or 0.0, cell.std or 0.0)
                if abs(cell.mean - cell.paper.mean) > sigmas * deviation + ROUNDING:
                    found.append(Difference(column.title, table.methods[label], label, metric, cell, cell.paper))
    return found
