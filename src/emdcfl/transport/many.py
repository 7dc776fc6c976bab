"""Certified lower bounds of many transport problems with one source, in a few array operations for all of them.

The bounds are those of ``bounds``: minima, then one Sinkhorn stage and c-transforms. They are never above the exact value, and tell which
samples lie alike: at 60 to 300 samples of ReLU features about 0.003 below it, give or take 0.0008, in a tenth of the time.
"""

from __future__ import annotations

import numpy as np

from emdcfl.transport.bounds import COSINE_SLACK
from emdcfl.transport.cost import unit
from emdcfl.transport.pool import Array, one_blas_thread

SHARE, ITERATIONS = 0.1, 12
"""Regularisation as a share of the first bound or half the mean cost, and Sinkhorn iterations."""

AT_ONCE = 1 << 18
"""Most costs held at once: more do not fit into the processor's cache."""


def cosine_lower_bounds(x: Array, samples: Array) -> Array:
    """Bound the transport cost between a sample and each of B samples from below, under the cosine cost.

    Parameters
    ----------
    x : (n, d) float32 array
        The source, of unit length (``cost.unit``).
    samples : (B, m, d) array
        Targets.

    Returns
    -------
    (B,) float64 array

    Examples
    --------
    >>> x, y = np.eye(3, dtype=np.float32), np.eye(3, dtype=np.float32)[[0, 0, 1]]
    >>> np.round(cosine_lower_bounds(x, np.stack([x, y])), 3)
    array([0.   , 0.333])
    """
    B, m, d = samples.shape
    at_once = max(1, AT_ONCE // (m * len(x)))
    memory = np.empty((2, min(B, at_once), m, len(x)), np.float32)  # fresh memory at every step would cost as much as the arithmetic
    y = unit(samples.reshape(-1, d)).reshape(-1, m, d)
    parts = [_bounds(x, part, memory[:, : len(part)]) for part in np.split(y, range(at_once, B, at_once))]
    return np.maximum(np.concatenate(parts) - COSINE_SLACK, 0.0)


def _bounds(x: Array, y: Array, memory: Array) -> Array:
    """Bound problems whose costs, and as many numbers again, fit into ``memory``; its axes are two, problem, target, source."""
    c, work = memory
    with one_blas_thread():
        np.matmul(y.reshape(-1, y.shape[2]), x.T, out=c.reshape(-1, len(x)))
    np.maximum(np.subtract(np.float32(1.0), c, out=c), np.float32(0.0), out=c)
    zero_x, zero_y = np.asarray(~x.any(axis=1)), np.asarray(~y.any(axis=2))
    if zero_x.any() and zero_y.any():
        c[zero_y[:, :, None] & zero_x] = 0.0
    f, g = _conjugate(c, c.min(axis=2), work)
    low = _value(f, g)
    scale = np.maximum(low, 0.5 * c.mean(axis=(1, 2), dtype=np.float64)).astype(np.float32)
    open_ = scale > 0  # with a source and a target of one point each, nothing is left to bound
    step = np.float32(SHARE) * np.where(open_, scale, np.float32(1.0))[:, None]
    np.divide(np.subtract(work, f[:, :, None], out=work), -step[:, :, None], out=work)
    kernel = np.exp(np.maximum(work, np.float32(-60.0), out=work), out=work)
    u = np.ones(c.shape[:2], np.float32)
    with np.errstate(all="ignore"), one_blas_thread():
        for _ in range(ITERATIONS):
            v = np.float32(1.0 / c.shape[2]) / np.matmul(u[:, None], kernel)[:, 0]
            u = np.float32(1.0 / c.shape[1]) / np.matmul(kernel, v[:, :, None])[:, :, 0]
        better = f + step * np.log(u)
    better = np.where(np.isfinite(better), better, f)  # any potential gives a bound
    f, g = _conjugate(c, better, work)
    return np.where(open_, np.maximum(low, _value(f, g)), 0.0)


def _conjugate(c: Array, f: Array, work: Array) -> tuple[Array, Array]:
    """Feasible potentials from any on the targets; ``work`` receives the costs less those of the sources."""
    g = np.subtract(c, f[:, :, None], out=work).min(axis=1)
    return np.subtract(c, g[:, None], out=work).min(axis=2), g


def _value(f: Array, g: Array) -> Array:
    return np.asarray(f.mean(axis=1, dtype=np.float64) + g.mean(axis=1, dtype=np.float64))
