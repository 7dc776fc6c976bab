"""Training on one GPU: SGD steps as CUDA graphs, several clients at a time on streams of their own.

Train data lie on the GPU as stored; a launch is one whole step (``lanes``). Runs are repeatable bit for bit with
``deterministic=True`` (the default), which fixes the algorithms of cuDNN and cuBLAS; results are those of the sequential engine up
to rounding. Networks with dropout, and those whose step cannot be captured, train eagerly, one client after the other, with one
warning.

May import: client, tasks, params, the staged engine, lanes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from emdcfl.client import Client, TaskInfo, Work
from emdcfl.data.types import Scenario
from emdcfl.engines.local.lanes import Lane, Samples
from emdcfl.engines.local.staged import Outcome, StagedFederation, attempt
from emdcfl.errors import ConfigError, EmdcflError
from emdcfl.federation import Failure, Inputs
from emdcfl.keys import global_seed
from emdcfl.schema import Reply
from emdcfl.tasks import Fit, batches, trained

log = logging.getLogger("emdcfl")

LANES = 4
"""Streams: enough to fill the GPU with steps of a small network (measured); a large one fills it alone."""

KNOWN = 8
"""Start states kept on the GPU while clients train."""

SHARE = 0.5
"""Part of the free GPU memory that models may take while clients are embedded."""


class GraphedFederation(StagedFederation):
    """Every client on one GPU.

    Parameters
    ----------
    lanes : int
        Clients trained at the same time, each with a network and a stream of its own.
    deterministic : bool
        Fix the algorithms, so that the same run gives the same bits; ``False`` lets cuDNN pick the fastest.
    precision : "fp32", "tf32" or "bf16"
    """

    held = 1 << 28

    def __init__(
        self, scenario: Scenario, *, lanes: int = LANES, deterministic: bool = True, precision: str = "fp32", **options: Any
    ) -> None:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts; equal bits on several streams need it
        super().__init__(scenario, precision=precision, **options)
        self._device = next(iter(self._clients.values())).network.device
        if self._device.type != "cuda":
            raise ConfigError("the graphed engine needs a CUDA device; use --engine auto or --device cuda")
        self._scenario, self._number, self._low = scenario, lanes, precision == "bf16"
        self._deterministic, self._tf32 = deterministic, precision == "tf32"
        self._lanes: list[Lane] = []
        self._capturable = not _draws(next(iter(self._clients.values())).network.module)
        if not self._capturable:
            log.warning("clients are trained one after the other: the network has dropout, whose draws belong to one client")

    def _dispatch(self, info: TaskInfo, inputs: Mapping[str, Inputs], common: Inputs) -> Iterator[tuple[str, Reply | Failure]]:
        """Answer as any engine; models that all clients embed with are brought to the GPU once, not once per client."""
        with self._arithmetic():
            yield from super()._dispatch(info, inputs, self._resident(common) if info.phase == "embed" else common)

    def _resident(self, common: Inputs) -> Inputs:
        size = sum(t.numel() * t.element_size() for t in _tensors(common))
        free = torch.cuda.mem_get_info(self._device)[0]
        if size > SHARE * free:
            log.info("%.1f GiB of models stay in host memory: %.1f GiB are free on the GPU", size / 2**30, free / 2**30)
            return common
        moved: Inputs = _moved(common, self._device)
        return moved

    def _compute(self, works: Sequence[tuple[Client, Work]]) -> list[Outcome]:
        fits = [(i, client, work) for i, (client, work) in enumerate(works) if isinstance(work, Fit)]
        results: dict[int, Outcome] = {}
        if self._capturable and fits:
            try:
                results = self._train(fits)
            except EmdcflError:  # one client's: the way below says whose
                pass
            except Exception as error:  # capture fails in many ways
                self._capturable, self._lanes = False, []
                log.warning("clients are trained one after the other: %s", str(error).splitlines()[0] if str(error) else type(error))
        return [results[i] if i in results else attempt(client, work) for i, (client, work) in enumerate(works)]

    def _train(self, fits: Sequence[tuple[int, Client, Fit]]) -> dict[int, Outcome]:
        """Feed the lanes until every training is done; a lane that finishes takes the next one."""
        lanes = self._make_lanes([(client, fit) for _, client, fit in fits])
        queue, finished = list(reversed(fits)), dict[int, tuple[Client, Fit, int, Tensor, Tensor]]()
        running: dict[int, tuple[int, Client, Fit]] = {}
        starts: dict[tuple[int, int], Tensor] = {}
        while queue or running:
            for number, lane in enumerate(lanes):
                if lane.left == 0 and number in running:
                    i, client, fit = running.pop(number)
                    with torch.cuda.stream(lane.stream):
                        finished[i] = (client, fit, len(lane.sizes), lane.theta(), lane.total.clone())
                if lane.left == 0 and queue:
                    running[number] = queue.pop()
                    _, client, fit = running[number]
                    lane.begin(client, fit, self._start(fit.theta, starts))
                    lane.capture()
                if lane.left:
                    lane.advance()
        torch.cuda.synchronize(self._device)
        return {i: _outcome(*result) for i, result in finished.items()}

    def _start(self, theta: Tensor, known: dict[tuple[int, int], Tensor]) -> Tensor:
        """Return a state on the GPU; clients of one cluster start from one state, and it travels once."""
        key = (theta.data_ptr(), theta.numel())
        if key not in known:
            if len(known) == KNOWN:
                known.pop(next(iter(known)))
            known[key] = theta.to(self._device)
            torch.cuda.current_stream(self._device).synchronize()
        return known[key]

    def _make_lanes(self, fits: Sequence[tuple[Client, Fit]]) -> list[Lane]:
        """Return lanes wide and long enough for every client's training."""
        needs_two = bool(self.layout.counters)
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
            samples = self._lanes[0].samples if self._lanes else Samples.of(list(self._clients.values()), self._device)
            self._lanes = []
            for _ in range(min(self._number, len(self.clients))):
                with global_seed(0):
                    module = self._scenario.model.untrained()().to(self._device)
                module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
                module.train(True)
                self._lanes.append(Lane(module, self.layout, samples, steps=steps, width=width, low=self._low))
        return self._lanes

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

    def memory(self) -> dict[str, float]:
        """Return GiB of GPU memory in use and at most in use so far."""
        return {
            "allocated": torch.cuda.memory_allocated(self._device) / 2**30,
            "peak": torch.cuda.max_memory_allocated(self._device) / 2**30,
        }


def _outcome(client: Client, fit: Fit, steps: int, theta: Tensor, total: Tensor) -> Outcome:
    n = len(client.site.train)
    try:
        return trained(theta, n, total.item() / n, steps, fit.training)
    except EmdcflError as error:  # this client's, not the others'
        return error


def _draws(module: nn.Module) -> bool:
    """Whether a network draws random numbers while training."""
    names = ("Dropout", "StochasticDepth", "DropPath")
    return any(any(n in type(m).__name__ for n in names) and getattr(m, "p", getattr(m, "drop_prob", 1.0)) for m in module.modules())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    return {k: _moved(v, device) for k, v in value.items()} if isinstance(value, Mapping) else value
