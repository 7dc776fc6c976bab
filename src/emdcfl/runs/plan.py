"""From settings to the objects they describe: a config with every default written out, its scenario, method and federation."""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
import math
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from emdcfl.core import keys
from emdcfl.core.checks import check_options
from emdcfl.core.errors import ConfigError, DataError, ModelError, nearest
from emdcfl.core.federation import Federation
from emdcfl.core.tasks import Training
from emdcfl.data import scenarios
from emdcfl.data.own.defaults import facts as facts_of
from emdcfl.data.types import Scenario, Site
from emdcfl.engines import make_federation, resolve
from emdcfl.engines.local.sequential import pick_device
from emdcfl.methods import find, make
from emdcfl.methods.base import Method, default_options, preset_values, told_k
from emdcfl.methods.oracle import NO_GROUPS
from emdcfl.models import ModelRecipe
from emdcfl.models.recipe import BUILDERS
from emdcfl.runs.config import AT_NODES, OWN_FILES, Choice, Config, PersonalizeConfig, as_dict, config_hash
from emdcfl.runs.store import data_record

log = logging.getLogger("emdcfl")

IN_MEMORY = "in-memory"
"""Scenario name of data that were given as arrays: a config cannot build them again, and identifies them by a fingerprint."""

TUNING = 0.4
"""Learning rate of fine-tuning over that of training, unless ``personalize.lr`` says otherwise.

Measured with FedAvg, ``if-it-pays`` and seeds 0 to 2: on ``watch`` (also with 14 training rows a site), ``hapt`` and ``hapt-later`` 30
epochs at 0.4 are at most 0.5 points below the best of 10 to 50 epochs at 0.4 or 1; 10 epochs at 0.4 lose up to 4.5, 50 at 1 up to 1.5.
"""


@dataclass(frozen=True)
class RunPlan:
    """A complete config and the objects it describes."""

    config: Config
    scenario: Scenario
    method: Method
    training: Training
    whole: Scenario
    """Also the sites held out of training; the same as ``scenario`` where there are none."""

    @property
    def held(self) -> tuple[Site, ...]:
        return tuple(site for site in self.whole.sites if site.name in (self.config.run.hold_out or ()))

    @property
    def name(self) -> str:
        """What nodes derive their protective randomness for: the data and the seed, so that no other setting changes a projection."""
        return keys.digest(json.dumps(as_dict(self.config)["scenario"], sort_keys=True), self.config.run.seed).hex()[:16]

    @cached_property
    def key(self) -> str:
        """Hash of the complete config: equal settings have equal keys."""
        return config_hash(self.config)

    @property
    def rounds(self) -> int:
        assert self.config.run.rounds is not None
        return self.config.run.rounds

    @property
    def says_what_differs(self) -> bool:
        """Whether sites are asked what their data are like: by default own data on one machine, and never unasked beside privacy noise."""
        asked = self.config.run.what_differs
        if asked is not None:
            return asked
        own = self.config.scenario.name in (OWN_FILES, IN_MEMORY)
        return own and self.config.engine.name != "flower" and getattr(self.method, "privacy_epsilon", None) is None

    def federation(self) -> Federation:
        engine, run = self.config.engine, self.config.run
        return make_federation(
            self.scenario,
            engine=engine.name,
            device=engine.device,
            workers=engine.workers,
            gpu={"streams": engine.streams, "deterministic": engine.deterministic, "compile": engine.compile, "rounds": self.rounds},
            source=(self.config.scenario.name, self.config.scenario.options),
            remote={"phase_deadline": engine.phase_deadline, "late_updates": getattr(self.method, "late_updates", False)},
            threads=engine.threads,
            precision=engine.precision,
            run=self.name,
            training=self.training,
            seed=run.seed,
            number=run.participants,
            on_failure=engine.on_failure,
            quorum=engine.quorum,
            trust=self.config.trust,
        )


def build_scenario(config: Config, folder: Path | None = None) -> Scenario:
    """Build the scenario a config names, with the network it asks for; ``folder`` is the run directory, which knows where own files are."""
    if config.scenario.name == IN_MEMORY:
        raise DataError("the data of this run were given as arrays in Python; give them again: emdcfl.load(folder, clients=…)")
    if config.scenario.name == AT_NODES and AT_NODES not in scenarios.names():  # as it is everywhere but at their server
        raise DataError(
            "the data of this run stay at the nodes of a federation: train with 'emdcfl run --federation DIR', and predict with --client; "
            "placing a site needs a run with the data of all sites on one machine"
        )
    given = dict(config.scenario.options)
    if config.scenario.name == OWN_FILES and isinstance(given.get("path"), str):
        given["path"] = data_record.locate(folder, given["path"])
    if config.model is not None and "model" in scenarios.options(config.scenario.name):
        given.setdefault("model", config.model.name)  # a pretrained network decides the size of people's own images
    return scenarios.build(config.scenario.name, **given)


