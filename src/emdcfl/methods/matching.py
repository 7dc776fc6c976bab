"""Samples with the class counts of a partner's validation sample, so that W does not depend on the luck of the draw of classes.

A row client packs how many validation samples of each class it has next to the seed of its projection, in the box that only the partner
can open. The partner draws, from all its data, blocks with exactly these counts. It learns the counts; the server does not. Why this is
a test of the same hypothesis with far less noise: ``transport.calibration``.

Imports client and ``drawing``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emdcfl.client import Client
from emdcfl.errors import ClientError
from emdcfl.methods.drawing import Column, column, draw

MOST_CLASSES = 2**16

Pools = Mapping[int, np.ndarray[Any, Any]]


def packed_counts(client: Client, sizes: Sequence[int]) -> bytes:
    """Class counts of the first m validation samples, for each size m: the number of classes, then the counts, four bytes each."""
    y = client.split("val").y[draw(client, "val", max(sizes))].cpu().numpy()
    classes = 1 + max(int(client.split(split).y.max()) for split in ("train", "val"))
    counts = [np.bincount(y[:size], minlength=classes) for size in sizes]
    return np.concatenate([[classes], *counts]).astype("<u4").tobytes()


def unpacked_counts(message: bytes, sizes: int) -> np.ndarray[Any, Any]:
    """Return the (sizes, classes) counts that a partner packed, or refuse what are none."""
    values = np.frombuffer(message, dtype="<u4").astype(np.int64) if len(message) % 4 == 0 else np.zeros(0, np.int64)
    if not values.size or not 0 < values[0] <= MOST_CLASSES or values.size != 1 + sizes * values[0]:
        raise ClientError(f"expected class counts for {sizes} sample sizes beside the seed, got {len(message)} bytes")
    return np.asarray(values[1:].reshape(sizes, -1))


def by_class(client: Client) -> Pools:
    """Where the samples of each class lie in: validation samples, then train samples."""
    y = np.concatenate([client.site.val.y.numpy(), client.site.train.y.numpy()])
    return {int(k): np.flatnonzero(y == k) for k in np.unique(y)}


def matched(client: Client, counts: np.ndarray[Any, Any], most_blocks: int, partner: str, pools: Pools) -> tuple[Column, int] | None:
    """Draw blocks with the given class counts from both splits; as many as the rarest class allows, or None where it allows none."""
    wanted = np.flatnonzero(counts)
    if not wanted.size:
        return None
    held_out = len(client.site.val)
    rng = client.generator(f"sample with the classes of {partner}", round=0)
    drawn = {int(k): rng.permutation(pools.get(int(k), np.zeros(0, np.int64))) for k in wanted}
    blocks = min(most_blocks, *(len(drawn[k]) // int(counts[k]) for k in drawn))
    if blocks < 1:
        return None
    parts = [np.concatenate([drawn[k][b * counts[k] : (b + 1) * counts[k]] for k in drawn]) for b in range(blocks)]
    shown = np.concatenate([rng.permutation(part) for part in parts])
    of_val = shown < held_out
    order = np.empty(len(shown), dtype=np.int64)  # where each shown sample lies in: validation samples, then train samples
    order[of_val], order[~of_val] = np.arange(of_val.sum()), of_val.sum() + np.arange((~of_val).sum())
    device = client.network.device
    val, train = (torch.from_numpy(index).to(device) for index in (shown[of_val], shown[~of_val] - held_out))
    return Column(val, train, torch.from_numpy(order)), blocks


def within_classes(g: Any, labels: Tensor) -> float:
    """Variance of a dual potential inside classes, pooled; 0 where no class has two samples."""
    values, y = np.asarray(g, dtype=np.float64), labels.cpu().numpy()
    _, index = np.unique(y, return_inverse=True)
    means = np.bincount(index, values) / np.bincount(index)
    freedom = len(values) - len(means)
    return float(((values - means[index]) ** 2).sum() / freedom) if freedom > 0 else 0.0


def shown_to(client: Client, partner: str, message: bytes, matching: Mapping[str, Any], pools: Pools) -> tuple[Column, int]:
    """The sample for one partner: blocks with its class counts and their number, or where data are short the plain sample and 0."""
    counts = unpacked_counts(message, len(matching["sizes"]))[matching["sizes"].index(matching["m"][partner])]
    found = matched(client, counts, matching["blocks"][partner], partner, pools)
    return found or (column(client, matching["m"][partner], held_out=True), 0)
