"""What bfloat16 does to accuracy: the same runs in fp32 and bf16, seed by seed.

    python benchmarks/precision.py --out FOLDER                              # rotated digits on the CPU, five seeds
    python benchmarks/precision.py --out FOLDER --scenario rotated-mnist --device cuda --jobs 1

Every run leaves a small JSON file in FOLDER and is not repeated if it is there. Seeds change the data, the initial model and the shuffles;
a pair of runs differs in precision alone. Accuracy is the unweighted mean over clients after the last round, in points.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

METHODS = ("emdcfl", "fedavg", "oracle")
PRECISIONS = ("fp32", "bf16")


def play(scenario: str, method: str, seed: int, precision: str, device: str, rounds: int | None) -> dict[str, Any]:
    """Run one of them in a folder of its own and return what counts."""
    from emdcfl.data import scenarios
    from emdcfl.runs.config import Choice, Config, EngineConfig, RunConfig
    from emdcfl.runs.runner import run
    from watch import refusing_fallbacks

    data = {"data_seed": seed} if "data_seed" in scenarios.options(scenario) else {}
    config = Config(
        run=RunConfig(seed=seed, rounds=rounds),
        scenario=Choice(scenario, data),
        method=Choice(method),
        engine=EngineConfig(name="sequential" if device == "cpu" else "auto", device=device, precision=precision),  # type: ignore[arg-type]
    )
    with tempfile.TemporaryDirectory() as folder, refusing_fallbacks():
        summary = run(config, Path(folder) / "run").summary
    return {
        "scenario": scenario,
        "method": method,
        "seed": seed,
        "precision": precision,
        "accuracy": 100 * summary["accuracy"]["mean"],
        "worst": 100 * summary["accuracy"]["worst"],
        "ari": summary["ari"],
        "clusters": summary["clusters"],
        "samples": summary["accuracy"]["samples"],
        "seconds": summary["seconds"]["train"],
        "torch": summary["versions"]["torch"],
    }


def settle(out: Path, *wanted: Any) -> dict[str, Any]:
    """Return a run's result, from its file where it has been played already."""
    file = out / ("-".join(str(part) for part in wanted) + ".json")
    if not file.exists():
        result = play(*wanted)
        draft = file.with_suffix(".part")
        draft.write_text(json.dumps(result))
        draft.replace(file)
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def table(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per method: mean accuracies, and the differences of the pairs."""
    rows = []
    for method in dict.fromkeys(r["method"] for r in results):
        by = {(r["seed"], r["precision"]): r for r in results if r["method"] == method}
        seeds = sorted({seed for seed, _ in by})
        low, full = [by[s, "bf16"] for s in seeds], [by[s, "fp32"] for s in seeds]
        differences = [a["accuracy"] - b["accuracy"] for a, b in zip(low, full, strict=True)]
        rows.append(
            {
                "method": method,
                "seeds": seeds,
                "fp32": statistics.mean(r["accuracy"] for r in full),
                "bf16": statistics.mean(r["accuracy"] for r in low),
                "difference": statistics.mean(differences),
                "by seed": [round(d, 3) for d in differences],
                "same clusters": sum(a["clusters"] == b["clusters"] for a, b in zip(low, full, strict=True)),
                "train seconds, bf16 over fp32": sum(r["seconds"] for r in low) / sum(r["seconds"] for r in full),
            }
        )
    return rows


def main() -> None:
    """Parse, run what is missing, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/precision"), help="folder for the results of the runs")
    parser.add_argument("--scenario", default="rotated-digits")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--seeds", nargs="+", type=int, default=range(5))
    parser.add_argument("--rounds", type=int, default=None, help="rounds; the scenario's own by default")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time, one core each")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    wanted = [
        (args.out, args.scenario, method, seed, precision, args.device, args.rounds)
        for method, seed, precision in itertools.product(args.methods, args.seeds, PRECISIONS)
    ]
    with ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        results = list(pool.map(settle, *zip(*wanted, strict=True)))
    rows = table(results)
    (args.out / "table.json").write_text(json.dumps(rows, indent=2))
    print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
