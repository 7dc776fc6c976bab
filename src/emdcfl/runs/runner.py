"""One path from settings to a finished run, in memory or in a run directory that can be resumed at any moment.

``emdcfl.fit``, ``emdcfl run``, ``compare``, ``reproduce`` and the Flower server app all call :func:`run`.
"""

from __future__ import annotations

import gc
import platform
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

import emdcfl
from emdcfl.core.checks import check_options
from emdcfl.core.errors import ConfigError, StoreError
from emdcfl.core.federation import Failure, Federation
from emdcfl.core.metric import Metric, score_of
from emdcfl.data.types import Scenario
from emdcfl.runs import signals
from emdcfl.runs.config import Config, with_workers
from emdcfl.runs.loop import Finished, NoOpObserver, Observer, play
from emdcfl.runs.outputs import read_summary, write_outputs
from emdcfl.runs.personal import FineTuned, gain, personalize
from emdcfl.runs.plan import RunPlan, plan
from emdcfl.runs.result import Result
from emdcfl.runs.scoring import MetricsRow, Untested, agreement, check_rows, is_tested, model_names, site_scores
from emdcfl.runs.served import ModelInfo
from emdcfl.runs.store import RunStore, data_record
from emdcfl.runs.store.identity import Baselines, note_baselines
from emdcfl.runs.store.rounds import METRICS
from emdcfl.runs.verdict.intervals import KIND
from emdcfl.runs.verdict.trained_with import origins
from emdcfl.runs.verdict.what_differs import what_differs

PHASES = ("train", "embed", "transport", "evaluate")
DECIDE, PERSONALIZE = "decide", "personalize"


def run(
    config: Config | RunPlan,
    out: Path | None = None,
    *,
    resume: bool = False,
    observer: Observer | None = None,
    scenario: Scenario | None = None,
    baselines: Baselines | None = None,
) -> Result:
    """Run an experiment, or with ``resume`` continue the one in ``out`` from its last complete round.

    The run directory ``out`` is written after every round; without one, everything stays in memory until ``Result.save``. ``scenario`` are
    data that are already built, or that exist in memory only. ``baselines`` says what the caller trains beside the run, whose directory
    notes it.
    """
    started = time.perf_counter()
    planned = config if isinstance(config, RunPlan) else plan(config, scenario, out)
    with planned.federation() as fed, _heap_frozen():
        if out is None:
            result = _play(_Account(planned, fed, started), observer)
        else:
            with RunStore.open(out, planned.config, resume=resume) as store:
                data_record.bind(out, planned.config.scenario.options, planned.whole.fingerprints)
                if baselines is not None:
                    note_baselines(out, baselines, planned.config.scenario.name)
                began = replace(planned, config=with_workers(planned.config, store.config().engine.workers))
                result = _play(_Account(began, fed, started, store), observer)
    if not planned.held or "unseen" in result.summary:
        return result
    from emdcfl.runs.new_sites.unseen import score_unseen  # which runs one model for all

    return score_unseen(result, planned, observer)


@contextmanager
def _heap_frozen() -> Iterator[None]:
    """Keep the garbage collector from visiting, at every pass, the hundreds of thousands of objects that exist before a run."""
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@dataclass(frozen=True)
class _Extra:
    """What a round commits beside the method's state."""

    seconds: dict[str, float]
    rows: list[dict[str, Any]]
    failures: list[dict[str, Any]]
    trust: dict[str, Any]
    bytes: dict[str, dict[str, int]]
    personal: dict[str, Any]
    differs: list[dict[str, Any]]
    untested: dict[str, Any]
    late: list[dict[str, Any]]


