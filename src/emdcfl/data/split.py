"""Seeded splitting of sample indices. Pure functions on arrays; every draw comes from the generator that is passed in."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from emdcfl.core.errors import DataError

Indices = NDArray[np.int64]


def split_indices(n: int, fractions: Sequence[float], rng: np.random.Generator) -> tuple[Indices, ...]:
    """Cut a shuffle of ``0..n-1`` into parts; every part but the first has ``round(fraction · n)`` elements, the first takes the rest.

    Examples
    --------
    >>> import numpy as np
    >>> [len(part) for part in split_indices(899, (0.6, 0.2, 0.2), np.random.default_rng(0))]
    [539, 180, 180]
    """
    return tuple(np.split(rng.permutation(n).astype(np.int64), _cuts(n, fractions)))


def _cuts(n: int, fractions: Sequence[float]) -> Indices:
    """Return where every part but the first begins."""
    _check(fractions)
    rest = [int(np.floor(f * n + 0.5)) for f in fractions[1:]]
    return np.cumsum([n - sum(rest), *rest], dtype=np.int64)[:-1]


def _check(fractions: Sequence[float]) -> None:
    if abs(sum(fractions) - 1) > 1e-9 or min(fractions) < 0:
        raise DataError(f"split fractions must be non-negative and sum to 1, got {tuple(fractions)}")


def stratified_indices(labels: NDArray[np.int64], fractions: Sequence[float], rng: np.random.Generator) -> tuple[Indices, ...]:
    """Split class by class, so that every part sees every class in the same proportion where its count allows; the first sees them all.

    Rounding is carried over from class to class (largest remainder against the running total), so the parts' sizes equal those of
    ``split_indices`` up to one element.

    Examples
    --------
    >>> import numpy as np
    >>> labels = np.array([0] * 5 + [1] * 5)
    >>> [np.bincount(labels[part]).tolist() for part in stratified_indices(labels, (0.6, 0.2, 0.2), np.random.default_rng(0))]
    [[3, 3], [1, 1], [1, 1]]
    """
    _check(fractions)
    target = np.zeros(len(fractions))
    taken = np.zeros(len(fractions), dtype=np.int64)
    parts: list[list[Indices]] = [[] for _ in fractions]
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        target += np.asarray(fractions) * len(members)
        counts = largest_remainder(target - taken, len(members))
        taken += counts
        for part, chunk in zip(parts, np.split(members, np.cumsum(counts)[:-1]), strict=True):
            part.append(chunk.astype(np.int64))
    return tuple(rng.permutation(np.concatenate(part)) if part else np.empty(0, np.int64) for part in parts)


def ordered_indices(order: NDArray[np.float64], fractions: Sequence[float]) -> tuple[Indices, ...]:
    """Cut by the values of ``order``, smallest first; equal values stay together, in the later part.

    Examples
    --------
    >>> import numpy as np
    >>> [part.tolist() for part in ordered_indices(np.array([9.0, 1, 2, 3, 3, 4, 5, 6, 7, 8]), (0.6, 0.2, 0.2))]
    [[1, 2, 3, 4, 5, 6], [7, 8], [0, 9]]
    """
    values = np.sort(order)
    edges = [-np.inf, *(values[cut] if cut < len(values) else np.inf for cut in _cuts(len(order), fractions)), np.inf]
    return tuple(np.flatnonzero((order >= low) & (order < high)) for low, high in pairwise(edges))


def grouped_indices(
    labels: NDArray[np.int64], groups: NDArray[np.int64], fractions: Sequence[float], rng: np.random.Generator
) -> tuple[Indices, ...]:
    """Split so that a group lies in one part, with classes in about the same proportion everywhere.

    Groups are dealt out from the largest to the smallest (in random order where equal), each to the part that lacks its classes most. A
    part that got none takes the smallest group of the part with the most groups.

    Examples
    --------
    >>> import numpy as np
    >>> groups = np.repeat(np.arange(10), 4)
    >>> parts = grouped_indices(np.arange(40) % 2, groups, (0.6, 0.2, 0.2), np.random.default_rng(0))
    >>> [len(part) for part in parts], [len(np.unique(groups[part])) for part in parts]
    ([24, 8, 8], [6, 2, 2])
    """
    counts = np.zeros((int(groups.max()) + 1, int(labels.max()) + 1))
    np.add.at(counts, (groups, labels), 1)
    shuffled = rng.permutation(len(counts))
    shuffled = shuffled[np.argsort(-counts[shuffled].sum(axis=1), kind="stable")]
    wanted = np.outer(fractions, counts.sum(axis=0))
    held = np.zeros_like(wanted)
    owner = np.zeros(len(counts), dtype=np.int64)
    for group in shuffled:
        need = ((1 - held / np.maximum(wanted, 1e-9)) * counts[group]).sum(axis=1)
        owner[group] = int(np.argmax(np.round(need, 9)))
        held[owner[group]] += counts[group]
    for part in range(len(fractions)):
        if not (owner == part).any():
            richest = int(np.bincount(owner, minlength=len(fractions)).argmax())
            owner[min(np.flatnonzero(owner == richest), key=lambda group: counts[group].sum())] = part
    return tuple(rng.permutation(np.flatnonzero(owner[groups] == part)) for part in range(len(fractions)))


def equal_parts(indices: Indices, parts: int) -> list[Indices]:
    """Cut into ``parts`` contiguous pieces of ``len // parts`` elements; the last one also takes what is left over.

    Examples
    --------
    >>> import numpy as np
    >>> [len(part) for part in equal_parts(np.arange(5421), 10)][-2:]
    [542, 543]
    """
    width = len(indices) // parts
    return np.split(indices, [width * i for i in range(1, parts)])


def largest_remainder(wanted: NDArray[np.float64], total: int) -> NDArray[np.int64]:
    wanted = np.clip(wanted, 0, None)
    wanted = wanted * (total / wanted.sum()) if wanted.sum() > 0 else wanted
    counts = np.floor(wanted + 1e-9).astype(np.int64)
    order = np.argsort(-(wanted - counts), kind="stable")
    counts[order[: total - int(counts.sum())]] += 1
    if counts[0] == 0:  # the first part is the training split, which must have every class
        counts[int(np.argmax(counts))] -= 1
        counts[0] = 1
    return counts
