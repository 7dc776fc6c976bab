"""How a run grows with the number of clients: seconds by phase, bytes, peak memory, agreement with the true groups.

    python benchmarks/scale.py --out runs/scale.jsonl                       # 100, 300 and 1,000 clients
    python benchmarks/scale.py --clients 3000 10000 --out runs/scale.jsonl
    python benchmarks/scale.py --clients 100 --pairing all --out runs/scale.jsonl
    python benchmarks/scale.py --beside ../before --out runs/scale.jsonl    # a checkout of another commit, in turn with this one

Clients hold tables of 300 rows and 16 columns, drawn from four groups; the default perceptron, two rounds of ten epochs, grouping by
benefit, without fine-tuning and baselines. Every number of clients is a process of its own, for its peak memory. ``seconds`` depend on
what else the machine does, which ``load`` says; ``processor`` is the processor time of all threads in a phase, which does so less.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

ROWS, COLUMNS, GROUPS = 300, 16, 4
TRAINING = {"rounds": 2, "local_epochs": 10}


def tables(clients: int, seed: int = 0) -> tuple[dict[str, Any], dict[str, str]]:
    """Clients in turn from four groups, which differ in where their rows lie and in what the label depends on."""
    rng = np.random.default_rng(seed)
    shape = rng.normal(size=(GROUPS, COLUMNS, COLUMNS)) / 2
    centre, weight = rng.normal(size=(2, GROUPS, COLUMNS))
    data, truth = {}, {}
    for c in range(clients):
        k, name = c % GROUPS, f"site{c:05d}"
        x = rng.normal(size=(ROWS, COLUMNS)) @ shape[k] + centre[k]
        score = x @ weight[k] + 0.1 * rng.normal(size=ROWS)
        data[name], truth[name] = (x.astype(np.float32), (score > np.median(score)).astype(np.int64)), str(k)
    return data, truth


def count_processor_time() -> dict[str, float]:
    """Let federations count processor time by phase too; returns where they do."""
    from emdcfl.core import federation, rounds

    spent: dict[str, float] = {}
    inside = [0.0]

    class ProcessorClock(rounds.Clock):
        @contextmanager
        def __call__(self, phase: str) -> Iterator[None]:
            began = time.process_time()
            inside.append(0.0)
            try:
                with super().__call__(phase):
                    yield
            finally:
                used = time.process_time() - began
                spent[phase] = spent.get(phase, 0.0) + used - inside.pop()
                inside[-1] += used

    federation.Clock = ProcessorClock  # type: ignore[misc]
    return spent


def measured(clients: int, pairing: str) -> dict[str, Any]:
    """Run once in this process."""
    processor = count_processor_time()
    from emdcfl import fit
    from emdcfl.report import write_report
    from emdcfl.studies.results import commit, hardware

    data, truth = tables(clients)
    began, used = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        settings = {"method.pairing": pairing, "personalize.mode": "off"}
        result = fit(data, groups=truth, settings=settings, out=out, **TRAINING)
        wall, whole = time.perf_counter() - began, time.process_time() - used
        page = write_report(out).stat().st_size
        disk = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    summary = result.summary
    sent = {phase: sum(ways.values()) for phase, ways in summary["bytes"].items()}
    return {
        "clients": clients,
        "pairing": pairing,
        **TRAINING,
        "seconds": {**summary["seconds"], "wall": round(wall, 2)},
        "processor": {phase: round(spent, 2) for phase, spent in {**processor, "whole": whole}.items()},
        "bytes": sent,
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3),
        "report_bytes": page,
        "run_bytes": disk,
        "k": summary["k"],
        "ari": summary["ari"],
        "load": round(os.getloadavg()[0], 1),
        "cores": len(os.sched_getaffinity(0)),
        "seed": 0,
        "commit": commit(),
        "hardware": hardware("cpu"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 300, 1000])
    parser.add_argument("--pairing", default="auto", choices=["auto", "all", "representatives"])
    parser.add_argument("--out", type=Path, help="rows are added to this file")
    parser.add_argument("--beside", type=Path, help="checkout of another commit that is measured in turn with this one")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measured(options.clients[0], options.pairing)))
        return
    checkouts = [path.resolve() for path in (options.beside, Path(__file__).parents[1]) if path is not None]
    for clients, checkout in ((clients, checkout) for clients in options.clients for checkout in checkouts):
        command = [sys.executable, str(Path(__file__).resolve()), "--one", "--clients", str(clients), "--pairing", options.pairing]
        paths = {"PYTHONPATH": str(checkout / "src")} if options.beside else {}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, **paths})
        row = done.stdout.splitlines()[-1]
        print(row, flush=True)
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            with options.out.open("a", encoding="utf-8") as file:
                file.write(row + "\n")


if __name__ == "__main__":
    main()
