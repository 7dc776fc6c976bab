"""K-means, agglomerative clustering of a distance matrix, and the spectral features that both are used on."""

from __future__ import annotations

import warnings
from typing import Any, Literal

import numpy as np

from emdcfl.clustering.labels import Array, Labels, first_appearance, square
from emdcfl.core.errors import DataError

Linkage = Literal["complete", "average", "weighted"]
GAP = 1.3
"""Smallest ratio of two successive merges between which clients are said to be apart."""


def kmeans(x: Any, k: int, *, seed: int, max_iter: int = 300) -> Labels:
    """Labels of a k-means clustering (k-means++, best of ten starts), numbered by first appearance.

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
    rows = [row.tobytes() for row in points + 0.0]  # + 0.0 makes -0.0 and 0.0 the same bytes
    if len(set(rows)) <= k:
        return first_appearance(rows)
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():
        # Points that differ only by rounding may collapse to fewer clusters; fewer labels is the right answer then.
        warnings.simplefilter("ignore", ConvergenceWarning)
        fitted = KMeans(n_clusters=k, init="k-means++", n_init=10, max_iter=max_iter, random_state=seed % 2**32).fit(points)
    return first_appearance(fitted.labels_.tolist())


def cut(d: Any, threshold: float, *, linkage: Linkage = "complete") -> Labels:
    """Merge the closest clusters while their distance is at most `threshold`.

    "weighted" is WPGMA: the distances of a merged cluster are the plain mean of its two parts', whatever their sizes.

    Parameters
    ----------
    d : (C, C) array_like
        Symmetric distances; the diagonal is ignored.
    threshold : float
        Largest distance at which two clusters are still merged.
    linkage : {"complete", "average", "weighted"}

    Examples
    --------
    >>> cut([[0, 1, 9], [1, 0, 9], [9, 9, 0]], 2.0)
    array([0, 0, 1])
    """
    from scipy.cluster.hierarchy import fcluster

    tree = _tree(d, linkage)
    return np.zeros(1, dtype=np.int64) if tree is None else first_appearance(fcluster(tree, threshold, criterion="distance").tolist())


def first_gap(d: Any, *, linkage: Linkage = "complete") -> float:
    """Return a threshold for ``cut``: below the first merge that is much farther than the one before it.

    That is ``GAP`` times as far, and the root of the largest such ratio, where groups are grouped themselves. Clusters are taken to have
    two members or more on average: with few clients, the first merges of a cluster differ by chance. Where there is no such merge, nothing
    separates the clients, and the threshold is above all merges.

    Examples
    --------
    >>> first_gap([[0, 1, 9, 9], [1, 0, 9, 9], [9, 9, 0, 1], [9, 9, 1, 0]])
    3.0
    """
    tree = _tree(d, linkage)
    if tree is None:
        return 0.0
    heights = np.sort(tree[:, 2]).clip(min=1e-9 * max(1.0, float(tree[:, 2].max())))
    clients = len(heights) + 1
    ratios = {i: heights[i] / heights[i - 1] for i in range((clients + 1) // 2, clients - 1)}
    wide = [i for i, ratio in ratios.items() if ratio >= max(GAP, max(ratios.values()) ** 0.5)]
    return float(np.sqrt(heights[wide[0] - 1] * heights[wide[0]])) if wide else GAP * float(heights[-1])


def bipartition(d: Any) -> Labels:
    """Undo the last merge of a clustering by complete linkage: two clusters (one, where there is only one client).

    Examples
    --------
    >>> bipartition([[0, 1, 9], [1, 0, 9], [9, 9, 0]])
    array([0, 0, 1])
    """
    # Not by fcluster("maxclust"): equal heights at the top would make it return one cluster.
    found = merges(d, linkage="complete")
    right = set(found[-1][1]) if found else set()
    return first_appearance(client in right for client in range(len(found) + 1))


def merges(d: Any, *, linkage: Linkage = "average") -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The two sides of every merge of a clustering, in the order in which they are merged; the last one is the root.

    Examples
    --------
    >>> merges([[0, 1, 9], [1, 0, 9], [9, 9, 0]])
    [((0,), (1,)), ((2,), (0, 1))]
    """
    tree = _tree(d, linkage)
    if tree is None:
        return []
    nodes: list[tuple[int, ...]] = [(i,) for i in range(len(tree) + 1)]
    found = []
    for left, right in tree[:, :2].astype(int):
        found.append((nodes[left], nodes[right]))
        nodes.append(tuple(sorted(nodes[left] + nodes[right])))
    return found


