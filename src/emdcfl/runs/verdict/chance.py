"""Whether a model has learned anything: scores that guessing would reach as well.

Guessing has an AUC of 0.5, a balanced accuracy (and, where classes are balanced, an accuracy) of one over the number of classes, and an R²
of 0. A model is beyond chance where the whole 95 % interval is. Where each site's most frequent class is known, always answering that
is guessing, too: a model must be more often right, or rank the samples of the sites with unbalanced classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from emdcfl.core.metric import Metric, metric_of, score_of
from emdcfl.core.units import percent, percent_range
from emdcfl.runs.verdict.intervals import Interval

HARDLY = 0.05
"""Balanced accuracy above chance up to which models leave rare classes out, even if they rank samples well."""


@dataclass(frozen=True)
class Guessing:
    """What a model does no better than guessing, and what would help."""

    says: str
    remedy: str


def guessing(summary: Mapping[str, Any], over_most_frequent: Interval | None = None) -> Guessing | None:
    """Return in what the models of a run are no better than guessing; None where they are better, or without an interval.

    Classes count as unbalanced where they are at more than half of the sites. ``over_most_frequent`` is the accuracy of the models less
    that of always answering each site's most frequent class, where that is known.
    """
    score, classes = score_of(summary), summary.get("classes")
    if score.get("low") is None:
        return None
    if metric_of(summary) is Metric.R2:
        told = f"is not known to be better than the mean of the numbers (R² {Metric.R2.range(score['low'], score['high'])})"
        return None if score["low"] > 0 else Guessing(told, "other features or more samples")
    if 2 * score.get("balanced", {}).get("sites", 0) <= len(summary["clients"]):
        told = f"chance (accuracy {percent_range(score['low'], score['high'])}, {classes} classes)"
        better = not classes or score["low"] > 1 / classes
        if better and over_most_frequent is not None and over_most_frequent.sign < 1 and score.get("auc", {"low": 0.0})["low"] <= 0.5:
            told, better = f"always answering each site's most frequent class ({over_most_frequent.points()})", False
        return None if better else Guessing(f"is not known to be better than {told}", "other features or more samples")
    balanced, auc = score["balanced"], score["auc"]
    if auc["low"] <= 0.5:
        numbers = f"balanced accuracy {percent(balanced['mean'])}, AUC {auc['low']:.2f}–{auc['high']:.2f}"
        return Guessing(f"is not known to be better than chance ({numbers})", "more samples of the rare classes or other features")
    if classes and balanced["mean"] <= 1 / classes + HARDLY:
        told = f"hardly ever predicts a rare class (balanced accuracy {percent(balanced['mean'])}, as by chance; AUC {auc['mean']:.2f})"
        return Guessing(told, "more samples of the rare classes or a threshold of your own on the probabilities")
    return None
