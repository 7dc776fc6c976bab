"""From a config to a run directory: complete the config, play the rounds, save each, write what came out. Resumable at any moment."""

from __future__ import annotations

import dataclasses
import inspect
import json
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

import emdcfl
from emdcfl.core import keys
from emdcfl.core.checks import check_options
from emdcfl.core.errors import ConfigError, nearest
from emdcfl.core.federation import Federation
from emdcfl.core.tasks import Training
from emdcfl.data import scenarios
from emdcfl.data.own.defaults import recipe
from emdcfl.data.types import Scenario
from emdcfl.engines import make_federation, resolve
from emdcfl.engines.local.sequential import pick_device
from emdcfl.methods import find, make
from emdcfl.methods.base import Method, Serving
from emdcfl.models import ModelRecipe
from emdcfl.models.recipe import BUILDERS
from emdcfl.runs import signals
from emdcfl.runs.config import Choice, Config, as_dict, config_hash
from emdcfl.runs.loop import Finished, Observer, play
from emdcfl.runs.outputs import write_outputs
from emdcfl.runs.scoring import MetricsRow, accuracy, agreement
from emdcfl.runs.store import RunStore

PHASES = ("train", "embed", "transport", "evaluate")


@dataclass(frozen=True)
class RunPlan:
    """A complete config and the objects it describes."""

    config: Config
    scenario: Scenario
    method: Method
    training: Training

    @property
    def name(self) -> str:
        """What nodes derive their protective randomness for: the data and the seed, so that no other setting changes a projection."""
        return keys.digest(json.dumps(as_dict(self.config)["scenario"], sort_keys=True), self.config.run.seed).hex()[:16]

    def federation(self) -> Federation:
        """Start the engine the config names."""
        engine, run = self.config.engine, self.config.run
        common: dict[str, Any] = {
            "threads": engine.threads,
            "precision": engine.precision,
            "run": self.name,
            "training": self.training,
            "seed": run.seed,
            "number": run.participants,
            "on_failure": engine.on_failure,
            "quorum": engine.quorum,
            "trust": self.config.trust,
        }
        if engine.name == "flower":  # imported where it is used: an optional dependency
            from emdcfl.engines.flower.session import connect

            return connect(self.scenario, (self.config.scenario.name, self.config.scenario.options), **common)
        gpu = {"streams": engine.streams, "deterministic": engine.deterministic, "compile": engine.compile, "rounds": run.rounds or 1}
        return make_federation(self.scenario, engine=engine.name, workers=engine.workers, device=engine.device, gpu=gpu, **common)


def build_scenario(config: Config) -> Scenario:
    """Build the scenario a config names, with the network it asks for."""
    given = dict(config.scenario.options)
    if config.model is not None and "model" in scenarios.options(config.scenario.name):
        given.setdefault("model", config.model.name)  # a pretrained network decides the size of people's own images
    scenario = scenarios.build(config.scenario.name, **given)
    return scenario if config.model is None else replace(scenario, model=_model(scenario, config.model))


def plan(config: Config, scenario: Scenario | None = None) -> RunPlan:
    """Build the scenario and the method, and write every default into the config, so that it can be rerun as it is.

    ``scenario`` is what ``build_scenario`` returned for this config, where several plans share it.
    """
    cls = find(config.method.name)
    device = str(pick_device(config.engine.device))
    scenario = build_scenario(config) if scenario is None else scenario
    options = dict(config.method.options)
    preset = options.pop("preset", None)
    if "privacy_epsilon" in options and "privacy_epsilon" not in _names(cls):
        raise ConfigError(f"expected privacy.epsilon with a method that adds noise (emdcfl), got {cls.name}; leave [privacy] out")
    checked = check_options(cls, {**scenario.method_defaults.get(cls.name, {}), **options}, "method")
    method = make(cls.name, **checked, **({"preset": preset} if preset else {}))
    if cls.family == "personal" and not config.trust.plain:
        raise ConfigError(f"expected trust.max_share, clip and aggregate at their defaults with {cls.name}: it averages along a graph")
    explicit = {k: v for k, v in asdict(config.training).items() if v is not None}
    training = Training(**{**{k: v for k, v in scenario.defaults.items() if k in _names(Training)}, **explicit})
    rounds = config.run.rounds or int(scenario.defaults.get("rounds", 10))
    complete = replace(
        config,
        run=replace(config.run, rounds=rounds),
        method=Choice(cls.name, {f.name: getattr(method, f.name) for f in fields(cls) if getattr(method, f.name) is not None}),  # type: ignore[arg-type]
        model=Choice(scenario.model.name, dict(scenario.model.options)),
        training=replace(config.training, **{k: v for k, v in asdict(training).items() if k in _names(type(config.training))}),
        engine=replace(config.engine, device=device, name=_engine(config, scenario, training, device)),
    )
    return RunPlan(complete, scenario, method, training)


def _engine(config: Config, scenario: Scenario, training: Training, device: str) -> str:
    """Return the engine's own name, so that a config says what ran even where ``auto`` was asked for."""
    engine, participants = config.engine, config.run.participants
    if engine.name == "flower":
        return engine.name
    size, workers = training.batch_size, engine.workers
    return resolve(engine.name, scenario, device=device, batch_size=size, workers=workers, participants=participants)


