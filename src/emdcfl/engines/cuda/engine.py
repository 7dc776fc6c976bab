"""Training on one GPU: SGD steps as CUDA graphs, several clients at a time on streams of their own.

Data lie on the GPU as stored; a launch is one whole step (``streams``), and one thread launches (``driving``). Embeddings that many
clients want of one model are computed together, while the host compares those that are there (``embedder``). Runs are repeatable bit for
bit with ``deterministic=True`` (the default), which fixes the algorithms of cuDNN and cuBLAS; results are those of the sequential engine
up to rounding. Networks with dropout, and those whose step cannot be captured, train eagerly, one client after the other, with one
warning; a step that cannot be compiled is captured as it is.

May import: client, tasks, params, data types, federation, keys, choose, the staged engine, streams, driving, embedder, resident, narrow,
pooled, and the worker threads of transport.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import nn

from emdcfl.core.client import TASKS, Client, Task, TaskInfo, Work
from emdcfl.core.errors import ConfigError, EmdcflError
from emdcfl.core.federation import Failure, Inputs
from emdcfl.core.keys import global_seed
from emdcfl.core.params import find_head
from emdcfl.core.schema import Reply
from emdcfl.core.tasks import Embed, Fit, batches
from emdcfl.data.types import Scenario, Split
from emdcfl.engines.cuda.driving import drive
from emdcfl.engines.cuda.embedder import EMBEDDED_ALONE, Embedder
from emdcfl.engines.cuda.narrow import multiply_narrow
from emdcfl.engines.cuda.pooled import pool_first
from emdcfl.engines.cuda.resident import Resident
from emdcfl.engines.cuda.streams import Samples, StreamTrainer
from emdcfl.engines.local.choose import multiply_adds
from emdcfl.engines.local.staged import Outcome, Result, StagedFederation, attempt
from emdcfl.transport import SolverPool

log = logging.getLogger("emdcfl")

LANES, LANES_LARGE = 8, 2
"""Streams: enough to fill the GPU with steps of a small network (measured); a large one fills it nearly alone."""

LARGE_STEP = 3.0e10
"""Multiply-adds of a step's forward pass from which a network is large."""

COMPILED, COMPILED_LARGE = 100_000, 25_000
"""Steps of a run from which they are compiled, of a small and of a large network. On a machine that has not compiled them before, the
paper's CNN takes 10 to 20 s, and then 0.10 to 0.14 ms less a step; ResNet18 25 to 31 s, and 1.0 to 1.1 ms."""

SMALL_PATCH = 32
"""Numbers of a patch up to which a convolution is a product without compilation too."""

NOT_COMPILED, ONE_AFTER_THE_OTHER = "training steps are not compiled", "clients are trained one after the other"
FALLBACKS = (NOT_COMPILED, ONE_AFTER_THE_OTHER, EMBEDDED_ALONE)
"""How the warnings begin that say that a run goes on more slowly than it should; who measures time looks for them."""


