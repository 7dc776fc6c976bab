from __future__ import annotations

import pytest
import torch
from tests.methods.scripted import PROBE, Scripted, at, batch_norm_toy
from tests.methods.toy import MORE_STEPS, history, run, truth

from emdcfl.clustering import adjusted_rand
from emdcfl.core.errors import QuorumError
from emdcfl.core.params import average
from emdcfl.methods import make

GROUPS = {"a": (3.0, 0.0), "b": (-3.0, 2.0), "c": (-3.0, -2.0)}
CLIENTS = ["c1", "a1", "b1", "a2", "c2", "b2", "b3", "a3", "c3"]  # groups mixed, so that positions are not client numbers


def three_ways(client, round, theta):
    """At the common model a goes against b and c; a model that has left it (a split did that) sees b go against c."""
    x, y = GROUPS[client[0]]
    first = PROBE.layout.trainable.start
    moved = abs(float(theta[first] - PROBE.initial()[first])) > 1.5
    return at(PROBE, 0.0 if moved else x, y)


def test_splits_twice_and_maps_second_level_members_to_clients():
    fed = Scripted(CLIENTS, three_ways)
    states = history(fed, make("cfl", epsilon1=1.5, epsilon2=1.6), 3)
    assert states[1].sets == [CLIENTS]
    assert sorted(map(sorted, states[2].sets)) == [["a1", "a2", "a3"], ["b1", "b2", "b3", "c1", "c2", "c3"]]
    assert sorted(map(sorted, states[3].sets)) == [["a1", "a2", "a3"], ["b1", "b2", "b3"], ["c1", "c2", "c3"]]
    assert all(len(path) in (1, 2) for path in states[3].paths) and not states[3].founded
    for index, c, theta in fed.asked:
        assert torch.equal(theta, states[index - 1].models[states[index - 1].labels.get(c, 0)])


def test_models_are_weighted_by_size_after_a_split():
    n = {c: 5 + 7 * i for i, c in enumerate(CLIENTS)}
    fed = Scripted(CLIENTS, three_ways, n=n)
    states = history(fed, make("cfl", epsilon1=1.5, epsilon2=1.6), 2)
    start = states[1].models[0]
    for members, model in zip(states[2].sets, states[2].models, strict=True):
        assert torch.equal(model, average([start + three_ways(c, 2, start) for c in members], [n[c] for c in members]))


def test_cosines_decide_whatever_the_length_of_updates():
    """The default: a client that goes against three others is split off, four that go one way with noise are not."""
    size = PROBE.layout.size
    noise = torch.zeros(4, size)
    noise[:, PROBE.layout.trainable] = (
        torch.randn(4, size, generator=torch.Generator().manual_seed(0))[:, PROBE.layout.trainable] / size**0.5
    )
    mean = torch.eye(size)[PROBE.layout.trainable.start]
    for scale in (1e-3, 10.0):
        for sign, clusters in ((1.0, 1), (-1.0, 2)):
            fed = Scripted("abcd", lambda c, r, t, s=scale, g=sign: s * ((g if c == "d" else 1.0) * mean + noise["abcd".index(c)]))
            assert len(history(fed, make("cfl"), 2)[-1].sets) == clusters


@pytest.mark.parametrize(
    ("options", "splits"),
    [
        ({"thresholds": "absolute", "epsilon1": 1.001, "epsilon2": 2.9}, True),
        ({"thresholds": "absolute", "epsilon1": 0.999, "epsilon2": 2.9}, False),  # the mean update has norm 1
        ({"thresholds": "absolute", "epsilon1": 1.001, "epsilon2": 3.001}, False),  # the longest has norm 3
        ({"thresholds": "absolute", "epsilon1": 1.001, "epsilon2": 2.9, "first_split": 3}, False),
    ],
)
def test_thresholds_are_norms_of_the_plain_mean_and_of_the_longest_update(options, splits):
    moves = {"a": (3.0,), "b": (3.0,), "c": (-3.0,)}  # sizes would move the mean elsewhere
    fed = Scripted("abc", lambda c, r, theta: at(PROBE, *moves[c]), n={"a": 1, "b": 1, "c": 100})
    state = history(fed, make("cfl", **options), 2)[-1]
    assert len(state.sets) == (2 if splits else 1)
    if splits:
        assert state.sets == [["a", "b"], ["c"]]


def test_two_members_are_never_split():
    fed = Scripted("ab", lambda c, r, theta: at(PROBE, 3.0 if c == "a" else -3.0))
    assert len(history(fed, make("cfl"), 3)[-1].sets) == 1


