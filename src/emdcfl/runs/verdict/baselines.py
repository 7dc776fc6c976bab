"""Is grouping worth it? The same data trained as one model for all and as every site alone, beside the clustered run."""

from __future__ import annotations

from dataclasses import replace

from emdcfl.runs.config import Choice, Config, PersonalizeConfig
from emdcfl.runs.loop import Observer
from emdcfl.runs.personal import FINE_TUNED, with_personal
from emdcfl.runs.result import Result
from emdcfl.runs.runner import run
from emdcfl.runs.verdict.advice import BASELINES

__all__ = ["BASELINES", "one_for_all", "run_baselines"]


def one_for_all(config: Config) -> Config:
    """Return the config of FedAvg beside a run: fine-tuned as the run is, else where that pays."""
    wanted = config.personalize
    return replace(config, method=Choice("fedavg"), personalize=wanted if wanted.wanted else PersonalizeConfig("if-it-pays"))


def _plain(config: Config, method: str) -> Config:
    return replace(config, method=Choice(method), personalize=PersonalizeConfig("off"))


def run_baselines(result: Result, *, observer: Observer | None = None) -> dict[str, Result]:
    """Run (or finish) the baselines on the same data, in sub-folders of the run directory if there is one.

    One run of FedAvg is two of them: one model for all, and the same model fine-tuned at home. It follows ``[personalize]`` of the run,
    or keeps what pays.
    """
    found = {}
    for name, config in (("fedavg", one_for_all(result.config)), ("local", _plain(result.config, "local"))):
        place = None if result.folder is None else result.folder / "baselines" / name
        found[name] = run(config, place, resume=place is not None, observer=observer, scenario=result.scenario)
        if config.personalize.wanted:
            summary, rows = with_personal(found[name].summary, found[name].history)
            found[name + FINE_TUNED] = replace(found[name], summary=summary, history=rows)
    return found
