from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.methods.scripted import PROBE, Scripted, at, direct
from tests.methods.toy import federation, history, run, truth

from emdcfl.clustering import adjusted_rand, gram_features
from emdcfl.methods import make
from emdcfl.methods.shared.profiles import Fresh, ProfileUpdate, profile_coordinates, renumber

SIDES = {"a": 1.0, "b": 1.2, "c": -1.0, "d": -1.3}


def apart(client, round, theta):
    return at(PROBE, SIDES[client], 0.1 * round)


def test_gram_of_a_profile_update_is_that_of_the_profiles_written_out():
    rng = np.random.default_rng(0)
    draw = lambda: torch.from_numpy(rng.standard_normal(50).astype(np.float32))  # noqa: E731
    vectors = {"0": {"a": draw(), "b": draw()}, "1": {"b": draw()}}
    steps = {"0": {"a": 3.0, "b": 5.0}, "1": {"b": 2.0}}
    fresh = {"0": {"a": Fresh(draw(), draw(), 7.0), "c": Fresh(draw(), draw(), 1.0)}, "1": {"b": Fresh(draw(), draw(), 4.0)}}
    for from_zero in (False, True):
        update = ProfileUpdate(vectors, steps, {b: dict(entries) for b, entries in fresh.items()}, 0.3, from_zero)
        found = update.gram("abc", counters=6)
        new, moved = update.apply()
        zero = torch.zeros(50)
        G = np.stack(
            [np.concatenate([np.append(new[b].get(c, zero), [np.sqrt(6) * moved[b].get(c, 0.0)]) for b in "01"]) for c in "abc"]
        ).astype(np.float64)
        np.testing.assert_allclose(found, G @ G.T, rtol=1e-5, atol=1e-5)
        expected = fresh["0"]["c"].after - fresh["0"]["c"].before
        torch.testing.assert_close(new["0"]["c"], expected * (0.3 if from_zero else 1.0))
        torch.testing.assert_close(new["0"]["a"], 0.7 * vectors["0"]["a"] + 0.3 * (fresh["0"]["a"].after - fresh["0"]["a"].before))
        assert moved["0"]["a"] == pytest.approx(0.7 * 3 + 0.3 * 7)
        assert update.knows("c") is False  # applied: what was fresh has been taken in


@pytest.mark.parametrize("scope", ["P", "F", "H", "state"])
def test_features_are_those_of_a_direct_svd(scope):
    fed = Scripted("abcd", lambda c, r, theta: 0.1 * torch.randn(theta.shape, generator=torch.Generator().manual_seed(ord(c))), k=2,
                   steps={"a": 1, "b": 2, "c": 3, "d": 4})  # fmt: skip
    state = history(fed, make("cflgp", vector_scope=scope), 1)[-1]
    moves = [fed.move(c, 1, state.theta0).float() for c in "abcd"]
    G = np.stack([direct(fed, (state.theta0 + m) - state.theta0, s, scope) for m, s in zip(moves, (1, 2, 3, 4), strict=True)], axis=1)
    left = np.linalg.svd(G, full_matrices=False)[0][:, :2]
    np.testing.assert_allclose(np.abs(gram_features(G.T @ G, 2)), np.abs(G.T @ left), atol=1e-6)
    kept = np.stack([state.profile["shared"][c] for c in "abcd"])
    np.testing.assert_allclose(kept, G[: kept.shape[1]].T, atol=1e-6)


