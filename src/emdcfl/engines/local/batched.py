r"""Many clients' SGD steps as one: states stacked to :math:`\Theta \in R^{F\times P}`, the network mapped over the rows.

Every training takes exactly its own batches in its own order (``schedule``), so the results are those of the sequential engine up to
the rounding of float sums, and the same bits from run to run. The forward pass is ``torch.func.vmap`` of the network; the gradient
of the summed losses is the stack of all gradients, because row f's loss depends on row f's state alone.

What cannot be stacked runs one client after the other instead, with one warning: networks with dropout (its draws belong to one
client), and those that ``vmap`` refuses. BatchNorm takes its statistics from a batch, so short batches are not filled up but
computed apart.

May import: client, tasks, params, the staged engine.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emdcfl.core.client import Client, Work
from emdcfl.core.errors import ClientError
from emdcfl.core.tasks import Fit, Training, trained
from emdcfl.data.types import Preprocess
from emdcfl.engines.cuda.chain import Chain, find_chain
from emdcfl.engines.local.buffers import Buffers
from emdcfl.engines.local.schedule import Schedule, schedule
from emdcfl.engines.local.stack import Stack
from emdcfl.engines.local.staged import Outcome, StagedFederation, attempt
from emdcfl.engines.local.terms import kind, make_terms

log = logging.getLogger("emdcfl")

STACKED = 1 << 20
"""Numbers of one stacked Θ: above this the matrices of a step leave the cache, and a larger stack gains nothing."""

PREPARED = 1 << 25
"""Numbers of network input that are kept ready; above this they are made from the stored samples batch by batch."""


@dataclass
class Pool:
    """The train splits of all clients in one tensor, so that the batches of many are one gather."""

    x: Tensor
    y: Tensor
    first: dict[str, int]
    preprocess: Preprocess | None

    @classmethod
    def of(cls, clients: Sequence[Client]) -> Pool:
        first, total = {}, 0
        for client in clients:
            first[client.name] = total
            total += len(client.site.train)
        device = clients[0].network.device
        x = torch.cat([c.site.train.x for c in clients]).to(device)
        y = torch.cat([c.site.train.y for c in clients]).to(device)
        preprocess = clients[0].preprocess
        if len(x) and preprocess(x[:1]).numel() * len(x) <= PREPARED:
            return cls(preprocess(x), y, first, None)
        return cls(x, y, first, preprocess)

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return network inputs ``(A, b, …)`` and labels ``(A, b)``."""
        flat = index.reshape(-1)
        x = self.x.index_select(0, flat)
        if self.preprocess is not None:
            x = self.preprocess(x)
        return x.view(*index.shape, *x.shape[1:]), self.y.index_select(0, flat).view(index.shape)


