"""How long a run will take: arithmetic on a measured speed, and what a budget leaves of it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.tiny import tiny

from emdcfl.core.errors import ConfigError, StoreError
from emdcfl.runs.config import Choice, Config, PersonalizeConfig, RunConfig, TrainingConfig
from emdcfl.runs.loop import NoOpObserver
from emdcfl.runs.plan import IN_MEMORY, RunPlan, plan
from emdcfl.runs.runner import run
from emdcfl.runs.verdict import baselines
from emdcfl.runs.watching import forecast as forecasts
from emdcfl.runs.watching.forecast import Speed, forecast, measure_speed, within

pytestmark = pytest.mark.usefixtures("sketches")
SPEED = Speed(train=0.01, forward=0.002, solve=0.001)


def planned(rounds: int = 4, epochs: int = 6, **options: Any) -> RunPlan:
    config = Config(
        run=RunConfig(rounds=rounds),
        scenario=Choice(IN_MEMORY, {"fingerprint": "tiny"}),
        method=Choice("emdcfl", {"grouping": "benefit", **options}),
        training=TrainingConfig(local_epochs=epochs, batch_size=16, lr=0.05),
        personalize=PersonalizeConfig("if-it-pays", epochs=6),
    )
    return plan(config, tiny(groups=2, clients_per_group=2))


def test_passes_over_samples_are_counted_and_baselines_too() -> None:
    short, long = planned(rounds=2), planned(rounds=4)
    n = sum(len(site.train) for site in short.scenario.sites)
    alone = forecast(short, SPEED, baselines=False)
    assert alone.phases["training"] == pytest.approx(2 * 6 * n * SPEED.train)
    assert forecast(long, SPEED, baselines=False).phases["training"] == pytest.approx(2 * alone.phases["training"])
    both = forecast(short, SPEED, baselines=True)
    once = alone.phases["training"] + alone.phases["testing"]
    assert both.total - alone.total == pytest.approx(2 * once + alone.phases["fine-tuning"])
    assert alone.replies["train"] * 2 * len(short.scenario.sites) == pytest.approx(alone.phases["training"])


def test_a_budget_shortens_epochs_first_then_rounds_and_says_when_nothing_fits() -> None:
    whole = planned()
    total = forecast(whole, SPEED, baselines=True).total
    assert within(whole, SPEED, 2 * total, baselines=True) == whole.config
    less = within(whole, SPEED, 0.5 * total, baselines=True)
    assert less.run.rounds == 4 and less.training.local_epochs is not None and 1 <= less.training.local_epochs < 6
    assert less.personalize.epochs == less.training.local_epochs
    chosen = replace(whole, config=less, training=replace(whole.training, local_epochs=less.training.local_epochs))
    assert 0.2 * total < forecast(chosen, SPEED, baselines=True).total <= 0.5 * total
    least = within(whole, SPEED, 0.12 * total, baselines=True)
    assert least.training.local_epochs == 1 and least.run.rounds is not None and least.run.rounds < 4
    with pytest.raises(ConfigError, match="one round of one epoch"):
        within(whole, SPEED, 0.001 * total, baselines=True)


def test_the_speed_is_measured_without_touching_the_run() -> None:
    own = planned(rounds=1, epochs=1)
    without = run(own).serving.models
    found = measure_speed(own)
    assert min(found.train, found.forward, found.solve) > 0
    assert torch.equal(run(own).serving.models, without)


def test_a_site_without_validation_data_is_measured_too() -> None:
    found = measure_speed(plan(Config(method=Choice("fedavg")), tiny(val=(70, 0))))
    assert min(found.train, found.forward) > 0


def test_neither_preparations_nor_an_interruption_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now, durations = [0.0], iter([0.6, 0.1, 0.1, 0.3, 5.0])

    def work() -> None:
        now[0] += next(durations)

    monkeypatch.setattr(forecasts, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    assert forecasts._timed(work)[1] == pytest.approx(0.1)
    assert forecasts._timed(work)[1] == pytest.approx(5.0)  # long enough at once


def test_loading_modules_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now, loaded = [0.0], [False]

    def work() -> None:
        now[0] += 0.1 if loaded[0] else 5.0
        monkeypatch.setitem(sys.modules, "emdcfl_a_module_of_this_test", sys)
        loaded[0] = True

    monkeypatch.setattr(forecasts, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    assert forecasts._timed(work)[1] == pytest.approx(0.1)


def test_models_of_baselines_are_not_kept_and_a_finished_one_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = planned(rounds=1, epochs=1)
    result = run(own, tmp_path / "run")
    said: list[str] = []
    found = baselines.run_baselines(result, say=said.append)
    assert said == ["for comparison: one model for all (fedavg)", "for comparison: every site alone (local)"]
    assert not list((tmp_path / "run" / "baselines").rglob("*.safetensors"))
    monkeypatch.setattr(baselines, "run", None)
    again = baselines.run_baselines(result, say=said.append)
    assert len(said) == 2
    assert {name: other.summary["accuracy"] for name, other in again.items()} == {n: o.summary["accuracy"] for n, o in found.items()}
    assert [row["accuracy"] for row in again["local"].history] == [row["accuracy"] for row in found["local"].history]
    with pytest.raises(StoreError, match="has no models"):
        again["local"].models  # not those of the groups


def test_models_of_baselines_are_kept_where_asked_also_if_they_were_not_before(tmp_path: Path) -> None:
    result = run(planned(rounds=1, epochs=1), tmp_path / "run")
    baselines.run_baselines(result)
    baselines.run_baselines(result, keep=True)
    assert len(list((tmp_path / "run" / "baselines" / "local" / "models").glob("*.safetensors"))) == 4


def test_nobody_else_may_resume_a_run_while_its_baselines_train(tmp_path: Path) -> None:
    own = planned(rounds=1, epochs=1)
    result = run(own, tmp_path / "run")

    refused: list[str] = []

    class Another(NoOpObserver):
        def begin(self, *_: object) -> None:
            with pytest.raises(StoreError, match="in use by another emdcfl run") as caught:
                run(own, tmp_path / "run", resume=True)
            refused.append(str(caught.value))

    baselines.run_baselines(result, observer=Another())
    assert refused
    run(own, tmp_path / "run", resume=True)  # and then they may
