"""What a client says of averages that it may train with: moments of its validation losses, never the losses of single samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from emdcfl.core.client import Client, Stages, staged_task
from emdcfl.core.errors import ClientError
from emdcfl.core.schema import Field, Reply
from emdcfl.core.tasks import Score

LOSS_CUT = 6.0
"""Largest loss of a sample that counts in ``loss_moments``, in nats."""

MIN_VOTE = 4
"""Validation samples below which the spread of losses is not known."""

MOMENTS = {
    "mean": Field(torch.float64, (None,), low=0.0, high=LOSS_CUT),
    "covariance": Field(torch.float64, (None, None)),
    "accuracy": Field(torch.float64, (None,), low=0.0, high=1.0),
    "accuracy_covariance": Field(torch.float64, (None, None)),
    "n": Field(int, low=MIN_VOTE, high="max_n"),
}


@staged_task(phase="decide", returns=MOMENTS)
def loss_moments(client: Client, *, models: Sequence[Tensor]) -> Stages:
    """Return validation losses under L states, cut at ``LOSS_CUT``, and accuracies: means, and the covariances of sums over the samples."""
    m = len(client.site.val)
    if m < MIN_VOTE:
        raise ClientError(f"client {client.name!r} has {m} validation samples, and {MIN_VOTE} are needed to say how losses vary")
    (scored,) = yield [Score(models, "val")]
    losses = scored["losses"].double().nan_to_num(nan=LOSS_CUT).clamp(0.0, LOSS_CUT)
    return moments_of(losses, scored["correct"].double())


def moments_of(losses: Tensor, correct: Tensor) -> Reply:
    """Return what ``loss_moments`` sends of losses and hits under L models, a row for each."""
    return {
        "mean": losses.mean(1),
        "covariance": _covariance_of_sums(losses),
        "accuracy": correct.mean(1),
        "accuracy_covariance": _covariance_of_sums(correct),
        "n": losses.shape[1],
    }


def _covariance_of_sums(values: Tensor) -> Tensor:
    r"""Estimate the covariance of the sums of L series from k blocks of about :math:`\sqrt m` consecutive samples.

    With :math:`s_j` the sums over block j of :math:`w_j` samples and :math:`\mu` the means it is
    :math:`\frac{k}{k-1}\sum_j (s_j - w_j\mu)(s_j - w_j\mu)^\top`: values that go up and down together over a block of a series are no
    independent evidence.
    """
    m = values.shape[1]
    k = round(m / int(m**0.5))
    first = [j * (m // k) + min(j, m % k) for j in range(k)]
    deviations = torch.from_numpy(np.add.reduceat((values - values.mean(1, keepdim=True)).numpy(), first, axis=1))
    covariance = deviations @ deviations.T * (k / (k - 1))
    return (covariance + covariance.T) / 2
