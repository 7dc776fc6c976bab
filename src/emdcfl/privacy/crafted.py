r"""Embeddings that tell more about a projection than about data: a node does not send them.

Under a model made for it, embeddings are vectors the server knows beforehand, and each one it gets back projected is a row of R, or a
sum of rows. Such a model ignores its input (one vector for all samples), sorts inputs into a few known vectors, or lights one unit per
sample. Embeddings of a trained model do neither: distinct samples have distinct embeddings, spread over many units.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

MIN_SAMPLES = 16
"""Samples below which nothing is concluded."""

GRID = 1e-4
"""Embeddings that agree to this, relative to the largest entry, are the same."""

ONE_UNIT = 1.5
"""Units that carry an embedding, below which it is taken for a single one."""

Array = NDArray[Any]


def suspicion(z: Array, x: Array) -> str | None:
    r"""Say why embeddings ``z`` of the samples ``x`` look made to show a projection; ``None`` if they do not.

    Refused are embeddings with fewer than half as many different values as the samples have; with fewer than an eighth of the units
    varying (at least two); and with a median of :math:`\|z\|_1^2/\|z\|_2^2`, the number of units that carry a sample, below 1.5. Samples
    whose embedding is not finite are left out, because a crafted model makes some; too few others are suspicious.

    Examples
    --------
    >>> x = np.random.default_rng(0).normal(size=(32, 5))
    >>> suspicion(np.ones((32, 8)), x)
    'they take 1 different values for 32 different samples'
    >>> suspicion(np.abs(x @ np.random.default_rng(1).normal(size=(5, 8))), x) is None
    True
    """
    z = np.asarray(z, dtype=np.float64)
    usable = np.isfinite(z).all(axis=1)
    if len(z) < MIN_SAMPLES or not usable.any():
        return None  # too few to tell; rows that are not finite leave as NaN throughout (``tasks.Embed``)
    if usable.sum() < MIN_SAMPLES:
        return f"{usable.sum()} of {len(z)} are finite"
    z, x = z[usable], np.asarray(x)[usable]
    length = np.linalg.norm(z, axis=1, keepdims=True)
    unit = z / np.where(length > 0, length, 1.0)
    values = _different(np.round(z / (GRID * max(float(np.abs(z).max()), 1e-30))))
    samples = _different(np.asarray(x).reshape(len(z), -1))
    if 2 * values < samples:
        return f"they take {values} different values for {samples} different samples"
    spread = z.std(axis=0)
    varying, needed = int((spread > 1e-6 * max(float(np.abs(z).max()), 1e-30)).sum()), max(2, z.shape[1] // 8)
    if samples > 1 and varying < min(needed, z.shape[1]):
        return f"{varying} of their {z.shape[1]} units vary"
    carried = np.abs(unit).sum(axis=1) ** 2
    if z.shape[1] >= 8 and float(np.median(carried)) < ONE_UNIT:
        return "each sample lights a single unit"
    return None


def _different(rows: Array) -> int:
    return len({row.tobytes() for row in np.ascontiguousarray(rows)})
