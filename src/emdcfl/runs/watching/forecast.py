"""How long a run will take, from a short measurement on the machine it will run on, and how to fit it into a budget.

Two clients (some more where clients are computed in batches) train one epoch, score a model and are compared, in a federation of their own:
the run itself draws the same random numbers with and without a forecast. The rest is arithmetic: passes over samples, pairs, rounds.
"""

from __future__ import annotations

import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from emdcfl.core.errors import ConfigError
from emdcfl.core.tasks import Training
from emdcfl.core.units import seconds
from emdcfl.data.types import Scenario, Split
from emdcfl.methods.emdcfl import EMDCFL
from emdcfl.methods.emdcfl.comparison import measure
from emdcfl.methods.emdcfl.proposals import REPRESENTATIVES, SINGLE
from emdcfl.runs.config import Config
from emdcfl.runs.plan import RunPlan

AT_ONCE, TOGETHER = 2, 16
"""Clients measured one after the other, and in batches."""

MAX_SAMPLES = 128
"""Samples of a split in the measurement."""

REPEATS, ENOUGH = 6, 1.0
"""Measurements of one thing: at most so many, and no further one after so many seconds."""

TWO_WORKERS = 0.95
"""Share of an additional worker process that is useful."""

BOUND = 0.15
"""Time of a bound over that of an exact solve, where clients are compared with representatives."""


@dataclass(frozen=True)
class Speed:
    """Seconds on this machine: of a training pass and a forward pass of one sample, of one transport problem."""

    train: float
    forward: float
    solve: float


@dataclass(frozen=True)
class Forecast:
    """Seconds by phase, and by task for one client's reply."""

    phases: Mapping[str, float]
    replies: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.phases.values())

    def __str__(self) -> str:
        """Say it in one line: whole minutes, or seconds, and every phase that matters.

        Examples
        --------
        >>> print(Forecast({"training": 180.0, "comparing": 61.0, "deciding": 2.0, "baselines": 115.0}, {}))
        about 6 min: training 3, comparing 1, baselines 2
        """
        unit = 60 if self.total >= 120 else 1
        shown = {name: value / unit for name, value in self.phases.items() if value >= 0.04 * self.total}
        digits = 0 if max(shown.values(), default=0) >= 2 else 1
        return f"about {seconds(self.total)}: " + ", ".join(f"{name} {value:.{digits}f}" for name, value in shown.items())


def forecast(planned: RunPlan, speed: Speed, *, baselines: bool) -> Forecast:
    """Add up what a run takes, with its baselines if it has them."""
    config, scenario, method = planned.config, planned.scenario, planned.method
    C, rounds = len(scenario.sites), planned.rounds
    workers = 1 + (min(config.engine.workers, C) - 1) * TWO_WORKERS
    n, m = sum(len(site.train) for site in scenario.sites), sum(len(site.val) for site in scenario.sites)
    tested = sum(len(split) for site in scenario.sites for split in site.tests.values())
    share = min(1.0, (config.run.participants or C) / C)
    rounds_of_training = rounds * share * planned.training.local_epochs * n * speed.train / workers
    testing = math.ceil(rounds / config.run.evaluate_every) * tested * speed.forward / workers
    tuning = (config.personalize.epochs * n * speed.train + (2 * m + tested) * speed.forward) / workers
    own_tuning = tuning if config.personalize.wanted else 0.0
    phases = {"training": rounds_of_training}
    per_client = {"train": rounds_of_training / (rounds * share * C), "personalize": tuning / C}
    per_client["test"] = tested * speed.forward / workers / C
    if isinstance(method, EMDCFL):
        comparing, asked = _comparing(method, planned.scenario, speed, workers)
        deciding, exams = _deciding(C, m / C, rounds, speed, workers) if method.by_benefit else (0.0, 1)
        phases |= {"comparing": comparing, "deciding": deciding}
        per_client |= {"project": comparing / (C * asked), "loss_moments": deciding / (C * exams)}
    phases |= {"fine-tuning": own_tuning, "testing": testing}
    if baselines:
        phases["baselines"] = 2 * (rounds_of_training + testing) + tuning  # one for all, fine-tuned; every site alone
    return Forecast(phases, per_client)


def _comparing(method: EMDCFL, scenario: Scenario, speed: Speed, workers: float) -> tuple[float, int]:
    """Seconds of embedding and transport, and how often each client is asked."""
    C, (n, m) = len(scenario.sites), _sizes(scenario, method)
    few = not method.all_pairs(C)
    rows, solve = (min(REPRESENTATIVES, C), BOUND * speed.solve) if few else (C, speed.solve)
    embedding = rows * (n + m) + rows * (C - 1) * m
    return embedding * speed.forward / workers + (rows * (C - 1) * solve + rows * speed.solve), 3 if few else 1


def _sizes(scenario: Scenario, method: EMDCFL) -> tuple[float, float]:
    """Typical numbers of samples on the two sides of a transport problem."""
    n, m = (statistics.median(len(split) for split in splits) for splits in zip(*((s.train, s.val) for s in scenario.sites), strict=True))
    return min(method.max_samples, n), min(method.max_samples, m)


