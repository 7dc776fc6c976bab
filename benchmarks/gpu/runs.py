"""Oracle and EMD-CFL (three tolerances or rules, and representatives) on Rotated MNIST at paper scale, one after the other in one process.

Two short runs go first: what is compiled and loaded once is there then, for both methods, and what does not run for one epoch is not
tried for a hundred. Oracle is played again at the end: seconds are compared with the mean of both. Rows go to a folder of results.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from emdcfl.runs.config import Choice, Config, override
from emdcfl.studies.compare import execute, parse_methods
from emdcfl.studies.results import Results
from gpu.machine import Box, Emit, Machine, attempt

METHODS = "oracle,emdcfl:tolerance=auto,emdcfl:tolerance=auto:pairing=representatives,emdcfl:tolerance=0.025,emdcfl:grouping=benefit"
ORACLE, AGAIN = "oracle", "oracle, again"
COMPILES, COMPARES = "a short one, which compiles", "a short one, which compares"
SHORT = {"run.rounds": 1, "training.local_epochs": 1}


def wanted(machine: Machine) -> dict[str, Config]:
    """Return the runs by name."""
    base = Config(scenario=Choice("rotated-digits", {"clients_per_group": 1}) if machine.tiny else Choice("rotated-mnist"))
    chosen = {"engine.name": machine.engine, "engine.device": machine.device}
    base = override(base, chosen | ({"engine.precision": "bf16"} if machine.real else {}) | (SHORT if machine.tiny else {}))
    short = override(base, SHORT | ({"engine.compile": "yes"} if machine.real else {}))
    methods = {":".join([m.name, *(f"{k}={v}" for k, v in m.options.items())]): m for m in parse_methods(METHODS)}
    return {
        COMPILES: replace(short, method=Choice("oracle")),
        COMPARES: replace(short, method=Choice("emdcfl")),
        **{name: replace(base, method=method) for name, method in methods.items()},
        AGAIN: replace(base, method=Choice("oracle")),
    }


def measure(machine: Machine, emit: Emit, *, repeats: int, seconds: float, rows: Path | None) -> None:
    """Play the runs; seconds by phase, and ratios to Oracle's."""
    box, totals = Box(5 * seconds), dict[str, float]()
    for name, config in wanted(machine).items():
        about = {"part": "gpu-runs", "run": name}
        if not box.open:
            emit({**about, "skipped": "no time left"})
            continue
        machine.tidy()
        row = attempt(partial(execute, config), about, emit)
        if row is None and name in (COMPILES, COMPARES):
            return
        if row is None:
            continue
        took = row["seconds"]
        found = {"seconds": took, "ari": row["ari"], "accuracy": row["accuracy"]["mean"], "worst": row["accuracy"]["worst"]}
        emit({**about, **found, "peak_gib": machine.peak()})
        if name in (COMPILES, COMPARES):
            continue
        totals[name] = took["total"]
        if rows is not None and name != AGAIN:
            with Results(rows) as results:
                results.add([row])
    oracle = [totals[name] for name in (ORACLE, AGAIN) if name in totals]
    if oracle:
        ratios = {name: round(total * len(oracle) / sum(oracle), 4) for name, total in totals.items()}
        emit({"part": "gpu-runs", "total_over_oracle": ratios})
