r"""The guard of a federation: it flags unusual values and averages clients' states under the trust policy.

With the default policy an average is ``params.Average``, bit for bit. Otherwise, over the k members of an average,

1. weights are capped: no client has more than ``max_share`` of their sum;
2. updates :math:`\Delta_c = \theta_c - \theta_c^{start}` longer than ``clip`` times the median :math:`\|\Delta\|` are clipped to it;
3. the states are combined by weighted mean, or by trimmed mean or median of each coordinate.

None of this helps where hostile clients are the majority of a cluster, and two members have no majority.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from torch import Tensor

from emdcfl.core.params import TOGETHER, Average, average
from emdcfl.trust.ledger import Ledger
from emdcfl.trust.policy import Trust
from emdcfl.trust.robust import MEMBERS, capped_weights, cut, distance, distances, outliers, shortened, trimmed_mean

log = logging.getLogger("emdcfl")

NORM_FACTOR = 3.0
"""Smallest ratio to the median norm that is flagged: honest clients of very different size differ by up to two."""

SANITY_FACTOR = 10.0
"""Smallest ratio to the median at which a reference distance is flagged (squared for a variance): honest clients of very small networks
differ by up to 6.5."""


class Guard:
    """Quarantine, flags and averages of one federation."""

    def __init__(self, policy: Trust | None = None) -> None:
        self.policy = policy or Trust()
        self.ledger = Ledger(self.policy.max_faults)

    def mean(self) -> TrustedMean:
        """Return a running average under the policy."""
        return TrustedMean(self)

    def average(self, thetas: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """Combine the members' states: cap the weights, then take the mean, trimmed mean or median."""
        policy = self.policy
        if policy.aggregate == "mean":
            return average(thetas, capped_weights(weights, policy.max_share))
        return trimmed_mean(thetas, cut(len(thetas), policy.trim if policy.aggregate == "trimmed-mean" else 0.5))

    def shares(self, weights: Sequence[float]) -> list[float]:
        """Return the weight of each member in ``average``; of a trimmed mean or median, where all count alike, equal ones."""
        used = capped_weights(weights, self.policy.max_share) if self.policy.aggregate == "mean" else [1.0] * len(weights)
        return [weight / sum(used) for weight in used]

    def clip_updates(
        self, local: Mapping[str, Tensor], starts: Mapping[str, Tensor], groups: Collection[Sequence[str]]
    ) -> dict[str, Tensor]:
        """Flag long updates of this round and, under ``clip``, shorten them; return the states.

        ``local`` and ``starts`` are the states clients sent and trained from. Norms are compared within ``groups``; a client in several is
        clipped to the smallest of their limits.
        """
        out = dict(local)
        if not self.checks_updates:
            return out
        norms = {c: distance(local[c], starts[c]) for c in local if c in starts}
        for group in groups:
            for c, scale in self.scales({c: norms[c] for c in group if c in norms}).items():
                shorter = shortened(local[c], starts[c], scale)
                if distance(shorter, starts[c]) < distance(out[c], starts[c]):
                    out[c] = shorter
        return out

    @property
    def checks_updates(self) -> bool:
        """Whether the policy asks for the norms of updates."""
        return self.policy.flag > 0 or self.policy.clip is not None

    def scales(self, norms: Mapping[str, float]) -> dict[str, float]:
        """Flag outlying norms of a cluster; return the factor by which to shorten each update that ``clip`` does not allow."""
        if len(norms) < MEMBERS:
            return {}
        values = np.fromiter(norms.values(), dtype=np.float64)
        found = outliers(values, z=self.policy.flag, factor=NORM_FACTOR)
        if self.policy.clip is None and not any(found):
            return {}
        middle = float(np.median(values))
        for (c, norm), out in zip(norms.items(), found, strict=True):
            if out:
                self.flag(c, "update norm", norm, middle)
        if self.policy.clip is None:
            return {}
        limit = self.policy.clip * middle
        return {c: limit / norm for c, norm in norms.items() if norm > limit}

    def cap_outliers(self, values: Mapping[str, float], what: str, *, factor: float = SANITY_FACTOR) -> dict[str, float]:
        """Flag values (named ``what``) far above the others'; return the cap for each such client: the largest value that is no outlier.

        Values are such that a large one would gain its client links.
        """
        found = outliers(list(values.values()), z=self.policy.flag, factor=factor)
        if not any(found):
            return {}
        kept = max(v for v, out in zip(values.values(), found, strict=True) if not out)
        middle = float(np.median(list(values.values())))
        high = {c: v for (c, v), out in zip(values.items(), found, strict=True) if out}
        for c, value in high.items():
            self.flag(c, what, value, middle)
        return dict.fromkeys(high, kept)

    def flag(self, client: str, what: str, value: float, typical: float) -> None:
        """Record that a client's value is an outlier; log it once per round, and only the first time as a warning."""
        known = self.ledger.flags.get((client, what))
        if known is None or known.last != self.ledger.round:
            level = logging.WARNING if known is None else logging.DEBUG
            log.log(level, "round %d: %s of client %r is %.3g, median %.3g", self.ledger.round, what, client, value, typical)
        self.ledger.flag(client, what, value, typical)


class TrustedMean:
    """A running average under a policy. It keeps all states only where the policy needs them at once.

    Examples
    --------
    >>> import torch
    >>> mean = Guard(Trust(aggregate="median")).mean()
    >>> for name, value in (("a", 1.0), ("b", 2.0), ("c", 1e6)):
    ...     mean.add(torch.tensor([value]), 1, client=name)
    >>> mean.result()
    tensor([2.])
    """

    def __init__(self, guard: Guard) -> None:
        self._guard, self._checks_updates, self._plain = guard, guard.checks_updates, guard.policy.plain
        self._running = Average()
        self._waiting: list[tuple[str, Tensor, float, Tensor | None]] = []
        self._kept: list[tuple[str, Tensor, float]] = []
        self._starts: dict[str, Tensor] = {}
        self._norms: dict[str, float] = {}

    @property
    def total(self) -> float:
        """Sum of the weights so far; 0 while nothing was added."""
        self._add_waiting()
        return self._running.total or sum(weight for _, _, weight in self._kept)

    def add(self, theta: Tensor, weight: float, *, client: str, start: Tensor | None = None) -> None:
        """Add a client's state; ``start`` is the state it trained from, needed to check its update."""
        self._waiting.append((client, theta, float(weight), start))
        if (len(self._waiting) + 1) * theta.numel() > TOGETHER:
            self._add_waiting()

    def _add_waiting(self) -> None:
        """Add the collected states in their order."""
        if not self._waiting:
            return
        clients, thetas, weights, _ = zip(*self._waiting, strict=True)
        if self._checks_updates:
            known = [member for member in self._waiting if member[3] is not None]
            if known:
                started, trained, _, starts = zip(*known, strict=True)
                self._norms.update(zip(started, distances(trained, starts), strict=True))
                self._starts.update(zip(started, starts, strict=True))
        if self._plain:
            self._running.add_all(thetas, weights)
        else:
            self._kept += zip(clients, thetas, weights, strict=True)
        self._waiting.clear()

    def result(self) -> Tensor:
        """Return the average; outlying updates are flagged here, when all members are known."""
        self._add_waiting()
        scales = self._guard.scales(self._norms)
        if self._plain:
            return self._running.result()
        thetas = [shortened(t, self._starts[c], scales[c]) if c in scales else t for c, t, _ in self._kept]
        return self._guard.average(thetas, [w for _, _, w in self._kept])
