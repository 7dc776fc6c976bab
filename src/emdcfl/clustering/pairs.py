"""Distances of all pairs: how near they are to their tolerance, which are only bounds, and how clearly they separate the clusters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypedDict

import numpy as np

from emdcfl.clustering.labels import Array, Labels, first_appearance, square
from emdcfl.core.errors import DataError

BAND = 1.25
"""A pair is borderline if its deciding distance is within this factor of the tolerance."""

EXACT, LOWER, UPPER = 1, 2, 3
"""Kinds of a distance: measured, a lower bound, an upper bound; 0 is unset."""

SIGNS = {LOWER: "≥ ", UPPER: "≤ "}
"""How a bound is written."""


def over_tolerance(w: Array | float, epsilon: Array | float) -> Array:
    """Return W in units of its tolerance, within ±1000; 0 or 1000 where the tolerance is not positive (all samples of a client are alike).

    Examples
    --------
    >>> over_tolerance(np.array([0.5, 0.0, -0.5, np.nan]), np.array([0.25, 0.0, 0.0, 0.25])).tolist()
    [2.0, 1000.0, 0.0, nan]
    """
    w, e = np.asarray(w, dtype=np.float64), np.asarray(epsilon, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        r = np.where(e > 0, w / e, np.where(np.isnan(w), np.nan, np.where(w < e, 0.0, 1e3)))
    return np.clip(r, -1e3, 1e3)


@dataclass(frozen=True)
class Edge:
    """The pair of a client that is closest to the tolerance: the other client, the ratio, and its kind."""

    other: int
    ratio: float
    kind: int


@dataclass(frozen=True)
class PairRatios:
    """The distances behind a clustering, in units of the tolerance."""

    W: Array
    epsilon: Array
    kind: Array
    """W, epsilon and kind are (C, C), as a run saves them: NaN where unset; kind 1 exact, 2 lower bound, 3 upper bound."""
    clusters: list[int]

    @cached_property
    def ratio(self) -> Array:
        """``over_tolerance`` of all pairs of two clients."""
        r = over_tolerance(self.W, self.epsilon)
        np.fill_diagonal(r, np.nan)
        return r

    @cached_property
    def same(self) -> Array:
        labels = np.asarray(self.clusters)
        return np.asarray(labels[:, None] == labels[None, :])

    @cached_property
    def deciding(self) -> Array:
        """The larger direction of each pair, which decides. One direction is enough to separate a pair, but not to link it."""
        r = self.ratio
        either = np.fmax(r, r.T)
        return np.where(np.isnan(np.maximum(r, r.T)) & (either < 1), np.nan, either)

    @cached_property
    def deciding_kind(self) -> Array:
        """Kind of the deciding value: a lower bound where one direction is unknown, 0 where the pair is undecided."""
        r = np.where(np.isnan(self.ratio), -np.inf, self.ratio)
        kind = np.where(r >= r.T, self.kind, self.kind.T)
        kind = np.where((r == r.T) & ((self.kind == EXACT) | (self.kind.T == EXACT)), EXACT, kind)
        kind = np.where(np.isnan(self.ratio) | np.isnan(self.ratio.T), LOWER, kind)
        return np.where(np.isnan(self.deciding), 0, kind)

    @cached_property
    def near(self) -> Array:
        """Pairs whose deciding value is within a factor ``BAND`` of the tolerance."""
        with np.errstate(invalid="ignore"):
            return np.asarray((self.deciding > 1 / BAND) & (self.deciding < BAND))

    @property
    def tolerance(self) -> float | None:
        """The tolerance, where all pairs share one."""
        known = self.epsilon[~np.isnan(self.epsilon)]
        return float(known[0]) if known.size and np.all(known == known[0]) else None

    def borderline(self) -> list[int]:
        """Clients with an exact deciding distance near the tolerance."""
        return np.flatnonzero((self.near & (self.deciding_kind == EXACT)).any(axis=1)).tolist()

    def uncompared(self) -> list[int]:
        """Clients none of whose pairs was decided."""
        return np.flatnonzero(np.isnan(self.deciding).all(axis=1)).tolist()

    def near_bounds(self) -> int:
        """Number of pairs near the tolerance that are known as bounds only."""
        return int(np.triu(self.near & (self.deciding_kind > EXACT), 1).sum())

    def pairs(self, *, same: bool) -> Array:
        """Deciding values of all compared pairs inside, or between, clusters."""
        mask = np.triu(np.ones_like(self.same), 1) & (self.same == same) & ~np.isnan(self.deciding)
        return np.asarray(self.deciding[mask])

    def count(self) -> dict[str, int]:
        """Number of pairs whose deciding distance is exact, a bound, or unset."""
        kinds = self.deciding_kind[np.triu_indices(len(self.clusters), 1)]
        return {"exact": int((kinds == EXACT).sum()), "bound": int((kinds > EXACT).sum()), "unset": int((kinds == 0).sum())}

    def edge(self, client: int, *, same: bool) -> Edge | None:
        """The farthest partner of the client's own cluster, or the nearest client of another."""
        row = self.deciding[client]
        mask = (self.same[client] == same) & ~np.isnan(row)
        mask[client] = False
        if not mask.any():
            return None
        filled = np.where(mask, row, -np.inf if same else np.inf)
        other = int(filled.argmax() if same else filled.argmin())
        return Edge(other, float(row[other]), int(self.deciding_kind[client, other]))

    def tightness(self, client: int) -> float:
        """Factor of at least 1 between the tolerance and the client's closest deciding distance."""
        edges = [self.edge(client, same=True), self.edge(client, same=False)]
        ratios = [max(e.ratio, 1e-3) for e in edges if e is not None]
        return min((max(r, 1 / r) for r in ratios), default=float("inf"))


class Link(TypedDict):
    """One pair and its distance in the direction that decides, max(W, Wᵀ)."""

    a: int
    b: int
    value: float


class Margins(TypedDict):
    """How far the distances are from changing the clusters."""

    inside: float | None
    """Largest max(W, Wᵀ) between two clients of one cluster; None when no cluster has two."""
    outside: float | None
    """Smallest max(W, Wᵀ) between clients of different clusters; None when there is one cluster."""
    interval: tuple[float, float] | None
    """Tolerances lo < ε <= hi that give exactly these clusters by identical neighbourhoods: of several such intervals the one around the
    tolerance that was used, or the lowest where none is named. lo may be -inf and hi inf. None when no such number does. For a
    tolerance per row pass ``W / epsilon[:, None]``: the interval then holds factors of the tolerance."""
    weakest: dict[int, Link]
    """For each cluster of two or more, its farthest pair."""
    nearest: dict[int, Link]
    """For each cluster, the closest outsider (``b``) and the member (``a``) it is closest to."""


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