def _deciding(C: int, m: float, rounds: int, speed: Speed, workers: float) -> tuple[float, int]:
    """Seconds of scoring the averages of nested groups, and the number of exams; later ones find groups divided already."""
    exams = rounds.bit_length()
    models = 1.5 * math.log2(max(2, min(C, SINGLE))) + 1
    return C * m * models * (1 + 0.5 * (exams - 1)) * speed.forward / workers, exams


def measure_speed(planned: RunPlan) -> Speed:
    """Measure on this machine: some seconds for networks that take long, a fraction of one for small ones."""
    batched = planned.config.engine.name == "batched"
    small = _small(planned.scenario, TOGETHER if batched else AT_ONCE)
    engine = replace(planned.config.engine, workers=1)
    run = replace(planned.config.run, participants=None)
    with replace(planned, scenario=small, config=replace(planned.config, engine=engine, run=run)).federation() as fed:
        fed.begin(1)
        names, start = list(fed.clients), fed.initial()
        one = Training(**{**planned.training.as_dict(), "local_epochs": 1})
        fed.training = one
        trained, took = _timed(lambda: fed.train(dict.fromkeys(names, start)))
        train = took / sum(len(s.train) for s in small.sites)
        models = torch.stack([start, start])
        _, took = _timed(lambda: fed.evaluate(names, models))
        forward = took / (2 * sum(len(s.val) for s in small.sites))
        if not isinstance(planned.method, EMDCFL):
            return Speed(train, forward, 0.0)
        local, few = trained.column("theta"), names[: 2 if not batched else 6]
        pairs = [(c, d) for c in few for d in few if c != d]
        method = replace(planned.method, distances="all")
        _, took = _timed(lambda: measure(method, fed, pairs, local))
        n, m = _sizes(small, method)
        embedding = (len(few) * (n + m) + len(pairs) * m) * forward
        larger = _sizes(planned.scenario, method)
        solve = max(took - embedding, 0.05 * took) / (len(pairs) + len(few)) * math.prod(larger) / (n * m)
    return Speed(train, forward, solve)


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """Do something and say how long it took: the median of some repetitions without the first, which prepares; once where it takes long.

    What loads modules is done again: that alone may take longer than a run's pairs.
    """
    took: list[float] = []
    while len(took) < REPEATS and sum(took) < ENOUGH:
        loaded, begun = len(sys.modules), time.perf_counter()
        result = work()
        if len(sys.modules) == loaded:
            took.append(time.perf_counter() - begun)
    return result, statistics.median(took[1:] or took)


def _small(scenario: Scenario, clients: int) -> Scenario:
    """Return a few clients of middling size, with the first samples of each split; who has no validation data scores training data."""
    order = sorted(scenario.sites, key=lambda site: len(site.train))
    begin = max(0, (len(order) - clients) // 2)
    sites = tuple(replace(s, train=_first(s.train), val=_first(s.val if len(s.val) else s.train)) for s in order[begin : begin + clients])
    return replace(scenario, sites=sites, groups=None, scored=None)


def _first(split: Split) -> Split:
    return Split(split.x[:MAX_SAMPLES], split.y[:MAX_SAMPLES])


def parse_budget(text: str) -> float:
    """Read a duration.

    Examples
    --------
    >>> parse_budget("10m"), parse_budget("1.5h"), parse_budget("90s")
    (600.0, 5400.0, 90.0)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h)", text.strip())
    if found is None or float(found[1]) <= 0:
        raise ConfigError(f"--budget: expected a duration such as 10m, 90s or 2h, got {text!r}")
    return float(found[1]) * {"s": 1, "m": 60, "min": 60, "h": 3600}[found[2]]


def within(planned: RunPlan, speed: Speed, budget: float, *, baselines: bool) -> Config:
    """Return the config with as many rounds and epochs, up to those it has, as the budget allows: rounds go last.

    Fine-tuning is shortened in the same proportion as local epochs.
    """
    config, rounds, epochs = planned.config, planned.rounds, planned.training.local_epochs
    shorter = [*((rounds, fewer) for fewer in range(epochs, 0, -1)), *((fewer, 1) for fewer in range(rounds - 1, 0, -1))]
    for T, E in shorter:
        tuning = max(1, round(config.personalize.epochs * E / epochs))
        tried = replace(
            config,
            run=replace(config.run, rounds=T),
            training=replace(config.training, local_epochs=E),
            personalize=replace(config.personalize, epochs=tuning) if config.personalize.wanted else config.personalize,
        )
        found = forecast(replace(planned, config=tried, training=replace(planned.training, local_epochs=E)), speed, baselines=baselines)
        if found.total <= budget:
            return tried
    hint = "; --no-baselines saves more than half" if baselines else ""
    raise ConfigError(f"--budget: expected at least {seconds(found.total)} for one round of one epoch, got {seconds(budget)}{hint}")
