"""Engines run clients' tasks: ``local`` in this process or its workers, ``cuda`` on one GPU, ``flower`` on other machines.

This module knows the engines by name. Only a run that asks for the GPU or for Flower imports what that needs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from emdcfl.core.errors import ConfigError, nearest
from emdcfl.core.federation import Federation
from emdcfl.core.keys import global_seed
from emdcfl.data.types import Scenario
from emdcfl.engines.local import ProcessFederation, SequentialFederation
from emdcfl.engines.local.sequential import pick_device

ENGINES = ("auto", "sequential", "batched", "cuda", "flower")

SMALL_STEP = 1.0e7
"""Largest step that is faster in a stack: multiply-adds of one client's forward pass over one batch."""

MIN_CLIENTS = 4
"""With fewer clients, setting up a stack takes longer than it saves."""


def multiply_adds(scenario: Scenario) -> float:
    """Return the multiply-adds of one sample's forward pass, those of linear layers and convolutions."""
    with global_seed(0):
        module = scenario.model.untrained()()
    module.train(False)
    total = 0.0

    def count(layer: nn.Module, _inputs: Any, out: Tensor) -> None:
        nonlocal total
        if isinstance(layer, nn.Linear):
            total += out.numel() * layer.in_features
        elif isinstance(layer, nn.modules.conv._ConvNd):
            total += out.numel() * layer.in_channels // layer.groups * math.prod(layer.kernel_size)

    for layer in module.modules():  # not torch's FlopCounterMode: importing it takes seconds
        layer.register_forward_hook(count)
    sample = next(site.train.x[:1] for site in scenario.sites if len(site.train))
    with torch.no_grad():
        module(scenario.preprocess(sample))
    return total


def choose(scenario: Scenario, *, device: torch.device, batch_size: int, workers: int = 1, participants: int | None = None) -> str:
    """Return the engine that ``auto`` stands for: ``"cuda"``, ``"batched"`` or ``"sequential"`` (also over several worker processes).

    A fixed rule from measurements (``docs/results/tables/performance.md``), so that the same config gives the same engine everywhere. On a
    CPU, training many clients at once is faster while a step is small: Python and operator calls cost about a millisecond per client and
    step, and a stack of clients pays that once.
    """
    if workers > 1:
        return "sequential"
    if device.type == "cuda":
        return "cuda"
    if (participants or len(scenario.sites)) < MIN_CLIENTS:
        return "sequential"
    batch = min(batch_size, statistics.median(len(site.train) for site in scenario.sites))
    return "batched" if multiply_adds(scenario) * batch <= SMALL_STEP else "sequential"


def resolve(
    engine: str, scenario: Scenario, *, device: str = "auto", batch_size: int, workers: int = 1, participants: int | None = None
) -> str:
    """Return the name of the engine that will run: ``"auto"`` becomes the one ``choose`` names.

    Raises
    ------
    ConfigError
        If the engine is unknown, or cannot run with this device or number of workers.
    """
    if engine not in ENGINES:
        raise ConfigError(f"unknown engine {engine!r}: {nearest(engine, ENGINES)}")
    if engine == "flower":
        return engine
    chosen = pick_device(device)
    if engine in ("batched", "cuda") and workers > 1:
        raise ConfigError(f"the {engine} engine runs in one process, got workers = {workers}; use 'sequential', or one worker")
    if engine == "cuda" and chosen.type != "cuda":
        raise ConfigError(f"the cuda engine needs a CUDA device, got {chosen}; use 'auto' or --device cuda")
    if engine != "auto":
        return engine
    return choose(scenario, device=chosen, batch_size=batch_size, workers=workers, participants=participants)


def make_federation(
    scenario: Scenario,
    *,
    engine: str = "sequential",
    device: str = "auto",
    workers: int = 1,
    gpu: Mapping[str, Any] | None = None,
    source: tuple[str, Mapping[str, Any]] | None = None,
    remote: Mapping[str, Any] | None = None,
    **options: Any,
) -> Federation:
    """Start an engine by the name ``resolve`` returned.

    With ``workers`` above 1, the sequential engine runs clients in so many processes, with bit-identical results. ``gpu`` and ``remote``
    are options that only the CUDA engine and Flower take; ``source``, a scenario's name and options, is how a node finds its data. Other
    ``options`` are those of ``Federation``, and the run's name, number of threads and precision.
    """
    if engine == "flower":
        from emdcfl.engines.flower.session import connect

        assert source is not None
        return connect(scenario, source, **(remote or {}), **options)
    options["device"] = device
    if engine == "batched":
        from emdcfl.engines.local.batched import BatchedFederation

        return BatchedFederation(scenario, **options)
    if engine == "cuda":
        from emdcfl.engines.cuda.engine import CudaFederation

        return CudaFederation(scenario, **(gpu or {}), **options)
    if engine != "sequential":
        raise ConfigError(f"expected an engine that can be started, got {engine!r}: {nearest(engine, ENGINES[1:])}")
    return ProcessFederation(scenario, workers=workers, **options) if workers > 1 else SequentialFederation(scenario, **options)


__all__ = ["ENGINES", "make_federation", "resolve"]