def test_relative_thresholds_follow_the_largest_mean_update():
    moves = {1: {"a": 8.0, "b": 8.0, "c": 8.0}, 2: {"a": 3.0, "b": 3.0, "c": -3.0}}  # means 8, then 1
    for scale in (1e-3, 1.0, 10.0):
        fed = Scripted("abc", lambda c, r, theta, scale=scale: at(PROBE, scale * moves[r][c]))
        states = history(fed, make("cfl", thresholds="relative", relative1=0.13, relative2=0.37), 2)
        assert states[2].largest == pytest.approx(8.0 * scale, rel=1e-3)
        assert len(states[2].sets) == 2
        tight = make("cfl", thresholds="relative", relative1=0.12)
        assert len(history(fed, tight, 2)[-1].sets) == 1
    fed, _, _, serving = run("cfl", rounds=6, thresholds="relative", relative1=0.8, relative2=1.0, training=MORE_STEPS)
    assert adjusted_rand(truth(fed), serving.clusters) == 1.0


def test_absent_at_the_split_goes_down_the_tree_when_it_returns():
    fed = Scripted(CLIENTS, three_ways, absent={1: "c3", 2: "a1c3", 3: "a1"})
    states = history(fed, make("cfl", epsilon1=1.5, epsilon2=1.6), 4)
    assert states[2].labels["a1"] == states[2].paths.index("")  # keeps the model from before the split
    assert torch.equal(states[2].models[states[2].labels["a1"]], states[1].models[0])
    assert "c3" not in states[2].labels  # never seen: it will start at the root
    assert states[3].labels["c3"] == states[3].labels["b1"] or states[3].labels["c3"] == states[3].labels["c1"]
    assert states[4].labels["a1"] == states[4].labels["a2"]
    assert adjusted_rand([c[0] for c in CLIENTS], [states[4].labels[c] for c in CLIENTS]) == 1.0
    assert sorted(map(len, states[4].paths)) == [1, 2, 2]  # nobody will come through the inner nodes again
    walked = [theta for index, c, theta in fed.asked if (index, c) == (4, "a1")]
    assert len(walked) == 2 and torch.equal(walked[0], states[1].models[0])


def test_the_quorum_counts_clients_that_do_not_answer_on_the_way_down():
    late = "a2a3c2b2b3c3"
    fed = Scripted(CLIENTS, three_ways, absent={1: late, 2: late})
    method = make("cfl", epsilon1=1.5, epsilon2=1.6)
    states = history(fed, method, 2)
    assert len(states[-1].paths) > 1
    fed.quorum, fed.absent = 0.5, {3: late}
    with pytest.raises(QuorumError, match="expected 50% of 9 clients to train in round 3, got 3"):
        method.step(fed, states[-1], fed.begin(3))


def test_a_zero_step_update_has_norm_zero_on_batch_norm_and_counters_forbid_splits():
    fed = Scripted(CLIENTS, three_ways, steps=dict.fromkeys(CLIENTS, 710))
    right, public = make("cfl", epsilon1=1.5, epsilon2=1.6), make("cfl", preset="reference", epsilon1=1.5, epsilon2=1.6)
    assert len(history(fed, right, 3)[-1].sets) == 3
    state = history(fed, public, 3)[-1]
    assert len(state.sets) == 1 and state.largest >= 710
    still = Scripted("abc", lambda c, r, theta: torch.zeros_like(theta), steps=dict.fromkeys("abc", 710))
    assert history(still, right, 2)[-1].largest == 0.0


@pytest.mark.slow
def test_the_public_code_never_splits_with_batch_norm_where_the_method_does():
    options = {"thresholds": "absolute", "epsilon1": 1.1, "epsilon2": 1.2}
    scenario = batch_norm_toy()
    assert len(run("cfl", scenario, rounds=6, **options)[2].sets) > 1
    assert len(run("cfl", scenario, rounds=6, preset="reference", **options)[2].sets) == 1


def test_a_run_too_short_to_split_says_so(caplog):
    fed = Scripted(CLIENTS, three_ways)
    for method, rounds in ((make("cfl"), 2), (make("cfl"), None), (make("cfl", preset="original"), 1)):
        method.init(fed, fed.begin(0, rounds))
    assert not caplog.records
    make("cfl").init(fed, fed.begin(0, 1))
    assert "method.first_split = 2" in caplog.text and "1 round" in caplog.text
