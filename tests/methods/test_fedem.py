"""FedEM: the EM step by hand, K = 1 is FedAvg bit for bit, the mixture that is served, and the public code's last component."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.methods.toy import BRIEF, accuracies, federation, play, run, toy

from emdcfl.core.tasks import Fit, local_sgd, mixture, sample_losses
from emdcfl.methods import make
from emdcfl.methods.shared.em import label_mass, responsibilities


def test_responsibilities_are_the_posterior_of_the_components() -> None:
    rng = np.random.default_rng(0)
    losses, pi, log_rho = rng.exponential(size=(3, 7)), np.array([0.2, 0.5, 0.3]), rng.normal(size=(3, 7))
    joint = pi[:, None] * np.exp(-losses - log_rho)
    q = responsibilities(torch.from_numpy(losses), torch.from_numpy(pi), torch.from_numpy(log_rho))
    np.testing.assert_allclose(q.numpy(), joint / joint.sum(0), rtol=1e-12)


def test_a_component_of_weight_zero_can_come_back() -> None:
    q = responsibilities(torch.tensor([[0.0], [100.0]]), torch.tensor([0.0, 1.0]))
    assert torch.isfinite(q).all() and q[0] > 0.99


def test_label_mass_sums_to_the_samples_of_each_label() -> None:
    q, y = torch.rand(3, 50, dtype=torch.float64).softmax(0), torch.arange(50) % 4
    torch.testing.assert_close(label_mass(q, y, 5).sum(0), torch.bincount(y, minlength=5).double())


@pytest.mark.parametrize(
    "options", [{}, {"participants": 5}, {"on_failure": "continue", "fails": {"site-2": 2}}], ids=["all", "some", "one out"]
)
def test_one_component_is_fedavg_bit_for_bit(options: dict[str, Any]) -> None:
    scenario = toy(n=[96, 40, 64, 96, 96, 20, 96, 96, 33])
    _, _, em, served = run("fedem", scenario, rounds=3, k=1, training=BRIEF, **options)
    _, _, average, _ = run("fedavg", scenario, rounds=3, training=BRIEF, **options)
    assert torch.equal(em.models[0], average.theta)
    assert torch.equal(served.weights, torch.ones(9, 1))


@pytest.mark.parametrize("name", ["fedem", "fedrc"])
def test_k_times_the_rate(name: str) -> None:
    _, _, fast, _ = run(name, toy(), rounds=2, k=2, rate="times-k", training=BRIEF)
    _, _, same, _ = run(name, toy(), rounds=2, k=2, training=replace(BRIEF, lr=2 * BRIEF.lr))
    assert torch.equal(fast.models, same.models)


def test_a_round_is_the_em_step_written_out() -> None:
    fed = federation(toy(per_group=1, n=[96, 40, 64]), training=BRIEF)
    method = make("fedem", k=2)
    state = method.step(fed, method.init(fed, fed.begin(0)), fed.begin(1))
    new = method.step(fed, state, fed.begin(2))
    total = torch.zeros(2, fed.layout.size, dtype=torch.float64)
    for name, client in fed._clients.items():
        losses = torch.stack([sample_losses(client, theta, "train")[0] for theta in state.models]).double()
        joint = state.pi[name][:, None] * (-losses).exp()
        q = joint / joint.sum(0)
        torch.testing.assert_close(new.pi[name], q.mean(1), rtol=1e-9, atol=1e-12)
        for k in range(2):
            total[k] += local_sgd(client, Fit(state.models[k], BRIEF, sample_weights=q[k].float()))["theta"].double() * len(
                client.site.train
            )
    torch.testing.assert_close(new.models, (total / 200).float(), rtol=1e-5, atol=1e-6)


def test_the_mixture_averages_probabilities_and_one_hot_weights_are_a_single_model() -> None:
    fed, _, _, serving = run("fedem", toy(per_group=1), rounds=1, training=BRIEF)
    assert serving.mix == "predictions" and serving.clusters is None
    client = next(iter(fed._clients.values()))
    parts = [mixture(client, serving.models[k : k + 1], torch.ones(1), "test:test")[0] for k in range(3)]
    both, _ = mixture(client, serving.models, serving.weights[0], "test:test")
    torch.testing.assert_close(both, sum(w * p for w, p in zip(serving.weights[0], parts, strict=True)))
    single, _ = mixture(client, serving.models, torch.tensor([0.0, 1.0, 0.0]), "test:test")
    assert torch.equal(single, parts[1])
    hard = replace(serving, weights=torch.eye(3)[[1, 1, 1]])
    alone = replace(serving, models=serving.models[1:2], weights=torch.ones(3, 1), mix="parameters")
    assert accuracies(fed, hard).tolist() == accuracies(fed, alone).tolist()


def test_reference_scores_the_last_component_as_trained_at_home() -> None:
    fed, method, state, reference = run("fedem", rounds=3, preset="reference", training=BRIEF)
    own = make("fedem")
    mixed = own.serve(state)
    assert torch.equal(reference.weights, torch.eye(9)) and reference.mix == "parameters"
    client = fed._clients["site-4"]
    before, _ = play(federation(training=BRIEF), method, 2)
    client.begin(3)
    q = responsibilities(torch.stack([sample_losses(client, theta, "train")[0] for theta in before.models]), before.pi["site-4"])
    assert torch.equal(reference.models[4], local_sgd(client, Fit(before.models[-1], BRIEF, sample_weights=q[-1].float()))["theta"])
    assert not torch.equal(reference.models[4], state.models[-1])
    assert accuracies(fed, reference).tolist() != accuracies(fed, mixed).tolist()


def test_clients_never_seen_have_uniform_weights_and_absent_ones_keep_theirs() -> None:
    fed = federation(training=BRIEF, participants=3)
    method = make("fedem")
    state = method.step(fed, method.init(fed, fed.begin(0)), fed.begin(1))
    serving = method.serve(state)
    unseen = [i for i, c in enumerate(fed.clients) if c not in state.pi]
    assert len(state.pi) == 3 and torch.equal(serving.weights[unseen], torch.full((6, 3), 1 / 3))
    torch.testing.assert_close(serving.weights.sum(1), torch.ones(9))
    new = method.step(fed, state, fed.begin(2))
    absent = set(state.pi) - set(fed.begin(2).participants)
    assert absent and all(torch.equal(new.pi[c], state.pi[c]) for c in absent)


def test_a_client_that_fails_in_a_round_keeps_its_weights() -> None:
    fails = {"site-0": 2}
    _, method, state, serving = run("fedem", rounds=2, on_failure="continue", fails=fails, training=BRIEF)
    before, _ = play(federation(training=BRIEF), method, 1)
    assert torch.equal(state.pi["site-0"], before.pi["site-0"])
    assert not torch.equal(state.pi["site-1"], before.pi["site-1"])
    assert torch.isfinite(serving.models).all()


def test_k_comes_from_the_scenario_or_the_field() -> None:
    assert run("fedem", rounds=1, training=BRIEF)[3].models.shape[0] == 3
    assert run("fedem", rounds=1, k=4, training=BRIEF)[3].models.shape[0] == 4
