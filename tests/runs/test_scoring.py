from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.tiny import federation, same_bits, score

from emdcfl.methods.base import Serving
from emdcfl.runs.scoring import agreement, better_rounds, by_round, model_names, site_scores
from emdcfl.runs.served import served_to

MODELS = torch.arange(6.0).reshape(3, 2)
CLIENTS = ["a", "b", "c"]


def row(client: str, value: float | None, n: int = 10) -> dict[str, object]:
    tested = {"accuracy": None, "test_samples": None} if value is None else {"accuracy": {"test": value}, "test_samples": {"test": n}}
    return {"client": client, **tested}


def test_one_hot_rows_serve_the_model_itself() -> None:
    serving = Serving(MODELS, torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]), clusters=torch.tensor([0, 1]))
    models, weights = served_to(serving, CLIENTS[:2])["a"].values()
    assert same_bits(models, MODELS[1:2]) and weights.tolist() == [1.0]


def test_mixtures_are_of_parameters_or_of_predictions() -> None:
    weights = torch.tensor([[0.25, 0.75, 0.0]])
    models, one = served_to(Serving(MODELS, weights), ["a"])["a"].values()
    assert models.tolist() == [[1.5, 2.5]] and one.tolist() == [1.0]
    models, pi = served_to(Serving(MODELS, 2 * weights, mix="predictions"), ["a"])["a"].values()
    assert same_bits(models, MODELS[:2]) and pi.tolist() == [0.25, 0.75]


def test_a_mixture_of_all_models_is_no_copy_of_them() -> None:
    serving = Serving(MODELS, torch.full((2, 3), 1 / 3), mix="predictions")
    assert {one["models"].data_ptr() for one in served_to(serving, CLIENTS[:2]).values()} == {MODELS.data_ptr()}


def test_accuracy_is_an_unweighted_mean_over_those_who_count() -> None:
    rows = [row("a", 0.5, 10), row("b", 1.0, 1000), row("c", None), row("d", 0.0, 0)]
    found = site_scores(rows, "test")
    assert (found["mean"], found["worst"]) == (0.75, 0.5)
    assert found["sites"] == [0.5, 1.0, None, None] and found["tested"] == [10, 1000, 0, 0]
    assert 0.5 < found["low"] < 0.75 < found["high"] < 1.0 and found["new_sites"] == {"low": 0.0, "high": 1.0}
    one = site_scores(rows, "test", ["b"])
    assert (one["mean"], one["worst"], one["new_sites"], one["tested"]) == (1.0, 1.0, None, [0, 1000, 0, 0])
    for nobody in (site_scores(rows, "test", []), site_scores([], "test")):
        assert {nobody[key] for key in ("mean", "worst", "low", "high", "new_sites")} == {None}


