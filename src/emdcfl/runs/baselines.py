"""Is grouping worth it? The same data trained as one model for all and as every site alone, beside the clustered run."""

from __future__ import annotations

from dataclasses import replace

from emdcfl.runs.config import Choice
from emdcfl.runs.loop import Observer
from emdcfl.runs.result import Result
from emdcfl.runs.runner import run
from emdcfl.runs.verdict import BASELINES

__all__ = ["BASELINES", "run_baselines"]


def run_baselines(result: Result, *, observer: Observer | None = None) -> dict[str, Result]:
    """Run (or finish) the baselines on the same data, in sub-folders of the run directory if there is one."""
    found = {}
    for name in BASELINES:
        place = None if result.folder is None else result.folder / "baselines" / name
        config = replace(result.config, method=Choice(name))
        found[name] = run(config, place, resume=place is not None, observer=observer, scenario=result.scenario)
    return found
