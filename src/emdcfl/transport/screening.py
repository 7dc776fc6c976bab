r"""Which clients are linked, with as few exact solves as possible. Imports numpy only.

A pair is linked iff both :math:`W_{cc'} = T_{cc'} - \tau_c < \epsilon_{cc'}` and :math:`W_{c'c} < \epsilon_{c'c}`. Certified bounds
(``bounds``) of the transport value T settle most pairs: one direction certainly at or above its tolerance refuses the link, both
certainly below make it. Only what the bounds leave open is solved exactly, so the links are those of solving everything, bit for bit.

Columns may come one by one, in any order; work begins when they arrive and the result does not depend on the order or on the workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emdcfl.errors import ConfigError, EmdcflError, nearest
from emdcfl.transport.bounds import refine, slack
from emdcfl.transport.cost import COSTS, cost_matrix
from emdcfl.transport.plan import Array
from emdcfl.transport.pool import Pool
from emdcfl.transport.solve import SOLVERS, solve

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
class Decision:
    """What a screening found, in the order of `clients`.

    Attributes
    ----------
    clients : tuple
        Names or numbers of the clients.
    w : (C, C) float64 array
        Values or bounds of W; NaN where nothing was added. ``links(w, epsilon)`` gives the adjacency.
    kind : (C, C) int8 array
        What each entry is: 0 unknown, 1 exact, 2 a lower bound, 3 an upper bound (``KINDS``).
    linked : (C, C) bool array
        The adjacency, with a true diagonal. A pair with a direction that was never added is not linked.
    exact_solves : int
        Problems the solver was run for.
    pairs : int
        Ordered pairs that were added.
    """

    clients: tuple[Client, ...]
    w: NDArray[np.float64]
    kind: NDArray[np.int8]
    linked: NDArray[np.bool_]
    exact_solves: int
    pairs: int


@dataclass(frozen=True)
class _Row:
    a: Any
    tau: float
    epsilon: float
    labels: Any


@dataclass(frozen=True)
class _Problem:
    """One direction of a pair, with all that is needed to decide it."""

    row: _Row
    b: Any
    labels: Any
    epsilon: float

    def cost(self, options: _Options) -> Array:
        labels = {"labels_a": self.row.labels, "labels_b": self.labels, "label_weight": options.label_weight}
        return cost_matrix(self.row.a, self.b, cost=options.cost, **(labels if options.cost == "label-aware" else {}))


@dataclass(frozen=True)
class _Options:
    cost: str
    solver: str
    reg: float
    label_weight: float
    all: bool


class Screen:
    """Decide links as samples come in.

    Parameters
    ----------
    pool : Pool
        Workers.
    cost, solver, reg, label_weight
        As in :func:`emdcfl.transport.cost.cost_matrix` and :func:`emdcfl.transport.solve.solve`. With Sinkhorn only lower bounds are used:
        its value is never below the exact one, but may lie above an upper bound of it.
    distances : {"needed", "all"}
        "all" solves every problem that is added (for pictures of W without bounds); the links are the same.

    Examples
    --------
    >>> x = np.eye(3)
    >>> with Pool(1) as pool:
    ...     screen = Screen(pool)
    ...     for c in ("a", "b"):
    ...         screen.row(c, x, tau=0.0, epsilon=0.025)
    ...     screen.add("a", "b", x)
    ...     screen.add("b", "a", x)
    ...     screen.finish().linked
    array([[ True,  True],
           [ True,  True]])
    """

    def __init__(
        self,
        pool: Pool,
        *,
        cost: str = "cosine",
        solver: str = "exact",
        reg: float = 0.1,
        label_weight: float = 1.0,
        distances: str = "needed",
    ) -> None:
        for what, name, valid in (("cost", cost, COSTS), ("solver", solver, SOLVERS), ("distances", distances, ("needed", "all"))):
            if name not in valid:
                raise ConfigError(f"unknown transport {what} {name!r}; {nearest(name, valid)}")
        self._pool = pool
        self._options = _Options(cost, solver, reg, label_weight, distances == "all")
        self._rows: dict[Client, _Row] = {}
        self._waiting: dict[Client, list[tuple[Client, Any, Any, float | None]]] = {}
        self._first: dict[tuple[Client, Client], Future[_Look]] = {}
        self._jobs: dict[tuple[Client, Client], Future[_Outcome]] = {}
        self._added: set[tuple[Client, Client]] = set()

    def row(self, client: Client, a: Any, *, tau: float, epsilon: float, labels: Any = None) -> None:
        """Give a client's own sample (the source of its whole row), its reference distance and its tolerance."""
        if client in self._rows:
            raise EmdcflError(f"expected one row sample per client, got a second one for {client!r}")
        if not (np.isfinite(tau) and np.isfinite(epsilon)):
            raise EmdcflError(f"expected a finite tau and tolerance from client {client!r}, got tau={tau} and epsilon={epsilon}")
        self._rows[client] = _Row(a, float(tau), float(epsilon), labels)
        for column, b, column_labels, own in self._waiting.pop(client, []):
            self._start(client, column, b, column_labels, own)

    def add(self, row: Client, column: Client, b: Any, *, labels: Any = None, epsilon: float | None = None) -> None:
        """Give the sample of `column` under the model of `row`; before or after the row's own sample.

        `epsilon` replaces the row's tolerance for this partner (for instance because its sample is smaller).
        """
        if row == column:
            raise EmdcflError(f"expected two different clients, got {row!r} twice; every client is linked to itself")
        if (row, column) in self._added:
            raise EmdcflError(f"expected one sample per ordered pair, got a second one of {column!r} for {row!r}")
        self._added.add((row, column))
        if row in self._rows:
            self._start(row, column, b, labels, epsilon)
        else:
            self._waiting.setdefault(row, []).append((column, b, labels, epsilon))

    def finish(self, clients: Sequence[Client] | None = None) -> Decision:
        """Wait for the work and return the links among `clients` (default: all that were named, sorted)."""
        if self._waiting:
            missing = ", ".join(repr(c) for c in self._waiting)
            raise EmdcflError(f"expected the own sample of every row client, got none for {missing}; call row() for each")
        named = {c for pair in self._added for c in pair} | set(self._rows)
        order = tuple(sorted(named, key=lambda c: (isinstance(c, str), c)) if clients is None else clients)
        index = {c: i for i, c in enumerate(order)}
        if unknown := named - set(index):
            raise EmdcflError(f"expected every added client among those to finish with, got others: {sorted(map(repr, unknown))}")
        entries: dict[tuple[Client, Client], Entry] = {}
        solves = 0
        for (row, column), future in self._first.items():
            try:
                look = future.result()
            except EmdcflError as error:
                raise type(error)(f"sample of client {column!r} under the model of client {row!r}: {error}") from error
            entries[row, column] = look.entry
            solves += look.solved
        for job in self._jobs.values():
            outcome = job.result()
            entries |= outcome.entries
            solves += outcome.solves
        return _decision(order, index, entries, solves)

    def _start(self, row: Client, column: Client, b: Any, labels: Any, epsilon: float | None) -> None:
        own = self._rows[row]
        problem = _Problem(own, b, labels, own.epsilon if epsilon is None else float(epsilon))
        look = self._pool.submit(_look, problem, self._options)
        self._first[row, column] = look
        other = self._first.get((column, row))
        if other is not None:
            # Submitted after both looks, so a worker that waits for them waits only for work that has already begun.
            key = (row, column) if _before(row, column) else (column, row)
            self._jobs[key] = self._pool.submit(_settle, key, *((look, other) if key == (row, column) else (other, look)), self._options)


