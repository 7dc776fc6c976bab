"""Is grouping worth it? The same data trained as one model for all and as every site alone, beside the clustered run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from emdcfl.data.types import Scenario
from emdcfl.runs.config import Choice, Config, PersonalizeConfig, config_hash, with_workers
from emdcfl.runs.loop import Observer
from emdcfl.runs.outputs import read_summary, write_summary
from emdcfl.runs.personal import FINE_TUNED, with_personal
from emdcfl.runs.plan import plan
from emdcfl.runs.result import Result, load
from emdcfl.runs.runner import run, scores_of
from emdcfl.runs.store import RunStore
from emdcfl.runs.store.files import Lock, make_folder
from emdcfl.runs.store.run_store import LOCK
from emdcfl.runs.verdict.advice import BASELINES, LINEAR, LOGISTIC
from emdcfl.runs.verdict.per_site import is_table, most_frequent, regression_rows, training_mean


def one_for_all(config: Config) -> Config:
    """Return the config of FedAvg beside a run: fine-tuned as the run is, else where that pays."""
    wanted = config.personalize
    return replace(config, method=Choice("fedavg"), personalize=wanted if wanted.wanted else PersonalizeConfig("if-it-pays"))


def not_tuned(config: Config, method: str) -> Config:
    """Return the config of a method beside a run, without fine-tuning."""
    return replace(config, method=Choice(method), personalize=PersonalizeConfig("off"))


def run_baselines(
    result: Result,
    *,
    observer: Observer | None = None,
    keep: bool = False,
    workers: int | None = None,
    say: Callable[[str], object] = lambda _: None,
) -> dict[str, Result]:
    """Run (or finish) the baselines on the same data, in sub-folders of the run directory if there is one.

    One run of FedAvg is two of them: one model for all, and the same model fine-tuned at home. It follows ``[personalize]`` of the run,
    or keeps what pays. Of a table whose rows are here there is also a regression at every site: logistic, or linear of numbers. Only
    scores stay on disk, unless models are to be kept. ``workers`` are the run's if not given; ``say`` is told which training begins.
    """
    with ExitStack() as held:
        if result.folder is not None:  # whose own run has ended: nobody else is to resume it meanwhile
            held.callback(Lock(result.folder / LOCK).release)
        common = result.config if workers is None else with_workers(result.config, workers)
        return _run_all(result, common, observer, say, keep=keep)


def _run_all(result: Result, common: Config, observer: Observer | None, say: Callable[[str], object], *, keep: bool) -> dict[str, Result]:
    found = {}
    for name, config in (("fedavg", one_for_all(common)), ("local", not_tuned(common, "local"))):
        place = None if result.folder is None else result.folder / "baselines" / name
        done = None if keep else _finished(result, config, place)
        if done is None:
            say(f"for comparison: {BASELINES[name]} ({name})")
        found[name] = done or run(config, place, resume=place is not None, observer=observer, scenario=result.scenario)
        if place is not None and not keep:
            _forget_models(place)
        if config.personalize.wanted:
            summary, rows = with_personal(found[name].summary, found[name].history)
            found[name + FINE_TUNED] = replace(found[name], summary=summary, history=rows)
    if result.scenario is not None and is_table(result.scenario) and any(len(site.train) for site in result.scenario.sites):
        name = LOGISTIC if result.scenario.target is None else LINEAR
        found[name] = _regression(name, found["local"], result.scenario)
    return found


def _forget_models(place: Path) -> None:
    """Remove the models of a finished run, and the state to resume from."""
    for part in ("models", "personal", "state/tensors"):
        shutil.rmtree(place / part, ignore_errors=True)
    for state in (place / "state").glob("round-*.json"):
        state.unlink(missing_ok=True)


def _finished(result: Result, config: Config, place: Path | None) -> Result | None:
    """Return a baseline whose models were not kept: its scores, without models."""
    if place is None or (place / "models").exists() or not (place / "summary.json").is_file():
        return None
    summary, stored = read_summary(place), RunStore.read(place)
    planned = plan(with_workers(config, stored.config().engine.workers), result.scenario).config
    if not summary["finished"] or config_hash(planned) != summary["config"]:
        return None
    scores = replace(result, config=planned, summary=summary, history=stored.read_metrics(), folder=place)
    return replace(scores, source=lambda: load(place).serving, personal={}, state=None, extra={})  # an error says that there are no models


def _regression(name: str, alone: Result, scenario: Scenario) -> Result:
    """Return a regression at every site, in the place of the networks trained alone."""
    by_name = {site.name: site for site in scenario.sites}
    sites = [by_name[client] for client in alone.clients]
    rows = regression_rows(scenario, sites, alone.summary["rounds"], alone.config.run.seed)
    kept = ("scenario", "seed", "rounds", "finished", "k", "clients", "classes", "groups", "clusters", "scored", "versions")
    about = {key: alone.summary[key] for key in kept}
    summary = {"method": name, **about, "ari": None, **scores_of(rows, scenario), "notes": []}
    summary |= {"most_frequent": most_frequent(sites)} if scenario.target is None else {"training_mean": training_mean(sites)}
    if alone.folder is not None:
        place = alone.folder.parent / name
        make_folder(place)
        write_summary(place, summary)
    return replace(alone, summary=summary, history=rows)
