"""SGD steps captured as CUDA graphs, on one CUDA stream with a network of its own.

A step reads everything from fixed GPU memory: the plan of the training (which samples at which step) and a step counter are there, so
replaying a graph needs nothing from the host. Gathering a batch, preprocessing, forward and backward pass and the update are one graph,
and one launch is one step. In a compiled step, ``torch.compile`` fuses element-wise work, and the first convolution is a matrix product
(``layers``).
"""

from __future__ import annotations

import gc
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import local
from typing import Any

import torch
from torch import Tensor, nn

from emdcfl.core.client import Client
from emdcfl.core.errors import EmdcflError
from emdcfl.core.params import Layout, find_head
from emdcfl.core.schema import finite
from emdcfl.core.tasks import Fit, Training, trained
from emdcfl.engines.cuda.compiling import batch, compile_once, objective
from emdcfl.engines.cuda.fused import exchange_pools, fuse
from emdcfl.engines.cuda.layers import PixelOrder, copy_low, fold_strided, keep_permuted, multiply_narrow, multiply_strided, pool_first
from emdcfl.engines.cuda.resident import Samples
from emdcfl.engines.local.schedule import schedule
from emdcfl.engines.local.staged import Outcome
from emdcfl.engines.local.update import Terms, fused_sgd, kind, make_terms

WARM_UP = 3
"""Eager steps before a capture, in which libraries choose their algorithms and allocate workspaces."""

MIN_STEPS = 3
"""Least steps of one batch width for which a graph is captured. Under BatchNorm, the last batch of every epoch has its own width."""


@dataclass
class Plan:
    """One training's batches on the GPU: ``(steps, B)`` indices, weights, and the weights of the reported loss."""

    index: Tensor
    scale: Tensor
    last: Tensor


