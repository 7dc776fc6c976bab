"""How one pair of clients is decided: bounds first, the solver last. The functions run on the workers of a ``Screen``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from emdcfl.core.errors import DataError
from emdcfl.transport.bounds import COSINE_SLACK, cosine_minima, minima, refine, slack
from emdcfl.transport.cost import cosine_of_units, cost_matrix, sample, unit
from emdcfl.transport.pool import Array, scratch
from emdcfl.transport.solvers import solve

Client = int | str
Key = tuple[Client, Client]

# What an entry of W is: not measured, an exact value, or a bound.
UNKNOWN, EXACT, LOWER, UPPER = 0, 1, 2, 3

PRECISE, LARGE = 0.05, 2**15
"""With ``distances="precise"``, bounds that know W to this share of it replace its value, in problems of more costs than this."""


@dataclass(frozen=True)
class PairOutcome:
    """One entry of W: its value or the bound that settled it, which of these it is, and whether the row client accepts the column.

    With ``distances="precise"``, ``accepts`` says whether the entry is settled: True, or None.
    """

    value: float
    kind: int
    accepts: bool | None


@dataclass(frozen=True)
class Source:
    """A row client's own sample, with its labels where the cost needs them."""

    a: Any
    labels: Any = None

    @cached_property
    def matrix(self) -> Array:
        """The sample as a matrix of finite numbers, checked once for all partners."""
        return sample(self.a, "a")

    @cached_property
    def unit(self) -> Array:
        """The sample at unit length, computed once for all partners."""
        return unit(self.matrix)

    @cached_property
    def has_zeros(self) -> bool:
        """Whether some embedding is the zero vector, which has no direction."""
        return not bool(self.unit.any(axis=1).all())


