r"""Groups that grouping by benefit weighs: trees over clients, or over cells of clients around a few representatives.

Up to ``SINGLE`` clients, a tree's leaves are the clients and distances are those of all pairs. Of more clients, up to
``REPRESENTATIVES`` are chosen, and client c is described by how far it lies from each of them, :math:`F_{rc}`. Two clients are alike where
these columns are:

.. math:: D_{cc'} = \frac1R \sum_r |F_{rc} - F_{rc'}|

so C clients take O(C·R) comparisons. Representatives are far apart from each other (farthest-first traversal: Gonzalez, *Clustering to
minimize the maximum intercluster distance*, 1985), so that a small group has one too.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emdcfl.clustering import merges
from emdcfl.core.params import Layout, blocks
from emdcfl.methods.shared.vectors import update_gram

Array = np.ndarray[Any, Any]
Cell = tuple[str, ...]
Merge = tuple[Cell, Cell]

SINGLE = 64
"""Most clients that are leaves of a tree themselves."""

REPRESENTATIVES = 32
"""Most representatives."""

FIRST, MIN_NEW = 8, 4
"""Representatives drawn at random, and how many are added at least; what distances from those before tell chooses them."""

COVERED = 3.0
"""Representatives are added while somebody lies so many times as far from the nearest one as the median client does."""


@dataclass(frozen=True)
class Tree:
    """Leaves, and the two sides of every merge, bottom up."""

    leaves: list[Cell]
    merges: list[Merge]

    def cut(self, at: Container[Cell]) -> Tree:
        """Return the tree without what lies below some nodes, which become its leaves.

        Examples
        --------
        >>> whole = Tree([("a",), ("b",), ("c",)], [(("a",), ("b",)), (("a", "b"), ("c",))])
        >>> whole.cut({("a", "b")})
        Tree(leaves=[('a', 'b'), ('c',)], merges=[(('a', 'b'), ('c',))])
        """
        if not self.merges:
            return self
        left, right = self.merges[-1]
        leaves, kept = {key(left + right): None}, []
        for left, right in reversed(self.merges):
            node = key(left + right)
            if node in leaves and node not in at:
                del leaves[node]
                leaves |= {left: None, right: None}
                kept.append((left, right))
        return Tree(list(leaves), kept[::-1])


def key(members: Sequence[str]) -> Cell:
    """A set of clients as it is known by."""
    return tuple(sorted(members))


def tree(distances: Array, cells: Sequence[Sequence[str]]) -> Tree:
    """Average linkage of cells."""
    leaves = [key(cell) for cell in cells]

    def union(side: Sequence[int]) -> Cell:
        return leaves[side[0]] if len(side) == 1 else key([c for i in side for c in leaves[i]])

    return Tree(leaves, [(union(a), union(b)) for a, b in merges(distances)])


def tree_of_columns(F: Array, members: Sequence[str]) -> Tree:
    """Average linkage of clients, or of cells around those farthest apart, by their columns."""
    if len(members) <= SINGLE:
        return tree(_differences(F, F), [(c,) for c in members])
    centres = farthest_first(F, [], REPRESENTATIVES)
    near = _differences(F[:, centres], F)
    near[np.arange(len(centres)), centres] = -1.0  # a centre lies in its own cell, also beside an equal one
    label = near.argmin(axis=0)
    cells = [[members[i] for i in np.flatnonzero(label == k).tolist()] for k in range(len(centres))]
    return tree(_differences(F[:, centres], F[:, centres]), cells)


def farthest_first(F: Array, chosen: Sequence[int], most: int, radius: float = -1.0) -> list[int]:
    """Return up to ``most`` columns, beginning with those chosen, each of the others the one farthest from all before.

    No more are taken once every column lies within ``radius`` of one of them.

    Examples
    --------
    >>> farthest_first(np.array([[0.0, 0.1, 5.0, 5.1, 9.0]]), [0], 3)
    [0, 4, 2]
    >>> farthest_first(np.array([[0.0, 0.1, 5.0, 5.1, 9.0]]), [0], 5, radius=0.2)
    [0, 4, 2]
    """
    found = list(chosen) or [int(np.abs(F - np.median(F, axis=1, keepdims=True)).mean(axis=0).argmin())]
    nearest = _differences(F[:, found], F).min(axis=0)
    nearest[found] = -1.0
    while len(found) < min(most, F.shape[1]) and nearest.max() > radius:
        found.append(int(nearest.argmax()))
        nearest = np.minimum(nearest, _differences(F[:, found[-1:]], F)[0])
        nearest[found[-1]] = -1.0
    return found


def _differences(F: Array, G: Array) -> Array:
    """Mean absolute differences between the columns of two matrices."""
    return np.stack([np.abs(F[:, i, None] - G).mean(axis=0) for i in range(F.shape[1])])


def fill_unknown(D: Array) -> Array:
    """Replace unknown distances by the largest known one."""
    finite = np.isfinite(D)
    return np.where(finite, D, D[finite].max(initial=1.0))


def choose(
    measure: Callable[[Sequence[int]], Array],
    count: int,
    rng: np.random.Generator,
    before: Sequence[int] = (),
    F: Array | None = None,
) -> tuple[list[int], Array]:
    """Choose representatives of ``count`` clients, until everybody lies near one, and measure how far everybody lies from them.

    Parameters
    ----------
    measure : callable
        Positions → distances from these clients, one row each, NaN where not known.
    before, F
        Representatives that were chosen before, and the distances from them.
    """
    rows = list(before) or sorted(int(i) for i in rng.permutation(count)[:FIRST])
    F = measure(rows) if F is None or not before else F
    while len(rows) < min(REPRESENTATIVES, count):
        filled, most = fill_unknown(F), min(2 * len(rows), REPRESENTATIVES)
        nearest = np.delete(_differences(filled[:, rows], filled).min(axis=0), rows)
        wanted = len(farthest_first(filled, rows, most, COVERED * float(np.median(nearest))))
        if wanted == len(rows):
            break
        new = farthest_first(filled, rows, min(max(wanted, len(rows) + MIN_NEW), most))[len(rows) :]
        F, rows = np.concatenate([F, measure(new)]), rows + new
    return rows, F


def updates_apart(layout: Layout, local: Sequence[Tensor], start: Sequence[Tensor], rng: np.random.Generator) -> tuple[Array, bool]:
    """Return one minus the cosines between updates: of all pairs, or (and True) of everybody with a few representatives."""
    if len(local) <= SINGLE:
        G = update_gram(layout, local, start).numpy()
        length = np.sqrt(np.maximum(np.diag(G), 1e-30))
        return np.clip(1 - G / np.outer(length, length), 0.0, 2.0), False

    def measure(rows: Sequence[int]) -> Array:
        device = local[0].device
        products = torch.zeros(len(rows), len(local), dtype=torch.float64, device=device)
        squares = torch.zeros(len(local), dtype=torch.float64, device=device)
        where = layout.trainable
        for part in blocks(where.stop - where.start, len(local), on_gpu=device.type == "cuda"):
            at = slice(where.start + part.start, where.start + part.stop)
            block = torch.stack([theta[at] for theta in local]) - torch.stack([theta[at] for theta in start])
            products += (block[list(rows)] @ block.T).double()
            squares += (block * block).sum(1).double()
        length = squares.clamp_min(1e-30).sqrt()
        return (1 - products / torch.outer(length[list(rows)], length)).clamp(0.0, 2.0).cpu().numpy()

    return choose(measure, len(local), rng)[1], True