class StreamTrainer:
    """A stream, a network of its own (on the GPU, convolutions in channels-last order), and the graphs of its SGD step.

    All streams share ``samples``. A training has at most ``steps`` steps of batches up to ``width``; with ``low``, forward and backward
    passes are in bfloat16, and ``compiled`` compiles the step of a full batch.
    """

    def __init__(
        self, module: nn.Module, layout: Layout, samples: Samples, *, steps: int, width: int, low: bool, compiled: bool = False
    ) -> None:
        device = samples.x.device
        self.module, self.layout, self.samples, self.low, self.compiled = module, layout, samples, low, compiled
        channels: dict[str, int] = {}
        if compiled:
            fold_strided(module)
            multiply_narrow(module)
            multiply_strided(module)
            pool_first(module, head=find_head(module))
            channels = keep_permuted(module)
        self._order = PixelOrder(layout, channels)
        full = copy_low(module) if compiled and low else {}
        fuse(module)
        if full:
            exchange_pools(module)
        self.stream = torch.cuda.Stream(device)
        index = torch.zeros(steps, width, dtype=torch.int64, device=device)
        self.plan = Plan(index, torch.zeros_like(index, dtype=torch.float32), torch.zeros_like(index, dtype=torch.float32))
        self.counter = torch.zeros(1, dtype=torch.int64, device=device)
        self.total = torch.zeros((), device=device)
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        self.tensors = [full.get(e.name, tensors[e.name]) for e in layout.entries]
        self.weights = [full.get(e.name, tensors[e.name]) for e in layout.entries if e.trainable]
        self.leaves = [tensors[e.name] for e in layout.entries if e.trainable]
        self._copies = bool(full)
        self.velocity = [torch.zeros_like(w, requires_grad=False) for w in self.weights]
        self.terms: dict[object, Terms] = {}
        self.graphs: dict[object, torch.cuda.CUDAGraph] = {}
        self._memory: Any = None
        self.steps = 0  # of the training that was begun
        self.ahead: list[int] = []  # batch widths of the steps still to launch, the next one last
        self.key: tuple[object, Training] = (None, Training())

    @torch.no_grad()
    def load(self, theta: Tensor) -> None:
        """Start from a state, with a fresh optimiser."""
        theta = self._order.stored(theta)
        for e, tensor in zip(self.layout.entries, self.tensors, strict=True):
            tensor.copy_(theta[e.slice].view(e.shape))
        for leaf, weight in zip(self.leaves, self.weights, strict=True):
            if leaf is not weight:
                leaf.copy_(weight)
        for velocity in self.velocity:
            velocity.zero_()
        self.counter.zero_()
        self.total.zero_()

    @torch.no_grad()
    def theta(self) -> Tensor:
        return self._order.restored(torch.cat([tensor.reshape(-1) for tensor in self.tensors]))

    def result(self) -> tuple[Tensor, Tensor, torch.cuda.Event]:
        """Return state and loss of the launched training, and the event after which they are computed."""
        with torch.cuda.stream(self.stream):
            theta, total, done = self.theta(), self.total.clone(), torch.cuda.Event()
            done.record(self.stream)
        return theta, total, done

    def prepare(self, client: Client, fit: Fit) -> tuple[Plan, list[int]]:
        """Return a training's batches in pinned memory, which the GPU copies from while it computes, and their sizes."""
        laid = schedule([(client, fit)], needs_two=self.layout.batch_statistics)
        index, scale, last = laid.index[:, 0] + self.samples.first[client.name], laid.scale[:, 0].contiguous(), laid.last[:, 0].float()
        return Plan(index.pin_memory(), scale.pin_memory(), last.pin_memory()), laid.sizes[:, 0].tolist()

    def begin(self, plan: Plan, sizes: list[int], fit: Fit, start: Tensor) -> None:
        """Load a prepared training on this stream: start state (already on the GPU), plan and anchors."""
        steps, width = plan.index.shape
        with torch.cuda.stream(self.stream), torch.no_grad():
            for mine, new in ((self.plan.index, plan.index), (self.plan.scale, plan.scale), (self.plan.last, plan.last)):
                if mine.shape[1] == width:
                    mine[:steps].copy_(new, non_blocking=True)
                else:  # not contiguous: copied first, placed on the GPU
                    mine[:steps, :width].copy_(new.to(mine.device, non_blocking=True))
            self.plan.scale[:, width:], self.plan.last[:, width:] = 0.0, 0.0
            start.record_stream(self.stream)
            self.load(start)
            terms = make_terms([self._ordered(fit)], [w.detach()[None] for w in self.weights], self.layout)
            self._keep(kind(fit), terms)
        self.steps, self.key = steps, (kind(fit), fit.training)
        # padded batches all have the same width; under BatchNorm nothing is padded
        self.ahead = sizes[::-1] if self.layout.batch_statistics else [self.plan.index.shape[1]] * steps

    def _ordered(self, fit: Fit) -> Fit:
        """Return a training whose anchors lie as the weights do."""

        def moved(term: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
            return {**term, "anchor": self._order.stored(term["anchor"])} if term and "anchor" in term else term

        return replace(fit, prox=moved(fit.prox), cosine=moved(fit.cosine))

    def _keep(self, name: object, terms: Terms) -> None:
        """Copy anchors to the memory that the graph reads."""
        if name not in self.terms:
            self.terms[name] = terms
            return
        mine = self.terms[name]
        for old, new in ((mine.prox, terms.prox), (mine.cosine, terms.cosine)):
            if old is not None and new is not None:
                for a, b in zip([*old[0], old[1]], [*new[0], new[1]], strict=True):
                    a.copy_(b)

    def advance(self) -> None:
        width = self.ahead.pop()
        graph = self.graphs.get((self.key, width))
        with torch.cuda.stream(self.stream):
            if graph is not None:
                graph.replay()
            else:
                self.step(width)

    def step(self, width: int, *, compiled: bool = False) -> None:
        """Take one SGD step, as in ``local_sgd``; graphs capture this."""
        name, training = self.key
        prepare, evaluate = (compile_once(batch), compile_once(objective)) if compiled else (batch, objective)
        index, scale, last = (row[:width] for row in self._take())
        x, y = prepare(self.samples, index, self.low)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=self.low, cache_enabled=False):
            value, reported = evaluate(self.module, x, y, scale, last)
        gradients = torch.autograd.grad(value, self.leaves)
        with torch.no_grad():
            # the kernels need weight, gradient and velocity with the same strides
            gradients = tuple(laid_as(w, g) for w, g in zip(self.weights, gradients, strict=True))
            terms = self.terms[name]
            if self._copies and (terms.prox or terms.cosine):
                gradients = tuple(g.float() for g in gradients)
            terms.add_gradient([w[None] for w in self.weights], [g[None] for g in gradients], slice(0, 1))
            if self._copies:
                from emdcfl.engines.cuda.kernels import update_copies  # needs triton, which machines without a GPU lack

                update_copies(self.weights, gradients, self.velocity, self.leaves, training)
            else:
                fused_sgd(self.weights, list(gradients), self.velocity, training)
            self.total += reported

    def _take(self) -> tuple[Tensor, ...]:
        """Return this step's row of the plan, and count the step."""
        rows = self.plan.index, self.plan.scale, self.plan.last
        if self.compiled:
            from emdcfl.engines.cuda.kernels import take  # needs triton, which machines without a GPU lack

            return take(rows, self.counter)
        found = tuple(row.index_select(0, self.counter)[0] for row in rows)
        self.counter += 1
        return found

    def capture(self) -> None:
        """Capture the step for batch widths that are frequent in this training and have no graph yet; the training state is restored."""
        missing = [width for width, n in Counter(self.ahead).items() if n >= MIN_STEPS and (self.key, width) not in self.graphs]
        if not missing:
            return
        with torch.cuda.stream(self.stream):
            kept = self.theta()
        with garbage_kept():
            for width in missing:
                self.graphs[self.key, width] = self._captured(width)
        with torch.cuda.stream(self.stream):
            self.load(kept)

    def _captured(self, width: int) -> torch.cuda.CUDAGraph:
        compiled = self.compiled and width == self._full()
        with torch.cuda.stream(self.stream):
            for _ in range(WARM_UP):
                self.counter.zero_()
                self.step(width, compiled=compiled)
            self.counter.zero_()
        graph = torch.cuda.CUDAGraph()
        self.stream.synchronize()
        if self._memory is None:  # one pool for all graphs of the stream, which never run at the same time
            self._memory = torch.cuda.graph_pool_handle()
        # thread_local: meanwhile, other threads copy finished states to the host
        with torch.cuda.graph(graph, pool=self._memory, stream=self.stream, capture_error_mode="thread_local"):
            self.step(width, compiled=compiled)
        return graph

    def _full(self) -> int:
        """The batch width that is compiled: that of a full batch."""
        return self.key[1].batch_size if self.layout.batch_statistics else self.plan.index.shape[1]


