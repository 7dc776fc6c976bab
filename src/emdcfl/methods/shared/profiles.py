r"""Accumulated updates of CFLGP: running means :math:`G_c \leftarrow (1-\beta)G_c + \beta\Delta_c` in blocks, and their Gram matrix.

The Gram matrix of the *new* profiles is a congruence :math:`A\,B\,A^\top` of the Gram matrix B of old profiles and fresh updates, so the
new profiles need not exist beside the old ones and the clients' states; ``apply`` makes them one by one and frees what it has used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emdcfl.clustering import match_labels
from emdcfl.core.federation import Federation
from emdcfl.core.keys import generator
from emdcfl.core.params import Scope, gram
from emdcfl.methods.base import Clustered
from emdcfl.methods.shared.vectors import sets_of

MAX_PROFILE = 1 << 29
"""Numbers all profiles together may hold (2 GiB); 40 clients of ResNet18 fit in one block. Larger ones keep a share of the coordinates."""


@dataclass(frozen=True)
class CFLGPState(Clustered):
    """``Clustered`` with K models, and the profiles."""

    profile: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Block → client → vector :math:`G_c`."""
    profile_steps: dict[str, dict[str, float]] = field(default_factory=dict)
    """Block → client → running mean of the steps, which is what BatchNorm's counters moved by."""
    clustered: bool = False
    """Whether K-means has run; before that all clients share model 0."""


@dataclass(frozen=True)
class Fresh:
    """A new update, not yet subtracted: the profile's part of the state after training and before, and the number of steps."""

    after: Tensor
    before: Tensor
    steps: float


@dataclass(frozen=True)
class ProfileUpdate:
    """What one round does to the profiles."""

    vectors: Mapping[str, Mapping[str, Tensor]]
    """Block → client → :math:`G_c`."""
    steps: Mapping[str, Mapping[str, float]]
    """The same running mean of the number of steps."""
    fresh: dict[str, dict[str, Fresh]]
    """Block → client → new update; emptied by ``apply``."""
    beta: float
    """Weight of the new update."""
    from_zero: bool = False
    """Whether a client's first update in a block is weighed by beta too (the block was zero before), or taken whole."""

    @property
    def blocks(self) -> list[str]:
        return sorted({*self.vectors, *self.fresh})

    def knows(self, client: str) -> bool:
        """Whether the client has a profile, in any block, once this round is applied."""
        return any(client in self.vectors.get(b, {}) or client in self.fresh.get(b, {}) for b in self.blocks)

    def weights(self, block: str, client: str) -> tuple[float, float]:
        """Return the weights of the old profile and of the fresh update in the new profile."""
        old, new = client in self.vectors.get(block, {}), client in self.fresh.get(block, {})
        if not new:
            return float(old), 0.0
        return (1 - self.beta, self.beta) if old else (0.0, self.beta if self.from_zero else 1.0)

    def gram(self, clients: Sequence[str], *, counters: float = 0.0) -> Tensor:
        """Return the Gram matrix of the new profiles, summed over blocks; ``counters`` further entries move by one with each step."""
        total = torch.zeros(len(clients), len(clients), dtype=torch.float64)
        for block in self.blocks:
            rows: list[Tensor] = []
            origins: list[Tensor] = []
            mix: list[tuple[int, float]] = []
            moved = torch.zeros(len(clients), dtype=torch.float64)
            for i, c in enumerate(clients):
                a, b = self.weights(block, c)
                if a > 0:
                    rows.append(self.vectors[block][c])
                    origins.append(torch.zeros((), dtype=torch.float32).expand(rows[-1].shape))
                    mix.append((i, a))
                    moved[i] += a * self.steps[block][c]
                if b > 0:
                    rows.append(self.fresh[block][c].after)
                    origins.append(self.fresh[block][c].before)
                    mix.append((i, b))
                    moved[i] += b * self.fresh[block][c].steps
            if rows:
                A = torch.zeros(len(clients), len(rows), dtype=torch.float64)
                for column, (i, weight) in enumerate(mix):
                    A[i, column] = weight
                total += A @ gram(rows, origin=origins) @ A.T
            total += counters * torch.outer(moved, moved)
        return total

    def apply(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, dict[str, float]]]:
        """Return the new profiles and steps."""
        vectors = {b: dict(self.vectors.get(b, {})) for b in self.blocks}
        steps = {b: dict(self.steps.get(b, {})) for b in self.blocks}
        for block, entries in self.fresh.items():
            for c in list(entries):
                a, b = self.weights(block, c)
                new = entries.pop(c)
                vector = (new.after - new.before).mul_(b)
                if a > 0:
                    vector.add_(vectors[block][c], alpha=a)
                vectors[block][c] = vector
                steps[block][c] = b * new.steps + (a * steps[block][c] if a > 0 else 0.0)
        return vectors, steps


def profile_coordinates(fed: Federation, blocks: int, scope: Scope) -> tuple[slice | Tensor, float]:
    """Return which entries of θ profiles keep, and their share; the entries are drawn once per run."""
    span = fed.layout.scope(scope)
    width = span.stop - span.start
    share = min(1.0, MAX_PROFILE / (blocks * len(fed.clients) * width))
    if share >= 1:
        return span, 1.0
    drawn = generator(fed.seed, "", 0, "profile coordinates").random(width, dtype=np.float32) < share
    drawn[:1] |= not drawn.any()
    return torch.from_numpy(np.flatnonzero(drawn)) + span.start, share


def renumber(new: Mapping[str, int], old: Mapping[str, int], k: int) -> dict[str, int]:
    """Renumber clusters so that as many clients as possible keep their number; clusters without known clients get free numbers.

    Examples
    --------
    >>> renumber({"a": 0, "b": 0, "c": 1}, {"a": 2, "b": 2}, 3)
    {'a': 2, 'b': 2, 'c': 0}
    """
    known = [c for c in new if c in old]
    matched = match_labels([new[c] for c in known], [old[c] for c in known], k).tolist()
    numbers = {new[c]: label for c, label in zip(known, matched, strict=True)}
    free = [label for label in range(k) if label not in numbers.values()]
    for label in new.values():
        if label not in numbers:
            numbers[label] = free.pop(0)
    return {c: numbers[label] for c, label in new.items()}


def nearest_clusters(features: Any, who: Sequence[str], labels: Mapping[str, int], k: int) -> dict[str, int]:
    """Return the cluster with the nearest mean of features for each client without a label.

    Examples
    --------
    >>> nearest_clusters(np.array([[0.0], [1.0], [0.8]]), ["a", "b", "new"], {"a": 0, "b": 1}, 2)
    {'new': 1}
    """
    rows = {c: features[i] for i, c in enumerate(who)}
    known = sets_of(who, {c: label for c, label in labels.items() if c in rows}, k)
    centres = {label: np.mean([rows[c] for c in members], axis=0) for label, members in enumerate(known) if members}
    return {c: min(centres, key=lambda label: float(np.linalg.norm(rows[c] - centres[label]))) for c in who if c not in labels}
