"""Training alone, random images: a bare loop, the engine as it is, and the engine with one thing changed at a time.

The paper's CNN on 24 clients × 1,600 images and ResNet18 on 4 × 1,024 images of 32×32 (resized to 224² on the GPU), batch 64, five epochs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bare import Bare, scenario
from emdcfl.core.client import Client
from emdcfl.core.tasks import Fit, Training
from emdcfl.data.types import Preprocess, Scenario
from emdcfl.engines.local.sequential import intra_op_threads
from emdcfl.models.recipe import ModelRecipe
from gpu.machine import Box, Emit, Line, Machine, attempt

BATCH = 64


@dataclass(frozen=True)
class Workload:
    """Random images for a network, dealt out to clients; ``streams`` are the numbers tried beside the engine's own."""

    name: str
    model: ModelRecipe
    shape: tuple[int, int]
    """Channels and side of a stored image."""
    size: int | None
    clients: int
    samples: int
    epochs: int = 5
    streams: tuple[int, ...] = ()

    def build(self) -> Scenario:
        rng, total, (channels, side) = torch.Generator().manual_seed(0), self.clients * self.samples, self.shape
        x = torch.randint(0, 256, (total, channels, side, side), generator=rng, dtype=torch.uint8)
        y = torch.randint(0, 10, (total,), generator=rng)
        preprocess = Preprocess((0.5,) * channels, (0.25,) * channels, 1 / 255, self.size)
        return scenario(self.name, x, y, clients=self.clients, samples=self.samples, recipe=self.model, preprocess=preprocess)

    def rate(self, epochs: int, seconds: Sequence[float]) -> Line:
        """Milliseconds per step and images per second, of the median and of the best."""
        steps, images = self.clients * epochs * -(-self.samples // BATCH), self.clients * self.samples * epochs
        middle, best = statistics.median(seconds), min(seconds)
        return {
            "ms_per_step": round(1e3 * middle / steps, 4),
            "ms_best": round(1e3 * best / steps, 4),
            "images_per_s": round(images / middle),
        }


def _cnn(name: str, channels: int, size: int) -> ModelRecipe:
    return ModelRecipe(name, {"channels": channels, "classes": 10, "size": size})


WORKLOADS = (
    Workload("paper CNN", _cnn("cnn", 1, 28), (1, 28), None, 24, 1600, streams=(4, 8, 12)),
    Workload("ResNet18, 224²", ModelRecipe("resnet18", {"classes": 10, "weights": None}), (3, 32), 224, 4, 1024, streams=(1, 3, 4)),
)
TINY = (
    Workload("paper CNN", _cnn("small_cnn", 1, 8), (1, 8), None, 4, 40, epochs=1, streams=(2,)),
    Workload("ResNet18, 224²", _cnn("small_cnn", 3, 12), (3, 8), 12, 4, 20, epochs=1),
)


@dataclass(frozen=True)
class Setting:
    """One way to run the engine; ``None`` is its own choice."""

    name: str
    compile: str = "yes"
    streams: int | None = None
    precision: str = "bf16"


def settings(workload: Workload) -> list[Setting]:
    """Return what is measured beside the bare loop, most important first."""
    return [
        Setting("the engine as it is"),
        Setting("one captured graph", "no", 1),
        Setting("not compiled", "no"),
        *(Setting(f"{n} streams", streams=n) for n in workload.streams),
        Setting("fp32", precision="fp32"),
    ]


def train(fed: Any, works: Sequence[tuple[Client, Fit]], machine: Machine) -> tuple[float, list[Tensor]]:
    """Train every client once, and bring the states to the host; returns seconds and states."""
    arithmetic: AbstractContextManager[None] = fed._arithmetic() if machine.real else nullcontext()
    with arithmetic, intra_op_threads(1):
        machine.wait()
        start = time.perf_counter()
        found = fed._compute(works)
        machine.wait()
        seconds = time.perf_counter() - start
    wrong = next((one for one in found if isinstance(one, Exception)), None)
    if wrong is not None:
        raise wrong
    return seconds, [one["theta"] for one in found]


def engine(world: Scenario, workload: Workload, setting: Setting, repeats: int, machine: Machine) -> Line:
    """Train a few times with one setting; the first time, which captures and compiles, is given apart."""
    training = Training(local_epochs=workload.epochs, batch_size=BATCH)
    options = {"precision": setting.precision, "streams": setting.streams, "compile": setting.compile}
    with machine.federation(world, training, **options) as fed:
        fed.begin(1)
        start = fed.initial()
        works = [(client, Fit(start, training)) for client in fed._clients.values()]
        for client, _ in works:
            client.begin(1)
        first, states = train(fed, works, machine)
        seconds, same = [], True
        for _ in range(repeats):
            took, again = train(fed, works, machine)
            seconds.append(took)
            same &= all(torch.equal(a, b) for a, b in zip(states, again, strict=True))
        used = {"streams": len(getattr(fed, "_streams", [])), "compiled": bool(getattr(fed, "_compiled", False))}
    about = {**used, "precision": setting.precision}
    return {**about, **workload.rate(workload.epochs, seconds), "first_s": round(first, 2), "same_bits": same}


def bare(world: Scenario, workload: Workload, machine: Machine, *, low: bool) -> Line:
    """The loop one would write by hand, one epoch at a time."""
    loop, seconds = Bare(world, Training(local_epochs=1, batch_size=BATCH), device=machine.device, low=low), []
    for index in range(3):
        start = time.perf_counter()
        loop(index)
        seconds.append(time.perf_counter() - start)
    return {"precision": "bf16" if low else "torch's default", **workload.rate(1, seconds[1:])}


def measure(machine: Machine, emit: Emit, *, repeats: int, seconds: float, rows: Path | None) -> None:
    """Every setting of both networks, a time box for each network; the bare loop again at the end, to see whether the machine changed."""
    for workload in TINY if machine.tiny else WORKLOADS:
        world, box = workload.build(), Box(seconds)
        plain = partial(bare, world, workload, machine, low=False)
        contestants: dict[str, Callable[[], Line]] = {
            "bare loop": plain,
            "bare loop, bf16": partial(bare, world, workload, machine, low=True),
        }
        contestants |= {s.name: partial(engine, world, workload, s, repeats, machine) for s in settings(workload)}
        contestants["bare loop, again"] = plain
        base: float | None = None
        for name, contestant in contestants.items():
            about = {"part": "gpu-steps", "network": workload.name, "contestant": name}
            machine.tidy()
            found = attempt(contestant, about, emit) if box.open else {"skipped": "no time left"}
            if found is not None:
                if name == "bare loop":
                    base = found.get("ms_per_step")
                ratio = {"ratio": round(found["ms_per_step"] / base, 4)} if base and "ms_per_step" in found else {}
                emit({**about, **found, **ratio, "peak_gib": machine.peak()})
