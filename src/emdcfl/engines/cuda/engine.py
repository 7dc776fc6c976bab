"""The CUDA engine: clients train on one GPU, several at a time, with SGD steps captured as CUDA graphs.

Data stay on the GPU. One launch is one step (``streams``), and one thread launches for all streams (``drive``). Embeddings of many
clients under one model are computed together, while the host compares those already computed (``embedding``). Transport problems are
bounded on the GPU (``transport_queue``).

With ``deterministic=True`` (the default), cuDNN and cuBLAS use fixed algorithms and runs are bit-identical. Results equal those of the
sequential engine up to rounding. Networks with dropout, and those whose step cannot be captured, train one client after the other,
with one warning; a step that cannot be compiled is captured without compilation.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from emdcfl.core.client import TASKS, Client, Task, TaskInfo, Work
from emdcfl.core.errors import ConfigError, EmdcflError
from emdcfl.core.federation import Failure, Inputs
from emdcfl.core.keys import global_seed
from emdcfl.core.params import Network, find_head
from emdcfl.core.schema import Reply
from emdcfl.core.tasks import Embed, Fit, Score, batches
from emdcfl.data.types import Scenario, Split
from emdcfl.engines import multiply_adds
from emdcfl.engines.cuda.embedding import EMBEDDED_ALONE, Embedder
from emdcfl.engines.cuda.fused import LowNetwork
from emdcfl.engines.cuda.layers import SMALL_PATCH, multiply_narrow, pool_first
from emdcfl.engines.cuda.resident import ModelCache, Samples
from emdcfl.engines.cuda.scoring import SCORED_ALONE, score_together
from emdcfl.engines.cuda.streams import StreamTrainer, drive
from emdcfl.engines.cuda.transport_queue import DeviceQueue, warm_up_bounds
from emdcfl.engines.local.staged import Outcome, StagedFederation, WorkResult, attempt
from emdcfl.transport import QueueFactory, SolverPool

log = logging.getLogger("emdcfl")

STREAMS, STREAMS_LARGE = 6, 2
"""Streams for a small and a large network: enough to keep the GPU busy (measured)."""

LARGE_STEP = 3.0e10
"""A network is large if a step's forward pass takes this many multiply-adds."""

COMPILED, COMPILED_LARGE = 100_000, 25_000
"""Least steps of a run for which compiling pays off, for a small and a large network. The first compilation of the paper's CNN takes 10 to
20 s and saves 0.10 to 0.14 ms per step; that of ResNet18 takes 25 to 31 s and saves 1.0 to 1.1 ms."""

NOT_COMPILED, ONE_AFTER_THE_OTHER = "training steps are not compiled", "clients are trained one after the other"
FALLBACKS = (NOT_COMPILED, ONE_AFTER_THE_OTHER, EMBEDDED_ALONE, SCORED_ALONE)
"""First words of the warnings that a run continues more slowly; benchmarks look for them."""


