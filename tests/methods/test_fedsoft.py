from __future__ import annotations

from dataclasses import replace

import torch
from tests.methods.toy import TRAINING, accuracies, federation, run, toy

from emdcfl.core.params import average
from emdcfl.methods import make
from emdcfl.methods.shared.votes import batch_votes, smooth


def test_votes_are_smoothed_where_there_are_none():
    assert torch.equal(smooth(torch.tensor([50, 0, 14]), smoothing=1e-4), torch.tensor([50, 64e-4, 14], dtype=torch.float64))
    assert torch.equal(smooth(torch.tensor([64, 0]), smoothing=1e-3, votes="batch"), torch.tensor([64.0, 1.0], dtype=torch.float64))
    assert torch.equal(smooth(torch.tensor([4000, 0]), smoothing=1e-3, votes="batch"), torch.tensor([4000.0, 4.0], dtype=torch.float64))


def test_batches_vote_with_all_their_samples():
    table = torch.tensor([[0.2, 0.9], [0.3, 0.1]])
    assert batch_votes(table, 70).tolist() == [64.0, 6.0]
    assert batch_votes(table[:, :1], 20).tolist() == [20.0, 0.0]


def test_one_round_is_the_paper():
    fed = federation(toy(n=[96, 48, 32, 96, 96, 96, 96, 96, 64]))
    method = make("fedsoft", lam=0.3)
    before = method.init(fed, fed.begin(0))
    after = method.step(fed, before, fed.begin(1))
    replies = fed.evaluate(fed.clients, before.models, reduction="argmin_counts")
    counts = {c: table[:, 0] for c, table in replies.column("table").items()}
    a = {c: torch.where(counts[c] > 0, counts[c].double(), 64e-4) for c in fed.clients}
    mix = {c: average(before.models, a[c].tolist()) for c in fed.clients}
    local = fed.train(mix, own={c: {"prox": {"anchor": mix[c], "mu": 0.3}} for c in fed.clients})
    for c in fed.clients:
        assert torch.equal(after.own[c], local[c]["theta"])
    for k in range(3):
        expected = average(local.column("theta").values(), [float(a[c][k] / a[c].sum()) * local[c]["n"] for c in fed.clients])
        torch.testing.assert_close(after.models[k], expected, rtol=1e-6, atol=1e-7)


def test_everybody_is_served_the_model_trained_last():
    fed, _, state, serving = run("fedsoft", rounds=3)
    assert torch.equal(serving.models, torch.stack([state.own[c] for c in fed.clients]))
    assert torch.equal(serving.weights, torch.eye(9)) and serving.clusters is None
    assert accuracies(fed, serving).min() > 0.7


def test_a_strong_pull_keeps_clients_at_their_mix():
    def spread(lam: float) -> float:
        fed = federation(training=replace(TRAINING, lr=0.01))
        method = make("fedsoft", lam=lam)
        before = method.init(fed, fed.begin(0))
        after = method.step(fed, before, fed.begin(1))
        return float(sum((after.own[c] - average(before.models, after.a[c].tolist())).norm() for c in fed.clients))

    assert spread(10.0) < 0.5 * spread(0.0)


def test_the_public_code_has_no_pull_and_lets_batches_vote():
    _, method, state, _ = run("fedsoft", rounds=1, preset="reference")
    assert method.lam == 0.0
    # 64 validation samples are one batch: all votes for one cluster, one for each of the others.
    assert all(sorted(a.tolist()) == [1.0, 1.0, 64.0] for a in state.a.values())
    _, _, ours, _ = run("fedsoft", rounds=1)
    assert any(sorted(a.tolist())[1] > 1.0 for a in ours.a.values())


def test_votes_stay_between_two_counts():
    fed = federation()
    method = make("fedsoft", interval=2)
    state = method.init(fed, fed.begin(0))
    votes = []
    for index in (1, 2, 3):
        state = method.step(fed, state, fed.begin(index))
        votes.append(torch.stack([state.a[c] for c in fed.clients]))
    assert torch.equal(votes[0], votes[1]) and not torch.equal(votes[1], votes[2])


def test_training_may_start_from_the_own_model():
    _, _, mix, _ = run("fedsoft", rounds=2)
    _, _, own, _ = run("fedsoft", rounds=2, start="own")
    _, _, first, _ = run("fedsoft", rounds=1, start="own")
    fed = federation()
    fed.begin(2)
    c = "site-0"
    anchor = average(first.models, own.a[c].tolist())
    expected = fed.train({c: first.own[c]}, prox={"anchor": anchor, "mu": 0.1})[c]["theta"]
    assert torch.equal(own.own[c], expected) and not torch.equal(mix.own[c], expected)


def test_a_cluster_without_weight_keeps_its_model():
    fed = federation(toy(groups=1, per_group=2))
    method = make("fedsoft", k=2, smoothing=0.0)
    state = method.init(fed, fed.begin(0))
    twins = state.models[:1].repeat(2, 1)  # the first of equals wins every vote
    state = method.step(fed, replace(state, models=twins), fed.begin(1))
    assert all(a.tolist() == [64.0, 0.0] for a in state.a.values())
    assert torch.equal(state.models[1], twins[1]) and not torch.equal(state.models[0], twins[0])


def test_who_never_answered_holds_theta0():
    fed, _, state, serving = run("fedsoft", rounds=3, on_failure="continue", fails={"site-2": (1, 2, 3), "site-3": 2})
    assert "site-2" not in state.own and torch.equal(serving.models[2], fed.initial())
