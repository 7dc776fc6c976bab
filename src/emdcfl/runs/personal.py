"""Fine-tuning at home: after the last round every client fine-tunes what it is served, and may keep the result.

The client decides (``core.tasks.personalize``); the server tests what was kept. A client that keeps nothing, or fails, goes on with the
model it is served. The rounds before do not depend on it, so one run has both: plain scores, and those with fine-tuning.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emdcfl.core import tasks
from emdcfl.core.errors import ClientError
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


@dataclass(frozen=True)
class FineTuned:
    """What fine-tuning brought."""

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
    replies = fed.run(tasks.personalize, inputs, verify=_verify, training=tuning, always=settings.mode == "on")
    states = {client: reply["theta"] for client, reply in replies.valid.items() if reply["kept"]}
    found = outcomes(fed, {c: {"models": theta[None], "weights": torch.ones(1)} for c, theta in states.items()}, variants)
    return FineTuned(states, [{**row, **found[row["client"]]} if row["client"] in states else dict(row) for row in plain])


def _verify(client: str, reply: Reply) -> None:
    if bool(reply["kept"]) != ("theta" in reply):
        raise ClientError(f"expected a state with kept = 1 and none with kept = 0, got kept = {reply['kept']}")


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
