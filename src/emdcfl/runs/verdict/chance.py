"""Whether a model has learned anything: scores that guessing would reach as well.

Guessing has an AUC of 0.5, a balanced accuracy (and, where classes are balanced, an accuracy) of one over the number of classes, and an R²
of 0. A model is beyond chance where the whole 95 % interval is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from emdcfl.core.metric import Metric, metric_of, score_of
from emdcfl.core.units import percent, percent_range

HARDLY = 0.05
"""Balanced accuracy above chance up to which models leave rare classes out, even if they rank samples well."""


@dataclass(frozen=True)
class Guessing:
    """What a model does no better than guessing, and what would help."""

    says: str
    remedy: str


def guessing(summary: Mapping[str, Any]) -> Guessing | None:
    """Return in what the models of a run are no better than guessing; None where they are better, or without an interval.

    Classes count as unbalanced where they are at more than half of the sites.
    """
    score, classes = score_of(summary), summary.get("classes")
    if score.get("low") is None:
        return None
    if metric_of(summary) is Metric.R2:
        told = f"is not known to be better than the mean of the numbers (R² {Metric.R2.range(score['low'], score['high'])})"
        return None if score["low"] > 0 else Guessing(told, "other features or more samples")
    if 2 * score.get("balanced", {}).get("sites", 0) <= len(summary["clients"]):
        told = f"is not known to be better than chance (accuracy {percent_range(score['low'], score['high'])}, {classes} classes)"
        return None if not classes or score["low"] > 1 / classes else Guessing(told, "other features or more samples")
    balanced, auc = score["balanced"], score["auc"]
    if auc["low"] <= 0.5:
        numbers = f"balanced accuracy {percent(balanced['mean'])}, AUC {auc['low']:.2f}–{auc['high']:.2f}"
        return Guessing(f"is not known to be better than chance ({numbers})", "more samples of the rare classes or other features")
    if classes and balanced["mean"] <= 1 / classes + HARDLY:
        told = f"hardly ever predicts a rare class (balanced accuracy {percent(balanced['mean'])}, as by chance; AUC {auc['mean']:.2f})"
        return Guessing(told, "more samples of the rare classes or a threshold of your own on the probabilities")
    return None
