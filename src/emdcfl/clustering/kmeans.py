"""K-means with an explicit seed. Imports numpy and scikit-learn only."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from emdcfl.clustering.order import Labels, first_appearance
from emdcfl.core.errors import ConfigError, DataError


def kmeans(x: Any, k: int, *, seed: int, n_init: int = 10, max_iter: int = 300) -> Labels:
    """Labels of a k-means clustering (k-means++ starts, best of `n_init`), numbered by first appearance.

    With fewer distinct points than `k`, every distinct point is its own cluster and the remaining numbers are not used.

    Examples
    --------
    >>> kmeans([[0.0], [0.1], [5.0], [5.1]], 2, seed=0)
    array([0, 0, 1, 1])
    >>> kmeans([[1.0], [1.0], [2.0]], 3, seed=0)
    array([0, 0, 1])
    """
    points = np.asarray(x, dtype=np.float64)
    if points.ndim != 2 or not np.isfinite(points).all():
        raise DataError(f"k-means expected finite (clients, features) points, got shape {points.shape}")
    if k < 1:
        raise ConfigError(f"expected at least one cluster, got k={k}")
    rows = [row.tobytes() for row in points + 0.0]  # + 0.0 makes -0.0 and 0.0 the same bytes
    if len(set(rows)) <= k:
        return first_appearance(rows)
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():
        # Points that differ only by rounding may collapse to fewer clusters; fewer labels is the right answer then.
        warnings.simplefilter("ignore", ConvergenceWarning)
        fitted = KMeans(n_clusters=k, init="k-means++", n_init=n_init, max_iter=max_iter, random_state=seed % 2**32).fit(points)
    return first_appearance(fitted.labels_.tolist())
