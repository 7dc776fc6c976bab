from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from tests.methods.scripted import PROBE, Scripted, at
from tests.methods.toy import accuracies, federation, history, run, toy

from emdcfl.clustering import cut
from emdcfl.core.params import average
from emdcfl.methods import make

PLACES = {"a": (0.0,), "b": (1.0,), "c": (10.0,), "d": (10.5,), "e": (30.0,), "f": (1.5,), "g": (50.0,)}


def scripted(absent=None, clients="abcdefg"):
    return Scripted(clients, lambda c, r, theta: at(PROBE, *PLACES[c]) if r else theta, absent=absent)


@pytest.mark.slow
def test_one_complete_linkage_cut_of_the_states():
    fed = federation()
    start = fed.initial()
    fed.begin(1)
    replies = fed.train(dict.fromkeys(fed.clients, start))
    X = replies.stack("theta").double().numpy()
    D = np.linalg.norm(X[:, None] - X[None], axis=2)
    for threshold in (0.5, 1.0, 1.5, 3.0, 100.0):
        state = run("fedclust", rounds=1, threshold=threshold)[2]
        labels = cut(D, threshold)
        assert [state.labels[c] for c in fed.clients] == labels.tolist()
        parts = [cut(D[np.ix_(labels == k, labels == k)], threshold) for k in set(labels.tolist())]
        assert all(part.max() == 0 for part in parts)  # cutting the parts again changes nothing
        for k, members in enumerate(state.sets):
            assert torch.equal(state.models[k], average([replies[c]["theta"] for c in members], [replies[c]["n"] for c in members]))


def test_later_clients_join_within_the_threshold_or_found_a_cluster():
    fed = scripted(absent={1: "fg"})
    states = history(fed, make("fedclust", threshold=2.0), 3)
    assert states[1].sets == [["a", "b"], ["c", "d"], ["e"]] and set(states[1].first) == set("abcde")
    assert states[2].sets == [["a", "b", "f"], ["c", "d"], ["e"], ["g"]] and not states[2].first
    assert states[3].sets == states[2].sets
    assert all(torch.equal(theta, fed.initial()) for index, c, theta in fed.asked if index == 2 and c in "fg")


def test_an_automatic_threshold_follows_the_clients_seen_and_moves_none_of_them():
    states = history(scripted(absent={1: "bcdefg", 2: "eg"}), make("fedclust"), 3)
    assert states[1].sets == [["a"]]  # one client alone shows no gap
    assert states[2].labels["b"] == states[1].labels["a"] != states[2].labels["c"]
    for before, after in pairwise(states[1:]):
        assert before.labels.items() <= after.labels.items()


def test_a_new_member_must_be_near_every_old_one():
    states = history(scripted(absent={1: "fg"}), make("fedclust", threshold=1.2), 2)
    assert states[2].sets == [["a", "b"], ["c", "d"], ["e"], ["f"], ["g"]]  # f is 0.5 from b and 1.5 from a


def test_a_cluster_nobody_answers_for_keeps_its_model():
    states = history(scripted(absent={2: "cd"}), make("fedclust", threshold=2.0), 2)
    assert torch.equal(states[2].models[1], states[1].models[1])
    assert not torch.equal(states[2].models[0], states[1].models[0])


@pytest.mark.parametrize("scope", ["P", "F", "H", "state"])
def test_equal_counters_cancel_and_the_head_may_be_compared_alone(scope):
    states = history(scripted(), make("fedclust", threshold=2.0, vector_scope=scope), 1)
    assert len(states[1].sets) == (1 if scope == "H" else 4)  # only the first layer differs


@pytest.mark.slow
def test_the_public_code_keeps_the_models_of_round_one():
    fed, _, first, serving = run("fedclust", rounds=1, threshold=1.5)
    _, _, public, old = run("fedclust", rounds=5, threshold=1.5, preset="reference")
    _, _, right, new = run("fedclust", rounds=5, threshold=1.5)
    assert torch.equal(public.models, first.models) and not torch.equal(right.models, first.models)
    assert accuracies(fed, new).mean() > accuracies(fed, old).mean() + 0.05
    assert accuracies(fed, old).mean() == accuracies(fed, serving).mean()


def test_every_client_alone_is_local_training():
    _, _, clustered, serving = run("fedclust", toy(per_group=1), rounds=3, threshold=1e-6)
    _, _, _, alone = run("local", toy(per_group=1), rounds=3)
    assert len(clustered.sets) == 3
    assert torch.equal(serving.models, alone.models)
