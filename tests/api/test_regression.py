"""Numbers instead of classes: the same run with the squared error, R² and RMSE."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import r2_score, root_mean_squared_error
from tests.tiny import Stop, StopAfter

import emdcfl
from emdcfl.core.errors import ConfigError, DataError
from emdcfl.core.learning import objective
from emdcfl.core.learning.objective import r_squared, r_squared_error
from emdcfl.data.own import from_arrays
from emdcfl.methods import METHODS
from emdcfl.runs.config import Choice, Config
from emdcfl.runs.plan import IN_MEMORY, NEED_CLASSES, plan
from emdcfl.runs.scoring import site_scores
from emdcfl.runs.verdict.advice import advice
from emdcfl.runs.verdict.baselines import run_baselines
from emdcfl.runs.verdict.chance import guessing
from emdcfl.runs.verdict.findings import how_sure
from emdcfl.runs.verdict.intervals import SiteScores, these_sites
from emdcfl.sklearn import FederatedRegressor
from emdcfl.studies.results import checked

SIGNS = {"a": 1, "b": 1, "c": -1, "d": -1}
QUICK: dict[str, Any] = {"task": "regression", "rounds": 1, "local_epochs": 2}


def sites(n: int = 60) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Two groups in which a feature has the opposite effect."""
    rng, found = np.random.default_rng(0), {}
    for name, sign in SIGNS.items():
        x = rng.normal(size=(n, 4))
        found[name] = x, 100 + 20 * sign * x[:, 0] + rng.normal(size=n)
    return found


def test_groups_are_found_and_scores_are_those_of_the_test_rows(tmp_path: Path) -> None:
    x = sites()["a"][0]
    data = {name: {"train": (x[:36], y[:36]), "val": (x[36:48], y[36:48]), "test": (x[48:], y[48:])} for name, (x, y) in sites().items()}
    result = emdcfl.fit(data, task="regression", rounds=3, personalize="off")
    assert result.clusters == {"a": 0, "b": 0, "c": 1, "d": 1}
    numbers = result.regression
    assert numbers.r2 > 0.9 and result.accuracy.mean is None
    for name, (r2, rmse) in numbers.clients.items():
        rows, truth = data[name]["test"]
        assert r2 == pytest.approx(r2_score(truth, result.predict(name, rows)), abs=1e-4)
        assert rmse == pytest.approx(root_mean_squared_error(truth, result.predict(name, rows)), rel=1e-4)
    again = emdcfl.load(result.save(tmp_path / "run"))
    assert again.regression == numbers and again.predict("a", x[:5]) == result.predict("a", x[:5])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert summary["r2"]["mean"] == numbers.r2 and summary["r2"]["rmse"]["mean"] == numbers.rmse and "accuracy" not in summary
    assert numbers.low < numbers.r2 < numbers.high
    with pytest.raises(DataError, match="no class probabilities"):
        result.predict_proba("a", x)


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(name for name, cls in METHODS.items() if cls.__module__.startswith("emdcfl.")))
def test_methods_run_or_say_that_they_need_classes(method: str) -> None:
    if method in NEED_CLASSES:
        with pytest.raises(ConfigError, match="needs no classes"):
            emdcfl.fit(sites(), method=method, **QUICK)
        return
    found = emdcfl.fit(sites(), method=method, groups=["x", "x", "y", "y"], **QUICK).regression
    assert found.r2 is not None and np.isfinite(found.rmse) and set(found.clients) == set(SIGNS)


def test_a_killed_run_goes_on_to_the_same_models(tmp_path: Path) -> None:
    options = {**QUICK, "rounds": 2}
    with pytest.raises(Stop):
        emdcfl.fit(sites(), "mlp", "fedavg", out=tmp_path / "run", observer=StopAfter(1), **options)
    resumed = emdcfl.fit(sites(), "mlp", "fedavg", out=tmp_path / "run", resume=True, **options)
    whole = emdcfl.fit(sites(), "mlp", "fedavg", **options)
    assert np.array_equal(resumed.serving.models.numpy(), whole.serving.models.numpy()) and resumed.regression == whole.regression