def _names(cls: Any) -> set[str]:
    return {f.name for f in dataclasses.fields(cls)}


def _model(scenario: Scenario, wanted: Choice) -> ModelRecipe:
    """Take what the data determine (channels, size, features, classes) from the scenario, the rest from the config."""
    if wanted.name not in BUILDERS and ":" not in wanted.name:
        raise ConfigError(f"unknown model {wanted.name!r}: {nearest(wanted.name, BUILDERS)}, or 'package.module:function'")
    builder = BUILDERS.get(wanted.name)
    facts = {**scenario.model.options, **(_facts(scenario, wanted.name) if builder else {})}
    known = set(inspect.signature(builder).parameters) if builder else set(facts)
    options = check_options(builder, wanted.options, "model") if builder else dict(wanted.options)
    return ModelRecipe(wanted.name, {**{k: v for k, v in facts.items() if k in known}, **options})


def _facts(scenario: Scenario, model: str) -> Mapping[str, Any]:
    """Return what a network must know about the scenario's inputs, as they reach it."""
    shape, size = tuple(scenario.sites[0].train.x.shape[1:]), scenario.preprocess.size
    return recipe(model, shape=(shape[0], size, size) if size and len(shape) == 3 else shape, classes=len(scenario.classes)).options


def run(
    config: Config, out: Path, *, resume: bool = False, observer: Observer | None = None, scenario: Scenario | None = None
) -> dict[str, Any]:
    """Run (or resume) an experiment in directory ``out`` and return its summary."""
    started = time.perf_counter()
    plan_ = plan(config, scenario)
    with plan_.federation() as fed, RunStore.open(out, plan_.config, resume=resume) as store:
        loaded: tuple[int, Any, dict[str, Any]] | None = store.load_state(plan_.method.State)
        done, state, extra = loaded if loaded is not None else (0, None, {})
        store.trim_metrics(done)
        before = dict(extra.get("seconds", {}))
        rows: list[MetricsRow] = list(extra.get("rows", []))
        failures: list[dict[str, Any]] = list(extra.get("failures", []))
        fed.guard.ledger.restore(extra.get("trust", {}))
        fed.traffic.restore(extra.get("bytes", {}))
        rounds = plan_.config.run.rounds
        assert rounds is not None
        if loaded is not None and done >= rounds:
            return _conclude(store, plan_, fed, Finished(done, state, plan_.method.serve(state), rows), rows, before, failures)
        summary: dict[str, Any] = {}
        settings = {"evaluate_every": plan_.config.run.evaluate_every, "retries": plan_.config.engine.retries}
        for finished in play(fed, plan_.method, rounds=rounds, state=state, done=done, observer=observer, **settings):
            rows = finished.rows or rows
            failures += [{**asdict(f)} for f in fed.failures]
            fed.failures.clear()
            seconds = _seconds(before, fed, time.perf_counter() - started)
            with signals.defer_signals():  # a round that was played is saved, even if somebody asks to stop just now
                store.append_metrics(finished.rows)
                kept = {"seconds": seconds, "rows": rows, "failures": failures, "trust": fed.guard.ledger.as_dict()}
                kept["bytes"] = fed.traffic.bytes
                store.save_state(finished.index, finished.state, kept, beside=True)
                summary = _conclude(store, plan_, fed, finished, rows, seconds, failures)
        return summary


def _seconds(before: Mapping[str, float], fed: Federation, wall: float) -> dict[str, float]:
    now = {phase: fed.clock.seconds.get(phase, 0.0) for phase in PHASES} | {"total": wall}
    return {phase: before.get(phase, 0.0) + value for phase, value in now.items()}


def _conclude(
    store: RunStore,
    plan_: RunPlan,
    fed: Federation,
    finished: Finished,
    rows: list[MetricsRow],
    seconds: Mapping[str, float],
    failures: list[dict[str, Any]],
) -> dict[str, Any]:
    """Write what a person looks at, from the state alone: the same files whether the run was interrupted or not."""
    summary = summarise(plan_, fed, finished.index, finished.serving, rows, seconds, failures)
    write_outputs(store.path, plan_.scenario, finished.serving, summary)
    return summary


def summarise(
    plan_: RunPlan,
    fed: Federation,
    index: int,
    serving: Serving,
    rows: list[MetricsRow],
    seconds: Mapping[str, float],
    failures: list[dict[str, Any]],
) -> dict[str, Any]:
    """Return what ``summary.json`` holds."""
    scenario, clusters = plan_.scenario, serving.clusters
    variants = list(scenario.sites[0].tests) or ["test"]
    scores = {v: accuracy(rows, v, scenario.scored) for v in variants}
    return {
        "method": plan_.config.method.name,
        "scenario": scenario.name,
        "seed": plan_.config.run.seed,
        "rounds": index,
        "finished": index == plan_.config.run.rounds,
        "k": int(serving.models.shape[0]) if clusters is None else len(set(clusters.tolist())),
        "ari": agreement(serving, fed.clients, scenario.groups),
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
        "config": config_hash(plan_.config),
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
