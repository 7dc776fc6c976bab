from __future__ import annotations

import pytest
import torch
from tests.methods.scripted import PROBE, Scripted, at
from tests.methods.toy import accuracies, federation, history, run

from emdcfl.core.params import average
from emdcfl.methods import make
from emdcfl.methods.flexcfl import inter_group


def updates():
    fed = federation()
    start = fed.initial()
    fed.begin(1)
    return fed, start, fed.train(dict.fromkeys(fed.clients, start))


def test_first_group_models_are_plain_means_and_groups_stay():
    fed, _, replies = updates()
    first, later = run("flexcfl", rounds=1)[2], run("flexcfl", rounds=4)[2]
    for members, model in zip(first.sets, first.models, strict=True):
        assert torch.equal(model, average([replies[c]["theta"] for c in members], [1] * len(members)))
    assert later.labels == first.labels and [first.labels[c] for c in fed.clients] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_without_a_pull_it_is_oracle_on_the_right_groups():
    assert torch.equal(run("flexcfl", rounds=3, eta_g=0.0)[2].models, run("oracle", rounds=3)[2].models)


def test_the_pull_is_a_convex_combination():
    fed, _, replies = updates()
    models = torch.cat([replies.stack("theta")[:3], torch.ones(3, 1)], dim=1)
    where = fed.layout.trainable
    out = inter_group(fed.layout, models, 0.1, "normalised", "P").double()
    x = models.double()
    weight = [0.1 / float(x[k, where].norm()) for k in range(3)]
    expected = (x[0] + weight[1] * x[1] + weight[2] * x[2]) / (1 + weight[1] + weight[2])
    torch.testing.assert_close(out[0], expected, rtol=1e-6, atol=1e-7)
    assert (out <= x.amax(0) + 1e-6).all() and (out >= x.amin(0) - 1e-6).all()
    equal = models[:1].repeat(4, 1)
    torch.testing.assert_close(inter_group(fed.layout, equal, 0.1, "normalised", "P"), equal, rtol=1e-6, atol=1e-7)
    raw = inter_group(fed.layout, equal, 5.0, "raw", "P")
    growth = float(raw[0, where].double().norm() - equal[0, where].double().norm())
    assert growth == pytest.approx(5.0 * 3, rel=1e-4)


@pytest.mark.slow
def test_the_public_code_inflates_the_weights():
    fed, _, state, serving = run("flexcfl", rounds=5)
    _, _, public, poor = run("flexcfl", rounds=5, preset="reference")
    assert public.models.norm(dim=1).min() > 3 * state.models.norm(dim=1).max()
    assert accuracies(fed, serving).mean() > accuracies(fed, poor).mean() + 0.03


def test_counters_hide_the_inflation():
    def grown(steps):
        fed = Scripted("abcd", lambda c, r, theta: at(PROBE, 1.0 if c in "ab" else -1.0), steps=dict.fromkeys("abcd", steps), k=2)
        state = history(fed, make("flexcfl", preset="reference"), 3)[-1]
        return float(state.models.norm(dim=1).max())

    assert grown(1) > 10 > grown(710)


def test_later_clients_join_the_group_their_update_points_to():
    moves = {"a": (1.0, 0.1), "b": (1.1, 0.0), "c": (0.0, 2.0), "d": (0.1, 2.0), "e": (0.2, 9.0), "f": (0.3, 0.1)}
    fed = Scripted("abcdef", lambda c, r, theta: at(PROBE, *moves[c]), absent={1: "ef", 2: "cd", 3: "abf"}, k=2)
    method = make("flexcfl", eta_g=0.0)
    first = method.step(fed, method.init(fed, fed.begin(0)), fed.begin(1))
    assert first.sets == [["a", "b"], ["c", "d"]] and len(first.cold) == 2
    second = method.step(fed, first, fed.begin(2))
    assert second.sets == [["a", "b", "f"], ["c", "d", "e"]] and second.cold.numel() == 0
    third = method.step(fed, second, fed.begin(3))
    assert torch.equal(third.models[0], second.models[0]) and not torch.equal(third.models[1], second.models[1])


def test_fewer_clients_than_groups_in_round_one():
    fed = federation(participants=2)
    method = make("flexcfl")
    state = method.step(fed, method.init(fed, fed.begin(0)), fed.begin(1))
    assert 1 <= len(state.models) <= 2
