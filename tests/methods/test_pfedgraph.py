"""pFedGraph: the closed form of its weights, averages from one snapshot whatever the order of clients, and the public code's slips."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from tests.methods.toy import BRIEF, CLASSES, FEATURES, federation, history, play, run, toy
from torch import nn

from emdcfl.core.tasks import Training
from emdcfl.data.types import Scenario
from emdcfl.engines.local import SequentialFederation
from emdcfl.methods import make
from emdcfl.methods.shared.graph import PersonalModels, Trained, mix_rows, project_simplex
from emdcfl.models.recipe import ModelRecipe

UNEQUAL = [96, 40, 64, 96, 96, 20, 96, 96, 33]


def normalised_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))


def test_the_own_codes_score_is_that_of_the_model_that_validated_best() -> None:
    fed, _, state, serving = run("pfedgraph", toy(), rounds=2, preset="original", training=BRIEF)
    averaged = run("pfedgraph", toy(), rounds=2, training=BRIEF)[2]
    assert torch.equal(state.models, averaged.models)  # what is learned stays the same
    for model, accuracy, client in zip(serving.models, state.best_accuracy, fed.clients, strict=True):
        assert fed.evaluate([client], model[None])[client]["accuracy"] == accuracy
    assert not torch.equal(serving.models, state.models)


def with_batchnorm(scenario: Scenario) -> Scenario:
    return replace(scenario, model=ModelRecipe(f"{__name__}:normalised_mlp"))


def by_name(state: PersonalModels) -> dict[str, torch.Tensor]:
    return dict(zip(state.clients, state.models, strict=True))


def graph(method: Any, fed: SequentialFederation, state: PersonalModels | None = None, round: int = 1) -> torch.Tensor:
    """The weights of a round."""
    state = method.init(fed, fed.begin(0)) if state is None else state
    found: torch.Tensor = method.weights(fed.layout, state, method.train(fed, state, fed.begin(round)))
    return found


def largest_difference(a: PersonalModels, b: PersonalModels) -> float:
    one, other = by_name(a), by_name(b)
    return max(float((one[c] - other[c]).abs().max()) for c in one)


def permuted(scenario: Scenario, seed: int) -> Scenario:
    order = np.random.default_rng(seed).permutation(len(scenario.sites))
    return replace(scenario, sites=tuple(scenario.sites[i] for i in order))


@pytest.mark.parametrize("seed", range(5))
def test_weights_solve_the_quadratic_program(seed: int) -> None:
    rng = np.random.default_rng(seed)
    s, p, alpha = rng.uniform(-1, 1, 6), rng.dirichlet(np.ones(6)), 0.8
    x = project_simplex(p + s / (2 * alpha))
    solved = minimize(
        lambda v: alpha * v @ v + (-s - 2 * alpha * p) @ v,
        p,
        jac=lambda v: 2 * alpha * v - s - 2 * alpha * p,
        bounds=[(0, 1)] * 6,
        constraints={"type": "eq", "fun": lambda v: v.sum() - 1, "jac": np.ones_like},
        method="SLSQP",
        options={"ftol": 1e-14},
    )
    np.testing.assert_allclose(x, solved.x, atol=1e-6)


def test_orthogonal_updates_of_forty_clients_keep_two_thirds_for_oneself() -> None:
    x = project_simplex(np.full((40, 40), 1 / 40) + np.eye(40) / 1.6)
    assert np.diag(x) == pytest.approx(0.634, abs=0.001)


def test_mixing_takes_all_rows_from_one_snapshot_across_column_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emdcfl.core.params.CHUNK", 7)
    monkeypatch.setattr("emdcfl.core.params.WIDE", 3)
    theta, x = torch.randn(6, 50), torch.rand(4, 4, dtype=torch.float64).softmax(1)
    rows = [0, 2, 3, 5]
    expected = theta.clone()
    expected[rows] = (x @ theta[rows].double()).float()
    mix_rows(theta, rows, x, "snapshot")
    assert torch.equal(theta, expected)


def test_mixing_in_place_reads_what_was_just_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emdcfl.core.params.CHUNK", 7)
    monkeypatch.setattr("emdcfl.core.params.WIDE", 3)
    theta, x = torch.randn(3, 50), torch.rand(3, 3, dtype=torch.float64).softmax(1)
    expected = theta.double().clone()
    for i in range(3):
        expected[i] = sum(x[i, j] * expected[j] for j in range(3))
    mix_rows(theta, [0, 1, 2], x, "in-place")
    torch.testing.assert_close(theta, expected.float())


def test_a_round_follows_the_equations() -> None:
    fed = federation(toy(n=UNEQUAL), training=BRIEF)
    method = make("pfedgraph", snap=None)
    state, _ = play(fed, method, 1)
    new = method.step(fed, state, fed.begin(2))
    replies = fed.train(by_name(state), own={c: {"cosine": {"anchor": theta, "mu": 0.01}} for c, theta in by_name(state).items()})
    local = replies.stack("theta").double()
    updates = (local - state.theta0.double())[:, fed.layout.trainable].numpy()
    unit = updates / np.linalg.norm(updates, axis=1, keepdims=True)
    x = project_simplex(np.array(UNEQUAL) / sum(UNEQUAL) + unit @ unit.T / 1.6)
    np.testing.assert_allclose(graph(method, fed, state, 2).numpy(), x, atol=1e-9)
    torch.testing.assert_close(new.models, (torch.from_numpy(x) @ local).float())


def test_identical_updates_give_fedavg() -> None:
    scenario = toy(groups=1, per_group=4)
    same = tuple(replace(s, train=scenario.sites[0].train) for s in scenario.sites)
    fed = federation(replace(scenario, sites=same), training=replace(BRIEF, batch_size=96))
    state, _ = play(fed, make("pfedgraph"), 1)
    torch.testing.assert_close(graph(make("pfedgraph"), fed), torch.full((4, 4), 0.25, dtype=torch.float64))
    theta = play(fed, make("fedavg"), 1)[0].theta
    torch.testing.assert_close(state.models, theta.expand(4, -1), rtol=1e-5, atol=1e-7)


def test_similar_clients_snap_to_the_data_shares() -> None:
    fed = federation(toy(groups=1, per_group=3, n=[96, 48, 48]))
    method = make("pfedgraph", snap=-1.0)
    state, serving = play(fed, method, 2)
    torch.testing.assert_close(graph(method, fed, state, 3), torch.tensor([[0.5, 0.25, 0.25]] * 3, dtype=torch.float64))
    assert torch.equal(serving.weights, torch.eye(3))
    torch.testing.assert_close(serving.models, serving.models[:1].expand(3, -1))


@pytest.mark.parametrize(
    ("name", "options"), [("pfedgraph", {}), ("pfedgraph", {"since": "round"}), ("pfedgraph", {"snap": None}), ("fedsac", {})], ids=str
)
def test_the_order_of_clients_does_not_matter(name: str, options: dict[str, Any]) -> None:
    scenario = toy(n=UNEQUAL)
    a = run(name, scenario, rounds=3, training=BRIEF, **options)[2]
    b = run(name, permuted(scenario, 1), rounds=3, training=BRIEF, **options)[2]
    assert a.clients != b.clients and largest_difference(a, b) < 1e-5


def test_reference_depends_on_the_order_of_clients() -> None:
    scenario = toy(n=UNEQUAL)
    a = run("pfedgraph", scenario, rounds=3, training=BRIEF, preset="reference")[2]
    b = run("pfedgraph", permuted(scenario, 1), rounds=3, training=BRIEF, preset="reference")[2]
    assert largest_difference(a, b) > 1e-3


@pytest.mark.slow
def test_reference_counters_flatten_the_graph_of_networks_with_batchnorm() -> None:
    scenario = with_batchnorm(toy())
    training = Training(local_epochs=10, batch_size=8, lr=0.01)
    fed = federation(scenario, training=training)
    flat, sound = (graph(make("pfedgraph", preset=preset), fed) for preset in ("reference", None))
    assert float((flat - 1 / 9).abs().max()) < 0.01
    assert float((sound - 1 / 9).abs().max()) > 0.2


@pytest.mark.parametrize("since", ["initial", "round"])
def test_counters_enter_as_columns_would(since: Any) -> None:
    fed = federation(with_batchnorm(toy(n=UNEQUAL)), training=BRIEF)
    state, _ = play(fed, make("pfedgraph"), 2)
    method: Any = make("pfedgraph", mu=0.0, since=since, vector_scope="state", snap=None)
    trained = method.train(fed, state, fed.begin(3))
    s = method.cosines(fed.layout, state, trained)
    origin = state.theta0 if since == "initial" else state.models
    steps = torch.tensor([reply["steps"] for reply in trained.replies], dtype=torch.float64)
    before = torch.tensor([state.batches[c] for c in state.clients], dtype=torch.float64)
    counters = (steps + before if since == "initial" else steps)[:, None].expand(-1, len(fed.layout.counters))
    vectors = torch.cat([(trained.models.double() - origin.double()), counters], dim=1)
    unit = vectors / vectors.norm(dim=1, keepdim=True)
    torch.testing.assert_close(s, unit @ unit.T)


def test_counters_are_averaged_as_the_models_are() -> None:
    fed = federation(with_batchnorm(toy(n=UNEQUAL)), training=BRIEF)
    state, _ = play(fed, make("pfedgraph"), 1)
    steps = torch.tensor(list(fed.train(dict.fromkeys(fed.clients, state.theta0)).column("steps").values()), dtype=torch.float64)
    torch.testing.assert_close(torch.tensor(list(state.batches.values()), dtype=torch.float64), graph(make("pfedgraph"), fed) @ steps)


def test_the_cosine_term_waits_for_a_personal_model() -> None:
    fed = federation(training=BRIEF)
    start = make("pfedgraph").init(fed, fed.begin(0))

    def local(mu: float, first: bool, state: PersonalModels, index: int) -> Trained:
        method: Any = make("pfedgraph", mu=mu, first_round_term=first)
        trained: Trained = method.train(fed, state, fed.begin(index))
        return trained

    assert torch.equal(local(0.5, False, start, 1).models, local(0.0, False, start, 1).models)
    assert not torch.equal(local(0.5, True, start, 1).models, local(0.0, True, start, 1).models)
    later, _ = play(fed, make("pfedgraph"), 1)
    assert not torch.equal(local(0.5, False, later, 2).models, local(0.0, False, later, 2).models)


def test_absent_clients_keep_their_model_and_unseen_ones_theta0() -> None:
    fed = federation(training=BRIEF, participants=3)
    method = make("pfedgraph")
    empty = method.serve(method.init(fed, fed.begin(0)))
    assert torch.equal(empty.models[0], fed.initial()) and torch.equal(empty.weights, torch.ones(9, 1))
    state, serving = play(fed, method, 1)
    first = set(fed.begin(1).participants)
    for i, c in enumerate(fed.clients):
        assert torch.equal(serving.models[i], fed.initial()) == (c not in first)
    new = method.step(fed, state, fed.begin(2))
    second = set(fed.begin(2).participants)
    assert first - second
    assert all(torch.equal(by_name(new)[c], by_name(state)[c]) for c in first - second)


def test_a_missing_reply_leaves_the_others_graph_whole() -> None:
    fed = federation(on_failure="continue", fails={"site-0": 2}, training=BRIEF)
    method = make("pfedgraph")
    _, before, state = history(fed, method, 2)
    assert torch.equal(state.models[0], before.models[0])
    trained = method.train(fed, before, fed.begin(2))
    x = method.weights(fed.layout, before, trained)
    assert trained.rows == list(range(1, 9)) and torch.allclose(x.sum(1), torch.ones(8, dtype=torch.float64))
    torch.testing.assert_close(state.models[1:], (x @ trained.models[1:].double()).float())


def test_one_client_keeps_its_own_model_bit_for_bit() -> None:
    scenario = toy(groups=1, per_group=1)
    personal = run("pfedgraph", scenario, rounds=3, mu=0.0)[3]
    assert torch.equal(personal.models, run("local", scenario, rounds=3)[3].models)