def laid_as(weight: Tensor, gradient: Tensor) -> Tensor:
    """Return a gradient with the strides of its weight; a copy only where numbers lie in another order."""
    strides = zip(weight.shape, weight.stride(), gradient.stride(), strict=True)
    if all(size == 1 or mine == other for size, mine, other in strides):
        return gradient.as_strided(weight.shape, weight.stride())
    return torch.empty_like(weight, dtype=gradient.dtype).copy_(gradient)


@contextmanager
def garbage_kept() -> Iterator[None]:
    """Let no garbage be collected meanwhile.

    CUDA aborts a capture during which the graph of an earlier run is freed. Besides, what torch's compiler imports is no garbage, and
    looking for some takes a sixth of that time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


START_STATES = 8
"""Most start states kept on the GPU while clients train."""

Piece = tuple[int, Client, Fit]


def drive(streams: Sequence[StreamTrainer], fits: Sequence[Piece], device: torch.device) -> dict[int, Outcome]:
    """Train all clients; an idle stream takes the next one. Returns outcomes by the position given with each client.

    One thread launches steps, and two others copy finished states to the host meanwhile. More launching threads, or more steps per launch,
    were no faster. Which stream trains a client does not change its result.
    """
    states = States(device)
    with torch.cuda.device(device), ThreadPoolExecutor(2) as copying:
        copies = keep_busy(streams, deque(fits), states, copying)
        outcomes = {i: future.result() for i, future in copies.items()}
    torch.cuda.synchronize(device)
    return outcomes


class States:
    """Copies states between host and GPU. Clients of one cluster share a start state, which is copied once."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._known = device, dict[tuple[int, int], Tensor]()
        self._pinned = local()
        self._copies = torch.cuda.Stream(device, priority=-1)  # torch reuses streams of one priority; this must not be a training stream

    def start(self, theta: Tensor) -> Tensor:
        """Return a start state on the GPU."""
        key = (theta.data_ptr(), theta.numel())
        if key not in self._known:
            if len(self._known) == START_STATES:
                self._known.pop(next(iter(self._known)))
            self._known[key] = theta.to(self.device)
            torch.cuda.current_stream(self.device).synchronize()
        return self._known[key]

    def to_host(self, client: Client, fit: Fit, steps: int, theta: Tensor, total: Tensor, done: torch.cuda.Event) -> Outcome:
        """Copy a finished state to the host; returns the reply, or the error that rejects it."""
        done.synchronize()
        n = len(client.site.train)
        with torch.cuda.stream(self._copies):
            try:
                loss, fine = total.item() / n, finite(theta)
                return trained(self._copied(theta), n, loss, steps, fit.training, known_finite=fine, own=True)
            except EmdcflError as error:  # of this client alone
                return error

    def _copied(self, theta: Tensor) -> Tensor:
        """Copy a state to the host by way of pinned memory, which is many times faster; each thread has its own."""
        if getattr(self._pinned, "memory", None) is None or self._pinned.memory.shape != theta.shape:
            self._pinned.memory = torch.empty_like(theta, device="cpu", pin_memory=True)
        self._pinned.memory.copy_(theta, non_blocking=True)
        self._copies.synchronize()
        copy: Tensor = self._pinned.memory.clone()
        return copy


def keep_busy(
    streams: Sequence[StreamTrainer], waiting: deque[Piece], states: States, copying: ThreadPoolExecutor
) -> dict[int, Future[Outcome]]:
    """Launch one step per stream in turn, until all clients are trained."""
    running: dict[int, Piece] = {}
    copies: dict[int, Future[Outcome]] = {}
    while waiting or running:
        for number, stream in enumerate(streams):
            if stream.ahead:
                stream.advance()
                continue
            if number in running:
                i, client, fit = running.pop(number)
                copies[i] = copying.submit(states.to_host, client, fit, stream.steps, *stream.result())
            if waiting:
                _, client, fit = running[number] = waiting.popleft()
                plan, sizes = stream.prepare(client, fit)
                stream.begin(plan, sizes, fit, states.start(fit.theta))
                stream.capture()
    return copies
