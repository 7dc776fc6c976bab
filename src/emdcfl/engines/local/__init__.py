"""Clients simulated on this machine.

``sequential`` is the reference, one client after the other, also spread over worker processes with the same bits; ``batched`` stacks the
trainings of many clients (small models, CPU); ``cuda`` captures SGD steps as CUDA graphs. ``auto`` is one of them by a fixed
rule (``choose``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from emdcfl.core.errors import ConfigError, nearest
from emdcfl.core.federation import Federation
from emdcfl.data.types import Scenario
from emdcfl.engines.local.choose import choose
from emdcfl.engines.local.processes import ProcessFederation
from emdcfl.engines.local.sequential import SequentialFederation, pick_device

ENGINES = ("auto", "sequential", "batched", "cuda")


def resolve(
    engine: str, scenario: Scenario, *, device: str = "auto", batch_size: int, workers: int = 1, participants: int | None = None
) -> str:
    """Return the engine's own name: ``auto`` becomes what it stands for, and what cannot be is refused."""
    if engine not in ENGINES:
        raise ConfigError(f"unknown engine {engine!r}: {nearest(engine, ENGINES)}")
    chosen = pick_device(device)
    if engine in ("batched", "cuda") and workers > 1:
        raise ConfigError(f"the {engine} engine works in one process, got workers = {workers}; use 'sequential', or one worker")
    if engine == "cuda" and chosen.type != "cuda":
        raise ConfigError(f"the cuda engine needs a CUDA device, got {chosen}; use 'auto' or --device cuda")
    if engine != "auto":
        return engine
    return choose(scenario, device=chosen, batch_size=batch_size, workers=workers, participants=participants)


def make_federation(
    scenario: Scenario, *, engine: str = "sequential", workers: int = 1, gpu: Mapping[str, Any] | None = None, **options: Any
) -> Federation:
    """Start an engine by name; several workers spread the sequential engine's clients over processes, with the same bits.

    ``gpu`` holds options of the cuda engine alone.
    """
    name = resolve(
        engine,
        scenario,
        device=options.get("device", "auto"),
        batch_size=options["training"].batch_size,
        workers=workers,
        participants=options.get("number"),
    )
    if name == "batched":
        from emdcfl.engines.local.batched import BatchedFederation

        return BatchedFederation(scenario, **options)
    if name == "cuda":
        from emdcfl.engines.cuda.engine import CudaFederation

        return CudaFederation(scenario, **(gpu or {}), **options)
    return ProcessFederation(scenario, workers=workers, **options) if workers > 1 else SequentialFederation(scenario, **options)


__all__ = ["ENGINES", "ProcessFederation", "SequentialFederation", "choose", "make_federation", "resolve"]
