"""Sixteen sites of 500 images at the defaults for own data: which network suffices, how long a run takes, and was that forecast?

    python -m benchmarks.own_images --out docs/results/data/own-images/results.jsonl     # accuracy, network by network
    python -m benchmarks.own_images --time runs/sites                                    # forecast and seconds by phase

Twelve sites hold images as they are, three rotate them by 90 degrees, one inverts them. ``--out`` runs them in memory, without
fine-tuning and baselines, one row for a source, network and seed; rows that are there are not repeated. ``--time`` writes the MNIST sites
into a new folder and runs ``emdcfl run --data`` on them as people do. Needs ``EMDCFL_DATA``.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.calibration import numbers
from numpy.typing import NDArray
from PIL import Image

from emdcfl.cli import main as main_command
from emdcfl.data.own import from_arrays
from emdcfl.data.sources import load
from emdcfl.runs.config import Choice, Config, override
from emdcfl.runs.plan import IN_MEMORY
from emdcfl.runs.runner import run
from emdcfl.runs.watching import forecast as forecasts
from emdcfl.studies.results import commit, hardware

GROUPS = {"upright": 12, "rotated": 3, "inverted": 1}
IMAGES = 500
PHASES = {
    "training": ("train",),
    "comparing": ("embed", "transport"),
    "deciding": ("decide",),
    "fine-tuning": ("personalize",),
    "testing": ("evaluate",),
}
"""Phases of a forecast → what a summary calls them."""


def sites(source: str, seed: int) -> tuple[dict[str, tuple[NDArray[np.uint8], NDArray[Any]]], dict[str, str]]:
    """Deal images to the sites; also say the true group of each."""
    origin = load(source)
    order = iter(np.random.default_rng(seed).permutation(len(origin.images)).reshape(-1, IMAGES))
    names = np.array(origin.classes)
    data, truth = {}, {}
    for group, count in GROUPS.items():
        for i in range(count):
            rows = np.sort(next(order))
            x = np.ascontiguousarray(origin.images[rows])
            x = np.rot90(x, axes=(2, 3)).copy() if group == "rotated" else 255 - x if group == "inverted" else x
            data[f"{group}-{i:02d}"], truth[f"{group}-{i:02d}"] = (x, names[origin.labels[rows]]), group
    return data, truth


def row(source: str, model: str, seed: int) -> dict[str, Any]:
    """Run one network, without fine-tuning."""
    data, truth = sites(source, seed)
    used = time.process_time()
    settings = {"run.seed": seed, "engine.threads": 1, "personalize.mode": "off"}
    config = override(Config(scenario=Choice(IN_MEMORY)), settings)
    scenario = from_arrays(data, groups=truth, seed=seed, name=source, model=None if model == "default" else model)
    result = run(config, scenario=scenario)
    score = result.summary["accuracy"]
    return {
        "source": source,
        "model": model,
        "seed": seed,
        "k": result.summary["k"],
        "ari": result.summary["ari"],
        "accuracy": round(score["mean"], 6),
        "sites": [round(value, 6) for value in next(iter(score["variants"].values()))["sites"]],
        "seconds": {**result.summary["seconds"], "processor": round(time.process_time() - used, 1)},
        "commit": commit(),
        "hardware": hardware(result.config.engine.device),
    }


def write_folder(folder: Path, seed: int) -> None:
    """Write the MNIST sites as FOLDER/SITE/CLASS/NUMBER.png."""
    for site, (x, y) in sites("mnist", seed)[0].items():
        for i, (pixels, label) in enumerate(zip(x, y, strict=True)):
            place = folder / site / label
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels[0]).save(place / f"{i:03d}.png")


def timed(folder: Path, seed: int, arguments: Sequence[str]) -> dict[str, Any]:
    """Run the command line on the sites; return what it forecast and what it took, by phase, in seconds, and the bytes it left."""
    expected: list[forecasts.Forecast] = []
    real = forecasts.forecast

    def noted(*args: Any, **options: Any) -> forecasts.Forecast:
        expected.append(real(*args, **options))
        return expected[-1]

    forecasts.forecast = noted
    out = folder.with_name(f"{folder.name}-run")
    load, began = os.getloadavg()[0], time.perf_counter()
    try:
        main_command(["run", "--data", str(folder), "--out", str(out), "--seed", str(seed), *arguments])
    except SystemExit as ended:
        if ended.code:
            raise
    took = time.perf_counter() - began
    own = json.loads((out / "summary.json").read_text())
    others = [json.loads(path.read_text()) for path in out.glob("baselines/*/summary.json")]
    actual = {phase: sum(own["seconds"].get(name, 0.0) for name in names) for phase, names in PHASES.items()}
    actual["baselines"] = sum(other["seconds"]["total"] for other in others)
    return {
        "forecast": {phase: round(value, 1) for phase, value in {**expected[-1].phases, "whole": expected[-1].total}.items()},
        "actual": {phase: round(value, 1) for phase, value in {**actual, "whole": took}.items()},
        "ratio": round(expected[-1].total / took, 3),
        "k": own["k"],
        "accuracy": {other["method"]: round(other["accuracy"]["mean"], 4) for other in (own, *others)},
        "run_bytes": sum(path.stat().st_size for path in out.rglob("*") if path.is_file()),
        "data_bytes": sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
        "load": round(load, 1),
        "cores": len(os.sched_getaffinity(0)),
        "commit": commit(),
        "hardware": hardware("cpu"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--out", type=Path, help="add rows of accuracies to this file")
    task.add_argument("--time", type=Path, metavar="FOLDER", help="write the MNIST sites into this folder, and time a run on them")
    parser.add_argument("--sources", nargs="*", default=["mnist", "cifar10"])
    parser.add_argument("--models", nargs="*", default=["cnn", "small_cnn", "default"])
    parser.add_argument("--seeds", default="0-2", help="such as 0,2,5-9; --time takes the first")
    parser.add_argument("arguments", nargs="*", help="with --time, after --: further arguments of emdcfl run")
    options = parser.parse_args()
    if options.time is not None:
        seed = numbers(options.seeds)[0]
        write_folder(options.time, seed)
        print(json.dumps(timed(options.time, seed, options.arguments)))
        return
    logging.basicConfig(level=logging.ERROR)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    done = {(line["source"], line["model"], line["seed"]) for line in lines}
    for seed in numbers(options.seeds):
        for source in options.sources:
            for model in options.models:
                if (source, model, seed) not in done:
                    found = row(source, model, seed)
                    with options.out.open("a") as file:
                        file.write(json.dumps(found, separators=(",", ":")) + "\n")
                    print(json.dumps({k: v for k, v in found.items() if k not in ("sites", "hardware")}), flush=True)


if __name__ == "__main__":
    main()
