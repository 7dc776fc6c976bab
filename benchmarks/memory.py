"""Peak host memory of whole runs with many clients or a large model, in a process of its own, children included.

    python benchmarks/memory.py                          # 1,000 clients of a small CNN, and 40 of ResNet18
    python benchmarks/memory.py --only resnet18 --methods emdcfl --json

Random images and labels, one round of one epoch, everything a run does: training, EMD-CFL's comparison, scoring, saving, outputs. What is
reported is the largest sum of resident memory of the process and its children, sampled every 20 ms, and what imports and data take.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from emdcfl.data.types import Preprocess, Scenario, Site, Split
from emdcfl.methods import find
from emdcfl.models.recipe import ModelRecipe
from emdcfl.runs.config import Choice, Config, EngineConfig, RunConfig, TrainingConfig
from emdcfl.runs.runner import run


@dataclass(frozen=True)
class Case:
    """Clients, their data and their network."""

    clients: int
    model: str
    options: dict[str, Any]
    channels: int
    side: int
    samples: int
    validation: int


CASES = {
    "small": Case(1000, "small_cnn", {"channels": 1, "classes": 10, "size": 8}, 1, 8, 32, 8),
    "resnet18": Case(40, "resnet18", {"classes": 10, "weights": None}, 3, 32, 8, 4),
}


def resident(pid: int) -> int:
    """Bytes that a process and its children hold; memory that several of them share is counted for each."""
    total, page = 0, os.sysconf("SC_PAGE_SIZE")
    try:
        total += page * int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += sum(resident(int(child)) for child in (task / "children").read_text().split())
    except (OSError, ValueError):  # it has just ended
        pass
    return total


def world(case: Case) -> Scenario:
    """Return random images and labels for all clients."""
    rng = torch.Generator().manual_seed(0)

    def split(n: int) -> Split:
        x = torch.randint(0, 256, (n, case.channels, case.side, case.side), generator=rng, dtype=torch.uint8)
        return Split(x, torch.randint(0, 10, (n,), generator=rng))

    sites = tuple(
        Site(f"client-{i}", split(case.samples), split(case.validation), {"test": split(case.validation)}) for i in range(case.clients)
    )
    preprocess = Preprocess((0.5,) * case.channels, (0.25,) * case.channels, 1 / 255)
    return Scenario("random", sites, tuple("0123456789"), preprocess, ModelRecipe(case.model, case.options))


def config(case: Case, method: str, *, workers: int = 1, rounds: int = 1) -> Config:
    """Return the run of a method in it, with four clusters where it must be told their number."""
    options: dict[str, Any] = {"k": min(4, case.clients)} if hasattr(find(method), "k") else {}
    if method == "emdcfl" and case.clients > 100:  # a thousand clients have a million pairs; representatives compare with one per cluster
        options["pairing"] = "representatives"
    return Config(
        run=RunConfig(rounds=rounds),
        scenario=Choice("rotated-digits"),  # only its name: the scenario itself is handed over
        method=Choice(method, options),
        model=Choice(case.model, case.options),
        training=TrainingConfig(local_epochs=1, batch_size=16),
        engine=EngineConfig(device="cpu", workers=workers),
    )


def play(case: Case, method: str, workers: int, pipe: Connection) -> None:
    """Run in a process of its own: say when the imports are done, then what came out."""
    scenario, wanted = world(case), config(case, method, workers=workers)
    pipe.send("ready")
    with tempfile.TemporaryDirectory() as folder:
        result = run(wanted, Path(folder) / "run", scenario=scenario)
    pipe.send({"k": result.summary["k"], "seconds": result.summary["seconds"]["total"], "engine": result.config.engine.name})


def measure(case: Case, method: str, workers: int) -> dict[str, Any]:
    """Run a case and watch it."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=play, args=(case, method, workers, there))
    process.start()
    there.close()
    assert process.pid is not None
    here.recv()
    base = peak = resident(process.pid)
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, resident(process.pid or 0))
            time.sleep(0.02)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        result: dict[str, Any] = here.recv()
    finally:
        done.set()
        watcher.join()
        process.join()
    return {"peak GiB": round(peak / 2**30, 2), "imports and data GiB": round(base / 2**30, 2), **result}


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=tuple(CASES), default=tuple(CASES))
    parser.add_argument("--methods", nargs="+", default=("fedavg", "emdcfl"))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    args = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    for name in args.only:
        for method in args.methods:
            found[f"{name}, {method}"] = measure(CASES[name], method, args.workers)
            if not args.json:
                print(f"{name}, {method}: {found[f'{name}, {method}']}", flush=True)
    if args.json:
        print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
