from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from tests.methods.scripted import Scripted, direct
from tests.methods.toy import federation, run, toy, truth
from tests.tiny import same

from emdcfl.clustering import adjusted_rand, cut
from emdcfl.core.params import squared_distances
from emdcfl.methods import make
from emdcfl.methods.shared.vectors import sets_of, update_gram

HARD = {
    "cfl": {"epsilon1": 0.9, "epsilon2": 1.2},
    "fedclust": {"threshold": 1.5},
    "flexcfl": {},
    "fesem": {},
    "cflgp": {"last_clustering": 4},
    "cflgp own block": {"profile": "own_block"},
    "cflgp criterion": {"profile": "criterion"},
}
every_method = pytest.mark.parametrize("case", HARD)
other_profiles = pytest.mark.parametrize("case", ["cflgp own block", "cflgp criterion"])  # the defaults are in test_all.py


def name(case: str) -> str:
    return case.split()[0]


@pytest.mark.parametrize("scope", ["P", "F", "H", "state"])
@pytest.mark.parametrize("origins", ["none", "one", "each"])
def test_gram_is_that_of_the_vectors_written_out(scope, origins):
    fed = Scripted("ab", lambda c, r, theta: theta)
    rng = torch.Generator().manual_seed(0)
    thetas = torch.randn(4, fed.layout.size, generator=rng)
    origin = {"none": None, "one": thetas[0] * 0.5, "each": torch.randn(4, fed.layout.size, generator=rng)}[origins]
    steps = [3, 5, 0, 7]
    rows = thetas if origin is None else thetas.double() - origin.double()
    X = np.stack([direct(fed, row, s, scope) for row, s in zip(rows, steps, strict=True)])
    np.testing.assert_allclose(update_gram(fed.layout, thetas, origin, steps, scope), X @ X.T, rtol=1e-12)
    np.testing.assert_allclose(update_gram(fed.layout, list(thetas), origin, steps, scope), X @ X.T, rtol=1e-12)


def test_counters_count_only_in_the_whole_state():
    fed = Scripted("a", lambda c, r, theta: theta)
    theta = fed.initial()
    assert len(fed.layout.counters) == 1
    for scope in ("P", "F", "H"):
        assert update_gram(fed.layout, theta[None], theta, [710], scope).item() == 0
    assert update_gram(fed.layout, theta[None], theta, [710], "state").item() == 710**2
    with pytest.raises(ValueError, match="steps"):
        update_gram(fed.layout, theta[None], theta, None, "state")


def test_equal_states_have_equal_rows():
    fed = Scripted("a", lambda c, r, theta: theta)
    thetas = [1e3 * torch.randn(fed.layout.size, generator=torch.Generator().manual_seed(i % 3)) for i in range(40)]
    G = update_gram(fed.layout, thetas, None, None, "P")
    assert torch.equal(G, G.T)
    D = squared_distances(G).sqrt().numpy()
    assert cut(D, 1.0).tolist() == [i % 3 for i in range(40)]


def test_sets_leave_out_clients_without_a_label():
    assert sets_of("abc", {"c": 0, "a": 0}, 2) == [["a", "c"], []]


@pytest.mark.slow
@other_profiles
def test_recovers_the_groups(case):
    found = []
    for seed in range(5):
        fed, _, _, serving = run(name(case), toy(seed=seed), rounds=2, seed=seed, **HARD[case])
        found.append(adjusted_rand(truth(fed), serving.clusters))
    assert found.count(1.0) >= 4


@pytest.mark.slow
@other_profiles
def test_same_seed_same_bits_and_old_states_stay_as_they_were(case):
    method = make(name(case), **HARD[case])
    runs = []
    for _ in range(2):
        fed = federation(participants=6)
        states = [method.init(fed, fed.begin(0))]
        for index in range(1, 5):
            before = copy.deepcopy(states[-1])
            states.append(method.step(fed, states[-1], fed.begin(index)))
            assert same(before, states[-2])
        runs.append(states)
        assert same(method.step(fed, states[3], fed.begin(4)), states[4])
    assert same(*runs)


@every_method
def test_unequal_sizes_and_a_group_of_one(case):
    scenario = toy(per_group=[4, 3, 1], n=[64, 96, 96, 128, 64, 96, 160, 80])
    fed, _, _, serving = run(name(case), scenario, rounds=3, **HARD[case])
    assert torch.isfinite(serving.models).all()
    assert serving.weights.sum(1).tolist() == [1.0] * 8
    if case in ("flexcfl", "fesem", "cflgp"):  # FedClust's distances grow with the steps: no one threshold fits all sizes
        assert adjusted_rand(truth(fed), serving.clusters) == 1.0
