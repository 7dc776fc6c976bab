"""Sixteen sites of 500 MNIST images at the defaults for own data: how long a run takes, and was that forecast?

    python -m benchmarks.own_images --time runs/sites

Twelve sites hold images as they are, three rotate them by 90 degrees, one inverts them. The sites are written into a new folder, and
``emdcfl run --data`` runs on it as people do. Prints forecast and seconds by phase. Needs ``EMDCFL_DATA``.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from emdcfl.cli import main as main_command
from emdcfl.data.sources import load
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


def sites(seed: int) -> dict[str, tuple[NDArray[np.uint8], NDArray[Any]]]:
    """Deal images to the sites."""
    origin = load("mnist")
    order = iter(np.random.default_rng(seed).permutation(len(origin.images)).reshape(-1, IMAGES))
    names = np.array(origin.classes)
    data = {}
    for group, count in GROUPS.items():
        for i in range(count):
            rows = np.sort(next(order))
            x = np.ascontiguousarray(origin.images[rows])
            x = np.rot90(x, axes=(2, 3)).copy() if group == "rotated" else 255 - x if group == "inverted" else x
            data[f"{group}-{i:02d}"] = x, names[origin.labels[rows]]
    return data


def write_folder(folder: Path, seed: int) -> None:
    """Write the sites as FOLDER/SITE/CLASS/NUMBER.png."""
    for site, (x, y) in sites(seed).items():
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
    parser.add_argument("--time", type=Path, metavar="FOLDER", required=True, help="write the sites here, and time a run on them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("arguments", nargs="*", help="after --: further arguments of emdcfl run")
    options = parser.parse_args()
    write_folder(options.time, options.seed)
    print(json.dumps(timed(options.time, options.seed, options.arguments)))


if __name__ == "__main__":
    main()
