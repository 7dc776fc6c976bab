"""A trial federation for tests: started in a temporary folder, stopped whatever happens."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra emdcfl[flower]")

import emdcfl
from emdcfl.apps import deployment
from emdcfl.apps.deployment.processes import LINK
from emdcfl.runs.config import Config, from_dict

SOURCE = str(Path(emdcfl.__file__).parents[1])


def config(**tables: dict[str, Any]) -> Config:
    """A short run of EMD-CFL on two rotations with two clients each."""
    base: dict[str, dict[str, Any]] = {
        "run": {"rounds": 3, "evaluate_every": 3},
        "scenario": {"name": "rotated-digits", "groups": 2, "clients_per_group": 2},
        "training": {"local_epochs": 5},
        "engine": {"device": "cpu"},
    }
    return from_dict({name: {**base.get(name, {}), **tables.get(name, {})} for name in (*base, *tables)})


def over_flower(given: Config) -> Config:
    return replace(given, engine=replace(given.engine, name="flower", on_failure="continue"))


@contextmanager
def federation(folder: Path, *, nodes: int = 4, deadline: float = 300.0, start: bool = True) -> Iterator[deployment.Deployment]:
    """A running federation; its processes find this source tree whether or not it is installed.

    A test that is told to end (SIGTERM) stops them first.
    """
    there = deployment.create(folder, nodes=nodes, deadline=deadline)
    ended = signal.signal(signal.SIGTERM, _leave)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = SOURCE if not before else f"{SOURCE}{os.pathsep}{before}"
    try:
        if start:
            deployment.up(there)
            assert deployment.wait_accepted(there) == {}
        yield there
    finally:
        deployment.down(there)
        signal.signal(signal.SIGTERM, ended)
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _leave(*_: object) -> None:
    raise KeyboardInterrupt  # a test may fail with SystemExit; this ends the session, after its fixtures


def log_of(there: deployment.Deployment, name: str = LINK) -> str:
    return (there.path / "logs" / f"{name}.log").read_text(encoding="utf-8", errors="replace")
