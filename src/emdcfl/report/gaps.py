"""How clearly the distances decide: every pair in units of its tolerance, who is borderline, where the map puts clients.

Imports numpy, scipy and clustering only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from emdcfl.clustering import Margins, margins

Array = np.ndarray[Any, Any]
BAND = 1.25
"""A pair is borderline if its deciding distance is within this factor of the tolerance."""
EXACT, LOWER, UPPER = 1, 2, 3


@dataclass(frozen=True)
class Edge:
    """A client's most telling pair: with whom, at how many tolerances, and whether that is exact or a bound."""

    other: int
    ratio: float
    kind: int


@dataclass(frozen=True)
class Gaps:
    """Distances of a run, with the clusters they led to.

    Attributes
    ----------
    W, epsilon, kind : (C, C) arrays
        As a run saves them: NaN where unset; kind 1 exact, 2 lower bound, 3 upper bound.
    clusters : list of int
    """

    W: Array
    epsilon: Array
    kind: Array
    clusters: list[int]

    @cached_property
    def ratio(self) -> Array:
        """W in units of its tolerance; all or nothing where the tolerance is zero or below."""
        w, e = np.asarray(self.W, dtype=np.float64), np.asarray(self.epsilon, dtype=np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            r = np.where(e > 0, w / e, np.where(np.isnan(w), np.nan, np.where(w < e, 0.0, 1e3)))
        r = np.clip(r, -1e3, 1e3)
        np.fill_diagonal(r, np.nan)
        return r

    @cached_property
    def same(self) -> Array:
        labels = np.asarray(self.clusters)
        return np.asarray(labels[:, None] == labels[None, :])

    @cached_property
    def deciding(self) -> Array:
        """Value of each pair that decides: the larger direction. One direction is enough to refuse a pair, but not to accept it."""
        r = self.ratio
        either = np.fmax(r, r.T)
        return np.where(np.isnan(np.maximum(r, r.T)) & (either < 1), np.nan, either)

    @cached_property
    def deciding_kind(self) -> Array:
        """Kind of the deciding value: a lower bound where one direction is not known, 0 where the pair is open."""
        r = np.where(np.isnan(self.ratio), -np.inf, self.ratio)
        kind = np.where(r >= r.T, self.kind, self.kind.T)
        kind = np.where((r == r.T) & ((self.kind == EXACT) | (self.kind.T == EXACT)), EXACT, kind)
        kind = np.where(np.isnan(self.ratio) | np.isnan(self.ratio.T), LOWER, kind)
        return np.where(np.isnan(self.deciding), 0, kind)

    @cached_property
    def margins(self) -> Margins:
        """Margins of the pairs in units of the tolerance; bounds make them smaller than they are, never larger."""
        return margins(self.deciding, self.clusters, used=1.0)

    @cached_property
    def near(self) -> Array:
        """Pairs whose known value lies in the band around the tolerance."""
        with np.errstate(invalid="ignore"):
            return np.asarray((self.deciding > 1 / BAND) & (self.deciding < BAND))

    @property
    def tolerance(self) -> float | None:
        """The tolerance, where all pairs share one."""
        known = self.epsilon[~np.isnan(self.epsilon)]
        return float(known[0]) if known.size and np.all(known == known[0]) else None

    def borderline(self) -> list[int]:
        """Clients with an exact deciding distance in the band."""
        return np.flatnonzero((self.near & (self.deciding_kind == EXACT)).any(axis=1)).tolist()

    def uncompared(self) -> list[int]:
        """Clients of whom no pair was decided."""
        return np.flatnonzero(np.isnan(self.deciding).all(axis=1)).tolist()

    def unmeasured(self) -> int:
        """Number of pairs in the band that are known as bounds only: on their side for certain, but nobody knows how far."""
        return int(np.triu(self.near & (self.deciding_kind > EXACT), 1).sum())

    def pairs(self, *, same: bool) -> Array:
        """Deciding values of all compared pairs inside, or between, clusters."""
        mask = np.triu(np.ones_like(self.same), 1) & (self.same == same) & ~np.isnan(self.deciding)
        return np.asarray(self.deciding[mask])

    def count(self) -> dict[str, int]:
        """Number of pairs by what is known of their deciding distance."""
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
        """How close a client comes to the tolerance, as a factor of at least 1 (1: on it)."""
        edges = [self.edge(client, same=True), self.edge(client, same=False)]
        ratios = [max(e.ratio, 1e-3) for e in edges if e is not None]
        return min((max(r, 1 / r) for r in ratios), default=float("inf"))

    def symmetric(self) -> Array:
        """Symmetrised distances for a map: the mean of the known directions, bounds as they are, gaps bridged by the shortest way."""
        from scipy.sparse.csgraph import shortest_path

        w = np.asarray(self.W, dtype=np.float64)
        known = ~np.isnan(w)
        total = np.where(known, w, 0.0) + np.where(known, w, 0.0).T
        times = known.astype(int) + known.T.astype(int)
        d = np.where(times > 0, np.maximum(total / np.maximum(times, 1), 0.0), np.nan)
        np.fill_diagonal(d, 0.0)
        if np.isnan(d).any():
            smallest = 1e-9  # a zero would read as "no way" in a graph
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
        sign = np.sign(v[np.abs(v).argmax()]) or 1.0  # the same picture wherever it is drawn
        points[:, axis] = sign * v * np.sqrt(max(values[axis], 0.0))
    positive = values[values > 0].sum()
    return points, float(values[:2].clip(min=0.0).sum() / positive) if positive > 0 else 1.0
