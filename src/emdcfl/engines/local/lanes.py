"""One CUDA stream with a network of its own, and its SGD step captured as a CUDA graph.

The step reads everything from memory that stays where it is: the plan of the training (which samples at which step) lies on the GPU
beside a step counter, so that a replay needs nothing from the host. Gather, preprocessing, forward, backward and the fused
update are one graph launch.

May import: params, tasks, data types, schedule, terms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from emdcfl.client import Client
from emdcfl.data.types import Preprocess
from emdcfl.engines.local.schedule import schedule
from emdcfl.engines.local.terms import Terms, kind, make_terms
from emdcfl.params import Layout
from emdcfl.tasks import Fit, Training

WARM_UP = 3
"""Eager steps before a capture: libraries choose their algorithms and allocate workspaces in them."""


@dataclass(frozen=True)
class Samples:
    """Every client's train split on the GPU, as stored, and what makes network inputs of it without touching the host."""

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
            first[client.name] = total
            total += len(client.site.train)
        x, y = torch.cat([c.site.train.x for c in clients]).to(device), torch.cat([c.site.train.y for c in clients]).to(device)
        p = clients[0].preprocess
        shape = (1, -1) + (1,) * (x.dim() - 2)
        return cls(x, y, first, p, torch.tensor(p.mean, device=device).view(shape), torch.tensor(p.std, device=device).view(shape))

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Gather inputs and labels; images in channels-last order, which convolutions on tensor cores want."""
        z = (self.preprocess.resized(self.x.index_select(0, index)) - self.mean) / self.std
        if z.dim() == 4:  # not contiguous(): that leaves the strides of single-channel images, and the whole network, as they are
            z = z.to(memory_format=torch.channels_last)
        return z, self.y.index_select(0, index)


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


class Lane:
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
    """

    def __init__(self, module: nn.Module, layout: Layout, samples: Samples, *, steps: int, width: int, low: bool) -> None:
        device = samples.x.device
        self.module, self.layout, self.samples, self.low = module, layout, samples, low
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
        self.sizes: list[int] = []
        self.left = 0
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

    def begin(self, client: Client, fit: Fit, start: Tensor) -> None:
        """Load a training: start state (on the GPU already), plan, anchors; on this lane's stream."""
        plan = schedule([(client, fit)], needs_two=bool(self.layout.counters))
        steps, _, width = plan.index.shape
        with torch.cuda.stream(self.stream), torch.no_grad():
            for mine, new in (
                (self.plan.index, plan.index + self.samples.first[client.name]),
                (self.plan.scale, plan.scale),
                (self.plan.last, plan.last),
            ):
                mine[:steps, :width].copy_(new[:, 0], non_blocking=False)
            self.plan.scale[:, width:], self.plan.last[:, width:] = 0.0, 0.0
            start.record_stream(self.stream)
            self.load(start)
            terms = make_terms([fit], [w.detach()[None] for w in self.weights], self.layout)
            self._keep(kind(fit), terms)
        self.sizes = plan.sizes[:, 0].tolist()
        self.left, self.key = steps, (kind(fit), fit.training)

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

    def width(self, t: int) -> int:
        """Columns of the plan that step t needs: filled-up batches are as wide as all, except under BatchNorm."""
        return self.sizes[t] if self.layout.counters else self.plan.index.shape[1]

    def advance(self) -> None:
        """Launch the next step."""
        width = self.width(len(self.sizes) - self.left)
        graph = self.graphs.get((self.key, width))
        with torch.cuda.stream(self.stream):
            if graph is not None:
                graph.replay()
            else:
                self.step(width)
        self.left -= 1

    def step(self, width: int) -> None:
        """One SGD step, as in ``local_sgd``: what the graph holds."""
        name, training = self.key
        index = self.plan.index.index_select(0, self.counter)[0, :width]
        scale, last = (t.index_select(0, self.counter)[0, :width] for t in (self.plan.scale, self.plan.last))
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=self.low, cache_enabled=False):
            x, y = self.samples.batch(index)
            losses = F.cross_entropy(self.module(x), y, reduction="none")
            objective = (losses * scale).sum()
        gradients = torch.autograd.grad(objective, self.weights)
        with torch.no_grad():
            # the fused kernel wants weight, gradient and velocity in one order
            gradients = tuple(
                g if g.stride() == w.stride() else torch.empty_like(w).copy_(g) for w, g in zip(self.weights, gradients, strict=True)
            )
            self.terms[name].add_gradient([w[None] for w in self.weights], [g[None] for g in gradients], slice(0, 1))
            fused_sgd(self.weights, list(gradients), self.velocity, training)
            self.total += (losses.detach() * last).sum()
            self.counter += 1

    def capture(self) -> None:
        """Capture the step of the training that was begun, for full batches; afterwards it stands where it began."""
        width = max(self.sizes) if self.layout.counters else self.plan.index.shape[1]
        if (self.key, width) in self.graphs or len(self.sizes) < 2:
            return
        with torch.cuda.stream(self.stream):
            kept = self.theta()
            for _ in range(WARM_UP):
                self.counter.zero_()
                self.step(width)
        graph = torch.cuda.CUDAGraph()
        self.stream.synchronize()
        with torch.cuda.graph(graph, stream=self.stream):
            self.step(width)
        with torch.cuda.stream(self.stream):
            self.load(kept)
        self.graphs[self.key, width] = graph


def fused_sgd(weights: list[Any], gradients: list[Tensor], velocity: list[Tensor], training: Training) -> None:
    r"""Update :math:`v \leftarrow \beta v + g + \lambda w`, :math:`w \leftarrow w - \eta v` for all tensors in one kernel."""
    torch._fused_sgd_(
        weights,
        gradients,
        velocity,
        weight_decay=training.weight_decay,
        momentum=training.momentum,
        lr=training.lr,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )
