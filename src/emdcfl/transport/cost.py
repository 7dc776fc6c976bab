r"""Seeded random projections of embeddings, which are what the server sees, and ground costs between two samples.

===============  =========================================================================================================
``cosine``       :math:`1 - \cos(z, z')`, the paper's cost; zero vectors: :math:`d(0,0)=0`, :math:`d(0,z)=1`
``euclidean``    :math:`\lVert z - z' \rVert_2`; needs a tolerance of its own
``label-aware``  cosine :math:`+ \lambda\,[y \ne y']`: sees a shift of P(y|x) alone, at the price of showing the labels
===============  =========================================================================================================

A projection :math:`R \in \mathbb{R}^{d \times p}` has i.i.d. standard normal entries, then each row is scaled to unit length;
:math:`p = \lfloor \text{ratio} \cdot d \rfloor`. Everyone who holds the seed draws a bit-identical matrix.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np

from emdcfl.core.errors import ConfigError, DataError, nearest
from emdcfl.transport.pool import Array, one_blas_thread

COSTS = ("cosine", "euclidean", "label-aware")

SAFE = (1e-30, 1e30)
"""Squared lengths between which float32 neither overflows nor loses digits."""

FARTHEST = 1e30
"""Largest Euclidean cost: beyond, float32 could overflow, and one client's numbers would end the comparison of all."""


def cost_matrix(
    a: Any,
    b: Any,
    *,
    cost: str = "cosine",
    labels_a: Any = None,
    labels_b: Any = None,
    label_weight: float = 1.0,
) -> Array:
    """Cost of moving each sample of `a` to each sample of `b`.

    Parameters
    ----------
    a : (n, d) array_like
        Embeddings of the source sample.
    b : (m, d) array_like
        Embeddings of the target sample.
    cost : {"cosine", "euclidean", "label-aware"}
        Ground cost.
    labels_a, labels_b : (n,) and (m,) array_like, optional
        Labels, needed by the label-aware cost and ignored by the others.
    label_weight : float
        What a wrong label costs in units of the cosine distance.

    Returns
    -------
    (n, m) float32 array

    Examples
    --------
    >>> cost_matrix([[1.0, 0.0], [0.0, 0.0]], [[2.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    array([[0., 1., 1.],
           [1., 1., 0.]], dtype=float32)
    >>> cost_matrix([[1.0, 0.0]], [[1.0, 0.0], [1.0, 0.0]], cost="label-aware", labels_a=[3], labels_b=[3, 4], label_weight=0.5)
    array([[0. , 0.5]], dtype=float32)
    """
    if cost not in COSTS:
        raise ConfigError(f"unknown transport cost {cost!r}; {nearest(cost, COSTS)}")
    x, y = sample(a, "a"), sample(b, "b")
    if x.shape[1] != y.shape[1]:
        raise DataError(
            f"expected two samples of one embedding width, got {x.shape[1]} and {y.shape[1]}; use one model and one projection for both"
        )
    c = _euclidean(x, y) if cost == "euclidean" else cosine_of_units(unit(x), unit(y))
    if cost == "label-aware":
        c += np.float32(label_weight) * _different(labels_a, labels_b, c.shape)
    return c


def unit(z: Array) -> Array:
    """Scale rows to unit length in float32; rows that are zero stay zero.

    Where squares could overflow or vanish, the length is taken after a division by the largest entry.
    """
    z = np.asarray(z, dtype=np.float32)
    with np.errstate(all="ignore"):
        squares = np.einsum("ij,ij->i", z, z)
        scaled = z / np.sqrt(squares)[:, None]
    extreme = ~((squares > SAFE[0]) & (squares < SAFE[1]))
    if extreme.any():
        scaled[extreme] = _unit_of_extremes(z[extreme])
    return np.asarray(scaled)


def _unit_of_extremes(z: Array) -> Array:
    largest = np.abs(z).max(axis=1, keepdims=True, initial=0.0)
    scaled = np.divide(z, largest, out=np.zeros_like(z), where=largest > 0)
    length = np.sqrt(np.einsum("ij,ij->i", scaled, scaled))[:, None]
    return np.asarray(np.divide(scaled, length, out=scaled, where=length > 0))