@dataclass(frozen=True)
class Problem:
    """One direction of a pair: the row client's sample, reference distance and tolerance, and the partner's sample ``b``.

    The latter may consist of several equal `blocks`; T is then the mean over the blocks of the transport value.
    """

    source: Source
    tau: float
    epsilon: float
    b: Any
    labels: Any
    blocks: int = 1

    @property
    def large(self) -> bool:
        """Whether the solver takes much longer than bounds."""
        return len(self.source.a) * (len(self.b) // self.blocks) > LARGE

    def check(self, options: TransportOptions) -> None:
        """Raise ``DataError`` if no cost can be computed from the samples, before they are batched with others."""
        self._blocks(self.b)
        x, y = self.source.matrix, sample(self.b, "b")
        if x.shape[1] == y.shape[1] and options.cost != "label-aware":
            return
        labels = self.labels[:1] if self.labels is not None and len(self.labels) == len(y) else self.labels
        cost_matrix(x, y[:1], cost=options.cost, labels_a=self.source.labels, labels_b=labels)  # raises if anything is wrong

    def on_host(self) -> Problem:
        """Return the same problem with the partner's sample as an array in host memory, where threads and solvers read it."""
        is_tensor = not isinstance(self.b, np.ndarray) and hasattr(self.b, "cpu")
        return replace(self, b=self.b.cpu().numpy()) if is_tensor else self

    def units(self) -> Iterator[Array]:
        """The blocks of the partner's sample at unit length."""
        width = self.source.unit.shape[1]
        for part in self._blocks(self.b):
            y = sample(part, "b")
            if y.shape[1] != width:
                cost_matrix(self.source.a, y)  # raises
            yield unit(y)

    def costs(self, options: TransportOptions) -> Iterator[Array]:
        """One cost matrix per block; cosines in scratch memory, each overwritten by the next."""
        source = self.source
        if options.cost == "cosine":
            for y in self.units():
                yield cosine_of_units(source.unit, y, out=scratch("cost", (len(source.unit), len(y))))
            return
        shared = {"cost": options.cost, "labels_a": source.labels, "label_weight": options.label_weight}
        labels = [None] * self.blocks if self.labels is None else self._blocks(self.labels)
        for part, own in zip(self._blocks(self.b), labels, strict=True):
            yield cost_matrix(source.a, part, labels_b=own, **shared)

    def _blocks(self, values: Any) -> list[Array]:
        x = np.asarray(values)
        if len(x) % self.blocks or not len(x):
            raise DataError(f"expected {self.blocks} equal blocks of samples, got {len(x)} samples")
        return np.split(x, self.blocks)


@dataclass(frozen=True)
class TransportOptions:
    """What is the same for all pairs; `distances` as in ``Screen``."""

    cost: str
    solver: str
    reg: float
    label_weight: float
    distances: str


@dataclass
class FirstBounds:
    """The first bounds of one direction: a lower bound per block. The problem is kept only until the pair is settled."""

    entry: PairOutcome
    problem: Problem | None
    lows: tuple[float, ...] = ()
    solved: int = 0


@dataclass
class Settled:
    """What settling a pair added: entries that replace those of the first bounds, and the number of exact solves."""

    entries: Mapping[Key, PairOutcome] = field(default_factory=dict)
    solves: int = 0


def first_bounds(problem: Problem, options: TransportOptions) -> FirstBounds:
    """Bound a problem by row and column minima, which is enough for most pairs of different groups."""
    if options.distances != "needed":  # bounds as precise as those of a GPU take threads as long as the solver
        return FirstBounds(_solved(problem, options), None, solved=problem.blocks)
    lows, margin = [], COSINE_SLACK
    enough = problem.tau + problem.epsilon + margin if problem.blocks == 1 else np.inf
    if options.cost == "cosine" and not problem.source.has_zeros:
        lows = [cosine_minima(problem.source.unit, y, enough=enough) for y in problem.units()]
    else:
        for cost in problem.costs(options):
            margin = max(margin, slack(cost))
            lows.append(minima(cost))
    entry = judge(float(np.mean(lows)), np.inf, margin, problem, options)
    return FirstBounds(entry, None if entry.accepts is False else problem, tuple(lows))


def settle(key: Key, one: Future[FirstBounds], other: Future[FirstBounds], options: TransportOptions) -> Settled:
    """Decide a pair of which no direction is rejected yet: better bounds for both directions, then the exact solver."""
    first = {key: one.result(), key[::-1]: other.result()}
    problems = {direction: seen.problem for direction, seen in first.items() if seen.problem is not None}
    for seen in first.values():
        seen.problem = None
    if any(seen.entry.accepts is False for seen in first.values()):
        return Settled()
    entries: dict[Key, PairOutcome] = {}
    for direction, problem in problems.items():
        entries[direction] = _bounded(problem, first[direction].lows, options)
        if entries[direction].accepts is False:
            return Settled(entries)
    return conclude(entries, problems, options)


def conclude(entries: dict[Key, PairOutcome], problems: Mapping[Key, Problem], options: TransportOptions) -> Settled:
    """Solve what bounds left open, one direction after the other, until one rejects the link where only links are wanted."""
    solves = 0
    for direction, problem in problems.items():
        if entries[direction].accepts is None:
            entries[direction] = _solved(problem, options)
            solves += problem.blocks
            if not entries[direction].accepts:
                break
    return Settled(entries, solves)


def _bounded(problem: Problem, lows: tuple[float, ...], options: TransportOptions) -> PairOutcome:
    """Refine the bounds, all blocks to the same stage, until they decide or cannot be refined further."""
    upper = options.solver == "exact"
    costs = [cost if problem.blocks == 1 else cost.copy() for cost in problem.costs(options)]  # the next block overwrites it
    margin = max(map(slack, costs))
    entry = judge(float(np.mean(lows)), np.inf, margin, problem, options)
    for bounds in _together([refine(cost, low, upper=upper) for cost, low in zip(costs, lows, strict=True)], lows):
        low, high = np.mean(bounds, axis=0).tolist()
        entry = judge(low, high, margin, problem, options)
        if entry.accepts is not None:
            break
    return entry


def _together(iterators: list[Iterator[tuple[float, float]]], lows: tuple[float, ...]) -> Iterator[list[tuple[float, float]]]:
    """Step all iterators at once, repeating the last bounds of those that have ended, until all have."""
    last = [(low, np.inf) for low in lows]
    while True:
        steps = [next(one, None) for one in iterators]
        if all(step is None for step in steps):
            return
        last = [before if step is None else step for before, step in zip(last, steps, strict=True)]
        yield list(last)


def judge(low: float, high: float, margin: float, problem: Problem, options: TransportOptions) -> PairOutcome:
    """Compare bounds of the transport value with the tolerance; undecided where rounding might change the answer.

    With ``distances="precise"``, also with each other: a lower bound of W is settled where the upper one lies near it, on the same side of
    the tolerance.
    """
    tau = problem.tau
    if options.distances == "precise":
        w, most = low - margin - tau, high + margin - tau
        near = problem.large and most <= (1 + PRECISE) * w and (w < problem.epsilon) == (most < problem.epsilon)
        return PairOutcome(w, LOWER, True if near else None)
    if low - margin - tau >= problem.epsilon:
        return PairOutcome(low - margin - tau, LOWER, False)
    if high + margin - tau < problem.epsilon:
        return PairOutcome(high + margin - tau, UPPER, True)
    return PairOutcome(low - margin - tau, LOWER, None)


def _solved(problem: Problem, options: TransportOptions) -> PairOutcome:
    w = float(np.mean([solve(cost, solver=options.solver, reg=options.reg).value for cost in problem.costs(options)])) - problem.tau
    return PairOutcome(w, EXACT, options.distances == "precise" or bool(w < problem.epsilon))