@pytest.mark.parametrize(
    ("clients", "options", "said"),
    [
        (sites(), {"task": "regresion"}, "got 'regresion'"),
        (sites(), {"task": None}, "--task regression to predict numbers"),
        (sites(), {"settings": {"engine.name": "cuda"}}, "got cuda; leave it out"),
        (sites(), {"settings": {"engine.name": "flower"}}, "run it on one machine"),
        (sites(), {"settings": {"method.cost": "label-aware"}}, "label-aware"),
        ("rotated-digits", {}, "a scenario has its own"),
        ({"a": (np.zeros((20, 2)), np.full(20, np.nan)), "b": (np.zeros((20, 2)), np.zeros(20))}, {}, "one finite number"),
    ],
)
def test_what_does_not_fit_is_named(clients: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises((ConfigError, DataError), match=said):
        emdcfl.fit(clients, **{**QUICK, **options})


@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_costs_with_a_long_tail_do_not_make_training_diverge(engine: str) -> None:
    rng, found = np.random.default_rng(0), {}
    for name in SIGNS:
        x = np.exp(2 * rng.normal(size=(1000, 20)))
        found[name] = x, x.sum(1)
    assert emdcfl.fit(found, settings={"engine.name": engine}, task="regression", rounds=1).regression.r2 > 0.5


@pytest.mark.parametrize("scale", [1.0, 40.0])
def test_engines_that_batch_clients_agree(monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    """Also where every gradient is shortened."""
    monkeypatch.setattr(objective, "MAX_GRADIENT_NORM", objective.MAX_GRADIENT_NORM / scale)
    found = [emdcfl.fit(sites(), settings={"engine.name": engine}, **QUICK) for engine in ("sequential", "batched")]
    assert np.allclose(*(result.serving.models.numpy() for result in found), atol=1e-5) and found[0].clusters == found[1].clusters


def test_auto_is_an_engine_that_can_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = from_arrays(sites(), task="regression")
    monkeypatch.setattr("emdcfl.runs.plan.pick_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr("emdcfl.engines.pick_device", lambda _: torch.device("cuda"))
    config = Config(scenario=Choice(IN_MEMORY, {"fingerprint": "x"}))
    assert plan(config, scenario).config.engine.name == "sequential"
    assert plan(config, from_arrays({name: (x, (y > 100).astype(int)) for name, (x, y) in sites().items()})).config.engine.name == "cuda"


def test_the_interval_holds_for_other_test_rows() -> None:
    """Models are fixed and test rows are drawn anew: the interval of the mean R² should hold its true value in 95 % of draws."""
    rng, held, mse = np.random.default_rng(0), 0, (0.3, 0.6)
    for _ in range(400):
        values, errors = [], []
        for noise in mse:
            y = torch.from_numpy(rng.normal(size=40))
            squared = torch.from_numpy(noise * rng.normal(size=40) ** 2)
            values.append(r_squared(squared, y))
            errors.append(r_squared_error(squared, y))
        found = these_sites(SiteScores(tuple(values), (40, 40), tuple(errors)))
        held += found.low <= 1 - sum(mse) / 2 <= found.high
    assert held > 360  # 380 are expected, with a standard deviation of 4


def test_one_site_whose_test_numbers_are_alike_does_not_make_models_useless() -> None:
    """Its R² is far below 0 although its errors are as small as those of the others."""
    rows = [
        {"client": f"s{i}", "r2": {"test": r2}, "r2_error": {"test": 0.1}, "test_loss": {"test": 0.2}, "test_samples": {"test": 5}}
        for i, r2 in enumerate([0.8] * 5 + [-90.0])
    ]
    score = site_scores(rows, "test")
    run = {"clients": [row["client"] for row in rows], "r2": {**score, "variants": {"test": score}}}
    run["r2"]["samples"] = 30
    assert score["low"] < 0 and guessing(run) is None
    assert "over all sites together" in str(how_sure(run))


def test_where_numbers_drift_guessing_is_the_mean_of_what_was_known(tmp_path: Path) -> None:
    """Nobody knows the mean of tomorrow's numbers: a model that follows half of the way up is of use."""
    rng, found = np.random.default_rng(0), {}
    for name in SIGNS:
        y = 10.0 * np.repeat([0.0, 0.0, 1.0], 40) + rng.normal(size=120)
        x = (0.8 * y + rng.normal(size=120))[:, None]
        parts = {"train": slice(0, 60), "val": slice(60, 80), "test": slice(80, 120)}
        found[name] = {part: (x[rows], y[rows]) for part, rows in parts.items()}
    result = emdcfl.fit(found, task="regression", rounds=1, out=tmp_path / "run")
    baselines = {name: one.summary for name, one in run_baselines(result).items()}
    assert all(r2 < -10 for r2 in baselines["linear"]["training_mean"]["sites"])
    told = advice(result.summary, baselines)
    assert guessing(result.summary) is not None and told is not None and told.choice != "none"


def test_methods_are_compared_by_r_squared(tmp_path: Path) -> None:
    found = emdcfl.compare(sites(), ["fedavg", "local"], seeds=2, task="regression", rounds=1, local_epochs=2, out=tmp_path / "c")
    assert found.methods == ["FedAvg", "FedAvg + fine-tuning", "Local"] and {"r2", "rmse", "low"} <= set(found.frame.columns)
    page = (tmp_path / "c" / "report.html").read_text(encoding="utf-8")
    assert "Avg R²" in page and "Accuracy" not in page
    assert "rmse" in (tmp_path / "c" / "table.csv").read_text(encoding="utf-8")
    list(checked(found.rows, "results"))


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_frame_with_gaps_and_categories(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    x = pd.DataFrame({"size": rng.normal(100, 20, 240), "kind": rng.choice(["flat", "house"], 240), "town": np.repeat(list("abcd"), 60)})
    x["price"] = 3 * x["size"] + 50 * (x["kind"] == "house") + rng.normal(size=240)
    x.loc[5, "size"] = None
    x["empty"] = np.nan
    result = emdcfl.fit(x, label="price", site="town", task="regression", rounds=3, out=tmp_path / "run")
    assert result.regression.r2 > 0.8
    new = x[x["town"] == "a"].drop(columns="town")
    assert np.corrcoef(result.predict("a", new), new["price"])[0, 1] > 0.9
    assert result.place(new, name="new").metric.label == "R²"


def test_the_estimator_places_unseen_sites() -> None:
    data = sites()
    x, y = (np.concatenate([data[name][i] for name in data]) for i in (0, 1))
    site = np.repeat(list(data), 60)
    model = FederatedRegressor(rounds=3).fit(x, y, groups=site)
    assert model.clusters_ == {"a": 0, "b": 0, "c": 1, "d": 1} and model.score(x, y, groups=site) > 0.9
    assert model.predict(x[:3], groups=["new"] * 3).shape == (3,)
