"""A client: one site's data, a network to compute with, its keyed generators; and the register of tasks.

A task is a plain function ``f(client, **inputs) -> dict`` of tensors, numbers, text and dicts of them that runs where the data
live. The built-in ones are in ``tasks.py``; a method adds its own with the same decorator, in its own file. Tasks know neither the
engine nor the method that asks.

A task whose heavy work an engine may do for many clients at once is a generator: it yields a list of ``Work`` and is sent the list of
results. One of phase ``"embed"`` does not touch the network itself once it has yielded: an engine may be embedding for others with it
meanwhile, so what needs it is a work. Called directly, or by an engine that does not care, a generator is an ordinary task.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from emdcfl.core.errors import DataError
from emdcfl.core.keys import NodeSecret, generator, global_seed, keyed_int
from emdcfl.core.params import Network
from emdcfl.core.schema import Field, Reply
from emdcfl.data.types import Preprocess, Site, Split

EVALUATION_BATCH = 256
LOSS_BATCH = 64

CACHED_BATCH = 32
"""Images that a CPU evaluates at once: its caches hold their activations. With 256, CNNs take 1.1 to 2.2 times as long."""


class Client:
    """One site: its data, a network to compute with and its keyed generators.

    The network may be shared by the clients of one process: tasks load what they need. The seed is the run's, known to everybody; the
    secret is known to this node alone, and ``run``, the run's name, separates what it derives from it. ``"bf16"`` computes forward and
    backward passes under autocast; states stay float32.
    """

    def __init__(
        self,
        site: Site,
        network: Network,
        preprocess: Preprocess,
        *,
        seed: int,
        secret: NodeSecret,
        run: str = "run",
        precision: str = "fp32",
    ) -> None:
        self.site, self.name, self.network, self.preprocess = site, site.name, network, preprocess
        self.seed, self.secret, self.run, self.precision = seed, secret, run, precision
        self.checks_models = False  # whether it refuses to embed under models that look made to show its projection
        self.session: NodeSecret | None = None  # of this run alone, deleted after it; a simulation has none
        self.most_epsilon: float | None = None  # the largest ε per release its operator lets embeddings leave with; None: any, or no noise
        self.withheld: frozenset[str] = frozenset()  # tasks its operator refuses; a task that would send the same data refuses too
        self.distrusted: dict[str, str] = {}  # partners whose key, as relayed now, is not the one this node knows, and why
        self.projections: dict[str, str] | None = None  # digest of a partner's key → that of its seed, where a node holds it to one
        self.round = 0
        self._resident: dict[str, Split] = {}
        self._drawn: dict[tuple[object, ...], Tensor] = {}

    def begin(self, round: int) -> None:
        """Enter a round: generators refer to it from here on."""
        self.round = round

    def generator(self, purpose: str, *, round: int | None = None) -> np.random.Generator:
        """Return the generator for one purpose in this round (or a given one; 0 = drawn once per run)."""
        return generator(self.seed, self.name, self.round if round is None else round, purpose)

    def split(self, name: str) -> Split:
        """Return ``"train"``, ``"val"`` or a test variant, on the network's device."""
        if name not in self._resident:
            found = self.site.splits
            if name not in found:
                raise DataError(f"client {self.name!r} has no split {name!r}; it has {', '.join(found)}")
            split = found[name]
            self._resident[name] = (
                split if self.network.device.type == "cpu" else Split(split.x.to(self.network.device), split.y.to(self.network.device))
            )
        return self._resident[name]

    def rows(self, split: str, indices: Tensor) -> Tensor:
        """Return stored samples of a split; ``"all"`` counts the validation samples first, then the train samples."""
        if split != "all":
            return self.split(split).x[indices]
        val, train = self.split("val").x, self.split("train").x
        indices = indices.to(val.device)
        held_out = indices < len(val)
        if bool(held_out.all()):
            return val[indices]
        x = val.new_empty((len(indices), *val.shape[1:]))
        x[held_out], x[~held_out] = val[indices[held_out]], train[indices[~held_out] - len(val)]
        return x

    def place(self, name: str, split: Split) -> None:
        """Take a split that lies on the network's device already, instead of a copy of one's own."""
        self._resident[name] = split

    def sample(self, split: str, cap: int) -> Tensor:
        """Return at most ``cap`` indices of a split, in host memory, uniform without replacement, drawn once per run.

        In random order, so that the first m of a larger sample are the sample of size m, not its first classes.
        """

        def draw() -> Tensor:
            n = len(self.split(split))
            chosen = self.generator(f"sample {split}", round=0).permutation(n)[: min(cap, n)] if cap else np.zeros(0, np.int64)
            return torch.from_numpy(chosen)

        return self.once(draw, "sample", split, cap)

    def once(self, draw: Callable[[], Tensor], *name: object) -> Tensor:
        """Return what is drawn once per run under a name."""
        if name not in self._drawn:
            self._drawn[name] = draw()
        return self._drawn[name]

    @property
    def evaluation_batch(self) -> int:
        """Samples of one forward pass where nothing is learnt."""
        images = self.site.train.x.dim() > 2
        return CACHED_BATCH if images and self.network.device.type == "cpu" else EVALUATION_BATCH

    @torch.no_grad()
    def embeddings(self, state: Tensor, split: str, indices: Tensor, *, mode: Literal["eval", "train"] = "eval") -> Tensor:
        """Return g(x) for the chosen samples (see ``rows``) under ``state`` (or just its ω), on the CPU.

        ``mode="train"`` takes BatchNorm statistics from batches of 64 and leaves dropout on, as some research code does.
        """
        net = self.network
        net.load(state)
        statistics = net.theta.clone() if mode == "train" else None
        size = LOSS_BATCH if mode == "train" else self.evaluation_batch
        batches = list(indices.split(size))
        if mode == "train" and net.layout.batch_statistics and len(batches) > 1 and len(batches[-1]) == 1:
            batches[-2:] = [torch.cat(batches[-2:])]  # as in training: BatchNorm fails on a batch of one
        with self.mode(mode == "train"):
            parts = [net.embed(self.preprocess(self.rows(split, batch))) for batch in batches]
        if statistics is not None:  # running statistics moved while embedding; the next load may bring only ω
            net.theta.copy_(statistics)
        return torch.cat(parts).float().cpu()

    @contextmanager
    def mode(self, training: bool, purpose: str = "dropout") -> Iterator[None]:
        self.network.module.train(training)
        # no cache: it would keep the low-precision weights of the first step for all steps of the block
        low = torch.autocast(self.network.device.type, dtype=torch.bfloat16, enabled=self.precision == "bf16", cache_enabled=False)
        with global_seed(keyed_int(self.seed, self.name, self.round, purpose)), low:
            yield


