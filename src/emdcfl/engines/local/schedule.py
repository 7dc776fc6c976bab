"""The batches of many trainings as arrays: at every step, exactly the samples that ``tasks.local_sgd`` would take.

Trainings are sorted by their number of steps, longest first, so that those still running at step t are the first ``active[t]`` rows.
A batch shorter than the widest of its step is padded with a sample of the same client and weight zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emdcfl.core.client import Client
from emdcfl.core.tasks import Fit, batches

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Schedule:
    """The batches of F trainings with at most S steps of at most B samples."""

    rows: list[int]
    """Which training each row is."""
    index: Tensor
    """(S, F, B): train index of every sample, counted from the client's first."""
    scale: Tensor
    """(S, F, B): :math:`w_s / |b|`, zero where a batch is padded."""
    last: Tensor
    """(S, F, B): samples of the last epoch, whose losses are reported."""
    sizes: Array
    """(S, F): batch sizes, zero for a training that is over."""
    active: list[int]
    """Trainings still running at each step."""

    @property
    def steps(self) -> list[int]:
        """Number of steps of every row."""
        counts: list[int] = (self.sizes > 0).sum(0).tolist()
        return counts


def schedule(fits: Sequence[tuple[Client, Fit]], *, needs_two: bool) -> Schedule:
    """Lay out trainings that share epochs and batch size."""
    training, epochs = fits[0][1].training, fits[0][1].training.local_epochs
    by_length: dict[int, list[int]] = {}
    for i, (client, _) in enumerate(fits):
        by_length.setdefault(len(client.site.train), []).append(i)
    cuts = {n: _sizes(fits[members[0]][0], n, training.batch_size, needs_two=needs_two) for n, members in by_length.items()}
    lengths = sorted(by_length, key=lambda n: (-len(cuts[n]), -n))
    steps, width = epochs * len(cuts[lengths[0]]), max(int(sizes.max()) for sizes in cuts.values())
    shape = (steps, len(fits), width)
    index, scale, last = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.float32), np.zeros(shape, dtype=bool)
    sizes = np.zeros(shape[:2], dtype=np.int64)
    rows: list[int] = []
    for n in lengths:
        here, members, per_epoch = slice(len(rows), len(rows) + len(by_length[n])), by_length[n], len(cuts[n])
        s, there = epochs * per_epoch, np.arange(width) < cuts[n][:, None]
        filled = np.zeros((len(members), epochs, per_epoch, width), dtype=np.int64)
        # the order inside a batch does not matter, so an epoch of one batch needs no shuffle
        filled[:, :, there] = np.arange(n) if per_epoch == 1 else [_orders(*fits[i], n, epochs) for i in members]
        index[:s, here] = filled.reshape(len(members), s, width).transpose(1, 0, 2)
        sizes[:s, here] = np.tile(cuts[n], epochs)[:, None]
        scale[:s, here] = np.tile(there / cuts[n][:, None].astype(np.float32), (epochs, 1))[:, None]
        last[s - per_epoch : s, here] = there[:, None]
        rows += members
    for row, i in enumerate(rows):
        weights = fits[i][1].sample_weights
        if weights is not None:
            scale[:, row] *= weights.cpu().numpy()[index[:, row]]
    active = (sizes > 0).sum(1).tolist()
    return Schedule(rows, torch.from_numpy(index), torch.from_numpy(scale), torch.from_numpy(last), sizes, active)


def _sizes(client: Client, n: int, batch_size: int, *, needs_two: bool) -> Array:
    """Return the batch sizes of one epoch."""
    return np.array([len(b) for b in batches(np.empty(n), batch_size, needs_two=needs_two, client=client)])


def _orders(client: Client, fit: Fit, n: int, epochs: int) -> list[Array]:
    """Return the shuffled train indices of every epoch, as ``local_sgd`` draws them."""
    rng = client.generator(fit.purpose)
    return [rng.permutation(n) for _ in range(epochs)]