def decide(
    rows: Mapping[Client, Any],
    columns: Mapping[tuple[Client, Client], Any],
    *,
    tau: Mapping[Client, float],
    epsilon: float | Mapping[Client, float],
    pool: Pool,
    **options: Any,
) -> Decision:
    """Decide all links at once.

    Parameters
    ----------
    rows : mapping of client to (n, p) array
        Each client's own sample under its own model.
    columns : mapping of (row, column) to (m, p) array
        The column client's sample under the row client's model.
    tau, epsilon : mapping of client to float
        Reference distance and tolerance of each row client (the tolerance may be one number for all).
    pool : Pool
        Workers.
    **options
        As for :class:`Screen`.

    Examples
    --------
    >>> x, y = np.eye(2), np.array([[1.0, 1.0], [1.0, 1.0]])
    >>> with Pool(1) as pool:
    ...     found = decide({0: x, 1: y}, {(0, 1): y, (1, 0): x}, tau={0: 0.0, 1: 0.0}, epsilon=0.025, pool=pool)
    >>> found.linked.tolist(), found.exact_solves
    ([[True, False], [False, True]], 0)
    """
    screen = Screen(pool, **options)
    for client, a in rows.items():
        screen.row(client, a, tau=tau[client], epsilon=epsilon[client] if isinstance(epsilon, Mapping) else epsilon)
    for (row, column), b in columns.items():
        screen.add(row, column, b)
    return screen.finish(tuple(rows))


