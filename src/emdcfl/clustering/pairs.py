"""Distances of all pairs in units of their tolerance: which are near it, and which are only bounds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

BAND = 1.25
"""A pair is borderline if its deciding distance is within this factor of the tolerance."""

EXACT, LOWER, UPPER = 1, 2, 3
"""Kinds of a distance: measured, a lower bound, an upper bound; 0 is unset."""

SIGNS = {LOWER: "≥ ", UPPER: "≤ "}
"""How a bound is written."""


@dataclass(frozen=True)
class Edge:
    """The pair of a client that is closest to the tolerance: the other client, the ratio, and its kind."""

    other: int
    ratio: float
    kind: int


@dataclass(frozen=True)
class PairRatios:
    """The distances behind a clustering, in units of the tolerance.

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
        """W in units of its tolerance; 0 or 1000 where the tolerance is not positive."""
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
