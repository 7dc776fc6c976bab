r"""Trainings that come after their round: what they count for in the round in which they come.

The client trained from :math:`\theta^s` in round s and arrives in round t, in which it would train from :math:`\theta^t`. Its change is
moved there, and weighs less the older it is:

.. math:: \theta_c \leftarrow \theta^t + (\theta_c - \theta^s), \qquad n_c \leftarrow n_c\,(1 + t - s)^{-1/2}

The weight is the polynomial one of Xie, Koyejo, Gupta. *Asynchronous Federated Optimization.* OPT 2020. Running statistics of BatchNorm
are the client's own: a difference of variances is none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from emdcfl.core.schema import Reply
from emdcfl.engines.flower.messages import PendingRequest


@dataclass(frozen=True)
class Straggler:
    """A client that is still at work on a training of an earlier round, and the state it began from."""

    pending: PendingRequest
    task: str
    round: int
    start: Tensor


def staleness(age: int) -> float:
    """Return the share of its weight that an update keeps, ``age`` rounds after it was asked for.

    Examples
    --------
    >>> staleness(0), staleness(3)
    (1.0, 0.5)
    """
    return float((1 + age) ** -0.5)


def stale(reply: Reply, *, start: Tensor, now: Tensor, trainable: Any, max_n: int, age: int) -> Reply:
    """Return a late reply as one of this round; one that breaks the rules stays as it is, for validation to reject."""
    theta, n = reply.get("theta"), reply.get("n")
    if type(n) is not int or not 1 <= n <= max_n:
        return reply
    if not isinstance(theta, Tensor) or theta.shape != start.shape or theta.dtype != start.dtype:
        return reply
    moved = theta.clone()
    moved[trainable] += now[trainable] - start[trainable]
    return {**reply, "theta": moved, "n": max(1, round(n * staleness(age)))}