Work = Callable[[Client], Reply]
"""A piece of a task that an engine may do for many clients at once; called, it does it for one."""

Task = Callable[..., Reply]
AnyTask = TypeVar("AnyTask", bound=Task)
Stages = Generator[list[Work], list[Reply], Reply]
Q = ParamSpec("Q")


@dataclass(frozen=True)
class Divisible:
    """A request that may be divided into several smaller ones, because the task answers item by item."""

    items: str
    """The input that lists the items asked about."""
    by_item: tuple[str, ...]
    """The inputs that map an item to a value."""


@dataclass(frozen=True)
class TaskInfo:
    """What engines know of a task."""

    name: str
    run: Task
    phase: str
    """What its time is counted as."""
    returns: Mapping[str, Field]
    """Schema of its reply."""
    stages: Callable[..., Stages] | None = None
    """The generator behind a staged task."""
    divisible: Divisible | None = None
    """How a large request may be divided."""
    relayed_keys: tuple[str, ...] = ()
    """Inputs that map partners to the public keys the server relays. A node checks them before it runs the task."""


TASKS: dict[str, TaskInfo] = {}


@dataclass(frozen=True)
class NodeNeeds:
    """What a method asks of a node beside ``describe``, ``train`` and ``test``: tasks, and reductions of losses."""

    tasks: tuple[str, ...] = ()
    reductions: tuple[str, ...] = ()


NODE_NEEDS: dict[str, NodeNeeds] = {}
"""Method → what it needs. Methods declare it (``node_needs``), and the policy of a node reads it."""


def task(*, phase: str, returns: Mapping[str, Field]) -> Callable[[AnyTask], AnyTask]:
    """Register a function ``f(client, **inputs) -> dict`` as a task under its own name; see ``TaskInfo`` for the arguments."""

    def register(function: AnyTask) -> AnyTask:
        _register(TaskInfo(function.__name__, function, phase, returns))
        return function

    return register


def staged_task(
    *, phase: str, returns: Mapping[str, Field], divisible: Divisible | None = None, relayed_keys: tuple[str, ...] = ()
) -> Callable[[Callable[Q, Stages]], Callable[Q, Reply]]:
    """Register a generator that yields lists of ``Work`` and returns its reply; what comes back is an ordinary task."""

    def register(stages: Callable[Q, Stages]) -> Callable[Q, Reply]:
        @functools.wraps(stages)
        def run(*args: Q.args, **kwargs: Q.kwargs) -> Reply:
            client: Any = args[0]
            running = stages(*args, **kwargs)
            try:
                works = next(running)
                while True:
                    try:
                        results = [work(client) for work in works]
                    except Exception as error:  # the task may know what to do about it
                        works = running.throw(error)
                    else:
                        works = running.send(results)
            except StopIteration as finished:
                reply: Reply = finished.value
                return reply

        _register(TaskInfo(run.__name__, run, phase, returns, stages, divisible, relayed_keys))
        return run

    return register


def _register(info: TaskInfo) -> None:
    if info.name in TASKS and TASKS[info.name].run.__module__ != info.run.__module__:
        raise ValueError(f"a task named {info.name!r} exists already, in {TASKS[info.name].run.__module__}")
    TASKS[info.name] = info
