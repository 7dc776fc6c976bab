"""What a run is scored by: accuracy where classes are predicted, R² where numbers are.

Rows of metrics, summaries and results hold one of the two under its key; whoever shows them asks for the metric and its words here.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from emdcfl.core.units import percent, percent_range


class Metric(StrEnum):
    """The main score of a run; higher is better, at most 1."""

    ACCURACY = "accuracy"
    R2 = "r2"

    @property
    def label(self) -> str:
        """What people call it."""
        return "R²" if self is Metric.R2 else "accuracy"

    @property
    def heading(self) -> str:
        """The same at the beginning of a line."""
        return "R²" if self is Metric.R2 else "Accuracy"

    @property
    def unit(self) -> str:
        """What differences are counted in."""
        return "R²" if self is Metric.R2 else "points"

    @property
    def scale(self) -> float:
        """What a score is multiplied with in tables, and a difference in ``unit``."""
        return 1.0 if self is Metric.R2 else 100.0

    def text(self, value: float | None) -> str:
        """Write a score.

        Examples
        --------
        >>> Metric.ACCURACY.text(0.951), Metric.R2.text(0.514), Metric.R2.text(None)
        ('95.1%', '0.51', '–')
        """
        return percent(value) if self is Metric.ACCURACY or value is None else f"{value:.2f}"

    def range(self, low: float | None, high: float | None) -> str:
        """Write an interval of scores.

        Examples
        --------
        >>> Metric.ACCURACY.range(0.93, 0.964), Metric.R2.range(-0.1, 0.514)
        ('93.0–96.4%', '-0.10 to 0.51')
        """
        if self is Metric.ACCURACY or low is None or high is None:
            return percent_range(low, high)
        return f"{low:.2f} to {high:.2f}"

    def change(self, value: float, sign: str = "+") -> str:
        """Write a difference without its unit; zero without a sign.

        Examples
        --------
        >>> Metric.ACCURACY.change(0.031), Metric.R2.change(-0.0312), Metric.R2.change(0.0)
        ('+3.1', '-0.03', '0.00')
        """
        digits = 2 if self is Metric.R2 else 1
        rounded = round(self.scale * value, digits)
        return f"{rounded:{sign}.{digits}f}" if rounded else f"{0:.{digits}f}"


def metric_of(found: Mapping[str, Any]) -> Metric:
    """Return the metric of a row, a summary or a result."""
    return Metric.R2 if Metric.R2 in found else Metric.ACCURACY


def score_of(found: Mapping[str, Any]) -> Any:
    """Return what a row, a summary or a result holds of its metric."""
    return found[metric_of(found)]
