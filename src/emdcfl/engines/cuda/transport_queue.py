"""Transport problems bounded on a GPU, many at once; a pool's threads solve only what the bounds leave open.

``transport.Screen`` uses a ``DeviceQueue`` instead of threads when the engine brings one; the links are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from threading import Thread
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emdcfl.core.errors import EmdcflError
from emdcfl.engines.cuda import transport_bounds
from emdcfl.transport import SolverPool
from emdcfl.transport.pairs import UNKNOWN, FirstBounds, Key, PairOutcome, Problem, Settled, Source, TransportOptions, conclude, judge
from emdcfl.transport.screening import Entries, in_order, named

TOGETHER, REFINED_TOGETHER = 256, 512
"""Problems given to the GPU at once, for first and for better bounds: few problems take as many kernel launches as many."""

Shape = tuple[int, int, int, int]


class DeviceBounds:
    """Bounds transport problems on a device; the CPU works too, for tests, where ``transport.bounds`` on threads is faster."""

    def __init__(self, device: torch.device | str, options: TransportOptions) -> None:
        self.device, self.options = torch.device(device), options
        self._sources: dict[int, tuple[Source, Tensor, Tensor | None]] = {}

    def check(self, problem: Problem) -> None:
        """Raise ``DataError`` if no cost can be computed from a sample, before it is batched with others.

        For samples on the device only the shape is checked, because waiting for their numbers takes longer than their bounds. Numbers that
        are not finite never reject a link there, and the solver, which gets them unless the other direction rejects, raises.
        """
        b, width = problem.b, problem.source.matrix.shape[1]
        fitting = isinstance(b, Tensor) and b.dim() == 2 and len(b) > 0 and len(b) % problem.blocks == 0 and b.shape[1] == width
        if not fitting or self.options.cost == "label-aware":
            problem.on_host().check(self.options)

    def first_bounds(self, problems: Sequence[Problem]) -> list[FirstBounds]:
        """Bound each problem by row and column minima, as ``pairs.first_bounds``."""
        found: dict[int, FirstBounds] = {}
        for where, c, margin in self._batches(problems):
            blocks = problems[where[0]].blocks
            lows = transport_bounds.minima(c).view(-1, blocks).tolist()
            for i, low, slack in zip(where, lows, margin, strict=True):
                entry = judge(float(np.mean(low)), np.inf, slack, problems[i], self.options)
                found[i] = FirstBounds(entry, None if entry.accepts is False else _copied(problems[i]), tuple(low))
        return [found[i] for i in range(len(problems))]

    def refine(self, problems: Sequence[tuple[Problem, tuple[float, ...]]]) -> list[PairOutcome]:
        """Better bounds of each problem, given its first; later stages see only what the earlier ones left open."""
        entries = [PairOutcome(np.nan, UNKNOWN, None)] * len(problems)
        for where, c, margin in self._batches([problem for problem, _ in problems]):
            blocks = problems[where[0]][0].blocks
            low = torch.tensor([problems[i][1] for i in where], dtype=torch.float64, device=self.device).flatten()
            stages = transport_bounds.refine(c, low, upper=self.options.solver == "exact")
            open_, kept = list(zip(where, margin, strict=True)), None
            with suppress(StopIteration):
                while open_:
                    ends = [end.view(-1, blocks).mean(1) for end in stages.send(kept)]
                    for (i, slack), (down, up) in zip(open_, torch.stack(ends, 1).tolist(), strict=True):
                        entries[i] = judge(down, up, slack, problems[i][0], self.options)
                    still = [k for k, (i, _) in enumerate(open_) if entries[i].accepts is None]
                    kept = None if len(still) == len(open_) else self._positions(still, blocks)
                    open_ = [open_[k] for k in still]
        return entries

    def _positions(self, members: Sequence[int], blocks: int) -> Tensor:
        """Return the positions of the blocks of some problems in a batch."""
        first = blocks * torch.tensor(members, device=self.device)
        return (first[:, None] + torch.arange(blocks, device=self.device)).flatten()

    def _batches(self, problems: Sequence[Problem]) -> Iterator[tuple[list[int], Tensor, list[float]]]:
        """Yield problems of one shape, as many as memory allows: positions, costs, and how far rounding may move a bound."""
        shapes: dict[Shape, list[int]] = {}
        for i, problem in enumerate(problems):
            n, d = np.shape(problem.source.a)
            shapes.setdefault((n, len(problem.b) // problem.blocks, d, problem.blocks), []).append(i)
        for (n, m, d, blocks), members in shapes.items():
            size = max(1, self._elements() // (n * m * blocks))
            for start in range(0, len(members), size):
                where = members[start : start + size]
                c = self._costs([problems[i] for i in where], m, blocks)
                yield where, c, transport_bounds.rounding(c, d).view(-1, blocks).amax(1).tolist()

    def _elements(self) -> int:
        """Return how many entries of cost matrices are computed at once."""
        if self.device.type != "cuda":
            return transport_bounds.ELEMENTS
        return min(transport_bounds.ELEMENTS, torch.cuda.get_device_properties(self.device).total_memory // transport_bounds.BYTES)

    def _costs(self, problems: Sequence[Problem], m: int, blocks: int) -> Tensor:
        sources = [self._source(problem.source) for problem in problems]
        a = torch.stack([z for z, _ in sources for _ in range(blocks)])
        b = self._stacked([problem.b for problem in problems])
        labels = None
        if self.options.cost == "label-aware":
            own = torch.stack([y for _, y in sources for _ in range(blocks) if y is not None])
            theirs = torch.from_numpy(np.stack([np.asarray(p.labels) for p in problems])).to(self.device)
            labels = own, theirs.view(-1, m)
        return transport_bounds.costs(
            a, b.view(-1, m, b.shape[2]), cost=self.options.cost, labels=labels, label_weight=self.options.label_weight
        )

    def _stacked(self, samples: Sequence[Any]) -> Tensor:
        """Return samples of one shape on the device; those in host memory are copied together."""
        if any(isinstance(z, Tensor) for z in samples):
            return torch.stack([torch.as_tensor(z, dtype=torch.float32, device=self.device) for z in samples])
        return torch.from_numpy(np.stack([np.asarray(z, dtype=np.float32) for z in samples])).to(self.device)

    def _source(self, source: Source) -> tuple[Tensor, Tensor | None]:
        """Return a row client's sample on the device; it is copied once."""
        if id(source) not in self._sources:
            a = torch.from_numpy(np.asarray(source.a, dtype=np.float32)).to(self.device)
            y = None if source.labels is None else torch.from_numpy(np.asarray(source.labels)).to(self.device)
            self._sources[id(source)] = source, a, y
        _, a, y = self._sources[id(source)]
        return a, y


