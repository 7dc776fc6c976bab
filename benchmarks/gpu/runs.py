"""Oracle and EMD-CFL (calibrated and fixed tolerance) on Rotated MNIST at paper scale: whole runs one after the other in one process.

A short run goes first: it compiles, and what does not run for one epoch is not tried for a hundred. Rows go to a folder of results.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from emdcfl.experiments.compare import execute, parse_methods
from emdcfl.experiments.config import Choice, Config, override
from emdcfl.experiments.results import Results
from gpu.machine import Box, Emit, Machine, attempt

METHODS = "oracle,emdcfl:tolerance=auto,emdcfl:tolerance=0.025"
SHORT = {"run.rounds": "1", "training.local_epochs": "1"}


def wanted(machine: Machine) -> dict[str, Config]:
    """Return the runs by name."""
    base = Config(scenario=Choice("rotated-digits", {"clients_per_group": 1}) if machine.tiny else Choice("rotated-mnist"))
    chosen = {"engine.name": machine.engine, "engine.device": machine.device}
    base = override(base, chosen | ({"engine.precision": "bf16"} if machine.real else {}) | (SHORT if machine.tiny else {}))
    first = override(replace(base, method=Choice("oracle")), SHORT | ({"engine.fuse": "yes"} if machine.real else {}))
    methods = {":".join([m.name, *(f"{k}={v}" for k, v in m.options.items())]): m for m in parse_methods(METHODS)}
    return {"a short one, which compiles": first, **{name: replace(base, method=method) for name, method in methods.items()}}


def measure(machine: Machine, emit: Emit, *, repeats: int, seconds: float, rows: Path | None) -> None:
    """Play the runs; a ratio to Oracle's seconds, and the share that embedding and transport are of training."""
    box, oracle = Box(4 * seconds), None
    for number, (name, config) in enumerate(wanted(machine).items()):
        about = {"part": "gpu-runs", "run": name}
        if not box.open:
            emit({**about, "skipped": "no time left"})
            continue
        machine.tidy()
        row = attempt(partial(execute, config), about, emit)
        if row is None and number == 0:
            return
        if row is None:
            continue
        took = row["seconds"]
        if name == "oracle":
            oracle = took["total"]
        found = {"seconds": took, "ari": row["ari"], "accuracy": row["accuracy"]["mean"], "worst": row["accuracy"]["worst"]}
        shares = {"embedding_and_transport_over_training": round((took["embed"] + took["transport"]) / max(took["train"], 1e-9), 4)}
        ratio = {"ratio_to_oracle": round(took["total"] / oracle, 4)} if oracle else {}
        emit({**about, **found, **shares, **ratio, "peak_gib": machine.peak()})
        if rows is not None and number:
            with Results(rows) as results:
                results.add([row])
