"""Scores for unbalanced classes, and a logistic regression beside the networks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, roc_auc_score

from emdcfl.core.learning.balance import balance, possible
from emdcfl.data.own import from_arrays
from emdcfl.report.load_run import read_run
from emdcfl.report.page import render
from emdcfl.runs.config import Choice, Config, override
from emdcfl.runs.plan import IN_MEMORY
from emdcfl.runs.result import load
from emdcfl.runs.runner import run
from emdcfl.runs.scoring import site_scores
from emdcfl.runs.verdict.advice import LOGISTIC, advice
from emdcfl.runs.verdict.baselines import run_baselines
from emdcfl.runs.verdict.findings import sentences, unbalanced


@pytest.mark.parametrize("classes", [2, 5])
def test_scores_are_those_of_scikit_learn(classes: int) -> None:
    rng = np.random.default_rng(classes)
    y = rng.choice(classes, 300, p=[0.6, *[0.4 / (classes - 1)] * (classes - 1)])
    p = rng.dirichlet(np.ones(classes), 300).round(1) + 0.3 * np.eye(classes)[y]  # rounded: ties count half
    p /= p.sum(1, keepdims=True)
    found = balance(torch.from_numpy(p), torch.from_numpy(y))
    assert found["balanced"] == pytest.approx(balanced_accuracy_score(y, p.argmax(1)))
    assert found["auc"] == pytest.approx(roc_auc_score(y, p[:, 1] if classes == 2 else p, multi_class="ovr"))
    assert possible(found) and found["auc_n"] <= 300
    assert balance(torch.ones(3, 2), torch.zeros(3, dtype=torch.int64)) == {}


def test_the_interval_of_an_auc_covers_the_truth() -> None:
    rng, covered, times = np.random.default_rng(0), 0, 200
    truth = 0.5 * (1 + torch.erf(torch.tensor(1.5 / 2))).item()  # P(a > b) of two normals, 1.5 apart
    for _ in range(times):
        y = np.repeat([0, 1], [80, 20])
        score = 1 / (1 + np.exp(-(rng.standard_normal(100) + 1.5 * y)))
        scores = balance(torch.from_numpy(np.stack([1 - score, score], 1)), torch.from_numpy(y))
        row: dict[str, Any] = {"client": "a", "accuracy": {"test": 0.8}, "test_samples": {"test": 100}, "unbalanced": {"test": scores}}
        found = site_scores([row], "test")["auc"]
        covered += found["low"] <= truth <= found["high"]
    assert covered >= 0.9 * times


def sites(share: float) -> Any:
    rng = np.random.default_rng(0)

    def site() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        y = (rng.random(200) < share).astype(int)
        return (rng.standard_normal((200, 4)) + y[:, None]).astype(np.float32), y

    return from_arrays({name: site() for name in "abc"})


def test_a_run_on_unbalanced_tables_says_both_and_compares_with_a_regression(tmp_path: Path) -> None:
    config = override(Config(scenario=Choice(IN_MEMORY)), {"run.rounds": 1, "personalize.mode": "off"})
    result = run(config, tmp_path / "run", scenario=sites(0.1))
    others = {name: other.summary for name, other in run_baselines(result).items()}
    for summary in (result.summary, *others.values()):
        score = summary["accuracy"]
        assert score["balanced"]["sites"] == 3 and score["balanced"]["low"] < score["balanced"]["mean"] < score["mean"]
        assert score["auc"]["low"] <= score["auc"]["mean"] <= score["auc"]["high"]
    load(tmp_path / "run")  # rows with scores of unbalanced classes are as a run writes them
    said = unbalanced(result.summary)
    assert ("Classes", f"{said[:1].upper()}{said[1:]}.") in sentences(result.summary, None, others)
    assert list(others) == ["fedavg", "fedavg+ft", "local", LOGISTIC]
    frequent, tests = others[LOGISTIC]["most_frequent"], [site.tests["test"].y for site in sites(0.1).sites]
    assert frequent == {"sites": pytest.approx([float((y == 0).double().mean()) for y in tests]), "tested": [len(y) for y in tests]}
    assert LOGISTIC in advice(result.summary, others).gains
    read = read_run(tmp_path / "run").baselines[LOGISTIC]
    assert [read.score_at(c, "test") for c in "abc"] == others[LOGISTIC]["accuracy"]["variants"]["test"]["sites"]
    page = render(tmp_path / "run")
    assert "logistic regression" in page and "AUC" in page
    even = run(config, scenario=sites(0.5))
    assert "balanced" not in even.summary["accuracy"] and unbalanced(even.summary) is None