def plan(config: Config, scenario: Scenario | None = None, folder: Path | None = None) -> RunPlan:
    """Write every default into the config, so that it can be run again as it is, and build what it describes.

    ``scenario`` is what ``build_scenario`` returned for this config, where several runs share it, or data in memory. A run in a ``folder``
    knows where its own files are, whatever the working directory.
    """
    if config.scenario.name == OWN_FILES and isinstance(path := config.scenario.options.get("path"), str):
        own = {**config.scenario.options, "path": data_record.as_given(folder, path)}
        config = replace(config, scenario=replace(config.scenario, options=own))
    device = str(pick_device(config.engine.device))
    scenario = build_scenario(config, folder) if scenario is None else scenario
    if config.model is not None:
        scenario = replace(scenario, model=_model(scenario, config.model))
    if scenario.model.name not in BUILDERS and config.engine.name != "flower":
        _check_own_model(scenario)
    whole, scenario = scenario, _without(scenario, config)
    method = _method(config, scenario)
    cls = type(method)
    explicit = {k: v for k, v in asdict(config.training).items() if v is not None}
    training = Training(**{**{k: v for k, v in scenario.defaults.items() if k in _names(Training)}, **explicit})
    if config.engine.name == "flower":
        refuse_numbers(config)
    if scenario.target is not None:
        config = _for_numbers(config, method, device)
    if hasattr(method, "k"):  # before anything is trained, also of the methods beside it in a comparison
        told_k(method.k, scenario.k, cls.name)
    if cls.name == "oracle" and scenario.groups is None:
        raise ConfigError(NO_GROUPS)
    engine = config.engine
    name = resolve(
        engine.name,
        scenario,
        device=device,
        batch_size=training.batch_size,
        workers=engine.workers,
        participants=config.run.participants,
    )
    if engine.phase_deadline is not None and name != "flower":
        raise ConfigError(f"engine.phase_deadline is for nodes that may be slow, got the engine {name!r}; use engine.name = 'flower'")
    on_failure = ("continue" if engine.name == "flower" else "stop") if engine.on_failure == "auto" else engine.on_failure
    complete = replace(
        config,
        run=replace(config.run, rounds=config.run.rounds or int(scenario.defaults.get("rounds", 10))),
        method=Choice(
            cls.name, {k: getattr(method, k) for k, usual in default_options(cls).items() if (getattr(method, k), usual) != (None, None)}
        ),
        model=Choice(scenario.model.name, dict(scenario.model.options)),
        training=replace(config.training, **{k: v for k, v in asdict(training).items() if k in _names(type(config.training))}),
        personalize=_personalize(config.personalize, scenario.defaults.get("personalize", "off"), training),
        engine=replace(engine, device=device, name=name, on_failure=on_failure),
    )
    return RunPlan(complete, scenario, method, training, whole)


def _personalize(asked: PersonalizeConfig, usual: Literal["off", "on", "if-it-pays"], training: Training) -> PersonalizeConfig:
    """Return the settings of fine-tuning, ``usual`` being the scenario's mode; all others at their defaults where nobody fine-tunes."""
    wanted = replace(asked, mode=asked.mode or usual)
    if wanted.wanted:
        return replace(wanted, lr=wanted.lr or TUNING * training.lr)
    return PersonalizeConfig(None if usual == "off" else "off")


def _without(scenario: Scenario, config: Config) -> Scenario:
    """Leave out the sites that ``run.hold_out`` names."""
    out = config.run.hold_out
    if out is None:
        return scenario
    names = [site.name for site in scenario.sites]
    unknown = next((name for name in out if name not in names), None)
    if unknown is not None:
        raise ConfigError(f"run.hold_out: there is no site {unknown!r}: {nearest(unknown, names)}")
    if len(names) - len(out) < 2:
        raise ConfigError(f"run.hold_out: expected at least two sites to train with, got {len(names) - len(out)}; hold out fewer")
    if config.engine.name == "flower":
        raise ConfigError("run.hold_out needs the data of all sites on one machine; over Flower, leave a node out")
    return replace(
        scenario,
        sites=tuple(site for site in scenario.sites if site.name not in out),
        groups=None if scenario.groups is None else {name: group for name, group in scenario.groups.items() if name not in out},
        scored=None if scenario.scored is None else tuple(name for name in scenario.scored if name not in out),
    )


def _method(config: Config, scenario: Scenario) -> Method:
    """Build the method: its own defaults, then the scenario's for it, then a preset's, then the config's."""
    cls = find(config.method.name)
    options = dict(config.method.options)
    preset = preset_values(cls, options.pop("preset", None))
    if "privacy_epsilon" in options and "privacy_epsilon" not in _names(cls):
        raise ConfigError(f"expected privacy.epsilon with a method that adds noise (emdcfl), got {cls.name}; leave [privacy] out")
    if cls.family == "personal" and not config.trust.plain:
        raise ConfigError(f"expected trust.max_share, clip and aggregate at their defaults with {cls.name}: it averages along a graph")
    if cls.family == "soft" and config.trust.aggregate != "mean":
        raise ConfigError(
            f'expected trust.aggregate = "mean" with {cls.name}, got "{config.trust.aggregate}": each of its clusters averages all '
            "clients, and those that differ would be left out; limit clients with trust.max_share and clip"
        )
    method = make(cls.name, **check_options(cls, {**scenario.method_defaults.get(cls.name, {}), **preset, **options}, "method"))
    if hasattr(method, "check"):
        method.check()
    return method


