"""Is grouping worth it? The same data trained as one model for all and as every site alone, beside the clustered run."""

from __future__ import annotations

from dataclasses import replace

from emdcfl.data.types import Scenario
from emdcfl.runs.config import Choice, Config, PersonalizeConfig
from emdcfl.runs.loop import Observer
from emdcfl.runs.outputs import write_summary
from emdcfl.runs.personal import FINE_TUNED, with_personal
from emdcfl.runs.result import Result
from emdcfl.runs.runner import run, scores_of
from emdcfl.runs.store.files import make_folder
from emdcfl.runs.verdict.advice import BASELINES, LOGISTIC
from emdcfl.runs.verdict.logistic import is_table, logistic_rows

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
    or keeps what pays. Of a table there is also a logistic regression at every site.
    """
    found = {}
    for name, config in (("fedavg", one_for_all(result.config)), ("local", _plain(result.config, "local"))):
        place = None if result.folder is None else result.folder / "baselines" / name
        found[name] = run(config, place, resume=place is not None, observer=observer, scenario=result.scenario)
        if config.personalize.wanted:
            summary, rows = with_personal(found[name].summary, found[name].history)
            found[name + FINE_TUNED] = replace(found[name], summary=summary, history=rows)
    if result.scenario is not None and is_table(result.scenario):
        found[LOGISTIC] = _logistic(found["local"], result.scenario)
    return found


def _logistic(alone: Result, scenario: Scenario) -> Result:
    """Return a logistic regression at every site, in the place of the networks trained alone."""
    rows = logistic_rows(scenario, alone.clients, alone.summary["rounds"], alone.config.run.seed)
    kept = ("scenario", "seed", "rounds", "finished", "k", "clients", "groups", "clusters", "scored", "versions")
    about = {key: alone.summary[key] for key in kept}
    summary = {"method": LOGISTIC, **about, "ari": None, "accuracy": scores_of(rows, scenario), "notes": []}
    if alone.folder is not None:
        place = alone.folder.parent / LOGISTIC
        make_folder(place)
        write_summary(place, summary)
    return replace(alone, summary=summary, history=rows)