class BatchedFederation(StagedFederation):
    """Every client in this process, trainings of like kind stacked and stepped together.

    The replies of one stack leave before the next is trained: its memory, and what lies in the cache of it, is used again.
    """

    held = STACKED

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._stackable = True
        self._pool: Pool | None = None
        self._chain: Chain | None = None
        self._buffers = Buffers()

    def _compute(self, works: Sequence[tuple[Client, Work]]) -> list[Outcome]:
        results: list[Outcome | None] = [None] * len(works)
        groups: dict[object, list[int]] = {}
        for i, (_, work) in enumerate(works):
            if isinstance(work, Fit) and self._stackable:
                groups.setdefault((work.training, kind(work)), []).append(i)
        together = max(1, STACKED // self.layout.size)
        for members in groups.values():
            for begin in range(0, len(members), together):
                part = members[begin : begin + together]
                for i, outcome in zip(part, self._stack([works[i] for i in part]), strict=True):
                    results[i] = outcome
        return [attempt(*works[i]) if outcome is None else outcome for i, outcome in enumerate(results)]

    def _stack(self, works: Sequence[tuple[Client, Work]]) -> list[Outcome]:
        """Train a stack; where that is not possible, one after the other, which also says whose fault it was."""
        fits = [(client, work) for client, work in works if isinstance(work, Fit)]
        if len(fits) > 1 and self._stackable:
            try:
                if self._pool is None:
                    self._pool = Pool.of(list(self._clients.values()))
                    if fits[0][0].precision == "fp32":
                        self._chain = find_chain(fits[0][0].network, self._pool.batch(torch.arange(min(8, len(self._pool.y)))[None])[0][0])
                return fit_stacked(fits, self._pool, self._buffers, self._chain)
            except Exception as error:  # vmap refuses in many ways; and one bad client must not cost the others theirs
                outcomes = [attempt(*work) for work in works]
                if not any(isinstance(outcome, Exception) for outcome in outcomes):
                    self._stackable = False
                    log.warning("clients are trained one after the other: %s", str(error).splitlines()[0] if str(error) else type(error))
                return outcomes
        return [attempt(*work) for work in works]


def fit_stacked(fits: Sequence[tuple[Client, Fit]], pool: Pool, buffers: Buffers, chain: Chain | None = None) -> list[Outcome]:
    """Train several clients together; all share the training settings and the kind of terms."""
    network, training, low = fits[0][0].network, fits[0][1].training, fits[0][0].precision == "bf16"
    batch_norm = network.layout.batch_statistics
    plan = schedule(fits, needs_two=batch_norm)
    ordered = [fits[row] for row in plan.rows]
    stack = Stack.load(network, [fit.theta for _, fit in ordered], buffers)
    terms = make_terms([fit for _, fit in ordered], stack.trained, network.layout)
    first = np.array([pool.first[client.name] for client, _ in ordered])
    index = plan.index.add_(torch.from_numpy(first)[:, None]).to(network.device)
    scale, last = plan.scale.to(network.device), plan.last.to(network.device)
    totals = torch.zeros(len(ordered), device=network.device)
    settings = training if len(plan.active) > 1 else replace(training, momentum=0.0)  # of a single step nobody reads the velocity
    if chain is None:  # a chain never calls the module
        network.module.train(True)
    for t, active in enumerate(plan.active):
        for rows, width in _parts(plan, t, active, apart=batch_norm):
            x, y = pool.batch(index[t, rows, :width])
            part = stack.rows(rows)
            if chain is not None:
                losses, gradients = chain.gradients(part.trained, x, y, scale[t, rows, :width], buffers)
            else:
                losses, gradients = part.gradients(x, y, scale[t, rows, :width], low=low)
            part.step(gradients, terms, rows, settings, first=t == 0)
            stack.put(rows, part)
            totals[rows] += (losses * last[t, rows, :width]).sum(1)
    return _outcomes([fits[row][0] for row in plan.rows], stack.flat(), totals.cpu(), plan, training)


def _parts(plan: Schedule, t: int, active: int, *, apart: bool) -> list[tuple[slice | Tensor, int]]:
    """Return the rows at work and their batch size: all together, or those of equal size where sizes must not be mixed."""
    sizes = plan.sizes[t, :active]
    distinct = sorted(set(sizes.tolist()))
    if not apart or len(distinct) == 1:
        return [(slice(0, active), distinct[-1])]
    return [(torch.from_numpy((sizes == size).nonzero()[0]), size) for size in distinct]


def _outcomes(clients: Sequence[Client], states: Tensor, totals: Tensor, plan: Schedule, training: Training) -> list[Outcome]:
    """Return the replies in the order of the request; ``trained`` refuses what diverged."""
    outcomes: list[Outcome] = [{}] * len(clients)
    sums = states.sum(1).add_(totals).tolist()
    rows = zip(plan.rows, clients, states, totals.tolist(), plan.steps, sums, strict=True)
    for row, client, theta, total, steps, checksum in rows:
        n = len(client.site.train)
        try:
            outcomes[row] = trained(theta, n, total / n, steps, training, known_finite=math.isfinite(checksum), own=True)
        except ClientError as error:  # this client's, not the stack's
            outcomes[row] = error
    return outcomes
