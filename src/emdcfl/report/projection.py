"""Positions of clients in the plane, from their distances."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def symmetric(w: Array) -> Array:
    """Symmetrise distances: the mean of the known directions; unknown pairs get the length of the shortest path."""
    from scipy.sparse.csgraph import shortest_path

    w = np.asarray(w, dtype=np.float64)
    known = ~np.isnan(w)
    total = np.where(known, w, 0.0) + np.where(known, w, 0.0).T
    times = known.astype(int) + known.T.astype(int)
    d = np.where(times > 0, np.maximum(total / np.maximum(times, 1), 0.0), np.nan)
    np.fill_diagonal(d, 0.0)
    if np.isnan(d).any():
        smallest = 1e-9  # zero means "no edge" to scipy
        ways = shortest_path(np.where(np.isnan(d), 0.0, np.maximum(d, smallest)), directed=False)
        ways[~np.isfinite(ways)] = np.max(ways[np.isfinite(ways)], initial=0.0) * 1.2 or 1.0
        d = np.where(np.isnan(d), ways, d)
    return d


def classical_mds(d: Array) -> tuple[Array, float]:
    r"""Return points in the plane for symmetric distances, and the share of their (positive) variance the plane shows.

    The coordinates are :math:`V_2\Lambda_2^{1/2}` with the two leading eigenpairs of :math:`-\tfrac12 J D^{(2)} J`,
    :math:`J = I - \tfrac1n 11^T`.

    Examples
    --------
    >>> points, share = classical_mds(np.array([[0, 3, 4], [3, 0, 5], [4, 5, 0.0]]))
    >>> bool(np.allclose(np.linalg.norm(points[1] - points[2]), 5)), round(share, 6)
    (True, 1.0)
    """
    n = len(d)
    j = np.eye(n) - 1.0 / n
    values, vectors = np.linalg.eigh(-0.5 * j @ (d**2) @ j)
    values, vectors = values[::-1], vectors[:, ::-1]
    points = np.zeros((n, 2))
    for axis in range(min(2, n)):
        v = vectors[:, axis]
        sign = np.sign(v[np.abs(v).argmax()]) or 1.0  # eigenvectors have no sign of their own
        points[:, axis] = sign * v * np.sqrt(max(values[axis], 0.0))
    positive = values[values > 0].sum()
    return points, float(values[:2].clip(min=0.0).sum() / positive) if positive > 0 else 1.0
