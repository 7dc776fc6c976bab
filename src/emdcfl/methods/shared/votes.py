"""What FedSoft's clients do: vote which of K cluster models explains their samples best, and train near the mix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from emdcfl.core import tasks
from emdcfl.core.client import LOSS_BATCH, Client, Stages, staged_task
from emdcfl.core.errors import ClientError
from emdcfl.core.params import average
from emdcfl.core.schema import Field, Reply
from emdcfl.core.tasks import TRAINED, Fit, Training

Votes = Literal["sample", "batch"]


def smooth(counts: Tensor, *, smoothing: float, votes: Votes = "sample") -> Tensor:
    r"""Return :math:`a_c`: the votes of m samples, where a cluster without any gets :math:`\sigma m`.

    With ``votes="batch"`` it gets ⌊σm⌋, and one at least, as in the public code.

    Examples
    --------
    >>> smooth(torch.tensor([60, 40, 0]), smoothing=0.01)
    tensor([60., 40.,  1.], dtype=torch.float64)
    """
    m = float(counts.sum())
    least = smoothing * m if votes == "sample" else max(1.0, float(int(smoothing * m)))
    return torch.where(counts > 0, counts.double(), least)


def batch_votes(table: Tensor, n: int) -> Tensor:
    """Credit the cluster with the lowest mean loss on a batch with all samples of the batch.

    Parameters
    ----------
    table : (K, batches) tensor
        Mean losses on batches of 64, the last one with what is left of n samples.

    Examples
    --------
    >>> batch_votes(torch.tensor([[0.1, 0.9, 0.9], [0.5, 0.5, 0.5]]), 130)
    tensor([64., 66.], dtype=torch.float64)
    """
    return torch.zeros(len(table), dtype=torch.float64).index_add_(0, table.argmin(0), batch_sizes(n))


def batch_sizes(n: int) -> Tensor:
    """Return the sizes of the batches that n samples are scored in."""
    whole, rest = divmod(n, LOSS_BATCH)
    return torch.tensor([LOSS_BATCH] * whole + [rest] * (rest > 0), dtype=torch.float64)


@staged_task(phase="train", returns={**TRAINED, "a": Field(torch.float64, ("K",), low=0, high="max_n")})
def soft_train(
    client: Client,
    *,
    models: Tensor,
    training: Mapping[str, Any],
    method: Mapping[str, Any],
    a: Tensor | None = None,
    own: Tensor | None = None,
) -> Stages:
    """Count the votes (unless given), mix the cluster models by them and train near the mix."""
    if a is None:
        by_sample = method["votes"] == "sample"
        scored = tasks.evaluate(client, models=models, split=method["split"], reduction="argmin_counts" if by_sample else "per_batch")
        counts = scored["table"][:, 0] if by_sample else batch_votes(scored["table"], scored["n"])
        a = smooth(counts, smoothing=method["smoothing"], votes=method["votes"])
    mix = mix_models(models, a)
    prox = {"anchor": mix, "mu": method["lam"]} if method["lam"] > 0 else None
    (reply,) = yield [Fit(mix if own is None else own, Training.of(training), prox)]
    return {**reply, "a": a}


def mix_models(models: Tensor, a: Tensor) -> Tensor:
    r"""Return :math:`\bar w_c = \sum_k u_{ck}\,\theta_k`."""
    voted = torch.nonzero(a > 0).flatten().tolist()
    return average([models[k] for k in voted], [float(a[k]) for k in voted])  # rows, not a copy of them


def verify_votes(client: str, reply: Reply) -> None:
    """Refuse votes for no cluster at all: there is nothing to mix."""
    if not bool((reply["a"] > 0).any()):
        raise ClientError("expected votes for at least one cluster, got none")
