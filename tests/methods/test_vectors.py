from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.methods.scripted import Scripted, direct
from tests.methods.toy import run, toy, truth

from emdcfl.clustering import adjusted_rand, cut
from emdcfl.core.params import squared_distances
from emdcfl.methods.shared.vectors import update_gram


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


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["own_block", "criterion"])  # the default is in test_all.py
def test_other_profiles_recover_the_groups(profile):
    found = []
    for seed in range(5):
        fed, _, _, serving = run("cflgp", toy(seed=seed), rounds=2, seed=seed, profile=profile)
        found.append(adjusted_rand(truth(fed), serving.clusters))
    assert found.count(1.0) >= 4
