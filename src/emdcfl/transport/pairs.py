"""What is decided about one pair of clients, and how: bounds first, the solver last. Imports numpy only.

The functions here run on the workers of a :class:`~emdcfl.transport.screening.Screen`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from emdcfl.errors import DataError
from emdcfl.transport.bounds import refine, slack
from emdcfl.transport.cost import cost_matrix
from emdcfl.transport.plan import Array
from emdcfl.transport.solve import solve

Client = int | str

# What an entry of W is.
UNKNOWN, EXACT, LOWER, UPPER = 0, 1, 2, 3
KINDS = ("unknown", "exact", "lower bound", "upper bound")


@dataclass(frozen=True)
class Entry:
    """One entry of W: its value (or the bound that settled it), what it is, and whether the row client accepts the column client."""

    value: float
    kind: int
    accepts: bool | None


@dataclass(frozen=True)
class Row:
    """A row client: its own sample and labels, reference distance and tolerance."""

    a: Any
    tau: float
    epsilon: float
    labels: Any


@dataclass(frozen=True)
class Problem:
    """One direction of a pair, with all that is needed to decide it.

    The partner's sample may consist of several equal `blocks`; T is then the mean over the blocks of the transport value.
    """

    row: Row
    b: Any
    labels: Any
    blocks: int = 1

    @property
    def epsilon(self) -> float:
        return self.row.epsilon

    def costs(self, options: Options) -> list[Array]:
        """One cost matrix per block."""
        b = np.asarray(self.b)
        if len(b) % self.blocks or not len(b):
            raise DataError(f"expected {self.blocks} equal blocks of samples, got {len(b)} samples")
        parts = np.split(b, self.blocks)
        if options.cost != "label-aware":
            return [cost_matrix(self.row.a, part, cost=options.cost) for part in parts]
        labels = [None] * self.blocks if self.labels is None else np.split(np.asarray(self.labels), self.blocks)
        shared = {"cost": options.cost, "labels_a": self.row.labels, "label_weight": options.label_weight}
        return [cost_matrix(self.row.a, part, labels_b=own, **shared) for part, own in zip(parts, labels, strict=True)]


@dataclass(frozen=True)
class Options:
    """What is the same for all pairs; `all` asks for exact values everywhere."""

    cost: str
    solver: str
    reg: float
    label_weight: float
    all: bool


@dataclass
class Look:
    """The first look at one direction. The problem is kept only until the pair is settled."""

    entry: Entry
    problem: Problem | None
    solved: int = 0


@dataclass
class Outcome:
    """What settling a pair added: entries that replace those of the first look, and the number of exact solves."""

    entries: Mapping[tuple[Client, Client], Entry] = field(default_factory=dict)
    solves: int = 0


def look(problem: Problem, options: Options) -> Look:
    """Row and column minima: enough for most pairs of different groups."""
    costs = problem.costs(options)
    if options.all:
        return Look(_solved(costs, problem, options), None, len(costs))
    low = float(np.mean([next(refine(cost))[0] for cost in costs]))
    entry = _judge(low, np.inf, max(map(slack, costs)), problem)
    return Look(entry, None if entry.accepts is False else problem)


def settle(key: tuple[Client, Client], one: Future[Look], other: Future[Look], options: Options) -> Outcome:
    """Decide a pair of which no direction is refused yet: better bounds for both directions, then the exact solver."""
    looks = {key: one.result(), key[::-1]: other.result()}
    problems = {direction: seen.problem for direction, seen in looks.items() if seen.problem is not None}
    for seen in looks.values():
        seen.problem = None
    if options.all or any(seen.entry.accepts is False for seen in looks.values()):
        return Outcome()
    costs = {direction: problem.costs(options) for direction, problem in problems.items()}
    entries: dict[tuple[Client, Client], Entry] = {}
    solves = 0
    for direction, problem in problems.items():
        entries[direction] = _bounded(costs[direction], problem, upper=options.solver == "exact")
        if entries[direction].accepts is False:
            return Outcome(entries)
    for direction, problem in problems.items():
        if entries[direction].accepts is None:
            entries[direction] = _solved(costs[direction], problem, options)
            solves += len(costs[direction])
            if not entries[direction].accepts:
                break
    return Outcome(entries, solves)


def _bounded(costs: list[Array], problem: Problem, *, upper: bool) -> Entry:
    """Refine the bounds until they decide, or no further."""
    margin = max(map(slack, costs))
    entry = Entry(np.nan, UNKNOWN, None)
    for bounds in _together([refine(cost, upper=upper) for cost in costs]):
        low, high = np.mean(bounds, axis=0).tolist()
        entry = _judge(low, high, margin, problem)
        if entry.accepts is not None:
            break
    return entry


def _together(iterators: list[Iterator[tuple[float, float]]]) -> Iterator[list[tuple[float, float]]]:
    """Step all iterators at once, repeating the last bounds of those that have ended, until all have."""
    last = [next(one) for one in iterators]
    yield list(last)
    while True:
        steps = [next(one, None) for one in iterators]
        if all(step is None for step in steps):
            return
        last = [before if step is None else step for before, step in zip(last, steps, strict=True)]
        yield list(last)


def _judge(low: float, high: float, margin: float, problem: Problem) -> Entry:
    tau = problem.row.tau
    if low - margin - tau >= problem.epsilon:
        return Entry(low - margin - tau, LOWER, False)
    if high + margin - tau < problem.epsilon:
        return Entry(high + margin - tau, UPPER, True)
    return Entry(low - margin - tau, LOWER, None)


def _solved(costs: list[Array], problem: Problem, options: Options) -> Entry:
    values = [solve(cost, solver=options.solver, reg=options.reg).value for cost in costs]
    w = (values[0] if len(values) == 1 else float(np.mean(values))) - problem.row.tau
    return Entry(w, EXACT, bool(w < problem.epsilon))
