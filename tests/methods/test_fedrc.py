"""FedRC: label marginals, FedEM when they are constant, and what they change when they are not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.methods.toy import BRIEF, CLASSES, accuracies, federation, play, run, toy

from emdcfl.core.tasks import sample_losses
from emdcfl.methods import make
from emdcfl.methods.fedrc import marginals
from emdcfl.methods.shared.em import responsibilities


def test_marginals_are_positive_and_sum_to_one() -> None:
    rho = marginals(
        [torch.tensor([[3.0, 0.0], [1.0, 1.0]], dtype=torch.float64), torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)], 1e-8
    )
    torch.testing.assert_close(rho.sum(1), torch.ones(2, dtype=torch.float64))
    assert rho[0, 1] > 0 and rho[0, 1] == pytest.approx(1e-8 / 4, rel=1e-6)
    assert rho[1].tolist() == pytest.approx([0.25, 0.75])


def test_the_number_of_classes_is_read_off_the_head() -> None:
    assert federation().layout.outputs == CLASSES


def test_constant_marginals_are_fedem_bit_for_bit() -> None:
    scenario = toy(n=[96, 40, 64, 96, 96, 20, 96, 96, 33])
    fed = federation(scenario, training=BRIEF, participants=6)
    rc, em = make("fedrc"), make("fedem")
    a, b = rc.init(fed, fed.begin(0)), em.init(fed, fed.begin(0))
    for index in range(1, 4):
        a = replace(rc.step(fed, a, fed.begin(index)), rho=torch.ones(3, CLASSES, dtype=torch.float64))
        b = em.step(fed, b, fed.begin(index))
    assert torch.equal(a.models, b.models) and a.pi.keys() == b.pi.keys()
    assert all(torch.equal(a.pi[c], b.pi[c]) for c in a.pi)


def test_any_constant_leaves_the_responsibilities_alone() -> None:
    losses, pi = torch.rand(3, 9, dtype=torch.float64), torch.tensor([0.2, 0.3, 0.5])
    torch.testing.assert_close(responsibilities(losses, pi, torch.full((3, 9), -1.5)), responsibilities(losses, pi))


def test_learned_marginals_act_from_the_second_round_on() -> None:
    fed = federation(training=BRIEF)
    rc, em = make("fedrc"), make("fedem")
    a, b = play(fed, rc, 1)[0], play(fed, em, 1)[0]
    assert torch.equal(a.models, b.models)
    assert not torch.equal(rc.step(fed, a, fed.begin(2)).models, em.step(fed, b, fed.begin(2)).models)


def test_a_round_follows_the_equations() -> None:
    fed = federation(toy(per_group=1, n=[96, 40, 64]), training=BRIEF)
    method = make("fedrc", k=2)
    state, _ = play(fed, method, 1)
    new = method.step(fed, state, fed.begin(2))
    mass = torch.zeros(2, CLASSES, dtype=torch.float64)
    for name, client in fed._clients.items():
        losses = torch.stack([sample_losses(client, theta, "train")[0] for theta in state.models]).double()
        y = client.site.train.y
        joint = state.pi[name][:, None] * (-losses).exp() / state.rho[:, y]
        q = joint / joint.sum(0)
        torch.testing.assert_close(new.pi[name], q.mean(1), rtol=1e-9, atol=1e-12)
        for k in range(2):
            for label in range(CLASSES):
                mass[k, label] += q[k, y == label].sum()
    torch.testing.assert_close(new.rho, mass / mass.sum(1, keepdim=True), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(sum(new.mass.values()).sum(), torch.tensor(200.0, dtype=torch.float64))


def test_absent_clients_still_count_in_the_marginals() -> None:
    fed = federation(training=BRIEF, participants=3)
    state, _ = play(fed, make("fedrc"), 3)
    seen = {c for index in (1, 2, 3) for c in fed.begin(index).participants}
    assert set(state.mass) == seen and len(seen) > 3
    torch.testing.assert_close(state.rho, marginals([state.mass[c] for c in state.clients if c in seen], 1e-8))


def test_labels_nobody_has_keep_the_run_alive() -> None:
    scenario = toy(per_group=1)
    sites = [replace(s, train=type(s.train)(s.train.x[s.train.y != 3], s.train.y[s.train.y != 3])) for s in scenario.sites]
    _, _, state, serving = run("fedrc", replace(scenario, sites=tuple(sites)), rounds=3, training=BRIEF)
    assert (state.rho > 0).all() and torch.isfinite(serving.models).all()


def test_reference_scores_the_last_component_as_trained_at_home() -> None:
    fed, _, state, reference = run("fedrc", rounds=3, preset="reference", training=BRIEF)
    assert torch.equal(reference.models, torch.stack([state.last[c] for c in fed.clients]))
    assert all(not torch.equal(row, state.models[-1]) for row in reference.models)
    assert accuracies(fed, reference).tolist() != accuracies(fed, make("fedrc").serve(state)).tolist()
