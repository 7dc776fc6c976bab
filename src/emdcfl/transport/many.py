"""Certified lower bounds of many transport problems with one source, in a few array operations for all of them.

The bounds are those of ``bounds``: one Sinkhorn stage and c-transforms. They are never above the exact value, and tell which
samples lie alike: at 60 to 300 samples of ReLU features about 0.003 below it, give or take 0.0008, in a tenth of the time.
"""

from __future__ import annotations

import numpy as np

from emdcfl.transport.bounds import COSINE_SLACK
from emdcfl.transport.cost import unit
from emdcfl.transport.pool import Array, one_blas_thread, scratch

SHARE, ITERATIONS = 0.05, 12
"""Regularisation as a share of the mean cost, and Sinkhorn iterations."""

LEAST_MEAN = 1e-3
"""Least mean cost that the regularisation is a share of: samples may be equal."""

LEAST_MASS = np.float32(1e-30)
"""Sources far from all targets get at least this: their kernel may vanish."""

AT_ONCE = 1 << 20
"""Most costs held at once: with fewer, workers wait for Python's lock between short operations."""


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
    memory = scratch("cosines", (2, min(B, at_once), m, len(x)))
    y = unit(samples.reshape(-1, d)).reshape(-1, m, d)
    mean = 1.0 - y.mean(axis=1) @ x.mean(axis=0)
    step = SHARE * np.maximum(mean, LEAST_MEAN).astype(np.float32)
    parts = [slice(begin, begin + at_once) for begin in range(0, B, at_once)]
    bounds = [_bounds(x, y[part], step[part], memory[:, : len(y[part])]) for part in parts]
    return np.maximum(np.concatenate(bounds) - COSINE_SLACK, 0.0)


def _bounds(x: Array, y: Array, step: Array, memory: Array) -> Array:
    """Bound problems whose cosines, and as many numbers again, fit into ``memory``; its axes are two, problem, target, source.

    In units of the regularisation: with cosines s, the cost is 1 / step - s, and potentials f, g are feasible where s + f + g <= 1 / step.
    """
    s, work = memory
    with one_blas_thread():
        np.matmul((y / step[:, None, None]).reshape(-1, y.shape[2]), x.T, out=s.reshape(-1, len(x)))
    zero_x = np.asarray(~x.any(axis=1))
    if zero_x.any():  # two zero vectors cost nothing
        np.copyto(s, (1 / step)[:, None, None], where=np.asarray(~y.any(axis=2))[:, :, None] & zero_x)
    top = s.max(axis=2)
    kernel = np.exp(np.subtract(s, top[:, :, None], out=work), out=work)
    u = np.ones(s.shape[:2], np.float32)
    with np.errstate(all="ignore"), one_blas_thread():
        for _ in range(ITERATIONS):
            v = np.float32(1.0 / s.shape[2]) / np.maximum(np.matmul(u[:, None], kernel)[:, 0], LEAST_MASS)
            u = np.float32(1.0 / s.shape[1]) / np.matmul(kernel, v[:, :, None])[:, :, 0]
        f = np.log(u) - top
    f = np.where(np.isfinite(f), f, -top)  # any potential gives a bound
    g = -np.add(s, f[:, :, None], out=work).max(axis=1)
    f = -np.add(s, g[:, None], out=work).max(axis=2)
    return np.asarray(1.0 + step * (f.mean(axis=1, dtype=np.float64) + g.mean(axis=1, dtype=np.float64)))
