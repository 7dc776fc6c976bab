"""Cluster numbers in order of first appearance, so that equal partitions have equal labels. Imports numpy only."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

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


def square(x: Any, what: str) -> Array:
    """Return `x` as a square matrix or say what is wrong with it."""
    from emdcfl.core.errors import DataError

    a = np.asarray(x)
    if a.ndim != 2 or a.shape[0] != a.shape[1]:
        raise DataError(f"expected {what} as a square (clients x clients) matrix, got shape {a.shape}")
    return a
