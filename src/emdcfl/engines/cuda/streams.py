"""One CUDA stream with a network of its own, and its SGD steps captured as CUDA graphs.

A step reads everything from memory that stays where it is: the plan of the training (which samples at which step) lies on the GPU
beside a step counter, so that a replay needs nothing from the host. Gather, preprocessing, forward, backward and the fused
update are one graph, and a launch is one step. Where the step is ``fused``, its element-wise work is compiled (``torch.compile``)
and its first convolution is a matrix product (``narrow``).

May import: params, tasks, data types, schedule, terms, update, narrow.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from emdcfl.core.client import Client
from emdcfl.core.params import Layout
from emdcfl.core.tasks import Fit, Training
from emdcfl.data.types import Preprocess
from emdcfl.engines.cuda.narrow import multiply_narrow
from emdcfl.engines.local.schedule import schedule
from emdcfl.engines.local.terms import Terms, kind, make_terms
from emdcfl.engines.local.update import fused_sgd

WARM_UP = 3
"""Eager steps before a capture: libraries choose their algorithms and allocate workspaces in them."""

WORTH_IT = 3
"""Steps of one width in a training from which it is captured; the last, shorter batch of every epoch under BatchNorm has its own."""


@dataclass(frozen=True)
class Samples:
    """Every client's samples on the GPU, as stored, and what makes network inputs of them without touching the host.

    A client's validation samples lie before its train samples, which begin at ``first``.
    """

    x: Tensor
    y: Tensor
    first: dict[str, int]
    preprocess: Preprocess
    mean: Tensor
    std: Tensor

    @classmethod
    def of(cls, clients: list[Client], device: torch.device) -> Samples:
        first, total = {}, 0
        for client in clients:
            first[client.name] = total + len(client.site.val)
            total += len(client.site.val) + len(client.site.train)
        splits = [split for c in clients for split in (c.site.val, c.site.train)]
        x, y = torch.cat([s.x for s in splits]).to(device), torch.cat([s.y for s in splits]).to(device)
        p = clients[0].preprocess
        shape = (1, -1) + (1,) * (x.dim() - 2)
        return cls(x, y, first, p, torch.tensor(p.mean, device=device).view(shape), torch.tensor(p.std, device=device).view(shape))

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Gather inputs and labels; images in channels-last order, which convolutions on tensor cores want."""
        z = (self.preprocess.resized(self.x.index_select(0, index)) - self.mean) / self.std
        if z.dim() == 4:  # not contiguous(): that leaves the strides of single-channel images, and the whole network, as they are
            z = z.to(memory_format=torch.channels_last)
        return z, self.y.index_select(0, index)


def objective(module: nn.Module, samples: Samples, index: Tensor, scale: Tensor, low: bool) -> tuple[Tensor, Tensor]:
    """Return the weighted loss of a batch, to be differentiated, and the loss of every sample."""
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=low, cache_enabled=False):
        x, y = samples.batch(index)
        losses = F.cross_entropy(module(x), y, reduction="none")
    return (losses * scale).sum(), losses.detach()


@functools.cache
def fused_objective() -> Callable[..., tuple[Tensor, Tensor]]:
    """Return ``objective`` compiled, backward pass included; one compilation serves all lanes."""
    options: dict[str, str | int | bool | Callable[..., Any]] = {}
    import torch._inductor.config as inductor  # takes a second, and only this engine needs it

    if hasattr(inductor, "deterministic"):  # kernels picked by rule, not by a stopwatch: another process must get the same bits
        options["deterministic"] = True
    return torch.compile(objective, dynamic=False, fullgraph=True, options=options)


@dataclass
class Plan:
    """One training's batches on the GPU: ``(steps, B)`` indices, weights, and the weights of the reported loss."""

    index: Tensor
    scale: Tensor
    last: Tensor

    @classmethod
    def empty(cls, steps: int, width: int, device: torch.device) -> Plan:
        shape = (steps, width)
        return cls(
            torch.zeros(shape, dtype=torch.int64, device=device), torch.zeros(shape, device=device), torch.zeros(shape, device=device)
        )


