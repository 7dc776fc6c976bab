"""One path from settings to a finished run, in memory or in a run directory that can be resumed at any moment.

``emdcfl.fit``, ``emdcfl run``, ``compare``, ``reproduce`` and the Flower server app all call :func:`run`.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

import emdcfl
from emdcfl.core.federation import Federation
from emdcfl.data.types import Scenario
from emdcfl.methods.base import Serving
from emdcfl.runs import signals
from emdcfl.runs.config import Config
from emdcfl.runs.loop import Finished, Observer, play
from emdcfl.runs.outputs import write_outputs
from emdcfl.runs.plan import RunPlan, plan
from emdcfl.runs.result import Result
from emdcfl.runs.scoring import MetricsRow, accuracy, agreement
from emdcfl.runs.served import ModelInfo
from emdcfl.runs.store import RunStore

PHASES = ("train", "embed", "transport", "evaluate")


def run(
    config: Config | RunPlan,
    out: Path | None = None,
    *,
    resume: bool = False,
    observer: Observer | None = None,
    scenario: Scenario | None = None,
) -> Result:
    """Run (or resume) an experiment.

    Parameters
    ----------
    config : Config or RunPlan
        Settings, or what ``plan`` made of them.
    out : Path, optional
        Run directory, written after every round. Without one, everything stays in memory until ``Result.save``.
    resume : bool
        Continue the run in ``out`` from its last complete round.
    observer : Observer, optional
        Told of every round and reply.
    scenario : Scenario, optional
        Data that are already built, or that exist in memory only.
    """
    started = time.perf_counter()
    planned = config if isinstance(config, RunPlan) else plan(config, scenario)
    with planned.federation() as fed:
        if out is None:
            return _play(_Account(planned, fed, started), observer)
        with RunStore.open(out, planned.config, resume=resume) as store:
            return _play(_Account(planned, fed, started, store), observer)


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

    def restore(self) -> tuple[int, Any]:
        """Return the last complete round and its state (0 and none for a new run), and go on from its account."""
        loaded: tuple[int, Any, dict[str, Any]] | None = None if self.store is None else self.store.load_state(self.plan.method.State)
        done, state, extra = loaded if loaded is not None else (0, None, {})
        if self.store is not None:
            self.store.trim_metrics(done)
            self.history = self.store.read_metrics()
        self.before, self.last, self.failures = (
            dict(extra.get("seconds", {})),
            list(extra.get("rows", [])),
            list(extra.get("failures", [])),
        )
        self.fed.guard.ledger.restore(extra.get("trust", {}))
        self.fed.traffic.restore(extra.get("bytes", {}))
        return done, state

    def add(self, finished: Finished) -> Result:
        """Take in a round, save it where there is a run directory, and return the result so far."""
        self.last = finished.rows or self.last
        self.history += finished.rows
        self.failures += [asdict(f) for f in self.fed.failures]
        self.fed.failures.clear()
        result = self.result(finished, self._seconds())
        if self.store is not None:
            with signals.defer_signals():  # a round that was played is saved, even if somebody asks to stop just now
                self.store.append_metrics(finished.rows)
                self.store.save_state(finished.index, finished.state, result.extra, beside=True)
                write_outputs(self.store.path, result)
        return result

    def _seconds(self) -> dict[str, float]:
        now = {phase: self.fed.clock.seconds.get(phase, 0.0) for phase in PHASES} | {"total": time.perf_counter() - self.started}
        return {phase: self.before.get(phase, 0.0) + value for phase, value in now.items()}

    def result(self, finished: Finished, seconds: Mapping[str, float]) -> Result:
        extra = {
            "seconds": dict(seconds),
            "rows": self.last,
            "failures": self.failures,
            "trust": self.fed.guard.ledger.as_dict(),
            "bytes": self.fed.traffic.bytes,
        }
        return Result(
            config=self.plan.config,
            summary=summarise(self.plan, self.fed, finished.index, finished.serving, self.last, seconds, self.failures),
            history=self.history,
            source=finished.serving,
            about=ModelInfo.of(self.plan.scenario),
            scenario=self.plan.scenario,
            state=finished.state,
            extra=extra,
            folder=None if self.store is None else self.store.path,
        )


def _play(account: _Account, observer: Observer | None) -> Result:
    done, state = account.restore()
    planned, method = account.plan, account.plan.method
    if state is not None and done >= planned.rounds:
        finished = account.result(Finished(done, state, method.serve(state), account.last), account.before)
        assert account.store is not None
        write_outputs(account.store.path, finished)
        return finished
    settings: dict[str, Any] = {"evaluate_every": planned.config.run.evaluate_every, "retries": planned.config.engine.retries}
    settings["variants"] = {site.name: tuple(site.tests) for site in planned.scenario.sites}
    result: Result | None = None
    for round in play(account.fed, method, rounds=planned.rounds, state=state, done=done, observer=observer, **settings):
        result = account.add(round)
    assert result is not None
    return result


def summarise(
    planned: RunPlan,
    fed: Federation,
    index: int,
    serving: Serving,
    rows: list[MetricsRow],
    seconds: Mapping[str, float],
    failures: list[dict[str, Any]],
) -> dict[str, Any]:
    """Return what ``summary.json`` holds."""
    scenario, clusters = planned.scenario, serving.clusters
    variants = list(scenario.sites[0].tests) or ["test"]
    scores = {v: accuracy(rows, v, scenario.scored) for v in variants}
    return {
        "method": planned.config.method.name,
        "scenario": scenario.name,
        "seed": planned.config.run.seed,
        "rounds": index,
        "finished": index == planned.rounds,
        "k": int(serving.models.shape[0]) if clusters is None else len(set(clusters.tolist())),
        "ari": agreement(serving.clusters, fed.clients, scenario.groups),
        "clients": list(fed.clients),
        "groups": None if scenario.groups is None else [scenario.groups[c] for c in fed.clients],
        "clusters": None if clusters is None else [int(k) for k in clusters.tolist()],
        "accuracy": {**scores[variants[0]], "samples": _tested(rows, variants[0], scenario.scored), "variants": scores},
        "scored": None if scenario.scored is None else list(scenario.scored),
        "seconds": {phase: round(value, 3) for phase, value in seconds.items()},
        "bytes": fed.traffic.bytes,
        **({"memory": {name: round(gib, 3) for name, gib in memory.items()}} if (memory := fed.memory()) else {}),
        "failures": [{k: f[k] for k in ("round", "client", "task", "reason")} for f in failures],
        "quarantined": fed.guard.ledger.quarantined(),
        "flags": fed.guard.ledger.flagged(),
        "notes": list(scenario.notes),
        "config": planned.key,
        "versions": versions(),
    }


def _tested(rows: list[MetricsRow], variant: str, scored: tuple[str, ...] | None) -> int:
    return sum(r["test_samples"][variant] for r in rows if r["test_samples"] and (scored is None or r["client"] in scored))


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