def _before(a: Client, b: Client) -> bool:
    """A fixed order of the two directions, so that what is solved does not depend on who answered first."""
    return (isinstance(a, str), str(a)) < (isinstance(b, str), str(b))


@dataclass
class _Look:
    """The first look at one direction. The problem is kept only until the pair is settled."""

    entry: Entry
    problem: _Problem | None
    solved: int = 0


@dataclass
class _Outcome:
    """What settling a pair added: entries that replace those of the first look, and the number of exact solves."""

    entries: Mapping[tuple[Client, Client], Entry] = field(default_factory=dict)
    solves: int = 0


def _look(problem: _Problem, options: _Options) -> _Look:
    """Row and column minima: enough for most pairs of different groups."""
    cost = problem.cost(options)
    if options.all:
        return _Look(_solved(cost, problem, options), None, 1)
    low, _ = next(refine(cost))
    entry = _judge(low, np.inf, slack(cost), problem)
    return _Look(entry, None if entry.accepts is False else problem)


def _settle(key: tuple[Client, Client], one: Future[_Look], other: Future[_Look], options: _Options) -> _Outcome:
    """Decide a pair of which no direction is refused yet: better bounds for both directions, then the exact solver."""
    looks = {key: one.result(), key[::-1]: other.result()}
    problems = {direction: look.problem for direction, look in looks.items() if look.problem is not None}
    for look in looks.values():
        look.problem = None
    if options.all or any(look.entry.accepts is False for look in looks.values()):
        return _Outcome()
    costs = {direction: problem.cost(options) for direction, problem in problems.items()}
    entries: dict[tuple[Client, Client], Entry] = {}
    solves = 0
    for direction, problem in problems.items():
        entries[direction] = _bounded(costs[direction], problem, upper=options.solver == "exact")
        if entries[direction].accepts is False:
            return _Outcome(entries)
    for direction, problem in problems.items():
        if entries[direction].accepts is None:
            entries[direction] = _solved(costs[direction], problem, options)
            solves += 1
            if not entries[direction].accepts:
                break
    return _Outcome(entries, solves)


def _bounded(cost: Array, problem: _Problem, *, upper: bool) -> Entry:
    """Refine the bounds until they decide, or no further."""
    margin = slack(cost)
    entry = Entry(np.nan, UNKNOWN, None)
    for low, high in refine(cost, upper=upper):
        entry = _judge(low, high, margin, problem)
        if entry.accepts is not None:
            break
    return entry


def _judge(low: float, high: float, margin: float, problem: _Problem) -> Entry:
    tau = problem.row.tau
    if low - margin - tau >= problem.epsilon:
        return Entry(low - margin - tau, LOWER, False)
    if high + margin - tau < problem.epsilon:
        return Entry(high + margin - tau, UPPER, True)
    return Entry(low - margin - tau, LOWER, None)


def _solved(cost: Array, problem: _Problem, options: _Options) -> Entry:
    w = solve(cost, solver=options.solver, reg=options.reg).value - problem.row.tau
    return Entry(w, EXACT, bool(w < problem.epsilon))


def _decision(
    order: tuple[Client, ...], index: Mapping[Client, int], entries: Mapping[tuple[Client, Client], Entry], solves: int
) -> Decision:
    size = len(order)
    w, kind = np.full((size, size), np.nan), np.zeros((size, size), dtype=np.int8)
    accepts = np.zeros((size, size), dtype=bool)
    for (row, column), entry in entries.items():
        i, j = index[row], index[column]
        w[i, j], kind[i, j], accepts[i, j] = entry.value, entry.kind, bool(entry.accepts)
    linked = accepts & accepts.T
    np.fill_diagonal(linked, True)
    return Decision(order, w, kind, linked, solves, len(entries))
