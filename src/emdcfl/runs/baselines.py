"""Is grouping worth it? The same data trained as one model for all and as every site alone, beside the clustered run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from emdcfl.runs.config import Choice
from emdcfl.runs.loop import Observer
from emdcfl.runs.runner import run
from emdcfl.runs.store import RunStore
from emdcfl.runs.verdict import BASELINES

__all__ = ["BASELINES", "run_baselines"]


def run_baselines(out: Path, *, observer: Observer | None = None) -> dict[str, dict[str, Any]]:
    """Run (or finish) the baselines in sub-folders of a run directory and return their summaries."""
    completed = RunStore.read(out).config()
    found = {}
    for name in BASELINES:
        found[name] = run(replace(completed, method=Choice(name)), out / "baselines" / name, resume=True, observer=observer)
    return found
