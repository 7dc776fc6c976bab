"""How clearly the distances between clients separate the clusters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, TypedDict

import numpy as np

from emdcfl.clustering.labels import Labels, first_appearance, square
from emdcfl.core.errors import DataError


class Link(TypedDict):
    """One pair and its distance in the direction that decides, max(W, Wᵀ)."""

    a: int
    b: int
    value: float


class Margins(TypedDict):
    """How far the distances are from changing the clusters.

    Attributes
    ----------
    inside : float or None
        Largest max(W, Wᵀ) between two clients of one cluster; None when no cluster has two.
    outside : float or None
        Smallest max(W, Wᵀ) between clients of different clusters; None when there is one cluster.
    interval : (float, float) or None
        Tolerances lo < ε <= hi that give exactly these clusters by identical neighbourhoods: of several such intervals the one around
        the tolerance that was used, or the lowest where none is named. lo may be -inf and hi inf. None when no such number does. For a
        tolerance per row pass ``W / epsilon[:, None]``: the interval then holds factors of the tolerance.
    weakest : dict of int to Link
        For each cluster of two or more, its farthest pair.
    nearest : dict of int to Link
        For each cluster, the closest outsider (``b``) and the member (``a``) it is closest to.
    """

    inside: float | None
    outside: float | None
    interval: tuple[float, float] | None
    weakest: dict[int, Link]
    nearest: dict[int, Link]


def margins(w: Any, labels: Any, *, used: float | None = None) -> Margins:
    """Margin statistics of a distance matrix and a partition. NaN entries (not computed) are left out.

    Parameters
    ----------
    used : float, optional
        The tolerance behind the partition, which the interval must hold.

    Examples
    --------
    >>> found = margins([[0, 0.01, 0.3], [0.02, 0, 0.4], [0.1, 0.2, 0]], [0, 0, 1])
    >>> found["inside"], found["outside"], found["interval"]
    (0.02, 0.3, (0.02, 0.3))
    >>> found["weakest"][0], found["nearest"][1]
    ({'a': 0, 'b': 1, 'value': 0.02}, {'a': 2, 'b': 0, 'value': 0.3})
    """
    x = square(w, "W").astype(np.float64)
    k = first_appearance(np.asarray(labels).tolist())
    if len(k) != len(x):
        raise DataError(f"expected one label per client, got {len(k)} labels for {len(x)} clients")
    both = np.maximum(x, x.T)  # NaN if either direction is
    same = k[:, None] == k[None, :]
    off = ~np.eye(len(x), dtype=bool)
    names = np.asarray(labels).tolist()
    weakest: dict[int, Link] = {}
    nearest: dict[int, Link] = {}
    for cluster in range(int(k.max(initial=-1)) + 1):
        name = int(names[int(np.argmax(k == cluster))])
        member = (k == cluster)[:, None]
        if (far := _extreme(both, member & same & off, largest=True)) is not None:
            weakest[name] = far
        if (close := _extreme(both, member & ~same, largest=False)) is not None:
            nearest[name] = close
    inside = max((link["value"] for link in weakest.values()), default=None)
    outside = min((link["value"] for link in nearest.values()), default=None)
    fitting = (found for found in _intervals(both, k, inside) if used is None or found[0] < used <= found[1])
    return Margins(inside=inside, outside=outside, interval=next(fitting, None), weakest=weakest, nearest=nearest)


def _extreme(both: Any, where: Any, *, largest: bool) -> Link | None:
    """The first pair with the largest (smallest) known value in the mask."""
    mask = where & ~np.isnan(both)
    if not mask.any():
        return None
    filled = np.where(mask, both, -np.inf if largest else np.inf)
    a, b = np.unravel_index(int(filled.argmax() if largest else filled.argmin()), both.shape)
    return Link(a=int(a), b=int(b), value=float(both[a, b]))


def _intervals(both: Any, k: Labels, inside: float | None) -> Iterator[tuple[float, float]]:
    """Yield the runs of tolerances whose identical neighbourhoods are the clusters `k`, from the lowest on.

    That is so iff every cluster is a clique (ε > inside), any two clusters are linked completely or not at all, and no two clusters
    have the same neighbours. ε is moved upwards from pair value to pair value; a 63-bit hash per cluster, updated link by link, tells equal
    neighbourhoods apart.
    """
    clusters = int(k.max(initial=-1)) + 1
    members = [np.flatnonzero(k == c) for c in range(clusters)]
    within = [both[np.ix_(rows, rows)][~np.eye(len(rows), dtype=bool)] for rows in members]
    if any(np.isnan(values).any() for values in within):
        return
    events = _events(both, k)
    keys = np.random.Generator(np.random.Philox(0)).integers(1, 2**63, size=clusters).tolist()
    hashes, seen, partial = list(keys), Counter(keys), 0
    start: float | None = None
    position, low = 0, -np.inf if inside is None else inside
    while True:
        while position < len(events) and events[position][0] <= low:
            _, change, a, b = events[position]
            partial, position = partial + change, position + 1
            if change < 0:
                for one, other in ((a, b), (b, a)):
                    if seen[hashes[one]] == 1:
                        del seen[hashes[one]]
                    else:
                        seen[hashes[one]] -= 1
                    hashes[one] ^= keys[other]
                    seen[hashes[one]] += 1
        good = partial == 0 and len(seen) == clusters
        if good and start is None:
            start = low
        if not good and start is not None:
            yield float(start), float(low)
            start = None
        if position == len(events):
            if start is not None:
                yield float(start), np.inf
            return
        low = events[position][0]


def _events(both: Any, k: Labels) -> list[tuple[float, int, int, int]]:
    """For every two clusters: (value, +1) where the first link between them appears, (value, -1) where the last one does."""
    order = np.argsort(k, kind="stable")
    starts = np.searchsorted(k[order], np.arange(int(k.max()) + 1))
    blocks = both[np.ix_(order, order)]
    # fmin skips NaN (a link that is not known), maximum keeps it (a link that never comes).
    first = np.fmin.reduceat(np.fmin.reduceat(blocks, starts, axis=0), starts, axis=1)
    last = np.maximum.reduceat(np.maximum.reduceat(blocks, starts, axis=0), starts, axis=1)
    events: list[tuple[float, int, int, int]] = []
    for values, change in ((first, 1), (last, -1)):
        a, b = np.nonzero(np.triu(~np.isnan(values), k=1))
        events += zip(values[a, b].tolist(), [change] * len(a), a.tolist(), b.tolist())
    return sorted(events)
