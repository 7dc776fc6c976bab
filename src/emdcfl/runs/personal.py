"""Fine-tuning at home: after the last round every client fine-tunes what it is served, and may keep the result.

Clients say what fine-tuning gains on their validation data (``core.tasks.personalize``), and all of them together decide who keeps it
(``pays``). A client that keeps nothing, or fails, goes on with the model it is served. The rounds before do not depend on it, so one run
has both: plain scores, and those with fine-tuning.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emdcfl.core import tasks
from emdcfl.core.federation import Federation
from emdcfl.core.metric import metric_of, score_of
from emdcfl.core.schema import Reply
from emdcfl.core.tasks import Training
from emdcfl.core.units import plural
from emdcfl.methods.base import Serving
from emdcfl.runs.config import PersonalizeConfig
from emdcfl.runs.scoring import MetricsRow, is_tested, outcomes
from emdcfl.runs.served import served_to
from emdcfl.runs.verdict.intervals import SiteScores, difference

FINE_TUNED = "+ft"
"""Ends the name of a method whose models clients fine-tune at home, as in ``fedavg+ft``."""

PRIOR_SAMPLES = 5
"""Samples of the usual spread that count beside a client's own, whose spread few samples tell badly."""

MIN_VARIANCE = 1e-20
"""Of a gain; one that is claimed without error still has a finite weight."""


@dataclass(frozen=True)
class FineTuned:
    """The models that clients kept after fine-tuning, and their test."""

    states: Mapping[str, Tensor]
    """Client → the state it kept; the others keep what they are served."""
    rows: list[MetricsRow]
    """One row per client, as in ``metrics.jsonl``: tested with the model that it should use."""

    def as_dict(self) -> dict[str, Any]:
        """Return what the run's state stores."""
        return {"states": dict(self.states), "rows": self.rows}


def personalize(
    fed: Federation,
    serving: Serving,
    plain: Sequence[MetricsRow],
    settings: PersonalizeConfig,
    training: Training,
    variants: Mapping[str, Collection[str]] | None = None,
) -> FineTuned:
    """Let every client fine-tune what it is served, and test the models that were kept; ``plain`` are the rows of the last round."""
    assert settings.lr is not None
    tuning = replace(training, local_epochs=settings.epochs, lr=settings.lr).as_dict()
    inputs = served_to(serving, fed.clients)
    replies = fed.run(tasks.personalize, inputs, training=tuning, always=settings.mode == "on")
    tuned = {client: reply for client, reply in replies.valid.items() if "theta" in reply}
    kept = tuned if settings.mode == "on" else pays(tuned)
    states = {client: tuned[client]["theta"] for client in kept}
    found = outcomes(fed, {c: {"models": theta[None], "weights": torch.ones(1)} for c, theta in states.items()}, variants)
    return FineTuned(states, [{**row, **found[row["client"]]} if row["client"] in states else dict(row) for row in plain])


def pays(replies: Mapping[str, Reply]) -> list[str]:
    r"""Return the clients for whom fine-tuning is expected to pay, from what it gained on everybody's validation data.

    A client's own samples are few. So its gain :math:`g_c`, of variance :math:`v_c`, is drawn towards the mean gain :math:`\mu`; the more,
    the less the true gains differ between clients (variance :math:`\tau^2`). The client keeps its fine-tuned model if the gain that is
    then expected is positive:

    .. math:: \frac{\tau^2 g_c + v_c\,\mu}{\tau^2 + v_c} > 0

    :math:`\mu` and :math:`\tau^2` are those of a random-effects model [1]_ of the clients with two validation samples or more; the sign of
    :math:`\mu` decides for the others. Where a client claims a gain far from the others', :math:`\tau^2` is large, and each of the others
    is left to its own data.

    Parameters
    ----------
    replies : mapping
        Client → its ``personalize`` reply: ``gain``, its standard ``error``, and the number ``m`` of validation samples.

    References
    ----------
    .. [1] DerSimonian, Laird. *Meta-analysis in clinical trials.* Controlled Clinical Trials, 1986.

    Examples
    --------
    >>> few = {"m": 10, "error": 0.02}
    >>> pays({"a": {**few, "gain": 0.03}, "b": {**few, "gain": 0.05}, "c": {**few, "gain": -0.001}})
    ['a', 'b', 'c']
    >>> pays({"a": {**few, "gain": -0.03}, "b": {**few, "gain": -0.05}, "c": {**few, "gain": 0.001}})
    []
    """
    m, g, error = (np.array([float(reply[name]) for reply in replies.values()]) for name in ("m", "gain", "error"))
    measured, m = m > 1, np.maximum(m, 1.0)
    if not measured.any():
        return []
    spread = m * error**2  # of single samples
    varies = spread[measured & (spread > 0)]
    usual = float(np.median(varies)) if varies.size else 0.0
    v = np.maximum(((m - 1) * spread + PRIOR_SAMPLES * usual) / (m - 1 + PRIOR_SAMPLES) / m, MIN_VARIANCE)
    w = measured / v
    rest = w.sum() - (w**2).sum() / w.sum()
    tau2 = max(0.0, ((w * (g - np.average(g, weights=w)) ** 2).sum() - (measured.sum() - 1)) / rest) if rest > 0 else 0.0
    mu = np.average(g, weights=measured / (v + tau2))
    expected = np.where(measured, tau2 * g + v * mu, mu)
    return [client for client, value in zip(replies, expected, strict=True) if value > 0]


def gain(personal: Sequence[MetricsRow], plain: Sequence[MetricsRow], variant: str, scored: Sequence[str] | None) -> float | None:
    """Return the mean difference in accuracy (or R²) over the clients that were tested with both models."""
    after, before = ({r["client"]: score_of(r)[variant] for r in rows if is_tested(r, variant)} for rows in (personal, plain))
    gains = [after[c] - before[c] for c in after if c in before and (scored is None or c in scored)]
    return float(np.mean(gains)) if gains else None


def with_personal(summary: Mapping[str, Any], rows: Sequence[MetricsRow]) -> tuple[dict[str, Any], list[MetricsRow]]:
    """Return summary and last rows of a run with the scores after fine-tuning, as if that were a run of its own."""
    view, metric = dict(summary), metric_of(summary).value
    told = view.pop("personalized")
    last = [row for row in rows if row["round"] == summary["rounds"]]
    return {**view, metric: told[metric]}, [{**row, metric: told["clients"].get(row["client"])} for row in last]


def in_words(summary: Mapping[str, Any]) -> str:
    """Say who kept a fine-tuned model, and what it gained."""
    told, everybody = summary["personalized"], len(summary["clients"])
    after, before = (SiteScores.of(next(iter(score_of(one)["variants"].values()))) for one in (told, summary))
    found = difference(after, before) if after is not None and before is not None else None
    metric, score = metric_of(told), score_of(told)
    gained = found.points() if found is not None else "" if told["gain"] is None else f"{metric.change(told['gain'])} {metric.unit}"
    kept = f"fine-tuned at home: kept by {len(told['kept'])} of {plural(everybody, 'client')}"
    gained = f", {gained}" if gained and told["kept"] else ""  # where nobody kept one, the models are the same, and so are the scores
    return f"{kept}, {metric.label} {metric.text(score['mean'])}{gained}, worst client {metric.text(score['worst'])}"