def _tree(d: Any, linkage: Linkage) -> Array | None:
    """The dendrogram, or None for a single client."""
    from scipy.cluster.hierarchy import linkage as agglomerate
    from scipy.spatial.distance import squareform

    x = square(d, "the distances").astype(np.float64)
    if len(x) == 0 or not np.isfinite(x).all():
        raise DataError(
            f"expected finite distances between at least one client, got shape {x.shape}; check for NaN in the clients' replies"
        )
    if not np.allclose(x, x.T, rtol=1e-5, atol=1e-8 * max(1.0, float(np.abs(x).max()))):
        raise DataError("expected symmetric distances, got d[i, j] != d[j, i]; use (d + d.T) / 2 or max(d, d.T)")
    if len(x) == 1:
        return None
    x = (x + x.T) / 2
    np.fill_diagonal(x, 0.0)
    return np.asarray(agglomerate(squareform(x, checks=False), method=linkage))


def gram_features(gram: Any, k: int) -> Array:
    r"""Coordinates :math:`\sigma_j V_{ij}` on the `k` leading directions (CFLGP's reduced gradient profile).

    The sign of a direction is free; here its entry of largest magnitude (the first of them) is positive.

    Parameters
    ----------
    gram : (C, C) array_like
        Inner products of the clients' vectors.
    k : int
        Number of directions; beyond the number of clients the features are zero.

    Returns
    -------
    (C, k) float64 array

    Examples
    --------
    >>> x = np.array([[2.0, 0.0], [0.0, -1.0]])
    >>> gram_features(x @ x.T, 2) + 0.0
    array([[2., 0.],
           [0., 1.]])
    """
    g = square(gram, "the Gram matrix").astype(np.float64)
    if not np.isfinite(g).all():
        raise DataError("expected a finite Gram matrix, got NaN or infinity; a client's update has diverged")
    values, vectors = np.linalg.eigh((g + g.T) / 2)
    leading = vectors[:, ::-1][:, :k] * np.sqrt(np.maximum(values[::-1][:k], 0.0))
    # Rounded before the choice, so that entries equal up to rounding do not decide the sign by their last bit.
    size = np.abs(leading)
    peak = np.argmax(size >= size.max(axis=0) * (1 - 1e-9), axis=0)
    leading = leading * np.where(leading[peak, np.arange(leading.shape[1])] < 0, -1.0, 1.0)
    return np.pad(leading, ((0, 0), (0, k - leading.shape[1])))


def edc(gram: Any, k: int) -> Array:
    r"""FlexCFL's features :math:`e_{ij} = \sigma_j V_{ij} / \lVert\Delta_i\rVert`: cosines of each update with the leading directions.

    A client whose update is zero has cosine zero with everything.

    Examples
    --------
    >>> x = np.array([[2.0, 0.0], [0.0, -1.0], [0.0, 0.0]])
    >>> edc(x @ x.T, 2) + 0.0
    array([[1., 0.],
           [0., 1.],
           [0., 0.]])
    """
    features = gram_features(gram, k)
    norms = np.sqrt(np.maximum(np.diag(np.asarray(gram, dtype=np.float64)), 0.0))[:, None]
    return np.divide(features, norms, out=np.zeros_like(features), where=norms > 0)
