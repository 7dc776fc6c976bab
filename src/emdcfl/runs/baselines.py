"""Is grouping worth it? The same data trained as one model for all and as every site alone, beside the clustered run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from emdcfl.runs.config import Choice
from emdcfl.runs.loop import Observer
from emdcfl.runs.runner import run
from emdcfl.runs.store.directory import RunStore

BASELINES = {"fedavg": "one model for all", "local": "every site alone"}


def run_baselines(out: Path, *, observer: Observer | None = None) -> dict[str, dict[str, Any]]:
    """Run (or finish) the baselines in sub-folders of a run directory and return their summaries."""
    completed = RunStore.read(out).config()
    found = {}
    for name in BASELINES:
        found[name] = run(replace(completed, method=Choice(name)), out / "baselines" / name, resume=True, observer=observer)
    return found


def verdict(clustered: Mapping[str, Any], baselines: Mapping[str, Mapping[str, Any]]) -> str:
    """Say in one sentence what grouping gained over each baseline, in points of mean accuracy.

    A difference counts if it exceeds two standard errors of the accuracy on as many test samples as there are, or half a point.
    """
    own = clustered["accuracy"]["mean"]
    samples = max(clustered["accuracy"]["samples"], 1)
    least = max(0.5, 200 * math.sqrt(own * (1 - own) / samples))
    gains = {BASELINES[name]: 100 * (own - summary["accuracy"]["mean"]) for name, summary in baselines.items()}
    told = ", ".join(f"{gain:+.1f} points against {what}" for what, gain in gains.items())
    if clustered["k"] == 1:
        return f"all sites belong together, so grouping is one model for all: {told}"
    if all(gain > least for gain in gains.values()):
        return f"grouping pays: {told}"
    if any(gain < -least for gain in gains.values()):
        return f"grouping does not pay here: {told}"
    better = [what for what, gain in gains.items() if gain > least]
    if better:
        level = [what for what in gains if what not in better]
        return f"grouping is better than {' and '.join(better)}, level with {' and '.join(level)} on {samples} test samples: {told}"
    return f"grouping makes little difference on {samples} test samples: {told}"
