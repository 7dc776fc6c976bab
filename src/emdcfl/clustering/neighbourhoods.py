r"""From distances to clusters: links and identical neighbourhoods.

.. math:: M = (W < \epsilon) \wedge (W < \epsilon)^\top, \qquad N(c) = \{c' : M_{c,c'}\}

Clients with the same neighbourhood form a cluster (the paper's rule). It is strict: one missing link in a group of ten gives three
clusters, with overlapping neighbourhoods.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from emdcfl.clustering.labels import Labels, first_appearance, square
from emdcfl.core.errors import DataError

Sets = list[tuple[int, ...]]


def links(w: Any, epsilon: Any, *, force_diagonal: bool = True) -> NDArray[np.bool_]:
    """Return which pairs are linked: strictly below the tolerance in both directions.

    Parameters
    ----------
    w : (C, C) array_like
        ``W[c, c']``, row client c's view of c'. NaN (not computed) is no link.
    epsilon : float, (C,) or (C, C) array_like
        Tolerance for all, per row client, or per ordered pair.
    force_diagonal : bool
        Link every client to itself, whatever ``W[c, c]`` is.

    Examples
    --------
    >>> links([[0.0, 0.01, 0.01], [0.02, 0.0, 0.3], [0.3, 0.3, 0.0]], 0.025).astype(int)
    array([[1, 1, 0],
           [1, 1, 0],
           [0, 0, 1]])
    """
    x = square(w, "W").astype(np.float64)
    e = np.asarray(epsilon, dtype=np.float64)
    accepts = x < (e[:, None] if e.ndim == 1 else e)
    m = accepts & accepts.T
    if force_diagonal:
        np.fill_diagonal(m, True)
    return np.asarray(m)


def neighbourhoods(m: Any) -> tuple[Labels, Sets]:
    """Clusters of identical neighbourhoods.

    Parameters
    ----------
    m : (C, C) array_like of bool
        Links, as from :func:`links`.

    Returns
    -------
    labels : (C,) int array
        Cluster of each client: the number of the set that equals its neighbourhood, in order of first appearance.
    sets : list of tuple of int
        Members to average for each cluster. Where neighbourhoods overlap a client is in more sets than its own. Without a forced
        diagonal a neighbourhood may lack its own client; it is kept as it is. An empty one becomes the client alone, so that every
        cluster has a model and unlinked clients do not share one.

    Examples
    --------
    >>> labels, sets = neighbourhoods([[1, 1, 0], [1, 1, 0], [0, 0, 1]])
    >>> labels, sets
    (array([0, 0, 1]), [(0, 1), (2,)])
    """
    x = square(m, "the links").astype(bool)
    found = [tuple(int(j) for j in np.flatnonzero(row)) or (c,) for c, row in enumerate(x)]
    return first_appearance(found), list(dict.fromkeys(found))


def joined(m: Any, labels: Any) -> tuple[Labels, Sets]:
    """Add newcomers to clusters that stay as they are.

    A newcomer joins the first cluster whose every compared member it is linked with (the one where it was compared with most, if there
    are several), else it founds one, which later newcomers may join.

    Parameters
    ----------
    m : (C, C) array_like
        Links: 1 linked, 0 separate, NaN not compared.
    labels : (C,) array_like of int
        Cluster of each client that has one, -1 for newcomers.

    Examples
    --------
    >>> joined([[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 0], [0, 0, 0, 1]], [0, 0, -1, -1])
    (array([0, 0, 0, 1]), [(0, 1, 2), (3,)])
    """
    x = square(m, "the links").astype(np.float64)
    kept = np.asarray(labels, dtype=np.int64)
    if kept.shape != (len(x),):
        raise DataError(f"expected one label per client (-1 for newcomers), got {kept.shape} for {len(x)} clients")
    sets = [[int(c) for c in np.flatnonzero(kept == k)] for k in range(int(kept.max(initial=-1)) + 1)]
    for c in map(int, np.flatnonzero(kept < 0)):
        compared = [[d for d in members if not np.isnan(x[c, d])] for members in sets]
        fitting = [k for k, members in enumerate(compared) if members and all(x[c, d] for d in members)]
        if fitting:
            sets[max(fitting, key=lambda k: len(compared[k]))].append(c)
        else:
            sets.append([c])
    found = [tuple(sorted(members)) for members in sets if members]
    where = {c: i for i, members in enumerate(found) for c in members}
    return np.array([where[c] for c in range(len(x))], dtype=np.int64), found


def completed(m: Any) -> NDArray[np.bool_]:
    """Decide pairs that could not be compared by those that could.

    An open pair is linked if more clients that both were compared with are linked with both than with one alone. Pairs decided in this way
    help to decide the others, until none is left that anybody can say something about; those stay apart.

    Parameters
    ----------
    m : (C, C) array_like
        Links: 1 linked, 0 separate, NaN open; symmetric, the diagonal does not count.

    Examples
    --------
    >>> x = np.nan
    >>> completed([[1, 1, x, x], [1, 1, 1, 0], [x, 1, 1, 0], [x, 0, 0, 1]]).astype(int)
    array([[1, 1, 1, 0],
           [1, 1, 1, 0],
           [1, 1, 1, 0],
           [0, 0, 0, 1]])
    """
    x = square(m, "the links").astype(np.float64)
    np.fill_diagonal(x, np.nan)  # a client says nothing about its own pairs
    while True:
        linked, separate = (x == 1).astype(np.int64), (x == 0).astype(np.int64)
        both, one = linked @ linked, linked @ separate + separate @ linked
        found = np.isnan(x) & (both != one) & ~np.eye(len(x), dtype=bool)
        if not found.any():
            np.fill_diagonal(x, 1.0)
            return np.asarray(x == 1)
        x[found] = (both > one)[found]