@dataclass
class _Account:
    """What a run has come to: rows and failures so far, and where they are saved."""

    plan: RunPlan
    fed: Federation
    started: float
    store: RunStore | None = None
    history: list[MetricsRow] = field(default_factory=list)
    last: list[MetricsRow] = field(default_factory=list)
    failures: list[dict[str, Any]] = field(default_factory=list)
    before: dict[str, float] = field(default_factory=dict)
    personal: FineTuned | None = None
    differs: list[dict[str, Any]] | None = None
    untested: Untested | None = None

    @property
    def variants(self) -> dict[str, tuple[str, ...]]:
        return {site.name: tuple(site.tests) for site in self.plan.scenario.sites}

    @property
    def unfinished(self) -> bool:
        """Whether clients have still to fine-tune after the last round."""
        return self.plan.config.personalize.wanted and self.personal is None

    def restore(self) -> tuple[int, Any]:
        """Return the last complete round and its state (0 and none for a new run), and go on from its account."""
        loaded: tuple[int, Any, dict[str, Any]] | None = None if self.store is None else self.store.load_state(self.plan.method.State)
        done, state, extra = loaded if loaded is not None else (0, None, {})
        if self.store is not None:
            self.store.trim_metrics(done)
            self.history = self.store.read_metrics()
            check_rows(self.history, METRICS)
        try:
            extra = check_options(_Extra, extra, "its account")
            failures = [asdict(Failure(**check_options(Failure, failure, "a failure"))) for failure in extra.get("failures", [])]
            self.personal = FineTuned(**extra["personal"]) if "personal" in extra else None
            self.differs = extra.get("differs")
            if "untested" in extra:
                self.untested = Untested(**check_options(Untested, extra["untested"], "the round to be tested"))
                if self.untested.round != done:
                    raise ValueError(f"expected that round {done} is to be tested, got round {self.untested.round}")
            self.fed.guard.ledger.restore(extra.get("trust", {}))
        except (ConfigError, TypeError, ValueError) as error:
            raise StoreError(f"state/round-{done}.json is not what a run writes: {error}; start again with another --out") from error
        self.before, self.last, self.failures = extra.get("seconds", {}), extra.get("rows", []), failures
        self.fed.late = list(extra.get("late", []))
        check_rows([*self.last, *(self.personal.rows if self.personal else [])], f"state/round-{done}.json")
        self.fed.traffic.restore(extra.get("bytes", {}))
        return done, state

    def add(self, finished: Finished) -> Result:
        """Take in a round, save it where there is a run directory, and return the result so far."""
        self.last = [row for row in finished.rows if row["round"] == finished.rows[-1]["round"]] or self.last
        self.history += finished.rows
        return self._save(finished, finished.rows)

    def personalize(self, finished: Finished, observer: Observer | None) -> Result:
        """Let clients fine-tune what the last round serves, and commit that round again with what they kept."""
        planned, fed = self.plan, self.fed
        fed.observer = (observer or NoOpObserver()).reply
        fed.begin(finished.index)
        self.personal = personalize(fed, finished.serving, self.last, planned.config.personalize, planned.training, self.variants)
        return self._save(finished, [])

    def _save(self, finished: Finished, rows: list[MetricsRow]) -> Result:
        whole = finished.index == self.plan.rounds and not self.unfinished
        if whole and self.differs is None and finished.serving.clusters is not None and self.plan.says_what_differs:
            self.differs = what_differs(self.fed, self.plan.scenario, finished.serving.clusters.tolist())
        self.failures += [asdict(f) for f in self.fed.failures]
        self.fed.failures.clear()
        result = self.result(finished, self._seconds())
        if self.store is not None:
            with signals.defer_signals():  # a round that was played is saved, even if somebody asks to stop just now
                self.store.append_metrics(rows)
                self.store.save_state(finished.index, finished.state, result.extra, background=True)
                write_outputs(self.store.path, result)
        return result

    def _seconds(self) -> dict[str, float]:
        spent = [phase for phase in (DECIDE, PERSONALIZE) if phase in self.fed.clock.seconds or phase in self.before]
        phases = (*PHASES, *spent)
        now = {phase: self.fed.clock.seconds.get(phase, 0.0) for phase in phases} | {"total": time.perf_counter() - self.started}
        return {phase: self.before.get(phase, 0.0) + value for phase, value in now.items()}

    def result(self, finished: Finished, seconds: Mapping[str, float]) -> Result:
        extra = {
            "seconds": dict(seconds),
            "rows": self.last,
            "failures": self.failures,
            "trust": self.fed.guard.ledger.as_dict(),
            "bytes": self.fed.traffic.bytes,
            "personal": None if self.personal is None else self.personal.as_dict(),
            "differs": self.differs,
            "late": self.fed.late or None,
            "untested": None if finished.untested is None else asdict(finished.untested),
        }
        return Result(
            config=self.plan.config,
            summary=self._summary(finished, seconds),
            history=self.history,
            source=finished.serving,
            personal={} if self.personal is None else self.personal.states,
            about=ModelInfo.of(self.plan.scenario),
            scenario=self.plan.whole,
            state=finished.state,
            extra={key: value for key, value in extra.items() if value is not None},
            folder=None if self.store is None else self.store.path,
        )

    def _summary(self, finished: Finished, seconds: Mapping[str, float]) -> dict[str, Any]:
        """Return what ``summary.json`` holds."""
        planned, fed, serving, scenario = self.plan, self.fed, finished.serving, self.plan.scenario
        clusters = None if serving.clusters is None else [int(k) for k in serving.clusters.tolist()]
        found = {
            "method": planned.config.method.name,
            "scenario": scenario.name,
            "seed": planned.config.run.seed,
            "rounds": finished.index,
            "finished": finished.index == planned.rounds and not self.unfinished,
            "k": serving.k,
            "ari": agreement(clusters, fed.clients, scenario.groups),
            "clients": list(fed.clients),
            "classes": len(scenario.classes),
            "groups": None if scenario.groups is None else [scenario.groups[c] for c in fed.clients],
            "clusters": clusters,
            "trained_with": origins(serving, fed.clients, model_names(serving, fed.clients)),
            **scores_of(self.last, scenario),
            **({} if self.personal is None else {"personalized": _personalized(planned, self.last, self.personal)}),
            "scored": None if scenario.scored is None else list(scenario.scored),
            "seconds": {phase: round(value, 3) for phase, value in seconds.items()},
            "bytes": fed.traffic.bytes,
            **({"memory": {name: round(gib, 3) for name, gib in memory.items()}} if (memory := fed.memory()) else {}),
            "failures": [{k: f[k] for k in ("round", "client", "task", "reason")} for f in self.failures],
            **({"late": fed.late} if fed.late else {}),
            "quarantined": fed.guard.ledger.quarantined(),
            "flags": fed.guard.ledger.flagged(),
            "notes": list(scenario.notes),
            "config": planned.key,
            "versions": versions(),
        }
        return found if self.differs is None else {**found, "what_differs": self.differs}


