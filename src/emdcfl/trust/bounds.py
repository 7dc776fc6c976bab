r"""The default bounds on trained states: one far beyond its start or its peers is left out, and nobody else.

A state may be a hundred times as long as its start. The peers of a client are those that trained from the same state in the same request;
where they are fewer than three, all clients of the request. With the update :math:`\Delta_c = P(\theta_c) - P(\theta_c^{start})` over
:math:`n_c` samples, a client is left out if

.. math:: \|\Delta_c\| > 20\,\mathrm{med}\|\Delta\|\,\sqrt{\min(100, \max(1, n_c/\mathrm{med}(n)))}

and, where the peers did not share its start, if also :math:`\|\Delta_c\| > 3\max(1, \|P(\theta_c^{start})\|)`: who trains from θ⁰ beside
others that have converged moves much farther than they do. Honest updates of equal n differ by up to two; more samples are more steps.
Statistics (what is in θ without being trained) have a bound of their own, because they differ with the scale of the data.

Whoever is left out is at fault only if its start is near enough to the initial model that honest training does not diverge from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from emdcfl.core.errors import ClientError
from emdcfl.core.params import Layout
from emdcfl.core.schema import DivergedError
from emdcfl.trust.robust import MEMBERS

MAX_GROWTH = 100.0
"""Largest ratio of a trained state's norm to that of the state it began from (or to 1)."""

UPDATE_FACTOR = 20.0
"""Largest ratio of an update's norm to the median of its peers, at equal n."""

SIZE_FACTOR = 10.0
"""By how much a larger n may raise that ratio."""

JUMP_FACTOR = 3.0
"""Ratio to the norm of its start (or to 1) up to which an update is not compared with peers that began elsewhere."""

STATISTICS_FACTOR = 1e4
"""Largest ratio of the norm of the statistics to the median of the request (or to 1): inputs may differ in scale by 100."""

HEALTHY_FACTOR = 3.0
"""Ratio to the norm of the initial model (or to 1) up to which a start does not drive honest training apart."""

Start = Tensor | None


@dataclass(frozen=True)
class Update:
    """One client's update: what it began from (equal keys: the same state), norms of update, start and statistics, and n."""

    start: Any
    norm: float
    start_norm: float
    statistics: float
    n: int


@dataclass(frozen=True)
class Excess:
    """Why an update is left out; ``proven`` if its peers began from the same state and stayed near it."""

    reason: str
    proven: bool


class Bounds:
    """The bounds for states of one network; ``initial`` returns the initial model."""

    def __init__(self, layout: Layout, initial: Callable[[], Tensor]) -> None:
        self._trainable, self._initial = layout.trainable, initial
        self._variances = [e.slice for e in layout.entries if not e.trainable and e.name.endswith("running_var")]

    def check_state(self, theta: Tensor, start: Start) -> None:
        """Refuse a state so large, or with such variances, that whoever is served an average with it would diverge."""
        size = _norm(theta[..., self._trainable])
        began = math.inf if start is None else _norm(start[..., self._trainable])
        limit = MAX_GROWTH * max(1.0, began)
        if size > limit:
            text = f"expected a state of norm <= {limit:.3g} ({MAX_GROWTH:g} times that of its start), got {size:.3g}"
            raise (ClientError if self.healthy(_per_model(began, start)) else DivergedError)(text)

    def check_variances(self, theta: Tensor, start: Start) -> None:
        """Refuse running variances below zero, unless the start had some."""
        for part in self._variances:
            if float(theta[..., part].min()) < 0:
                served = start is not None and float(start[..., part].min()) < 0
                raise (DivergedError if served else ClientError)("expected running variances >= 0, got some below")

    def healthy(self, norm: float) -> bool:
        """Whether a start of this norm is near enough to the initial model."""
        return norm <= HEALTHY_FACTOR * max(1.0, _norm(self._initial()[self._trainable]))

    def update(self, theta: Tensor, start: Tensor, n: int) -> Update:
        """Measure an update; where the client mixes its start from K models, as the distance to the nearest of them."""
        apart = torch.linalg.vector_norm(theta[..., self._trainable] - start[..., self._trainable], dim=-1, dtype=torch.float64)
        norm = float(apart.min()) if theta.dim() < start.dim() else _norm(apart)
        rest = (theta[..., : self._trainable.start], theta[..., self._trainable.stop :])
        began = _per_model(_norm(start[..., self._trainable]), start)
        return Update((start.data_ptr(), tuple(start.shape)), norm, began, math.hypot(*map(_norm, rest)), n)


def _norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) if x.numel() else 0.0


def _per_model(norm: float, start: Start) -> float:
    return norm if start is None or start.dim() == 1 else norm / math.sqrt(len(start))


def excesses(updates: Mapping[str, Update]) -> dict[str, Excess]:
    """Return the clients whose update or statistics are beyond the bound, and why.

    Examples
    --------
    >>> updates = {name: Update("start", norm, 4.0, 0.0, 10) for name, norm in (("a", 1.0), ("b", 1.2), ("c", 90.0))}
    >>> excesses(updates)["c"].reason
    'expected an update of norm <= 24 (20 times the median of 3 clients), got 90'
    """
    if len(updates) < MEMBERS:
        return {}
    groups: dict[Any, list[Update]] = {}
    for update in updates.values():
        groups.setdefault(update.start, []).append(update)
    everybody, found = list(updates.values()), {}
    statistics = STATISTICS_FACTOR * max(1.0, median(update.statistics for update in everybody))
    for client, own in updates.items():
        shared = len(groups[own.start]) >= MEMBERS
        peers = groups[own.start] if shared else everybody
        middle, n = median(peer.norm for peer in peers), median(peer.n for peer in peers)
        limit = UPDATE_FACTOR * min(SIZE_FACTOR, math.sqrt(max(1.0, own.n / n))) * middle
        jump = JUMP_FACTOR * max(1.0, own.start_norm)
        if middle > 0 and own.norm > (limit if shared else max(limit, jump)):
            text = f"{UPDATE_FACTOR:g} times the median of {len(peers)} clients" + (", more for a larger n" if own.n > n else "")
            reason = f"expected an update of norm <= {limit:.3g} ({text}), got {own.norm:.3g}"
            found[client] = Excess(reason, proven=shared and middle <= jump)
        elif own.statistics > statistics:
            reason = f"expected statistics (means and variances) of norm <= {statistics:.3g}, got {own.statistics:.3g}"
            found[client] = Excess(reason, proven=True)
    return found