class CudaFederation(StagedFederation):
    """Every client on one GPU.

    Parameters
    ----------
    streams : int, optional
        Clients trained at the same time, each with a network and a stream of its own. By the size of the network if left out.
    deterministic : bool
        Fix the algorithms, so that the same run gives the same bits; ``False`` lets cuDNN pick the fastest.
    compile : "auto", "yes" or "no"
        Compile the step. ``"auto"``: where the run has enough steps to pay for it.
    rounds : int
        Rounds of the run, for ``"auto"``.
    precision : "fp32", "tf32" or "bf16"
    """

    held = 1 << 28

    def __init__(
        self,
        scenario: Scenario,
        *,
        streams: int | None = None,
        deterministic: bool = True,
        compile: str = "auto",
        rounds: int = 1,
        precision: str = "fp32",
        **options: Any,
    ) -> None:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts; equal bits on several streams need it
        super().__init__(scenario, precision=precision, **options)
        network = next(iter(self._clients.values())).network
        if self.device.type != "cuda":
            raise ConfigError("the cuda engine needs a CUDA device; use --engine auto or --device cuda")
        multiply_narrow(network.module, patch=SMALL_PATCH)
        pool_first(network.module, head=find_head(network.module))
        large = multiply_adds(scenario) * self.training.batch_size >= LARGE_STEP
        self._scenario, self._number, self._low = scenario, streams or (LANES_LARGE if large else LANES), precision == "bf16"
        self._fused = compile == "yes" or (compile == "auto" and rounds * _steps(self) >= (COMPILED_LARGE if large else COMPILED))
        self._deterministic, self._tf32 = deterministic, precision == "tf32"
        self._lanes: list[StreamTrainer] = []
        self._capturable = not _draws(network.module)
        if not self._capturable:
            log.warning("%s: the network has dropout, whose draws belong to one client", ONE_AFTER_THE_OTHER)

    def _dispatch(self, info: TaskInfo, inputs: Mapping[str, Inputs], common: Inputs) -> Iterator[tuple[str, Reply | Failure]]:
        """Answer as any engine; models that clients embed with are brought to the GPU once, not once per client and task."""
        self._embedder.settle()  # before any memory is let go that it reads
        if self._overlaps(info):
            common, inputs = self._resident.moved((common, inputs))
        elif info.phase == "train":
            self._resident.clear()
        with self._arithmetic():
            yield from super()._dispatch(info, inputs, common)

    def _overlaps(self, info: TaskInfo) -> bool:
        return info.phase == "embed"

    def _compute(self, works: Sequence[tuple[Client, Work]]) -> list[Result]:
        results: dict[int, Result] = {}
        results |= self._fits([(i, client, work) for i, (client, work) in enumerate(works) if isinstance(work, Fit)])
        embeds = [(i, client, work) for i, (client, work) in enumerate(works) if isinstance(work, Embed)]
        if embeds:
            results |= self._embedder.begin(embeds, self._samples)
        for i, (client, work) in enumerate(works):
            if i in results:
                continue
            if getattr(work, "threads", False):
                results[i] = self._workers.submit(attempt, client, work)
            else:
                self._embedder.settle()  # the network may be in use for another crew
                results[i] = attempt(client, work)
        return [results[i] for i in range(len(works))]

    def _fits(self, fits: Sequence[tuple[int, Client, Fit]]) -> dict[int, Outcome]:
        """Train on the streams; nothing comes back from what cannot be captured, or where one client's training is at fault."""
        while self._capturable and fits:
            try:
                streams = self._make_lanes([(client, fit) for _, client, fit in fits])
                with self._embedder.rehearsal(fits[0][1], fits[0][2].theta, self._samples):
                    return drive(streams, fits, self.device)
            except EmdcflError:  # one client's: the plain way says whose
                break
            except Exception as error:  # capture and compilation fail in many ways
                text, self._lanes = str(error).splitlines()[0] if str(error) else type(error).__name__, []
                if self._fused:
                    self._fused = False
                    log.warning("%s: %s", NOT_COMPILED, text)
                else:
                    self._capturable = False
                    log.warning("%s: %s", ONE_AFTER_THE_OTHER, text)
        return {}

    def expect(self, task: Task) -> None:
        if self._overlaps(TASKS[task.__name__]):
            self._embedder.wanted = True

    def _make_lanes(self, fits: Sequence[tuple[Client, Fit]]) -> list[StreamTrainer]:
        """Return streams wide and long enough for every client's training."""
        needs_two = self.layout.batch_statistics
        shapes = []
        for fit in {id(f): f for _, f in fits}.values():
            for client in self._clients.values():
                n, size = len(client.site.train), fit.training.batch_size
                widths = [len(b) for b in batches(torch.empty(n).numpy(), size, needs_two=False, client=client)]
                shapes.append((fit.training.local_epochs * len(widths), max(widths) + needs_two))
            break
        steps, width = max(s for s, _ in shapes), max(w for _, w in shapes)
        fitting = self._lanes and self._lanes[0].plan.index.shape[0] >= steps and self._lanes[0].plan.index.shape[1] >= width
        if not fitting:
            self._lanes = []
            for _ in range(min(self._number, len(self.clients))):
                with global_seed(0):
                    module = self._scenario.model.untrained()().to(self.device)
                module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
                module.train(True)
                self._lanes.append(
                    StreamTrainer(module, self.layout, self._samples, steps=steps, width=width, low=self._low, fused=self._fused)
                )
        return self._lanes

    @cached_property
    def _embedder(self) -> Embedder:
        return Embedder(self.device)

    @cached_property
    def _resident(self) -> Resident:
        return Resident(self.device)

    @cached_property
    def _workers(self) -> SolverPool:
        return SolverPool()

    def close(self) -> None:
        self._workers.close()
        super().close()

    @cached_property
    def _samples(self) -> Samples:
        """Every client's data, brought to the GPU once."""
        clients = list(self._clients.values())
        samples = Samples.of(clients, self.device)
        for client in clients:
            first = samples.first[client.name]
            for name, begin, end in (("val", first - len(client.site.val), first), ("train", first, first + len(client.site.train))):
                client.place(name, Split(samples.x[begin:end], samples.y[begin:end]))
        return samples

    @contextmanager
    def _arithmetic(self) -> Iterator[None]:
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = self._tf32
        flags = {"enabled": True, "deterministic": self._deterministic, "benchmark": not self._deterministic, "allow_tf32": self._tf32}
        try:
            with torch.backends.cudnn.flags(**flags):
                yield
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before


def _steps(fed: CudaFederation) -> int:
    """SGD steps of a round with everybody (or the participants' share of it)."""
    training = fed.training
    steps = sum(training.local_epochs * -(-len(c.site.train) // training.batch_size) for c in fed._clients.values())
    return steps * (fed.number or len(fed.clients)) // len(fed.clients)


def _draws(module: nn.Module) -> bool:
    """Whether a network draws random numbers while training."""
    names = ("Dropout", "StochasticDepth", "DropPath")
    return any(any(n in type(m).__name__ for n in names) and getattr(m, "p", getattr(m, "drop_prob", 1.0)) for m in module.modules())
