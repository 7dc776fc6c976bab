r"""Which clients are linked, with as few exact solves as possible.

A pair is linked iff both :math:`W_{cc'} = T_{cc'} - \tau_c < \epsilon_{cc'}` and :math:`W_{c'c} < \epsilon_{c'c}`. Certified bounds
(``bounds``) of the transport value T settle most pairs: one direction certainly at or above its tolerance rejects the link, both
certainly below make it. Only what the bounds leave open is solved exactly, so the links equal those of solving everything.

Columns may arrive one by one, in any order. Work begins when they arrive, and the result depends neither on the order nor on the workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from emdcfl.core.errors import ConfigError, EmdcflError, nearest
from emdcfl.transport.cost import COSTS
from emdcfl.transport.pairs import (
    Client,
    FirstBounds,
    Key,
    PairOutcome,
    Problem,
    Settled,
    Source,
    TransportOptions,
    first_bounds,
    settle,
)
from emdcfl.transport.pool import SolverPool
from emdcfl.transport.solvers import SOLVERS

Entries = dict[Key, PairOutcome]

DISTANCES = ("needed", "precise", "all")


class Queue(Protocol):
    """Decides problems as they come."""

    def add(self, key: Key, problem: Problem) -> None:
        """Take one direction of a pair."""

    def finish(self) -> tuple[Entries, int]:
        """Wait for everything; returns the entries and how often the solver was run."""


QueueFactory = Callable[[SolverPool, TransportOptions], Queue]
"""How an engine brings a queue of its own, such as one that bounds problems on a GPU."""


class ThreadQueue:
    """Decides on the threads of a pool: one job per direction for the first bounds, one per pair for the rest."""

    def __init__(self, pool: SolverPool, options: TransportOptions) -> None:
        self._pool, self._options = pool, options
        self._first: dict[Key, Future[FirstBounds]] = {}
        self._jobs: dict[Key, Future[Settled]] = {}

    def add(self, key: Key, problem: Problem) -> None:
        """Bound a problem; once both directions of a pair have come, settle the pair."""
        self._first[key] = self._pool.submit(first_bounds, problem.on_host(), self._options)
        if key[::-1] in self._first:
            # Submitted after both first bounds, so a worker that waits for them waits only for jobs that have begun.
            one = in_order(key)
            self._jobs[one] = self._pool.submit(settle, one, self._first[one], self._first[one[::-1]], self._options)

    def finish(self) -> tuple[Entries, int]:
        """Wait for everything; returns the entries and how often the solver was run."""
        entries: Entries = {}
        solves = 0
        for key, future in self._first.items():
            try:
                seen = future.result()
            except EmdcflError as error:
                raise named(key, error) from error
            entries[key] = seen.entry
            solves += seen.solved
        for job in self._jobs.values():
            outcome = job.result()
            entries |= outcome.entries
            solves += outcome.solves
        return entries, solves


@dataclass(frozen=True)
class Decision:
    """What a screening found, in the order of `clients`."""

    clients: tuple[Client, ...]
    """Names or numbers of the clients."""
    w: NDArray[np.float64]
    """(C, C): values or bounds of W; NaN where nothing was added. ``clustering.links(w, epsilon)`` gives the adjacency."""
    kind: NDArray[np.int8]
    """(C, C): what each entry is: 0 unknown, 1 exact, 2 a lower bound, 3 an upper bound."""
    exact_solves: int
    """Times the solver was run (once per block of a problem that bounds left open)."""
    pairs: int
    """Ordered pairs that were added."""


class Screen:
    """Decide links as samples come in.

    With Sinkhorn only lower bounds are used: its value is never below the exact one, but may lie above an upper bound of it. Distances
    "all" solves every problem that is added, for figures of W without bounds; the links are the same. "precise" is for trees over the
    clients: a queue with a GPU may leave lower bounds that W exceeds by at most ``PRECISE``, and threads solve every problem. ``queue``
    makes what decides problems, given pool and options: an engine with a GPU has one, by default the pool's threads decide, and "all"
    always uses these.

    Examples
    --------
    >>> x = np.eye(3)
    >>> with SolverPool(1) as pool:
    ...     screen = Screen(pool)
    ...     screen.add("a", "b", Source(x), x, tau=0.0, epsilon=0.025)
    ...     screen.add("b", "a", Source(x), x, tau=0.0, epsilon=0.025)
    ...     found = screen.finish()
    >>> bool(found.w[0, 1] < 0.025), found.exact_solves
    (True, 0)
    """

    def __init__(
        self,
        pool: SolverPool,
        *,
        cost: str = "cosine",
        solver: str = "exact",
        reg: float = 0.1,
        label_weight: float = 1.0,
        distances: str = "needed",
        queue: QueueFactory | None = None,
    ) -> None:
        for what, name, valid in (("cost", cost, COSTS), ("solver", solver, SOLVERS), ("distances", distances, DISTANCES)):
            if name not in valid:
                raise ConfigError(f"unknown transport {what} {name!r}; {nearest(name, valid)}")
        options = TransportOptions(cost, solver, reg, label_weight, distances)
        self._queue: Queue = ThreadQueue(pool, options) if queue is None or distances == "all" else queue(pool, options)
        self._added: set[Key] = set()

    def add(
        self, row: Client, column: Client, source: Source, b: Any, *, tau: float, epsilon: float, labels: Any = None, blocks: int = 1
    ) -> None:
        """Give the own sample of `row` (one object for all its partners is prepared once), and that of `column` under its model.

        With `blocks` > 1 the sample ``b`` is cut into that many equal blocks and the transport value is their mean.
        """
        if row == column:
            raise EmdcflError(f"expected two different clients, got {row!r} twice; every client is linked to itself")
        if (row, column) in self._added:
            raise EmdcflError(f"expected one sample per ordered pair, got a second one of {column!r} for {row!r}")
        if not (np.isfinite(tau) and np.isfinite(epsilon)):
            raise EmdcflError(f"expected a finite tau and tolerance from client {row!r}, got tau={tau} and epsilon={epsilon}")
        self._added.add((row, column))
        self._queue.add((row, column), Problem(source, float(tau), float(epsilon), b, labels, blocks))

    def finish(self, clients: Sequence[Client] | None = None) -> Decision:
        """Wait for the work and return what was found among `clients` (default: all that were named, sorted)."""
        named = {c for pair in self._added for c in pair}
        order = tuple(sorted(named, key=lambda c: (isinstance(c, str), c)) if clients is None else clients)
        index = {c: i for i, c in enumerate(order)}
        if unknown := named - set(index):
            raise EmdcflError(f"expected every added client among those to finish with, got others: {sorted(map(repr, unknown))}")
        entries, solves = self._queue.finish()
        w, kind = np.full((len(order), len(order)), np.nan), np.zeros((len(order), len(order)), dtype=np.int8)
        for (row, column), entry in entries.items():
            w[index[row], index[column]], kind[index[row], index[column]] = entry.value, entry.kind
        return Decision(order, w, kind, solves, len(entries))


def in_order(key: Key) -> Key:
    """Return a fixed order of the two directions, so that results do not depend on who answered first."""
    return min(key, key[::-1], key=lambda pair: (isinstance(pair[0], str), str(pair[0])))


def named(key: Key, error: EmdcflError) -> EmdcflError:
    """Return the same error with the name of the client whose sample caused it."""
    row, column = key
    return type(error)(f"sample of client {column!r} under the model of client {row!r}: {error}")