def cosine_of_units(x: Array, y: Array, *, out: Array | None = None) -> Array:
    """Cosine cost of samples that are already of unit (or zero) length; see :func:`unit`."""
    with one_blas_thread():
        c = np.matmul(x, y.T, out=out)
    np.subtract(np.float32(1.0), c, out=c)
    # Rounding leaves values like -6e-8, and a negative cost would break the bounds.
    np.maximum(c, np.float32(0.0), out=c)
    zero_x, zero_y = ~x.any(axis=1), ~y.any(axis=1)
    if zero_x.any() and zero_y.any():
        c[np.ix_(zero_x, zero_y)] = 0.0
    return np.asarray(c)


def _euclidean(x: Array, y: Array) -> Array:
    # float64 inside: the squared-norm expansion cancels badly in float32 for close vectors far from the origin.
    x64, y64 = x.astype(np.float64), y.astype(np.float64)
    with one_blas_thread():
        cross = x64 @ y64.T
    squared = (x64 * x64).sum(axis=1)[:, None] + (y64 * y64).sum(axis=1)[None, :] - 2.0 * cross
    return np.asarray(np.sqrt(np.clip(squared, 0.0, FARTHEST**2)), dtype=np.float32)


def _different(labels_a: Any, labels_b: Any, shape: tuple[int, ...]) -> Array:
    if labels_a is None or labels_b is None:
        raise DataError("the label-aware cost expects labels for both samples, got none; pass labels_a and labels_b or use cost='cosine'")
    u, v = np.asarray(labels_a), np.asarray(labels_b)
    if u.shape != shape[:1] or v.shape != shape[1:]:
        raise DataError(f"expected {shape[0]} and {shape[1]} labels, got {u.shape} and {v.shape}; one label per embedding")
    return np.asarray(u[:, None] != v[None, :], dtype=np.float32)


def sample(z: Any, name: str) -> Array:
    """Return embeddings as a float32 matrix; raises if they are empty or not finite."""
    x = np.asarray(z, dtype=np.float32)
    if x.ndim != 2 or x.shape[0] == 0:
        raise DataError(f"expected sample {name} as a non-empty (n, d) array of embeddings, got shape {x.shape}")
    if not np.isfinite(x).all():
        raise DataError(f"expected finite embeddings in sample {name}, got NaN or infinity; the model that made them has diverged")
    return x


@lru_cache(maxsize=64)  # every client asks for each request
def projected_width(ratio: float, d: int) -> int:
    """Width after projection, ``max(1, floor(ratio * d))``, with `ratio` read as the decimal it was written as.

    Examples
    --------
    >>> projected_width(0.9, 128), projected_width(0.29, 100), projected_width(0.1, 5)
    (115, 29, 1)
    """
    if not 0 < ratio <= 1:
        raise ConfigError(f"expected a projection ratio in (0, 1], got {ratio}; 0.9 is the paper's")
    if d < 1:
        raise ConfigError(f"expected an embedding width of at least 1, got {d}")
    return max(1, math.floor(Fraction(repr(float(ratio))) * d))


def projection(seed: bytes | int, d: int, p: int) -> Array:
    """Draw the projection that belongs to a seed.

    A (d, p) float32 array with rows of unit length; d and p are the embedding width before and after. The generator is numpy's
    counter-based Philox keyed with SHA-256 of (seed, d, p). Row lengths are summed without rounding error (``math.fsum``), because
    vectorised sums round differently from one processor to the next.

    Examples
    --------
    >>> r = projection(b"shared secret", 4, 3)
    >>> r.shape, bool(np.allclose((r**2).sum(axis=1), 1.0)), bool((r == projection(b"shared secret", 4, 3)).all())
    ((4, 3), True, True)
    """
    # Imported here: keys.py needs torch, and nothing else in this package does.
    from emdcfl.core.keys import digest

    if d < 1 or p < 1:
        raise ConfigError(f"expected a projection of at least 1 x 1, got {d} x {p}")
    kind = b"bytes" if isinstance(seed, bytes) else b"int"
    key = int.from_bytes(digest(b"emdcfl projection", kind, seed, d, p)[:16], "big")
    r = np.random.Generator(np.random.Philox(key=key)).standard_normal((d, p))
    length = np.array([math.sqrt(math.fsum(row)) for row in (r * r).tolist()])
    return np.asarray(r / length[:, None], dtype=np.float32)
