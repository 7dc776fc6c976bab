"""What is decided about one pair of clients, and how: bounds first, the solver last. Imports numpy only.

The functions here run on the workers of a :class:`~emdcfl.transport.screening.Screen`.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

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
    """One direction of a pair, with all that is needed to decide it."""

    row: Row
    b: Any
    labels: Any

    @property
    def epsilon(self) -> float:
        return self.row.epsilon

    def cost(self, options: Options) -> Array:
        labels = {"labels_a": self.row.labels, "labels_b": self.labels, "label_weight": options.label_weight}
        return cost_matrix(self.row.a, self.b, cost=options.cost, **(labels if options.cost == "label-aware" else {}))


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
    cost = problem.cost(options)
    if options.all:
        return Look(_solved(cost, problem, options), None, 1)
    low, _ = next(refine(cost))
    entry = _judge(low, np.inf, slack(cost), problem)
    return Look(entry, None if entry.accepts is False else problem)


def settle(key: tuple[Client, Client], one: Future[Look], other: Future[Look], options: Options) -> Outcome:
    """Decide a pair of which no direction is refused yet: better bounds for both directions, then the exact solver."""
    looks = {key: one.result(), key[::-1]: other.result()}
    problems = {direction: seen.problem for direction, seen in looks.items() if seen.problem is not None}
    for seen in looks.values():
        seen.problem = None
    if options.all or any(seen.entry.accepts is False for seen in looks.values()):
        return Outcome()
    costs = {direction: problem.cost(options) for direction, problem in problems.items()}
    entries: dict[tuple[Client, Client], Entry] = {}
    solves = 0
    for direction, problem in problems.items():
        entries[direction] = _bounded(costs[direction], problem, upper=options.solver == "exact")
        if entries[direction].accepts is False:
            return Outcome(entries)
    for direction, problem in problems.items():
        if entries[direction].accepts is None:
            entries[direction] = _solved(costs[direction], problem, options)
            solves += 1
            if not entries[direction].accepts:
                break
    return Outcome(entries, solves)


def _bounded(cost: Array, problem: Problem, *, upper: bool) -> Entry:
    """Refine the bounds until they decide, or no further."""
    margin = slack(cost)
    entry = Entry(np.nan, UNKNOWN, None)
    for low, high in refine(cost, upper=upper):
        entry = _judge(low, high, margin, problem)
        if entry.accepts is not None:
            break
    return entry


def _judge(low: float, high: float, margin: float, problem: Problem) -> Entry:
    tau = problem.row.tau
    if low - margin - tau >= problem.epsilon:
        return Entry(low - margin - tau, LOWER, False)
    if high + margin - tau < problem.epsilon:
        return Entry(high + margin - tau, UPPER, True)
    return Entry(low - margin - tau, LOWER, None)


def _solved(cost: Array, problem: Problem, options: Options) -> Entry:
    w = solve(cost, solver=options.solver, reg=options.reg).value - problem.row.tau
    return Entry(w, EXACT, bool(w < problem.epsilon))
