r"""Robust statistics, which one hostile member cannot move far: outliers by median and MAD, capped weights, trimmed means.

.. math:: z_i = \frac{\log x_i - \mathrm{med}(\log x)}{1.4826\ \mathrm{med}|\log x - \mathrm{med}(\log x)|}

Norms, distances and variances are compared on a logarithmic scale, because honest values of very small networks spread over orders of
magnitude.

Yin, Chen, Ramchandran, Bartlett. *Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates.* ICML 2018 (trimmed mean and
median by coordinate).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emdcfl.core.params import CHUNK, blocks, chunks, stacked

Array = np.ndarray[Any, Any]

MEMBERS = 3
"""Fewest values among which an outlier can be told."""

SMALL = 1 << 16
"""Numbers up to which a norm is summed in float32 (error below 1e-6), which is faster."""

MIN_RATIO = 1e-6
"""Smallest ratio to the median; smaller values, and zeros, count as this."""

NORMAL = 1.4826
"""MAD of a normal sample times this is its standard deviation."""


def outliers(values: Sequence[float] | Array, *, z: float, factor: float) -> list[bool]:
    """Return which values are far above the others: ``z`` robust standard deviations of the logarithm, and ``factor`` times the median.

    The factor keeps values that agree almost exactly, whose MAD is next to nothing, from being outliers of each other.

    Examples
    --------
    >>> outliers([1.0, 1.1, 0.9, 12.0], z=6, factor=3)
    [False, False, False, True]
    >>> outliers([1.0, 1.0, 1.0, 1.2], z=6, factor=3)
    [False, False, False, False]
    """
    x = np.asarray(values, dtype=np.float64)
    if len(x) < MEMBERS or z <= 0:
        return [False] * len(x)
    if 0 < x.max() <= factor * x.min():  # as usual, and much faster to see than the median
        return [False] * len(x)
    middle = float(np.median(x))
    if middle <= 0:  # most are zero: there is no scale to compare with
        return [False] * len(x)
    if x.max() <= factor * middle:
        return [False] * len(x)
    logs = np.log(np.maximum(x / middle, MIN_RATIO))
    spread = NORMAL * float(np.median(np.abs(logs)))
    found: list[bool] = (logs > max(z * spread, math.log(factor))).tolist()
    return found


def capped_weights(weights: Sequence[float], share: float) -> list[float]:
    r"""Return :math:`\min(w_i, c)` with the largest c for which no weight exceeds ``share`` of the sum; equal weights if there is none.

    Examples
    --------
    >>> capped_weights([10.0, 10.0, 10.0, 1000.0], 0.4)
    [10.0, 10.0, 10.0, 20.0]
    >>> capped_weights([1.0, 9.0], 0.3)
    [1.0, 1.0]
    """
    w = [float(v) for v in weights]
    if share >= 1 or max(w, default=0.0) <= share * math.fsum(w):
        return w
    if share * len(w) <= 1:
        return [1.0] * len(w)
    ordered = sorted(w, reverse=True)
    for j in range(1, len(w)):
        cap = share * math.fsum(ordered[j:]) / (1 - j * share)
        if cap >= ordered[j]:
            return [min(v, cap) for v in w]
    raise AssertionError("unreachable: with share * members > 1 some cap fits")


def cut(members: int, trim: float) -> int:
    """Return how many of ``members`` a trimmed mean drops at each end; ``trim`` of one half gives the median.

    Examples
    --------
    >>> [cut(k, 0.2) for k in (1, 2, 3, 5, 6, 10)], [cut(k, 0.5) for k in (1, 2, 4, 5)]
    ([0, 0, 1, 1, 2, 2], [0, 0, 1, 2])
    """
    return min(math.ceil(trim * members - 1e-9), (members - 1) // 2)


def trimmed_mean(thetas: Sequence[Tensor], ends: int) -> Tensor:
    r"""Return, coordinate by coordinate, the mean without the ``ends`` smallest and largest values.

    In float64, chunk by chunk; with ``ends = (k - 1) // 2`` it is the median.

    Examples
    --------
    >>> trimmed_mean([torch.tensor([1.0, 5.0]), torch.tensor([2.0, -9.0]), torch.tensor([99.0, 6.0])], 1)
    tensor([2., 5.])
    """
    k = len(thetas)
    if not 0 <= 2 * ends < k:
        raise ValueError(f"expected to leave out fewer than {k} states, got {2 * ends}")
    out = torch.empty_like(thetas[0])
    flat, rows = out.view(-1), [theta.reshape(-1) for theta in thetas]
    for part in blocks(flat.shape[0], k):
        block = torch.stack([row[part] for row in rows]).double().sort(dim=0).values
        flat[part] = block[ends : k - ends].mean(0).to(out.dtype)
    return out


def distance(theta: Tensor, start: Tensor) -> float:
    """Return the Euclidean norm of an update, summed in float64, chunk by chunk (in float32 where that is as good)."""
    if theta.numel() <= SMALL:
        return float(torch.dist(theta, start))
    a, b, total = theta.reshape(-1), start.reshape(-1), 0.0
    for part in chunks(a.shape[0]):
        total += float(torch.linalg.vector_norm(a[part] - b[part], dtype=torch.float64)) ** 2
    return math.sqrt(total)


def distances(thetas: Sequence[Tensor], starts: Sequence[Tensor]) -> list[float]:
    """Return ``distance`` of every update, bit-identical; small ones are computed together."""
    if len(thetas) == 1 or thetas[0].numel() > SMALL:
        return [distance(theta, start) for theta, start in zip(thetas, starts, strict=True)]
    shared = all(start is starts[0] for start in starts)
    states, origins = stacked(thetas).flatten(1), starts[0].flatten()[None] if shared else stacked(starts).flatten(1)
    norms: list[float] = []
    for part in chunks(len(states), max(1, CHUNK // states.shape[1])):  # the differences stay in the processor's cache
        norms += torch.linalg.vector_norm(states[part] - origins[slice(0, 1) if shared else part], dim=1).tolist()
    return norms


def shortened(theta: Tensor, start: Tensor, scale: float) -> Tensor:
    """Return ``start + scale * (theta - start)``."""
    return (start.double() + scale * (theta.double() - start.double())).to(theta.dtype)