def _play(account: _Account, observer: Observer | None) -> Result:
    done, state = account.restore()
    planned, method = account.plan, account.plan.method
    settings: dict[str, Any] = {"evaluate_every": planned.config.run.evaluate_every, "retries": planned.config.engine.retries}
    settings |= {"variants": account.variants, "untested": account.untested}
    result: Result | None = None
    if state is not None and done >= planned.rounds:
        last = Finished(done, state, method.serve(state), account.last)
    else:
        for last in play(account.fed, method, rounds=planned.rounds, state=state, done=done, observer=observer, **settings):
            result = account.add(last)
    if account.unfinished:
        return account.personalize(last, observer)
    if result is None:  # the run was finished before
        assert account.store is not None
        result = account.result(last, account.before)
        with suppress(StoreError):  # lost or damaged: then nobody knows what made the numbers
            before = read_summary(account.store.path)
            kept: dict[str, Any] = {key: before[key] for key in ("versions", "unseen") if key in before}  # nobody need be tested again
            result = replace(result, summary={**result.summary, **kept})
        write_outputs(account.store.path, result)
    return result


def _variants(scenario: Scenario) -> list[str]:
    return list(scenario.sites[0].tests) or ["test"]


def scores_of(rows: list[MetricsRow], scenario: Scenario) -> dict[str, dict[str, Any]]:
    """Return what a summary says of its metric: accuracy, or R² where numbers are predicted."""
    variants = _variants(scenario)
    std = None if scenario.target is None else scenario.target.std
    scores = {v: site_scores(rows, v, scenario.scored, std) for v in variants}
    main = scores[variants[0]]
    overall = {key: value for key, value in main.items() if key not in ("sites", "errors", "tested")}  # sites' own are the variant's
    metric = Metric.ACCURACY if scenario.target is None else Metric.R2
    return {metric.value: {**overall, "samples": sum(main["tested"]), "interval": KIND, "variants": scores}}


def _personalized(planned: RunPlan, rows: list[MetricsRow], personal: FineTuned) -> dict[str, Any]:
    """Return who kept a fine-tuned model, and scores with the model that each client should use."""
    scenario = planned.scenario
    return {
        "mode": planned.config.personalize.mode,
        "kept": list(personal.states),
        **scores_of(personal.rows, scenario),
        "gain": gain(personal.rows, rows, _variants(scenario)[0], scenario.scored),
        "clients": {row["client"]: {v: s for v, s in (score_of(row) or {}).items() if is_tested(row, v)} or None for row in personal.rows},
    }


def versions() -> dict[str, str]:
    """Return what the numbers depend on."""
    # asked of the installation: importing the packages takes seconds
    return {
        "emdcfl": emdcfl.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "scikit-learn": version("scikit-learn"),
        "POT": version("POT"),
    }
