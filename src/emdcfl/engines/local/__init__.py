"""Clients simulated on this machine: ``sequential`` (the reference) and the same over worker processes."""

from __future__ import annotations

from typing import Any

from emdcfl.data.types import Scenario
from emdcfl.engines.local.processes import ProcessFederation
from emdcfl.engines.local.sequential import SequentialFederation
from emdcfl.errors import ConfigError, nearest
from emdcfl.federation import Federation

ENGINES = ("sequential",)


def make_federation(scenario: Scenario, *, engine: str = "sequential", workers: int = 1, **options: Any) -> Federation:
    """Start an engine by name; several workers spread its clients over processes, with the same bits."""
    if engine not in ENGINES:
        raise ConfigError(f"unknown engine {engine!r}: {nearest(engine, ENGINES)}")
    return ProcessFederation(scenario, workers=workers, **options) if workers > 1 else SequentialFederation(scenario, **options)


__all__ = ["ENGINES", "ProcessFederation", "SequentialFederation", "make_federation"]