def _copied(problem: Problem) -> Problem:
    """Return the problem with a copy of its sample: an engine's samples are views, which would keep larger tensors in memory."""
    return replace(problem, b=problem.b.clone()) if isinstance(problem.b, Tensor) else problem


class DeviceQueue:
    """Bounds problems on a device, many at once; the threads of a pool solve what the bounds leave open.

    The last digits of a bound may depend on which problems are bounded together; links do not.
    """

    def __init__(self, pool: SolverPool, options: TransportOptions, device: torch.device | str) -> None:
        self._pool, self._options, self._bounds = pool, options, DeviceBounds(device, options)
        self._new: dict[Key, Problem] = {}
        self._entries: Entries = {}
        self._kept: dict[Key, tuple[Problem, tuple[float, ...]]] = {}
        self._open: list[Key] = []
        self._jobs: dict[Key, Future[Settled]] = {}

    def add(self, key: Key, problem: Problem) -> None:
        """Keep a problem until there are enough of them for the device."""
        try:
            self._bounds.check(problem)
        except EmdcflError as error:
            raise named(key, error) from error
        self._new[key] = problem
        if len(self._new) >= TOGETHER:
            self._bound_new()

    def finish(self) -> tuple[Entries, int]:
        """Decide what is left; returns the entries and how often the solver was run."""
        self._bound_new()
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

    def _bound_new(self) -> None:
        """Compute first bounds of all new problems; pairs of which no direction is rejected stay open."""
        new, self._new = self._new, {}
        for key, seen in zip(new, self._bounds.first_bounds(list(new.values())), strict=True):
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
        """Compute better bounds of both directions of the open pairs; what stays open goes to the solver."""
        open_, self._open = self._open, []
        keys = [direction for key in open_ for direction in (key, key[::-1])]
        kept = {key: self._kept.pop(key) for key in keys}
        bounded = dict(zip(keys, self._bounds.refine(list(kept.values())), strict=True))
        self._entries |= bounded
        for key in open_:
            pair = {direction: bounded[direction] for direction in (key, key[::-1])}
            if all(entry.accepts is not False for entry in pair.values()) and any(entry.accepts is None for entry in pair.values()):
                problems: Mapping[Key, Problem] = {direction: kept[direction][0].on_host() for direction in pair}
                self._jobs[key] = self._pool.submit(conclude, pair, problems, self._options)


def warm_up_bounds(device: torch.device) -> Thread:
    """Load the kernels that bound problems, in a thread: bound a few small ones, with every operation that real ones need."""
    thread = Thread(target=_bound_some, args=(device,), name="emdcfl-warm-up-bounds")
    thread.start()
    return thread


def _bound_some(device: torch.device) -> None:
    with suppress(Exception), torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):  # real bounds report errors
        a, b = (torch.rand(2, 512, 115, device=device, generator=torch.Generator(device).manual_seed(seed)) for seed in (0, 1))
        c = transport_bounds.costs(a, b, cost="cosine")
        low = transport_bounds.minima(c)
        transport_bounds.rounding(c, 115).tolist()
        for lower, upper in transport_bounds.refine(c, low, stages=((0.3, 1), (0.1, 1))):
            torch.stack([lower, upper], 1).tolist()
