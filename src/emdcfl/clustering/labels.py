"""Cluster numbers: numbering by first appearance, matching to an earlier clustering, agreement with the truth."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emdcfl.core.errors import DataError

Array = NDArray[Any]
Labels = NDArray[np.int64]


def first_appearance(keys: Iterable[Hashable]) -> Labels:
    """Number distinct keys 0, 1, … as they first appear.

    Examples
    --------
    >>> first_appearance(["b", "a", "b", "c"])
    array([0, 1, 0, 2])
    """
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)


def members_of(labels: Iterable[int]) -> dict[int, list[int]]:
    """Label, in ascending order → the positions that have it.

    Examples
    --------
    >>> members_of([1, 0, 1])
    {0: [1], 1: [0, 2]}
    """
    found: dict[int, list[int]] = {}
    for i, label in enumerate(labels):
        found.setdefault(int(label), []).append(i)
    return dict(sorted(found.items()))


def square(x: Any, what: str) -> Array:
    """Return `x` as a square matrix; raise if it is none."""
    a = np.asarray(x)
    if a.ndim != 2 or a.shape[0] != a.shape[1]:
        raise DataError(f"expected {what} as a square (clients x clients) matrix, got shape {a.shape}")
    return a


def match_labels(new: Any, old: Any, k: int) -> Labels:
    """Renumber `new` by the permutation of 0..k-1 that agrees with `old` for as many clients as possible.

    Parameters
    ----------
    new, old : (C,) array_like of int in 0..k-1
        Cluster numbers now and before.
    k : int
        Number of clusters.

    Examples
    --------
    >>> match_labels([0, 0, 1, 2], [2, 2, 0, 0], 3)
    array([2, 2, 1, 0])
    """
    from scipy.optimize import linear_sum_assignment

    a, b = np.asarray(new, dtype=np.int64), np.asarray(old, dtype=np.int64)
    agreement = np.zeros((k, k))
    np.add.at(agreement, (a, b), 1.0)
    # Among equally good permutations the one that keeps most numbers; the bonus is too small to outweigh a client.
    agreement += np.eye(k) / (k + 1)
    rows, columns = linear_sum_assignment(agreement, maximize=True)
    permutation = np.empty(k, dtype=np.int64)
    permutation[rows] = columns
    return np.asarray(permutation[a])


def adjusted_rand(truth: Any, labels: Any) -> float:
    r"""Adjusted Rand index (Hubert and Arabie, 1985); where the truth is a single group, 1 for a single cluster and 0 otherwise.

    (The index itself is 0 or undefined there, whatever was predicted.) Of the ordered pairs of clients, let a be in one group and in one
    cluster, b and c in one of them only, and d in neither: :math:`2(ad - bc) / ((a + b)(b + d) + (a + c)(c + d))`.

    Examples
    --------
    >>> adjusted_rand([0, 0, 1, 1], [5, 5, 2, 2]), adjusted_rand([0, 0, 0], [0, 0, 0]), adjusted_rand([0, 0, 0], [0, 0, 1])
    (1.0, 1.0, 0.0)
    """
    t, p = first_appearance(np.asarray(truth).tolist()), first_appearance(np.asarray(labels).tolist())
    if t.shape != p.shape or t.size == 0:
        raise DataError(f"expected one true group and one cluster per client, got {t.size} and {p.size}")
    if t.max() == 0:
        return float(p.max() == 0)
    counts = np.zeros((t.max() + 1, p.max() + 1), dtype=np.int64)
    np.add.at(counts, (t, p), 1)
    both, groups, clusters = (int((n**2).sum()) for n in (counts, counts.sum(1), counts.sum(0)))
    a, b, c = both - t.size, groups - both, clusters - both
    d = t.size**2 - both - b - c
    return 2.0 * (a * d - b * c) / ((a + b) * (b + d) + (a + c) * (c + d)) if b or c else 1.0
