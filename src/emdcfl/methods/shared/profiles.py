r"""Accumulated updates of CFLGP: running means :math:`G_c \leftarrow (1-\beta)G_c + \beta\Delta_c` in blocks, and their Gram matrix.

The Gram matrix of the *new* profiles is a congruence :math:`A\,B\,A^\top` of the Gram matrix B of old profiles and fresh updates, so the
new profiles need not exist beside the old ones and the clients' states; ``apply`` makes them one by one and lets go of what it has used.

Imports params only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from emdcfl.core.params import gram

Vectors = Mapping[str, Mapping[str, Tensor]]
Numbers = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Fresh:
    """A new update, not yet subtracted: the profile's part of the state after training and before, and the number of steps."""

    after: Tensor
    before: Tensor
    steps: float


@dataclass(frozen=True)
class ProfileUpdate:
    r"""What one round does to the profiles.

    Parameters
    ----------
    vectors, steps : mapping
        Block → client → :math:`G_c`, and the same running mean of the number of steps.
    fresh : dict
        Block → client → new update; emptied by ``apply``.
    beta : float
        :math:`\beta`, the weight of the new update.
    from_zero : bool
        Whether a client's first update in a block is weighed by :math:`\beta` too (the block was zero before), or taken whole.
    """

    vectors: Vectors
    steps: Numbers
    fresh: dict[str, dict[str, Fresh]]
    beta: float
    from_zero: bool = False

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
