r"""Euclidean projection on the probability simplex.

.. math:: \arg\min_x \lVert x - v\rVert^2 \quad\text{s.t.}\quad x \ge 0,\ \textstyle\sum_j x_j = 1

Its solution is :math:`x_j = \max(v_j - \theta, 0)` with the one threshold :math:`\theta` for which the entries sum to one (Held, Wolfe and
Crowder, 1974). pFedGraph's and FedSaC's quadratic programs are such projections.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from emdcfl.clustering.labels import Array
from emdcfl.core.errors import DataError


def project_simplex(v: Any) -> Array:
    """Project a vector, or each row of a matrix.

    Examples
    --------
    >>> project_simplex([0.5, 0.5]), project_simplex([[2.0, 0.0], [0.2, 0.4]])
    (array([0.5, 0.5]), array([[1. , 0. ],
           [0.4, 0.6]]))
    """
    x = np.asarray(v, dtype=np.float64)
    if x.ndim not in (1, 2) or x.shape[-1] == 0 or not np.isfinite(x).all():
        raise DataError(f"expected finite vectors of length >= 1 to project on the simplex, got shape {x.shape}")
    rows = np.atleast_2d(x)
    # A shift leaves the projection as it is, and keeps the sums small.
    rows = rows - rows.max(axis=1, keepdims=True)
    descending = -np.sort(-rows, axis=1)
    counts = np.arange(1, rows.shape[1] + 1)
    thresholds = (np.cumsum(descending, axis=1) - 1.0) / counts
    kept = (descending > thresholds).sum(axis=1)
    theta = np.take_along_axis(thresholds, kept[:, None] - 1, axis=1)
    return np.asarray(np.maximum(rows - theta, 0.0).reshape(x.shape))
