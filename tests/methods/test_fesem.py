from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.methods.scripted import PROBE, Scripted, at
from tests.methods.toy import accuracies, federation, history, run, truth

from emdcfl.clustering import adjusted_rand
from emdcfl.core.errors import QuorumError
from emdcfl.core.params import average
from emdcfl.methods import make

PLACES = {"a": 0.0, "b": 1.0, "c": 10.0, "d": 11.0, "e": 2.0}


def goes_home(client, round, theta):
    """Training brings a client to its own place wherever it starts."""
    return PROBE.initial() + at(PROBE, PLACES[client]) - theta


def test_warm_up_then_nearest_model_then_mean():
    n = {"a": 1, "b": 3, "c": 5, "d": 5}
    states = history(Scripted("abcd", goes_home, n=n, k=2), make("fesem", mu=0.0), 2)
    assert states[1].sets == [["a", "b"], ["c", "d"]]
    torch.testing.assert_close(states[1].models[0], PROBE.initial() + at(PROBE, 0.75))
    assert states[2].sets == states[1].sets


def test_the_e_step_takes_the_nearest_of_the_models_there_were():
    fed = federation()
    method = make("fesem")
    one = method.step(fed, method.init(fed, fed.begin(0)), fed.begin(1))
    rng = torch.Generator().manual_seed(3)
    drifted = replace(one, models=one.models + 0.6 * torch.randn(one.models.shape, generator=rng))
    two = method.step(fed, drifted, fed.begin(2))
    replies = fed.train({c: drifted.start(c) for c in fed.clients}, prox={"mu": 0.1})
    P = fed.layout.trainable
    for c in fed.clients:
        apart = [float((replies[c]["theta"][P].double() - m[P].double()).norm()) for m in drifted.models]
        assert two.labels[c] == int(np.argmin(apart))
    for k, members in enumerate(two.sets):
        expected = average([replies[c]["theta"] for c in members], [replies[c]["n"] for c in members]) if members else drifted.models[k]
        assert torch.equal(two.models[k], expected)


def test_an_empty_cluster_keeps_its_model_and_ties_go_to_the_first():
    fed = Scripted("abcd", goes_home, k=2)
    method = make("fesem", mu=0.0)
    state = history(fed, method, 1)[-1]
    far = PROBE.initial() + at(PROBE, 1e4)
    crowded = method.step(fed, replace(state, models=torch.stack([far, state.models[0]])), fed.begin(2))
    assert crowded.sets == [[], ["a", "b", "c", "d"]] and torch.equal(crowded.models[0], far)
    tied = method.step(fed, replace(state, models=state.models[:1].repeat(2, 1)), fed.begin(2))
    assert tied.sets[0] == ["a", "b", "c", "d"]


def test_a_later_client_trains_from_the_start_without_a_pull_and_is_placed():
    fed = Scripted("abcde", goes_home, absent={1: "e", 2: "cd"}, k=2)
    states = history(fed, make("fesem"), 2)
    assert "e" not in states[1].labels
    assert states[2].sets == [["a", "b", "e"], ["c", "d"]]
    assert torch.equal(states[2].models[1], states[1].models[1])
    assert all(torch.equal(theta, fed.initial()) for index, c, theta in fed.asked if (index, c) == (2, "e"))


@pytest.mark.parametrize("kind", ["squared", "layer_norm"])
def test_the_pull_keeps_clients_near_their_cluster(kind):
    def spread(mu):
        fed = federation()
        method = make("fesem", mu=mu, prox=kind)
        state = method.step(fed, method.init(fed, fed.begin(0)), fed.begin(1))
        fed.begin(2)
        replies, _ = method._train(fed, state, fed.clients)
        return sum(float((replies[c]["theta"] - state.start(c)).norm()) for c in fed.clients)

    assert spread(0.5) < 0.95 * spread(0.0)


@pytest.mark.slow
def test_the_public_code_starts_from_rounding_and_wastes_the_last_round():
    fed, _, _, serving = run("fesem", rounds=4)
    poor = run("fesem", rounds=4, preset="reference")[3]
    assert adjusted_rand(truth(fed), serving.clusters) == 1.0
    assert adjusted_rand(truth(fed), poor.clusters) == 0.0
    assert accuracies(fed, serving).mean() > accuracies(fed, poor).mean() + 0.1
    one = run("fesem", rounds=1, preset="reference")[2]
    assert len(set(one.labels.values())) == 3 and max(map(len, one.sets)) > 3  # an arbitrary split of equal models
    assert torch.equal(one.start("site-0"), one.theta0)  # a round was trained, and the models are the initial one
    states = history(federation(), make("fesem", preset="reference"), 2)
    for members, model in zip(states[2].sets, states[2].models, strict=True):
        if members:  # what round 1 trained; what round 2 trained is in nobody's model
            assert torch.equal(model, average([states[1].latest[c] for c in members], [states[1].n[c] for c in members]))


def test_the_quorum_counts_clients_that_do_not_answer_before_training():
    fed = Scripted("abcd", goes_home, k=2, absent={1: "abc"}, quorum=0.5)
    with pytest.raises(QuorumError, match="expected 50% of 4 clients to train in round 1, got 1"):
        history(fed, make("fesem", order="cluster-first"), 1)


def test_a_stale_counter_keeps_everybody_out_of_an_empty_cluster():
    fed = Scripted("abcd", goes_home, steps=dict.fromkeys("abcd", 710), k=2)
    near = torch.stack([PROBE.initial() + at(PROBE, 5.0), PROBE.initial() + at(PROBE, 10.5)])
    for scope, expected in (("P", [0, 0, 1, 1]), ("state", [0, 0, 0, 0])):
        method = make("fesem", mu=0.0, vector_scope=scope)
        state = replace(history(fed, method, 1)[-1], models=near, labels=dict.fromkeys("abcd", 0), counters=[710.0, 0.0])
        found = method.step(fed, state, fed.begin(2))
        assert [found.labels[c] for c in "abcd"] == expected