class StreamTrainer:
    """A stream, a network, and the graphs of its SGD step.

    Parameters
    ----------
    module : Module
        This lane's own, on the GPU, convolutions in channels-last order.
    layout : Layout
        Where its tensors lie in θ.
    samples : Samples
        Shared by all lanes.
    steps, width : int
        Most steps of a training, widest batch.
    low : bool
        Forward and backward passes in bfloat16.
    fused : bool
        Compile the step of a full batch.

    Attributes
    ----------
    steps : int
        Steps of the training that was begun.
    ahead : list of int
        Batch widths of its steps that are not launched yet, the next one last.
    """

    def __init__(
        self, module: nn.Module, layout: Layout, samples: Samples, *, steps: int, width: int, low: bool, fused: bool = False
    ) -> None:
        device = samples.x.device
        self.module, self.layout, self.samples, self.low, self.fused = module, layout, samples, low, fused
        if fused:
            multiply_narrow(module)
        self.stream = torch.cuda.Stream(device)
        self.plan = Plan.empty(steps, width, device)
        self.counter = torch.zeros(1, dtype=torch.int64, device=device)
        self.total = torch.zeros((), device=device)
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        self.tensors = [tensors[e.name] for e in layout.entries]
        self.weights = [tensors[e.name] for e in layout.entries if e.trainable]
        self.velocity = [torch.zeros_like(w, requires_grad=False) for w in self.weights]
        self.terms: dict[object, Terms] = {}
        self.graphs: dict[object, torch.cuda.CUDAGraph] = {}
        self._memory: Any = None
        self.steps = 0
        self.ahead: list[int] = []
        self.key: tuple[object, Training] = (None, Training())

    @torch.no_grad()
    def load(self, theta: Tensor) -> None:
        """Start from a state, with a fresh optimiser."""
        for e, tensor in zip(self.layout.entries, self.tensors, strict=True):
            tensor.copy_(theta[e.slice].view(e.shape))
        for velocity in self.velocity:
            velocity.zero_()
        self.counter.zero_()
        self.total.zero_()

    @torch.no_grad()
    def theta(self) -> Tensor:
        """Return the state, flat."""
        return torch.cat([tensor.reshape(-1) for tensor in self.tensors])

    def result(self) -> tuple[Tensor, Tensor, torch.cuda.Event]:
        """Return state and loss of the training that was launched, and the event after which they are there."""
        with torch.cuda.stream(self.stream):
            theta, total, done = self.theta(), self.total.clone(), torch.cuda.Event()
            done.record(self.stream)
        return theta, total, done

    def prepare(self, client: Client, fit: Fit) -> tuple[Plan, list[int]]:
        """Lay out a training's batches, in memory the GPU can fetch from while it works; returns them and their sizes."""
        laid = schedule([(client, fit)], needs_two=self.layout.batch_statistics)
        index, scale, last = laid.index[:, 0] + self.samples.first[client.name], laid.scale[:, 0].contiguous(), laid.last[:, 0].float()
        return Plan(index.pin_memory(), scale.pin_memory(), last.pin_memory()), laid.sizes[:, 0].tolist()

    def begin(self, plan: Plan, sizes: list[int], fit: Fit, start: Tensor) -> None:
        """Load a training that was prepared: start state (on the GPU already), plan, anchors; on this lane's stream."""
        steps, width = plan.index.shape
        with torch.cuda.stream(self.stream), torch.no_grad():
            for mine, new in ((self.plan.index, plan.index), (self.plan.scale, plan.scale), (self.plan.last, plan.last)):
                if mine.shape[1] == width:
                    mine[:steps].copy_(new, non_blocking=True)
                else:  # not in one piece: fetched first, laid out there
                    mine[:steps, :width].copy_(new.to(mine.device, non_blocking=True))
            self.plan.scale[:, width:], self.plan.last[:, width:] = 0.0, 0.0
            start.record_stream(self.stream)
            self.load(start)
            terms = make_terms([fit], [w.detach()[None] for w in self.weights], self.layout)
            self._keep(kind(fit), terms)
        self.steps, self.key = steps, (kind(fit), fit.training)
        # filled-up batches are as wide as all, except under BatchNorm
        self.ahead = sizes[::-1] if self.layout.batch_statistics else [self.plan.index.shape[1]] * steps

    def _keep(self, name: object, terms: Terms) -> None:
        """Copy anchors to where the graph looks for them."""
        if name not in self.terms:
            self.terms[name] = terms
            return
        mine = self.terms[name]
        for old, new in ((mine.prox, terms.prox), (mine.cosine, terms.cosine)):
            if old is not None and new is not None:
                for a, b in zip([*old[0], old[1]], [*new[0], new[1]], strict=True):
                    a.copy_(b)

    def advance(self) -> None:
        """Launch the next step."""
        width = self.ahead.pop()
        graph = self.graphs.get((self.key, width))
        with torch.cuda.stream(self.stream):
            if graph is not None:
                graph.replay()
            else:
                self.step(width)

    def step(self, width: int, *, fused: bool = False) -> None:
        """One SGD step, as in ``local_sgd``: what the graph holds."""
        name, training = self.key
        index = self.plan.index.index_select(0, self.counter)[0, :width]
        scale, last = (t.index_select(0, self.counter)[0, :width] for t in (self.plan.scale, self.plan.last))
        value, losses = (fused_objective() if fused else objective)(self.module, self.samples, index, scale, self.low)
        gradients = torch.autograd.grad(value, self.weights)
        with torch.no_grad():
            # the fused kernel wants weight, gradient and velocity in one order
            gradients = tuple(
                g if g.stride() == w.stride() else torch.empty_like(w).copy_(g) for w, g in zip(self.weights, gradients, strict=True)
            )
            self.terms[name].add_gradient([w[None] for w in self.weights], [g[None] for g in gradients], slice(0, 1))
            fused_sgd(self.weights, list(gradients), self.velocity, training)
            self.total += (losses * last).sum()
            self.counter += 1

    def capture(self) -> None:
        """Capture the step for widths the training that was begun has often and no graph holds yet; afterwards it stands where it began."""
        missing = [width for width, n in Counter(self.ahead).items() if n >= WORTH_IT and (self.key, width) not in self.graphs]
        if not missing:
            return
        with torch.cuda.stream(self.stream):
            kept = self.theta()
        for width in missing:
            fused = self.fused and width == self._full()
            with torch.cuda.stream(self.stream):
                for _ in range(WARM_UP):
                    self.counter.zero_()
                    self.step(width, fused=fused)
                self.counter.zero_()
            graph = torch.cuda.CUDAGraph()
            self.stream.synchronize()
            if self._memory is None:  # one for all graphs of the lane: they never run at the same time
                self._memory = torch.cuda.graph_pool_handle()
            # meanwhile finished states go on leaving, from threads of their own
            with torch.cuda.graph(graph, pool=self._memory, stream=self.stream, capture_error_mode="thread_local"):
                self.step(width, fused=fused)
            self.graphs[self.key, width] = graph
        with torch.cuda.stream(self.stream):
            self.load(kept)

    def _full(self) -> int:
        """The width that is worth compiling for: that of a full batch."""
        return self.key[1].batch_size if self.layout.batch_statistics else self.plan.index.shape[1]
