r"""Which of its samples a client shows in EMD-CFL, and in which order; with a partner's class counts where classes are matched.

A column sample may come from both splits. It is a tensor of indices into all samples of the client, the validation samples first
(``Client.rows`` with ``"all"``), in the order in which it is shown.

Matched classes: a row client packs how many validation samples of each class it has next to the seed of its projection, in the box that
only the partner can open, and the partner draws blocks with exactly these counts from all its data (``transport.calibration`` says why). A
partner that is short of some class *offers* the counts that both have, :math:`\min(m_k, n_k)`, sealed for the row client, which then
computes τ at these counts. With fewer than ``MIN_COMMON`` samples in common the two are not comparable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor

from emdcfl.core.client import Client
from emdcfl.core.errors import ClientError
from emdcfl.core.keys import digest

MAX_CLASSES = 2**16

MIN_COMMON = 12
"""Fewest samples in common that are offered, or that a row client computes τ with; the tolerance may need more."""

Array = np.ndarray[Any, Any]


class Matching(TypedDict):
    """What a column client is told to draw samples with its rows' class counts.

    ``sizes``: those the boxes hold counts for. ``m`` and ``blocks``: for each row, the size of a block and the most blocks.
    ``common``: for rows that took an offer, the size of a block with the counts in common.
    """

    sizes: list[int]
    m: dict[str, int]
    blocks: dict[str, int]
    common: dict[str, int]


def column(client: Client, size: int, *, held_out: bool) -> Tensor:
    """Draw a sample from the validation split alone (``held_out``), or fill it up from the train split, in an order of its own."""

    def drawn() -> Tensor:
        val = client.sample("val", size)
        train = client.sample("train", 0 if held_out else size - len(val))
        order = client.generator("order of the column sample", round=0).permutation(len(val) + len(train))
        return torch.cat([val, len(client.site.val) + train])[torch.from_numpy(order)]

    return client.once(drawn, "column", size, held_out)


def draw(client: Client, split: str, size: int) -> Tensor:
    """Draw a sample in random order, so that its first entries are a sample too, whatever order the data are stored in."""
    chosen = client.sample(split, size)
    return chosen[torch.from_numpy(client.generator(f"order of the {split} sample", round=0).permutation(len(chosen)))]


def all_labels(client: Client) -> Tensor:
    """Labels of all samples of a client, the validation samples first, in host memory."""
    return torch.cat([client.site.val.y, client.site.train.y])


def records(client: Client, split: str, index: Tensor) -> list[bytes]:
    """Identify records where privacy noise is drawn for them: by their index and their content."""
    if split == "all":
        m = len(client.site.val)
        return [records(client, *(("val", i) if i < m else ("train", i - m)))[0] for i in index.view(-1, 1)]
    x = client.split(split).x
    return [digest(split, i, x[i].cpu().numpy().tobytes()) for i in index.tolist()]


def packed_counts(client: Client, sizes: Sequence[int]) -> bytes:
    """Class counts of the first m validation samples, for each size m: the number of classes, then the counts, four bytes each."""
    y = client.site.val.y[draw(client, "val", max(sizes))].numpy()
    classes = 1 + max(int(split.y.max()) for split in (client.site.train, client.site.val))
    counts = [np.bincount(y[:size], minlength=classes) for size in sizes]
    return np.concatenate([[classes], *counts]).astype("<u4").tobytes()


def _numbers(message: bytes) -> Array:
    """Return the numbers that a partner packed, four bytes each; none where the message is not a whole number of them."""
    return np.frombuffer(message, dtype="<u4").astype(np.int64) if len(message) % 4 == 0 else np.zeros(0, np.int64)


def unpacked_counts(message: bytes, sizes: int) -> Array:
    """Return the (sizes, classes) counts that a partner packed, or refuse a message that holds none."""
    values = _numbers(message)
    if not values.size or not 0 < values[0] <= MAX_CLASSES or values.size != 1 + sizes * values[0]:
        raise ClientError(f"expected class counts for {sizes} sample sizes beside the seed, got {len(message)} bytes")
    return np.asarray(values[1:].reshape(sizes, -1))


def counts_of(partner: str, message: bytes, matching: Matching) -> Array:
    """Return the counts for the size at which a partner is compared; the sample drawn by them would have another size if they did."""
    m = matching["m"][partner]
    counts: Array = unpacked_counts(message, len(matching["sizes"]))[matching["sizes"].index(m)]
    if counts.sum() != m:
        raise ClientError(f"expected class counts of {m} samples beside the seed, got those of {counts.sum()}")
    return counts


@dataclass(frozen=True)
class Pools:
    """A client's samples by class, in random order; ``turn`` is the random order in which samples are shown, whatever their classes."""

    by_class: Mapping[int, Array]
    turn: Array


def pools(client: Client) -> Pools:
    """Shuffle all samples of a client, once for all partners, and sort them by class."""
    y = all_labels(client).numpy()
    rng = client.generator("samples by class", round=0)
    shuffled = rng.permutation(len(y))
    found = y[shuffled]
    return Pools({int(k): shuffled[found == k] for k in np.unique(y)}, rng.permutation(len(y)))


def matched(counts: Array, most_blocks: int, own: Pools) -> tuple[Tensor, int] | None:
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


def common_counts(counts: Array, own: Pools) -> Array:
    """Return how many samples of each class a row client and this one both have."""
    return np.minimum(counts, [len(own.by_class.get(k, ())) for k in range(len(counts))])


def shown_to(partner: str, counts: Array, matching: Matching, own: Pools) -> tuple[Tensor, int] | None:
    """Return the sample for one partner and its number of blocks, or None where classes are short for its counts."""
    if partner in matching["common"]:
        counts = common_counts(counts, own)
        if counts.sum() != matching["common"][partner]:
            raise ClientError(f"expected a request for the {counts.sum()} samples in common, got one for {matching['common'][partner]}")
    return matched(counts, matching["blocks"][partner], own)


def offered(message: bytes, labels: Array) -> Tensor:
    """Return which of a row client's validation samples make up the counts that a partner offers, or refuse the offer.

    Of each class the first ones, so that like offers give like samples.
    """
    counts = _numbers(message)
    own = np.bincount(labels, minlength=len(counts))
    if len(own) != len(counts) or (counts > own).any() or counts.sum() < MIN_COMMON:
        raise ClientError(f"expected class counts in common of at least {MIN_COMMON} samples, got {len(message)} bytes that are none")
    kept = [np.flatnonzero(labels == k)[:count] for k, count in enumerate(counts)]
    return torch.from_numpy(np.sort(np.concatenate(kept)))
