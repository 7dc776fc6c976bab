"""Engines run clients' tasks: ``local`` in this process or its workers, ``cuda`` on one GPU, ``flower`` on other machines.

This module knows the engines by name. Only a run that asks for the GPU or for Flower imports what that needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from emdcfl.core.errors import ConfigError, nearest
from emdcfl.core.federation import Federation
from emdcfl.data.types import Scenario
from emdcfl.engines.choose import choose
from emdcfl.engines.local import ProcessFederation, SequentialFederation
from emdcfl.engines.local.sequential import pick_device

ENGINES = ("auto", "sequential", "batched", "cuda", "flower")


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
    **options: Any,
) -> Federation:
    """Start an engine by the name ``resolve`` returned.

    Parameters
    ----------
    scenario : Scenario
    engine : str
    workers : int
        Above 1, the sequential engine runs clients in so many processes, with bit-identical results.
    gpu : mapping, optional
        Options that only the CUDA engine takes.
    source : (name, options), optional
        Over Flower: how a node finds its data.
    **options
        Those of ``Federation``, and the run's name, number of threads and precision.
    """
    if engine == "flower":
        from emdcfl.engines.flower.session import connect

        assert source is not None
        return connect(scenario, source, **options)
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