class CudaFederation(StagedFederation):
    """Every client on one GPU.

    So many ``streams`` train at the same time, each with its own network and CUDA stream; by default, the size of the network decides.
    ``deterministic`` fixes the algorithms, so that runs are bit-identical; without it cuDNN chooses the fastest. ``compile`` "auto"
    compiles the step if the ``rounds`` of the run have enough steps to save more time than compiling takes.
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
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at start; without it, results on several streams vary
        super().__init__(scenario, precision=precision, **options)
        network = next(iter(self._clients.values())).network
        if self.device.type != "cuda":
            raise ConfigError("the cuda engine needs a CUDA device; use --engine auto or --device cuda")
        multiply_narrow(network.module, patch=SMALL_PATCH)
        pool_first(network.module, head=find_head(network.module))
        large = multiply_adds(scenario) * self.training.batch_size >= LARGE_STEP
        self._scenario, self._number, self._low = scenario, streams or (STREAMS_LARGE if large else STREAMS), precision == "bf16"
        self._compiled = compile == "yes" or (compile == "auto" and rounds * _steps(self) >= (COMPILED_LARGE if large else COMPILED))
        self._deterministic, self._tf32 = deterministic, precision == "tf32"
        self._streams: list[StreamTrainer] = []
        self._capturable = not draws(network.module)
        if not self._capturable:
            log.warning("%s: the network has dropout, whose draws belong to one client", ONE_AFTER_THE_OTHER)

    def _dispatch(self, info: TaskInfo, inputs: Mapping[str, Inputs], common: Inputs) -> Iterator[tuple[str, Reply | Failure]]:
        """Run a task; models that clients embed or decide with are copied to the GPU once per round, not once per client and task."""
        self._embedder.settle()  # before memory that it reads is freed
        if self._overlaps(info) or info.phase == "decide":
            common, inputs = self._models.moved((common, inputs))
        elif info.phase in ("train", "personalize"):
            self._models.clear()
        with self._arithmetic():
            yield from super()._dispatch(info, inputs, common)

    def _overlaps(self, info: TaskInfo) -> bool:
        return info.phase == "embed"

    def _compute(self, works: Sequence[tuple[Client, Work]]) -> list[WorkResult]:
        results: dict[int, WorkResult] = {}
        results |= self._fits([(i, client, work) for i, (client, work) in enumerate(works) if isinstance(work, Fit)])
        if scores := [(i, client, work) for i, (client, work) in enumerate(works) if isinstance(work, Score)]:
            results |= score_together(scores, self._samples, self._network)
        if embeds := [(i, client, work) for i, (client, work) in enumerate(works) if isinstance(work, Embed)]:
            results |= self._embedder.begin(embeds, self._samples)
        for i, (client, work) in enumerate(works):
            if i in results:
                continue
            if getattr(work, "threads", False):
                results[i] = self._workers.submit(attempt, client, work)
            else:
                self._embedder.settle()  # the network may be in use for another client batch
                results[i] = attempt(client, work)
        return [results[i] for i in range(len(works))]

    def _fits(self, fits: Sequence[tuple[int, Client, Fit]]) -> dict[int, Outcome]:
        """Train on the streams; returns nothing if a step cannot be captured or one client's training fails."""
        while self._capturable and fits:
            try:
                streams = self._prepared_streams([(client, fit) for _, client, fit in fits])
                with self._embedder.warm_up(fits[0][1], fits[0][2].theta, self._samples):
                    return drive(streams, fits, self.device)
            except EmdcflError:  # of one client: training one after the other shows which
                break
            except Exception as error:  # capture and compilation fail in many ways
                text, self._streams = str(error).splitlines()[0] if str(error) else type(error).__name__, []
                if self._compiled:
                    self._compiled = False
                    log.warning("%s: %s", NOT_COMPILED, text)
                else:
                    self._capturable = False
                    log.warning("%s: %s", ONE_AFTER_THE_OTHER, text)
        return {}

    def expect(self, task: Task) -> None:
        if self._overlaps(TASKS[task.__name__]):
            self._embedder.wanted = True
            warm_up_bounds(self.device)

    def transport_queue(self) -> QueueFactory:
        return partial(DeviceQueue, device=self.device)

    def near(self, states: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        placed: Mapping[str, Tensor] = self._models.moved(states)
        return placed

    def _prepared_streams(self, fits: Sequence[tuple[Client, Fit]]) -> list[StreamTrainer]:
        """Return streams with room for the widest batch and the longest training of all clients."""
        training, needs_two = fits[0][1].training, self.layout.batch_statistics
        steps = width = 0
        for client in self._clients.values():
            samples = torch.empty(len(client.site.train)).numpy()
            widths = [len(b) for b in batches(samples, training.batch_size, needs_two=False, client=client)]
            steps, width = max(steps, training.local_epochs * len(widths)), max(width, max(widths) + needs_two)
        fitting = self._streams and self._streams[0].plan.index.shape[0] >= steps and self._streams[0].plan.index.shape[1] >= width
        if not fitting:
            self._streams = []
            for _ in range(min(self._number, len(self.clients))):
                with global_seed(0):
                    module = self._scenario.model.untrained()().to(self.device)
                module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
                module.train(True)
                self._streams.append(
                    StreamTrainer(module, self.layout, self._samples, steps=steps, width=width, low=self._low, compiled=self._compiled)
                )
        return self._streams

    @cached_property
    def _embedder(self) -> Embedder:
        return Embedder(self.device, self._network)

    @cached_property
    def _network(self) -> Network:
        """The network that embeds and scores for all clients."""
        if not self._low:
            return next(iter(self._clients.values())).network
        with global_seed(0):
            return LowNetwork(self._scenario.model.untrained(), self.device)

    @cached_property
    def _models(self) -> ModelCache:
        return ModelCache(self.device)

    @cached_property
    def _workers(self) -> SolverPool:
        return SolverPool()

    def close(self) -> None:
        self._workers.close()
        super().close()

    @cached_property
    def _samples(self) -> Samples:
        """Every client's data, copied to the GPU once."""
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
    """Return the SGD steps of a round."""
    training = fed.training
    steps = sum(training.local_epochs * -(-len(c.site.train) // training.batch_size) for c in fed._clients.values())
    return steps * (fed.number or len(fed.clients)) // len(fed.clients)


def draws(module: nn.Module) -> bool:
    """Whether a network draws random numbers while training."""
    names = ("Dropout", "StochasticDepth", "DropPath")
    return any(any(n in type(m).__name__ for n in names) and getattr(m, "p", getattr(m, "drop_prob", 1.0)) for m in module.modules())
