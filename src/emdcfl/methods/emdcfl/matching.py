"""Samples with the class counts of a partner's validation sample, so that W does not depend on the luck of the draw of classes.

A row client packs how many validation samples of each class it has next to the seed of its projection, in the box that only the partner
can open. The partner draws, from all its data, blocks with exactly these counts. It learns the counts; the server does not. Why this is
a test of the same hypothesis with far less noise: ``transport.calibration``.

Imports client and ``drawing``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emdcfl.core.client import Client
from emdcfl.core.errors import ClientError
from emdcfl.methods.emdcfl.sampling import all_labels, column, draw

MOST_CLASSES = 2**16

Places = np.ndarray[Any, Any]
"""Of samples among all of a client's, the validation samples first."""


@dataclass(frozen=True)
class Pools:
    """A client's samples by class, in random order; ``turn`` is the random order in which samples are shown, whatever their classes."""

    by_class: Mapping[int, Places]
    turn: Places


def packed_counts(client: Client, sizes: Sequence[int]) -> bytes:
    """Class counts of the first m validation samples, for each size m: the number of classes, then the counts, four bytes each."""
    y = client.site.val.y[draw(client, "val", max(sizes))].numpy()
    classes = 1 + max(int(split.y.max()) for split in (client.site.train, client.site.val))
    counts = [np.bincount(y[:size], minlength=classes) for size in sizes]
    return np.concatenate([[classes], *counts]).astype("<u4").tobytes()


def unpacked_counts(message: bytes, sizes: int) -> np.ndarray[Any, Any]:
    """Return the (sizes, classes) counts that a partner packed, or refuse what are none."""
    values = np.frombuffer(message, dtype="<u4").astype(np.int64) if len(message) % 4 == 0 else np.zeros(0, np.int64)
    if not values.size or not 0 < values[0] <= MOST_CLASSES or values.size != 1 + sizes * values[0]:
        raise ClientError(f"expected class counts for {sizes} sample sizes beside the seed, got {len(message)} bytes")
    return np.asarray(values[1:].reshape(sizes, -1))


def counts_of(partner: str, message: bytes, matching: Mapping[str, Any]) -> Places:
    """The counts for the size at which a partner is compared; counts of more or fewer samples would be answered with as many."""
    m = matching["m"][partner]
    counts: Places = unpacked_counts(message, len(matching["sizes"]))[matching["sizes"].index(m)]
    if counts.sum() != m:
        raise ClientError(f"expected class counts of {m} samples beside the seed, got those of {counts.sum()}")
    return counts


def pools(client: Client) -> Pools:
    """Shuffle all samples of a client, once for all partners, and sort them by class."""
    y = all_labels(client).numpy()
    rng = client.generator("samples by class", round=0)
    shuffled = rng.permutation(len(y))
    found = y[shuffled]
    return Pools({int(k): shuffled[found == k] for k in np.unique(y)}, rng.permutation(len(y)))


def matched(counts: Places, most_blocks: int, own: Pools) -> tuple[Tensor, int] | None:
    """Take blocks with the given class counts from both splits; as many as the rarest class allows, or None where it allows none.

    Of each class always the first ones of the shuffle, so that partners with like counts are shown the same samples, and no more of
    a client's data than one partner needs.
    """
    wanted = np.flatnonzero(counts).tolist()
    if not wanted or any(k not in own.by_class for k in wanted):
        return None
    blocks = min(most_blocks, *(len(own.by_class[k]) // int(counts[k]) for k in wanted))
    if blocks < 1:
        return None
    parts = np.concatenate([own.by_class[k][: blocks * counts[k]].reshape(blocks, -1) for k in wanted], axis=1)
    return torch.from_numpy(np.concatenate([block[own.turn[block].argsort()] for block in parts])), blocks


def within_classes(g: Any, labels: Tensor) -> float:
    """Variance of a dual potential inside classes, pooled; 0 where no class has two samples."""
    values, y = np.asarray(g, dtype=np.float64), labels.cpu().numpy()
    _, index = np.unique(y, return_inverse=True)
    means = np.bincount(index, values) / np.bincount(index)
    freedom = len(values) - len(means)
    return float(((values - means[index]) ** 2).sum() / freedom) if freedom > 0 else 0.0


def shown_to(client: Client, partner: str, counts: Places, matching: Mapping[str, Any], own: Pools) -> tuple[Tensor, int]:
    """The sample for one partner: blocks with its class counts and their number, or where data are short the plain sample and 0."""
    found = matched(counts, matching["blocks"][partner], own)
    return found or (column(client, matching["m"][partner], held_out=True), 0)
