"""Small tables: what does a run say of 569 rows cut into a few sites, alike, with instruments that read too high, or with labels swapped?

    python -m benchmarks.small_tables --out docs/results/data/small-tables/results.jsonl

Breast cancer (scikit-learn) dealt at random to 3, 4 and 6 sites, to five of which two read ten columns 1.5 times too high, and to four of
which two call benign what the others call malignant. Every run is ``emdcfl run --data`` at its defaults, with its baselines. Rows that are
in ``--out`` are not repeated.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.calibration import numbers
from benchmarks.rows import append, read
from sklearn.datasets import load_breast_cancer

from emdcfl.data.own import from_arrays
from emdcfl.data.types import Scenario
from emdcfl.runs.config import Choice, Config, override
from emdcfl.runs.plan import IN_MEMORY
from emdcfl.runs.runner import run
from emdcfl.runs.verdict.advice import advice, gains, used
from emdcfl.runs.verdict.baselines import run_baselines
from emdcfl.studies.results import commit, hardware

CASES = {
    "3 alike": (3, 0, 0),
    "4 alike": (4, 0, 0),
    "6 alike": (6, 0, 0),
    "gain 1.5 at 2 of 5": (5, 2, 0),
    "labels swapped at 2 of 4": (4, 0, 2),
}
"""What the tables call a case → sites, how many of them read too high, and how many swap the labels."""

COLUMNS, GAIN = 10, 1.5


def sites(case: str, seed: int) -> Scenario:
    """Deal the rows to the sites of a case."""
    count, high, swapped = CASES[case]
    data = load_breast_cancer()
    parts = np.array_split(np.random.default_rng(seed).permutation(len(data.data)), count)
    factor = np.where(np.arange(data.data.shape[1]) < COLUMNS, GAIN, 1.0)
    found = {}
    for i, rows in enumerate(parts):
        target = 1 - data.target[rows] if i < swapped else data.target[rows]
        found[f"site-{i}"] = (data.data[rows] * (factor if i < high else 1.0), data.target_names[target])
    return from_arrays(found, seed=seed, name="breast cancer")


def row(case: str, seed: int) -> dict[str, Any]:
    """Run a case with its baselines, and keep what the tables need."""
    started = time.perf_counter()
    config = override(Config(scenario=Choice(IN_MEMORY)), {"run.seed": seed, "engine.threads": 1})
    result = run(config, scenario=sites(case, seed))
    others = {name: other.summary for name, other in run_baselines(result).items()}
    found = advice(result.summary, others)
    assert found is not None
    return {
        "case": case,
        "seed": seed,
        "k": result.summary["k"],
        "choice": found.choice,
        "accuracy": {name: round(s["accuracy"]["mean"], 6) for name, s in {"run": used(result.summary), **others}.items()},
        "gains": {name: [round(end, 6) for end in (g.mean, g.low, g.high)] for name, g in gains(result.summary, others).items()},
        "seconds": round(time.perf_counter() - started, 1),
        "commit": commit(),
        "hardware": hardware("cpu"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", default="0-19", help="such as 0,2,5-9")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    options = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    done = {(line["case"], line["seed"]) for line in read(options.out)}
    for seed in numbers(options.seeds):
        for case in options.cases:
            if (case, seed) not in done:
                found = row(case, seed)
                append(options.out, found)
                print(json.dumps({k: found[k] for k in ("case", "seed", "k", "choice", "seconds")}), flush=True)


if __name__ == "__main__":
    main()
