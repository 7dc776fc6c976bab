"""The transport problems of EMD-CFL's pairs as the server knows them: samples, reference distances, tolerances."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from emdcfl.core.errors import DataError
from emdcfl.core.schema import Reply
from emdcfl.methods.emdcfl.client.tasks import ROW
from emdcfl.methods.emdcfl.settings import CompareSettings
from emdcfl.methods.emdcfl.tolerance import Level
from emdcfl.transport import Screen, SolverPool, Source, cosine_lower_bounds, cost_matrix, minima, solve, unit

STEP = math.sqrt(2)
"""Ratio of validation sizes below which clients are compared at the smaller one."""


def validation_sizes(m: Mapping[str, int], *, cap: int, at_least: int, calibrated: bool = False) -> dict[str, int]:
    """Say how many validation samples each client is compared with; a pair uses the smaller number of its two clients.

    With a fixed tolerance all use the same number, ``min(cap, smallest m)``, because a smaller sample looks farther away. The minimum is
    taken over clients with ``at_least`` samples, so that one tiny site does not cost the others their power; a smaller client is compared
    at its own size. A calibrated tolerance knows τ at every size, so that a small client costs only its own pairs their power: sizes
    are rounded down to the smallest of those within a factor ``STEP``, which leaves at most a dozen to compute τ at.

    Examples
    --------
    >>> validation_sizes({"a": 600, "b": 90, "c": 20}, cap=512, at_least=64)
    {'a': 90, 'b': 90, 'c': 20}
    >>> validation_sizes({"a": 600, "b": 90, "c": 100, "d": 20}, cap=512, at_least=64, calibrated=True)
    {'a': 512, 'b': 90, 'c': 90, 'd': 20}
    """
    empty = [c for c, size in m.items() if size < 1]
    if empty:
        raise DataError(f"client {empty[0]!r} has no validation data, and its reference distance needs some; give it a validation share")
    if calibrated:
        grid: list[int] = []
        for size in sorted(min(cap, size) for size in m.values()):
            if not grid or size >= STEP * grid[-1]:
                grid.append(size)
        return {c: max(size for size in grid if size <= own) for c, own in m.items()}
    large = [size for size in m.values() if size >= at_least]
    common = min([cap, *large])
    return {c: common if size >= at_least else min(size, common) for c, size in m.items()}


@dataclass(frozen=True)
class PairProblems:
    """All pairs' problems."""

    references: Mapping[str, Reply]
    """Row client → its ``reference`` reply."""
    sizes: Mapping[str, int]
    """Client → validation samples it is compared with; ``distinct`` are the sizes at which τ is known, in order."""
    distinct: list[int]
    settings: CompareSettings
    tolerance: float | str
    level: Level
    """Of calibrated tolerances."""
    blocks: bool
    """Average over as many equal blocks of a partner's data as ``max_samples`` hold."""
    common: dict[tuple[str, str], dict[str, float]] = field(default_factory=dict)
    """Pairs compared at the class counts they have in common → their ``recalibrate`` values, by field."""
    sources: dict[str, Source] = field(default_factory=dict)
    """Rows' samples that are the same for all partners, while a screen needs them."""

    def size(self, row: str, column: str) -> int:
        """Samples in a block of the pair, before classes that are short."""
        return min(self.sizes[row], self.sizes[column])

    def block(self, row: str, column: str) -> int:
        """Samples in a block of the pair."""
        common = self.common.get((row, column))
        return int(common["size"]) if common else self.size(row, column)

    def _of(self, name: str, row: str, column: str) -> Any:
        """A field of the row's reference reply: for this partner if it depends on the pair, else for all."""
        values = self.references[row][name]
        return values[column] if column in values else values[ROW]

    def _value(self, name: str, row: str, column: str) -> float:
        """A number that the row computed at the pair's size, or at the class counts the pair has in common."""
        if (row, column) in self.common:
            return self.common[row, column][name]
        return float(self._of(name, row, column)[self.distinct.index(self.size(row, column))])

    def tau(self, row: str, column: str) -> float:
        """The row's reference distance at the pair's size."""
        return self._value("tau", row, column)

    def own_tau(self, row: str) -> float:
        """The row's reference distance at its own size; where τ belongs to a pair, that of the first."""
        some = next(iter(self.references[row]["tau"]))
        return self.tau(row, row if some == ROW else some)

    def epsilon(self, row: str, column: str, blocks: int = 1, *, matched: bool = False) -> float:
        """The tolerance for a partner's sample of some blocks; where classes are matched, their mix adds no variance."""
        if not isinstance(self.tolerance, str):
            return self.tolerance
        inside = {name: self._value(name, row, column) for name in ("within", "freedom") if matched}
        return self.level.pair_tolerance(self._value("variance", row, column), self.block(row, column), blocks, **inside)

    def blocks_in(self, row: str, column: str, samples: int) -> int:
        """Blocks of the pair's size that a column sample holds and the cap allows."""
        m = self.size(row, column)
        return max(1, min(samples, self.settings.max_samples) // m) if self.blocks else 1

    def add(self, screen: Screen, row: str, column: str, reply: Reply) -> float:
        """Give the screen a column client's sample under a row client's model; returns the tolerance it is compared with."""
        m, sample = self.block(row, column), reply["samples"][row]
        matched = reply.get("matched", {}).get(row, 0)
        blocks = matched or self.blocks_in(row, column, len(sample))
        source = Source(self.own_sample(row, column), self._labels(row))
        if ROW in self.references[row]["samples"]:
            source = self.sources.setdefault(row, source)
        labels = reply["labels"][: blocks * m].numpy() if "labels" in reply else None
        epsilon = self.epsilon(row, column, blocks, matched=matched > 0)
        shown: Any = sample[: blocks * m]
        shown = shown.numpy() if shown.device.type == "cpu" else shown  # an engine may have left it on a GPU
        screen.add(row, column, source, shown, tau=self.tau(row, column), epsilon=epsilon, labels=labels, blocks=blocks)
        return epsilon

    def self_distance(self, row: str, reply: Reply) -> float:
        """W of a client with itself, which only counts where the diagonal is not forced."""
        m, s = self.sizes[row], self.settings
        labels = reply["labels"][:m].numpy() if "labels" in reply else None
        cost = self.cost(row, self.own_sample(row, row), reply["samples"][row][:m].cpu().numpy(), labels)
        return solve(cost, solver=s.solver, reg=s.sinkhorn_reg).value - self.tau(row, row)

    def own_sample(self, row: str, column: str) -> Any:
        """The row's own sample, as it is compared with a column's."""
        return self._of("samples", row, column).numpy()

    def cost(self, row: str, a: Any, b: Any, labels: Any) -> Any:
        """Ground costs between the row's sample and a column's."""
        s = self.settings
        return cost_matrix(a, b, cost=s.cost, labels_a=self._labels(row), labels_b=labels, label_weight=s.label_weight)

    def _labels(self, row: str) -> Any:
        labels = self.references[row].get("labels")
        return None if labels is None else labels.numpy()


class ManyBounds:
    """Lower bounds of the transport values between row samples and the samples of many columns, some columns at a time.

    Columns are bounded in the order in which they come, ``COLUMNS`` at once, so the values do not depend on the number of workers.
    The caller waits for ``GROUPS`` of them together: beside it, workers would spend as long on Python's lock as on the bounds.
    """

    COLUMNS, GROUPS = 64, 16

    def __init__(self, pool: SolverPool, problems: PairProblems) -> None:
        self._pool, self._problems = pool, problems
        self._waiting: dict[tuple[str, int], list[tuple[str, Any, Any]]] = {}
        self._groups: list[tuple[str, list[tuple[str, Any, Any]]]] = []
        self._units: dict[str, Any] = {}
        self._found: dict[str, dict[str, float]] = {}

    def add(self, row: str, column: str, reply: Reply) -> None:
        """Take a column's sample under a row's model."""
        m = self._problems.size(row, column)
        labels = reply["labels"][:m].numpy() if "labels" in reply else None
        waiting = self._waiting.setdefault((row, m), [])
        waiting.append((column, reply["samples"][row][:m].cpu().numpy(), labels))
        if len(waiting) >= self.COLUMNS:
            self._groups.append((row, self._waiting.pop((row, m))))
            if len(self._groups) >= self.GROUPS:
                self._bound()

    def finish(self) -> dict[str, dict[str, float]]:
        """Bound what is left; returns row → column → bound."""
        self._groups += [(row, some) for (row, _), some in self._waiting.items()]
        self._waiting.clear()
        self._bound()
        return self._found

    def _bound(self) -> None:
        for (row, some), bounds in zip(self._groups, self._pool.map(self._bounds, self._groups), strict=True):
            self._found.setdefault(row, {}).update(zip([column for column, _, _ in some], map(float, bounds), strict=True))
        self._groups = []

    def _bounds(self, group: tuple[str, list[tuple[str, Any, Any]]]) -> Any:
        row, some = group
        problems, settings = self._problems, self._problems.settings
        if settings.cost == "cosine" and settings.projection_scope in ("row", "none"):
            if row not in self._units:
                self._units[row] = unit(problems.own_sample(row, some[0][0]))
            return cosine_lower_bounds(self._units[row], np.stack([b for _, b, _ in some]))
        return [minima(problems.cost(row, problems.own_sample(row, column), b, labels)) for column, b, labels in some]