NEED_CLASSES = frozenset({"pacfl", "fedsac", "fedrc"})
"""Methods that compare or weigh clients class by class."""


def refuse_numbers(config: Config) -> None:
    """Refuse regression over Flower, where nodes would have to agree on the scale of their numbers first."""
    if config.scenario.options.get("task") == "regression":
        raise ConfigError("expected classes over a federation of nodes, got task = regression; run it on one machine, or use classes")


def _for_numbers(config: Config, method: Method, device: str) -> Config:
    """Refuse what regression cannot do, and choose the engine that can."""
    if type(method).name in NEED_CLASSES:
        raise ConfigError(f"expected a method that needs no classes for regression, got {type(method).name}; use emdcfl, fedavg or ifca")
    if getattr(method, "cost", "cosine") == "label-aware":
        raise ConfigError("expected method.cost cosine or euclidean for regression, got label-aware, which compares classes")
    if config.engine.name == "cuda":
        raise ConfigError("expected engine auto, sequential or batched for regression, got cuda; leave it out, or say --device cpu")
    if config.engine.name == "auto" and device.startswith("cuda"):
        return replace(config, engine=replace(config.engine, name="sequential"))
    return config


def _names(cls: Any) -> set[str]:
    return {f.name for f in dataclasses.fields(cls)}


def _model(scenario: Scenario, wanted: Choice) -> ModelRecipe:
    """Take what the data determine (channels, size, features, classes) from the scenario, the rest from the config."""
    if wanted.name == scenario.model.name and dict(wanted.options) == dict(scenario.model.options):
        return scenario.model  # also a function of one's own, which only the scenario knows
    if wanted.name not in BUILDERS and ":" not in wanted.name:
        raise ConfigError(f"unknown model {wanted.name!r}: {nearest(wanted.name, BUILDERS)}, or 'package.module:function'")
    builder = BUILDERS.get(wanted.name)
    if builder is None:
        return with_facts(scenario, ModelRecipe(wanted.name, dict(wanted.options)))
    facts, takes = {**scenario.model.options, **_facts(scenario)}, inspect.signature(builder).parameters
    return ModelRecipe(wanted.name, {**{k: v for k, v in facts.items() if k in takes}, **check_options(builder, wanted.options, "model")})


def _check_own_model(scenario: Scenario) -> None:
    """Let a network that is not one of ours answer one sample: a wrong shape is an error before anybody trains."""
    x, outputs = scenario.preprocess(scenario.sites[0].train.x[:1]), len(scenario.classes) or 1
    wanted = f"expected model {scenario.model.name!r} to turn one input of shape {tuple(x.shape)} into outputs of shape (1, {outputs})"
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            module, other = scenario.model(), scenario.model()
            out = module.eval()(x)
            found = tuple(out.shape)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise ModelError(f"{wanted}, got {type(error).__name__}: {str(error).partition(chr(10))[0]}") from error
    if {id(p) for p in module.parameters()} & {id(p) for p in other.parameters()}:
        raise ModelError(f"model {scenario.model.name!r} returned the same network twice; build a fresh one inside the function")
    if found != (1, outputs):
        raise ModelError(f"{wanted}, a score per class (or one number), got {found}; change its last layer")
    if outputs > 1 and bool((out >= 0).all()) and math.isclose(float(out.sum()), 1, abs_tol=1e-4):
        _doubt_probabilities(scenario.model.name)


@cache  # a comparison plans every run several times
def _doubt_probabilities(model: str) -> None:
    log.warning("model %r answers with probabilities, and training takes their softmax again: leave its last Softmax out", model)


def with_facts(scenario: Scenario, model: ModelRecipe) -> ModelRecipe:
    """Return the recipe of a function with what the data determine of the parameters that it has no default for.

    A default is kept: who fits a function, and who finds it again by its import path, must get the same network.
    """
    empty = inspect.Parameter.empty
    needed = {p.name for p in inspect.signature(model.builder_function()).parameters.values() if p.default is empty} - set(model.options)
    return replace(model, options={**model.options, **{k: v for k, v in _facts(scenario).items() if k in needed}})


def _facts(scenario: Scenario) -> dict[str, Any]:
    """Return what a network may have to know about the scenario's inputs, as they reach it, and its outputs."""
    shape, size = tuple(scenario.sites[0].train.x.shape[1:]), scenario.preprocess.size
    return facts_of((shape[0], size, size) if size and len(shape) == 3 else shape, len(scenario.classes) or 1)
