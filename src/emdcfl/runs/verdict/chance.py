"""Whether a model has learned anything: scores that guessing would reach as well.

Guessing has an AUC of 0.5 and a balanced accuracy (and, where classes are balanced, an accuracy) of one over the number of classes. A model
is beyond chance where the whole 95 % interval is. Where each site's most frequent class is known, always answering that is guessing, too: a
model must be more often right, or rank the samples of the sites with unbalanced classes.

Of numbers, guessing is the mean of each site's training numbers where that was tested, else that of its test numbers: an R² of 0. The R² of
a site with a handful of test numbers that happen to be alike is far below 0 whatever the model, and a mean over sites would rest on it. So
here squared errors and squared deviations are each summed over sites before they are divided: the mean of R², weighted by the spread of
each site's test numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from emdcfl.core.metric import Metric, metric_of, score_of
from emdcfl.core.units import percent, percent_range
from emdcfl.runs.verdict.intervals import Interval, SiteScores, difference, these_sites

HARDLY = 0.05
"""Balanced accuracy above chance up to which models leave rare classes out, even if they rank samples well."""


@dataclass(frozen=True)
class Guessing:
    """What to say of a model that is no better than guessing, and what would help."""

    says: str
    remedy: str


def over_mean(summary: Mapping[str, Any], guess: Mapping[str, Any] | None = None) -> Interval | None:
    """R² over all sites together, less that of always answering the mean of each site's training numbers where it is known (``guess``)."""
    score: Mapping[str, Any] = next(iter(score_of(summary).get("variants", {}).values()), {})
    own, errors = SiteScores.of(score), score.get("rmse", {}).get("sites", ())
    if own is None or own.metric is not Metric.R2 or len(errors) != len(own.values):
        return None
    spread = [(e or 0.0) ** 2 / (1.0 - r2) if r2 < 1.0 else 0.0 for e, r2 in zip(errors, own.values, strict=True)]
    other = None if guess is None else SiteScores.of(guess)
    return these_sites(own.weighted(spread)) if other is None else difference(own.weighted(spread), other.weighted(spread))


def guessing(summary: Mapping[str, Any], over: Interval | None = None) -> Guessing | None:
    """Return in what the models of a run are no better than guessing; None where they are better, or without an interval.

    Classes count as unbalanced where they are at more than half of the sites. ``over`` is the score of the models less that of always
    answering each site's most frequent class, or its mean, where that is known.
    """
    score, classes = score_of(summary), summary.get("classes")
    if score.get("low") is None:
        return None
    if metric_of(summary) is Metric.R2:
        together = over or over_mean(summary)
        if together is None or together.sign == 1:
            return None
        if over is None:
            told = f"each site's own numbers (R² over all sites together {together.range})"
        else:
            told = f"each site's training numbers ({over.points()} over all sites together)"
        return Guessing(f"is not known to be better than the mean of {told}", "other features or more samples")
    if 2 * score.get("balanced", {}).get("sites", 0) <= len(summary["clients"]):
        told = f"chance (accuracy {percent_range(score['low'], score['high'])}, {classes} classes)"
        better = not classes or score["low"] > 1 / classes
        if better and over is not None and over.sign < 1 and score.get("auc", {"low": 0.0})["low"] <= 0.5:
            told, better = f"always answering each site's most frequent class ({over.points()})", False
        return None if better else Guessing(f"is not known to be better than {told}", "other features or more samples")
    balanced, auc = score["balanced"], score["auc"]
    if auc["low"] <= 0.5 and (over is None or over.sign < 1):
        numbers = f"balanced accuracy {percent(balanced['mean'])}, AUC {auc['low']:.2f}–{auc['high']:.2f}"
        return Guessing(f"is not known to be better than chance ({numbers})", "more samples of the rare classes or other features")
    if classes and balanced["mean"] <= 1 / classes + HARDLY:
        told = f"hardly ever predicts a rare class (balanced accuracy {percent(balanced['mean'])}, as by chance; AUC {auc['mean']:.2f})"
        return Guessing(told, "more samples of the rare classes or a threshold of your own on the probabilities")
    return None
