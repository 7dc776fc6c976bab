"""First looks and better bounds of many problems at once, on a device of torch's. Imports torch and ``batched``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emdcfl.engines.cuda import transport_bounds
from emdcfl.transport.pairs import UNKNOWN, FirstBounds, Options, PairOutcome, Problem, Source, judge

Shape = tuple[int, int, int, int]


class Device:
    """A device that bounds transport problems.

    Parameters
    ----------
    device : torch.device or str
        CPU tensors take the same path; that is for tests, threads with ``bounds`` are faster there.
    options : Options
    """

    def __init__(self, device: torch.device | str, options: Options) -> None:
        self.device, self.options = torch.device(device), options
        self._sources: dict[int, tuple[Source, Tensor, Tensor | None]] = {}

    def check(self, problem: Problem) -> None:
        """Refuse a sample that no cost can be computed from, before it is put together with others.

        Of one that lies on the device only the shape is looked at, since waiting for its numbers takes longer than its bounds. Numbers that
        are not finite refuse nobody there, and the solver, which then gets them unless the other direction refuses, does not take them.
        """
        b, width = problem.b, problem.row.source.matrix.shape[1]
        fitting = isinstance(b, Tensor) and b.dim() == 2 and len(b) > 0 and len(b) % problem.blocks == 0 and b.shape[1] == width
        if not fitting or self.options.cost == "label-aware":
            problem.at_home().check(self.options)

    def first_bounds(self, problems: Sequence[Problem]) -> list[FirstBounds]:
        """RowSample and column minima of each problem, as ``pairs.look``."""
        looks: dict[int, FirstBounds] = {}
        for where, c, margin in self._batches(problems):
            blocks = problems[where[0]].blocks
            lows = transport_bounds.minima(c).view(-1, blocks).tolist()
            for i, low, slack in zip(where, lows, margin, strict=True):
                entry = judge(float(np.mean(low)), np.inf, slack, problems[i])
                looks[i] = FirstBounds(entry, None if entry.accepts is False else _apart(problems[i]), tuple(low))
        return [looks[i] for i in range(len(problems))]

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
                        entries[i] = judge(down, up, slack, problems[i][0])
                    still = [k for k, (i, _) in enumerate(open_) if entries[i].accepts is None]
                    kept = None if len(still) == len(open_) else self._positions(still, blocks)
                    open_ = [open_[k] for k in still]
        return entries

    def _positions(self, members: Sequence[int], blocks: int) -> Tensor:
        """Where the blocks of some problems of a batch lie."""
        first = blocks * torch.tensor(members, device=self.device)
        return (first[:, None] + torch.arange(blocks, device=self.device)).flatten()

    def _batches(self, problems: Sequence[Problem]) -> Iterator[tuple[list[int], Tensor, list[float]]]:
        """PairProblems of one shape together, as many as memory allows: positions, costs, and how far rounding may move a bound."""
        shapes: dict[Shape, list[int]] = {}
        for i, problem in enumerate(problems):
            n, d = np.shape(problem.row.source.a)
            shapes.setdefault((n, len(problem.b) // problem.blocks, d, problem.blocks), []).append(i)
        for (n, m, d, blocks), members in shapes.items():
            size = max(1, self._elements() // (n * m * blocks))
            for start in range(0, len(members), size):
                where = members[start : start + size]
                c = self._costs([problems[i] for i in where], m, blocks)
                yield where, c, transport_bounds.rounding(c, d).view(-1, blocks).amax(1).tolist()

    def _elements(self) -> int:
        """Entries of cost matrices that are computed together."""
        if self.device.type != "cuda":
            return transport_bounds.ELEMENTS
        return min(transport_bounds.ELEMENTS, torch.cuda.get_device_properties(self.device).total_memory // transport_bounds.BYTES)

    def _costs(self, problems: Sequence[Problem], m: int, blocks: int) -> Tensor:
        sources = [self._source(problem.row.source) for problem in problems]
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
        """Samples of one shape on the device: those in host memory in one copy, those that are there already without."""
        if any(isinstance(z, Tensor) for z in samples):
            return torch.stack([torch.as_tensor(z, dtype=torch.float32, device=self.device) for z in samples])
        return torch.from_numpy(np.stack([np.asarray(z, dtype=np.float32) for z in samples])).to(self.device)

    def _source(self, source: Source) -> tuple[Tensor, Tensor | None]:
        """A row client's sample on the device, moved there once."""
        if id(source) not in self._sources:
            a = torch.from_numpy(np.asarray(source.a, dtype=np.float32)).to(self.device)
            y = None if source.labels is None else torch.from_numpy(np.asarray(source.labels)).to(self.device)
            self._sources[id(source)] = source, a, y
        _, a, y = self._sources[id(source)]
        return a, y


def _apart(problem: Problem) -> Problem:
    """The same problem with a sample of its own: an engine's samples are parts of larger tensors, which would all be kept with it."""
    return replace(problem, b=problem.b.clone()) if isinstance(problem.b, Tensor) else problem
