"""All ordered pairs of Rotated MNIST at paper scale compared once: seconds of embedding and of transport, and where they go."""

from __future__ import annotations

import cProfile
import pstats
import time
from functools import partial
from pathlib import Path
from typing import Any

from emdcfl.core.tasks import Training
from emdcfl.data import scenarios
from emdcfl.methods.emdcfl import EMDCFL
from emdcfl.methods.emdcfl.comparison import Comparison
from gpu.machine import Box, Emit, Line, Machine, attempt

SHOWN = 25
"""Functions of a profile."""


def compare(fed: Any, local: Any, machine: Machine, tolerance: Any) -> Line:
    """Compare all ordered pairs; returns seconds in all and by phase."""
    fed.clock.seconds.clear()
    start = time.perf_counter()
    pairs = [(c, d) for c in fed.clients for d in fed.clients if c != d]
    found = Comparison(EMDCFL(tolerance=tolerance), fed, local).measure(pairs)
    machine.wait()
    phases = {phase: round(value, 3) for phase, value in fed.clock.seconds.items()}
    return {"seconds": round(time.perf_counter() - start, 3), **phases, "problems": found.problems, "solved": found.exact_solves}


def top(profile: cProfile.Profile) -> list[str]:
    """The functions with most time of their own: seconds of their own, with what they call, calls, place."""
    shown = sorted(pstats.Stats(profile).stats.items(), key=lambda item: -item[1][2])[:SHOWN]  # type: ignore[attr-defined]
    return [f"{own:.3f} {total:.3f} {calls} {Path(file).name}:{line} {name}" for (file, line, name), (_, calls, own, total, _) in shown]


def measure(machine: Machine, emit: Emit, *, repeats: int, seconds: float, rows: Path | None) -> None:
    """Train one epoch, compare as often as there is time for, and once more under a profiler, which makes everything slower."""
    box = Box(seconds)
    world = scenarios.build("rotated-digits", clients_per_group=1) if machine.tiny else scenarios.build("rotated-mnist")
    machine.tidy()
    with machine.federation(world, Training(local_epochs=1, batch_size=64), compile="no") as fed:
        fed.begin(1)
        start = time.perf_counter()
        local = fed.train(dict.fromkeys(fed.clients, fed.initial())).column("theta")
        emit({"part": "gpu-pairs", "clients": len(fed.clients), "one_epoch_s": round(time.perf_counter() - start, 2)})
        machine.tidy()  # the peak is that of the comparisons
        for repeat in range(1 if machine.tiny else 1 + min(repeats, 3)):  # the first one loads what is loaded once
            for tolerance in ("auto", 0.025):
                about = {"part": "gpu-pairs", "tolerance": tolerance, "repeat": repeat}
                found = attempt(partial(compare, fed, local, machine, tolerance), about, emit) if box.open else {"skipped": "no time left"}
                if found is not None:
                    emit({**about, **found, "peak_gib": machine.peak()})
        if box.open:
            profile = cProfile.Profile()
            profile.runcall(compare, fed, local, machine, "auto")
            emit({"part": "gpu-pairs", "profile": top(profile)})