def test_the_weight_of_the_new_update_follows_the_round():
    fed = Scripted("abcd", apart, k=2)
    second = [float(s.profile["shared"]["a"][1]) for s in history(fed, make("cflgp"), 5)[1:]]
    expected, value = [], 0.0
    for t in range(1, 6):
        beta = 1 / (t // 2 + 1)
        value = (1 - beta) * value + beta * 0.1 * t if t > 1 else 0.1
        expected.append(value)
    assert second == pytest.approx(expected, rel=1e-4)


def test_blocks_lie_where_the_profile_says():
    fed = Scripted("abcd", apart, k=2)
    own, shared = history(fed, make("cflgp", profile="own_block"), 3)[-1], history(fed, make("cflgp"), 3)[-1]
    assert set(shared.profile) == {"shared"} and set(shared.profile["shared"]) == set("abcd")
    assert {b: "".join(m) for b, m in own.profile.items()} == {"0": "abcd", "1": "cd"}  # everybody began in cluster 0


def test_criterion_asks_everybody_on_one_model_in_turn():
    fed = Scripted("abcd", apart, k=2)
    states = history(fed, make("cflgp", profile="criterion"), 4)
    assert [len(s.profile) for s in states] == [0, 1, 2, 2, 2]
    for t in (2, 3, 4):
        criterion = states[t - 1].models[(t - 1) % 2]
        assert {c for index, c, theta in fed.asked if index == t and torch.equal(theta, criterion)} == set("abcd")
        assert len([1 for index, _, _ in fed.asked if index == t]) == 6  # two clients train twice
    assert states[-1].sets == [["a", "b"], ["c", "d"]]


def test_mistakes_can_be_repaired_in_one_shared_block_only():
    def turns(client, round, theta):
        first = {"a": 1.0, "b": -1.0, "c": 1.1, "d": -1.1}  # a misleading first round
        return at(PROBE, first[client]) if round == 1 else at(PROBE, 0.0, SIDES[client])

    labels = lambda s: [s.labels[c] for c in "abcd"]  # noqa: E731
    shared = history(Scripted("abcd", turns, k=2), make("cflgp"), 4)
    locked = history(Scripted("abcd", turns, k=2), make("cflgp", preset="reference"), 4)
    assert adjusted_rand([0, 1, 0, 1], labels(shared[1])) == 1.0
    assert adjusted_rand([0, 0, 1, 1], labels(shared[4])) == 1.0
    assert adjusted_rand([0, 0, 1, 1], labels(locked[4])) < 1.0


def test_an_empty_cluster_keeps_its_model():
    fed = Scripted("abcd", apart, absent={2: "cd"}, k=2)
    states = history(fed, make("cflgp"), 2)
    assert states[2].sets == states[1].sets == [["a", "b"], ["c", "d"]]
    assert torch.equal(states[2].models[1], states[1].models[1])
    few = history(Scripted("abcd", apart, absent={1: "bd"}, k=3), make("cflgp"), 1)[-1]
    assert few.sets == [["a"], ["c"], []] and torch.equal(few.models[2], fed.initial(2))


def test_between_clusterings_only_newcomers_are_placed():
    fed = Scripted("abcd", apart, absent={1: "d", 2: "d"}, k=2)
    states = history(fed, make("cflgp", last_clustering=1), 3)
    assert states[2].labels == states[1].labels and states[2].profile
    assert states[3].labels == {**states[1].labels, "d": states[1].labels["c"]}
    assert not states[3].profile  # everybody is placed for good
    period = history(Scripted("abcd", apart, k=2), make("cflgp", period=2), 2)
    assert period[1].labels == dict.fromkeys("abcd", 0)
    assert sorted(map(len, period[2].sets)) == [2, 2]


def test_clusters_are_found_in_the_first_half_of_the_rounds_unless_told_otherwise():
    method, fed = make("cflgp"), Scripted("abcd", apart, k=2)
    state = method.init(fed, fed.begin(0, 4))
    held = []
    for index in range(1, 5):
        state = method.step(fed, state, fed.begin(index, 4))
        held.append(bool(state.profile))
    assert held == [True, False, False, False]  # from round 2 on nothing is needed to cluster again
    assert history(Scripted("abcd", apart, k=2), make("cflgp", last_clustering="never"), 4)[-1].profile


def test_a_run_too_short_to_cluster_says_so(caplog):
    method, fed = make("cflgp", preset="original"), Scripted("abcd", apart, k=2)
    for rounds in (None, 2):
        method.init(fed, fed.begin(0, rounds))
    assert not caplog.records
    state = method.init(fed, fed.begin(0, 1))
    assert "method.period = 2" in caplog.text and "1 round" in caplog.text
    assert method.step(fed, state, fed.begin(1, 1)).labels == dict.fromkeys("abcd", 0)


def test_profiles_are_thinned_before_they_fill_the_memory(monkeypatch):
    fed = federation()
    monkeypatch.setattr("emdcfl.methods.shared.profiles.MAX_PROFILE", 9 * 50)
    for blocks, expected in ((1, 50), (3, 50 / 3)):
        index, share = profile_coordinates(fed, blocks, "P")
        assert isinstance(index, torch.Tensor)
        assert share * (fed.layout.trainable.stop - fed.layout.trainable.start) == pytest.approx(expected)
        assert 0.4 * expected < len(index) < 1.8 * expected


def test_a_share_of_the_coordinates_is_enough(monkeypatch):
    monkeypatch.setattr("emdcfl.methods.shared.profiles.MAX_PROFILE", 500)
    fed, _, state, serving = run("cflgp", rounds=2)
    assert 0.5 * 500 < sum(map(len, state.profile["shared"].values())) < 1.5 * 500
    assert adjusted_rand(truth(fed), serving.clusters) == 1.0


def test_numbers_follow_the_known_clients():
    assert renumber({"a": 0, "b": 1, "c": 1}, {"b": 0, "c": 0}, 2) == {"a": 1, "b": 0, "c": 0}
    assert renumber({"a": 0, "b": 1}, {}, 2) == {"a": 0, "b": 1}