@pytest.mark.parametrize(
    ("means", "every", "n", "better"),
    [
        ((0.58, 0.78, 0.78, 0.89, 0.92), 1, 250, (10, 0.03)),
        ((0.58, 0.78, 0.78, 0.89, 0.92), 5, 250, None),  # by less in each round
        ((0.44, 0.87), 1, 360, (4, 0.43)),
        ((0.44, 0.87), 5, 360, (20, 0.086)),
        ((0.6, 0.8, 0.95, 0.96, 0.96), 1, 250, None),  # flat at the end
        ((0.58, 0.78, 0.89, 0.92, 0.89), 1, 250, None),  # a fall by chance
        ((0.58, 0.92, 0.85, 0.83, 0.82), 1, 250, (2, -0.1)),
        ((0.58, 0.92, 0.9, 0.9, 0.905), 1, 5000, None),  # nothing to speak of
        ((0.9, 0.9, 0.9, 0.9, 0.93), 1, 30, None),  # one sample
        ((0.5,), 1, 250, None),
    ],
)
def test_other_rounds_are_better_where_the_score_still_rises_or_has_fallen(
    means: tuple[float, ...], every: int, n: int, better: tuple[int, float] | None
) -> None:
    rows = [
        {"round": every * t, "client": c, "accuracy": {"test": mean}, "test_samples": {"test": n // 2}}
        for t, mean in enumerate(means, start=1)
        for c in "ab"
    ]
    summary = {"clients": ["a", "b"], "scored": None, "accuracy": {"variants": {"test": {}}}}
    assert better_rounds(rows, summary) == (None if better is None else pytest.approx(better))
    uncounted = [{**row, "test_samples": None} for row in rows]  # of a foreign run: too little to say anything by
    assert better_rounds(uncounted, summary) is None


def test_the_best_of_many_rounds_that_differ_by_chance_alone_was_no_better() -> None:
    draws, summary = np.random.default_rng(0), {"scored": None, "accuracy": {"variants": {"test": {}}}}
    right = draws.binomial(50, 0.8, (40, 30, 20)) / 50  # runs, rounds, sites
    runs = [[{"round": t, **row(str(c), right[i, t, c], 50)} for t in range(30) for c in range(20)] for i in range(40)]
    assert sum(better_rounds(rows, summary) is not None for rows in runs) <= 2


def test_the_history_has_a_mean_of_every_test() -> None:
    def tested(index: int, clean: float, trigger: float) -> list[dict[str, object]]:
        sizes = {"clean": 10, "trigger": 10}
        return [
            {"round": index, "client": c, "cluster": 0, "accuracy": {"clean": clean + d, "trigger": trigger}, "test_samples": sizes}
            for c, d in (("a", 0.1), ("b", -0.1))
        ]

    summary = {"clients": ["a", "b"], "groups": None, "clusters": [0, 0], "k": 1, "scored": None}
    rows = [*tested(1, 0.5, 0.4), *tested(2, 0.8, 0.2)]
    several = by_round(rows, {**summary, "accuracy": {"variants": {"clean": {}, "trigger": {}}}})
    assert [(h["round"], h["mean"], h["variants"]) for h in several] == [
        (1, 0.5, {"clean": 0.5, "trigger": 0.4}),
        (2, pytest.approx(0.8), {"clean": pytest.approx(0.8), "trigger": 0.2}),
    ]
    one = by_round(rows, {**summary, "accuracy": {"variants": {"clean": {}}}})
    assert [set(h) for h in one] == [{"round", "k", "ari", "mean"}] * 2  # one test is the mean itself


def test_agreement_needs_clusters_and_truth() -> None:
    assert agreement([0, 0, 1], CLIENTS, {"a": "x", "b": "x", "c": "y"}) == 1.0
    assert agreement(torch.tensor([0, 0, 1]), CLIENTS, {"a": "x", "b": "y", "c": "y"}) < 1.0
    assert agreement([0, 0, 1], CLIENTS, None) is None
    assert agreement(None, CLIENTS, {"a": "x", "b": "x", "c": "y"}) is None


def test_models_are_named_after_whom_they_serve() -> None:
    clusters = torch.tensor([1, 0, 1])
    weights = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    assert model_names(Serving(MODELS, weights, clusters=clusters), CLIENTS) == ["cluster-1", "unused-1", "cluster-0"]
    assert model_names(Serving(MODELS, torch.eye(3)), CLIENTS) == ["client-a", "client-b", "client-c"]
    assert model_names(Serving(MODELS, torch.eye(3), mix="predictions"), CLIENTS) == ["component-0", "component-1", "component-2"]
    assert model_names(Serving(MODELS[:1], torch.ones(3, 1)), CLIENTS) == ["cluster-0"]


def test_every_client_gets_a_row() -> None:
    fed = federation()
    fed.begin(5)
    serving = Serving(fed.initial()[None], torch.ones(4, 1), clusters=torch.tensor([0, 0, 0, 0]))
    rows = score(fed, serving, {"site-1": 0.5})
    assert [r["client"] for r in rows] == list(fed.clients)
    assert {r["round"] for r in rows} == {5} and {r["cluster"] for r in rows} == {0}
    assert [r["train_loss"] for r in rows] == [None, 0.5, None, None]
    assert all(r["test_samples"] == {"test": 40} and 0 <= r["accuracy"]["test"] <= 1 for r in rows)
    assert rows[0]["test_loss"]["test"] == pytest.approx(1.4, abs=0.5)
