"""Keep cluster numbers stable from one clustering to the next. Imports numpy and scipy only."""

from __future__ import annotations

from typing import Any

import numpy as np

from emdcfl.clustering.order import Labels
from emdcfl.core.errors import DataError


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
    if a.shape != b.shape or a.ndim != 1:
        raise DataError(f"expected one new and one old label per client, got shapes {a.shape} and {b.shape}")
    if a.size and (min(a.min(), b.min()) < 0 or max(a.max(), b.max()) >= k):
        raise DataError(f"expected labels between 0 and {k - 1}, got {min(a.min(), b.min())} to {max(a.max(), b.max())}")
    agreement = np.zeros((k, k))
    np.add.at(agreement, (a, b), 1.0)
    # Among equally good permutations the one that keeps most numbers; the bonus is too small to outweigh a client.
    agreement += np.eye(k) / (k + 1)
    rows, columns = linear_sum_assignment(agreement, maximize=True)
    permutation = np.empty(k, dtype=np.int64)
    permutation[rows] = columns
    return np.asarray(permutation[a])
