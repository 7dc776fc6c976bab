"""From a ``Serving`` to numbers: accuracy of every client by the one declared rule, agreement with the truth, the summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emdcfl.clustering import adjusted_rand
from emdcfl.core import tasks
from emdcfl.core.federation import Federation
from emdcfl.core.params import average
from emdcfl.methods.base import Serving

MetricsRow = dict[str, Any]
"""One line of ``metrics.jsonl``: a client in a round."""


def served(serving: Serving, client: int) -> tuple[Tensor, Tensor]:
    """Return the states client number ``client`` is served with, and their weights in the mixture of predictions."""
    weights = serving.weights[client]
    chosen = torch.nonzero(weights > 0).flatten().tolist()
    if len(chosen) == 1:
        return serving.models[chosen[0] : chosen[0] + 1], torch.ones(1)  # a view: there is one for every client
    if serving.mix == "predictions":
        every = len(chosen) == len(serving.models)
        return serving.models if every else serving.models[chosen], weights[chosen] / weights[chosen].sum()
    mixed = average([serving.models[k] for k in chosen], [float(weights[k]) for k in chosen])
    return mixed[None], torch.ones(1)


def score(fed: Federation, serving: Serving, losses: Mapping[str, float]) -> list[MetricsRow]:
    """Test every client with what it is served; one row per client, in client order."""
    inputs = {}
    for i, client in enumerate(fed.clients):
        models, weights = served(serving, i)
        inputs[client] = {"models": models, "weights": weights}
    replies = fed.run(tasks.test, inputs)
    rows = []
    for i, client in enumerate(fed.clients):
        reply = replies.valid.get(client)
        rows.append(
            {
                "round": fed.index,
                "client": client,
                "cluster": None if serving.clusters is None else int(serving.clusters[i]),
                "train_loss": losses.get(client),
                "accuracy": reply["accuracy"] if reply else None,
                "test_loss": reply["loss"] if reply else None,
                "test_samples": reply["n"] if reply else None,
            }
        )
    return rows


def accuracy(rows: Sequence[MetricsRow], variant: str, scored: Sequence[str] | None = None) -> dict[str, float | None]:
    """Unweighted mean and minimum over clients of one test variant; clients without an answer or without test samples do not count."""
    wanted = None if scored is None else set(scored)
    known = [r for r in rows if r["accuracy"] and (wanted is None or r["client"] in wanted)]
    values = [r["accuracy"][variant] for r in known if variant in r["accuracy"] and r["test_samples"][variant] > 0]
    return {"mean": float(np.mean(values)) if values else None, "worst": float(min(values)) if values else None}


def agreement(serving: Serving, clients: Sequence[str], truth: Mapping[str, str] | None) -> float | None:
    """ARI with the true groups, where both exist."""
    if serving.clusters is None or truth is None:
        return None
    order = {group: i for i, group in enumerate(dict.fromkeys(truth.values()))}
    return float(adjusted_rand([order[truth[c]] for c in clients], serving.clusters.tolist()))


def model_names(serving: Serving, clients: Sequence[str]) -> list[str]:
    """Name of each row of ``serving.models``: ``cluster-<k>``, ``component-<k>`` in mixtures, ``client-<name>`` for personal models."""
    rows = serving.models.shape[0]
    if serving.clusters is not None:
        label = {int(serving.weights[i].argmax()): int(k) for i, k in reversed(list(enumerate(serving.clusters.tolist())))}
        return [f"cluster-{label[row]}" if row in label else f"unused-{row}" for row in range(rows)]
    if serving.mix == "predictions":
        return [f"component-{k}" for k in range(rows)]
    personal = rows == len(clients) and rows > 1
    return [f"client-{clients[k]}" if personal else f"cluster-{k}" for k in range(rows)]
