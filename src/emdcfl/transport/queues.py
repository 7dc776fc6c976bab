"""Where problems wait for their turn and are decided: threads of this machine, or a device that bounds many at once. Imports numpy.

Both take ordered pairs in any order and begin while others are still coming. A queue on a device needs torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol

from emdcfl.core.errors import EmdcflError
from emdcfl.transport.pairs import Client, FirstBounds, Options, Outcome, PairOutcome, Problem, conclude, first_bounds, settle
from emdcfl.transport.pool import SolverPool

if TYPE_CHECKING:
    from emdcfl.engines.cuda.transport_device import Device

Key = tuple[Client, Client]
Entries = dict[Key, PairOutcome]

TOGETHER, REFINED_TOGETHER = 256, 512
"""Problems a device is given at once, for first bounds and for better ones: those take as many launches for few problems as for many."""


class Queue(Protocol):
    """Decides problems as they come."""

    def add(self, key: Key, problem: Problem) -> None: ...

    def finish(self) -> tuple[Entries, int]: ...


class ThreadQueue:
    """One job per direction for the first first_bounds, one per pair for the rest, on the threads of a pool."""

    def __init__(self, pool: SolverPool, options: Options) -> None:
        self._pool, self._options = pool, options
        self._first: dict[Key, Future[FirstBounds]] = {}
        self._jobs: dict[Key, Future[Outcome]] = {}

    def add(self, key: Key, problem: Problem) -> None:
        """FirstBounds at a problem; once both directions of a pair are there, settle it."""
        self._first[key] = self._pool.submit(first_bounds, problem.at_home(), self._options)
        if key[::-1] in self._first:
            # Submitted after both looks, so a worker that waits for them waits only for work that has already begun.
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


class DeviceQueue:
    """PairProblems are bounded on a device, many at once; only what its bounds leave open is solved on the threads of a pool.

    The last digits of a bound may depend on which problems came together; a link never does.
    """

    def __init__(self, pool: SolverPool, options: Options, device: Device) -> None:
        self._pool, self._options, self._device = pool, options, device
        self._new: dict[Key, Problem] = {}
        self._entries: Entries = {}
        self._kept: dict[Key, tuple[Problem, tuple[float, ...]]] = {}
        self._open: list[Key] = []
        self._jobs: dict[Key, Future[Outcome]] = {}

    def add(self, key: Key, problem: Problem) -> None:
        """Keep a problem until there are enough for the device."""
        try:
            self._device.check(problem)
        except EmdcflError as error:
            raise named(key, error) from error
        self._new[key] = problem
        if len(self._new) >= TOGETHER:
            self._look()

    def finish(self) -> tuple[Entries, int]:
        """Work off what is left; returns the entries and how often the solver was run."""
        self._look()
        self._refine()
        solves = 0
        for (one, other), job in self._jobs.items():
            try:
                outcome = job.result()
            except EmdcflError as error:  # of either direction
                raise type(error)(f"samples of clients {one!r} and {other!r}: {error}") from error
            self._entries |= outcome.entries
            solves += outcome.solves
        return self._entries, solves

    def _look(self) -> None:
        """First bounds of all new problems; pairs of which no direction is refused go on."""
        new, self._new = self._new, {}
        for key, seen in zip(new, self._device.first_bounds(list(new.values())), strict=True):
            self._entries[key] = seen.entry
            if seen.problem is not None:
                self._kept[key] = seen.problem, seen.lows
            other = self._entries.get(key[::-1])
            if other is None:
                continue
            if seen.entry.accepts is False or other.accepts is False:
                self._kept.pop(key, None)
                self._kept.pop(key[::-1], None)
            else:
                self._open.append(in_order(key))
        if 2 * len(self._open) >= REFINED_TOGETHER:
            self._refine()

    def _refine(self) -> None:
        """Better bounds of both directions of the open pairs; what stays open goes to the solver."""
        open_, self._open = self._open, []
        keys = [direction for key in open_ for direction in (key, key[::-1])]
        kept = {key: self._kept.pop(key) for key in keys}
        bounded = dict(zip(keys, self._device.refine(list(kept.values())), strict=True))
        self._entries |= bounded
        for key in open_:
            pair = {direction: bounded[direction] for direction in (key, key[::-1])}
            if all(entry.accepts is not False for entry in pair.values()) and any(entry.accepts is None for entry in pair.values()):
                problems: Mapping[Key, Problem] = {direction: kept[direction][0].at_home() for direction in pair}
                self._jobs[key] = self._pool.submit(conclude, pair, problems, self._options)


def in_order(key: Key) -> Key:
    """A fixed order of the two directions, so that what is solved does not depend on who answered first."""
    return min(key, key[::-1], key=lambda pair: (isinstance(pair[0], str), str(pair[0])))


def named(key: Key, error: EmdcflError) -> EmdcflError:
    """The same error, saying whose sample it was."""
    row, column = key
    return type(error)(f"sample of client {column!r} under the model of client {row!r}: {error}")
