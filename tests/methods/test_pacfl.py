from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.methods.toy import accuracies, federation, play, run, toy, truth

from emdcfl.clustering import adjusted_rand
from emdcfl.core.errors import ClientError
from emdcfl.core.params import average
from emdcfl.data.types import Preprocess, Scenario, Site, Split
from emdcfl.methods import make
from emdcfl.methods.shared.subspaces import data_subspace, leading_vectors, smallest_angle
from emdcfl.models.recipe import ModelRecipe


def images(n: int, seed: int, size: int = 6) -> Split:
    rng = np.random.default_rng(seed)
    return Split(torch.from_numpy(rng.integers(0, 256, (n, 3, size, size), dtype=np.uint8)), torch.arange(n) % 2)


def image_scenario() -> Scenario:
    sites = tuple(Site(f"cam-{i}", images(16, i), images(8, 10 + i), {"test": images(8, 20 + i)}) for i in range(2))
    recipe = ModelRecipe("mlp", {"features": 108, "classes": 2, "hidden": [4]})
    return Scenario("images", sites, ("a", "b"), Preprocess((0.5, 0.4, 0.3), (0.2, 0.2, 0.2), 1 / 255), recipe)


def basis(scenario: Scenario, **options: Any) -> torch.Tensor:
    return federation(scenario).run(data_subspace, {scenario.sites[0].name: {}}, **options)[scenario.sites[0].name]["basis"]


@pytest.mark.parametrize(("flatten", "features"), [("channel", 36), ("image", 108)])
def test_subspaces_of_images_are_singular_vectors_of_the_networks_inputs(flatten, features):
    scenario = image_scenario()
    U = basis(scenario, split="val", vectors=3, flatten=flatten)
    assert U.shape == (features, 6)
    torch.testing.assert_close(U.norm(dim=0), torch.ones(6))
    val = scenario.sites[0].val
    x = scenario.preprocess(val.x[val.y == 1]).double().reshape(-1, features)
    _, vectors = torch.linalg.eigh(x.T @ x)
    torch.testing.assert_close((vectors[:, -3:].flip(1).T @ U[:, 3:].double()).diagonal().abs(), torch.ones(3).double(), rtol=0, atol=1e-4)


def test_subspaces_of_tables_have_one_column_per_sample():
    scenario = toy(per_group=1)
    assert torch.equal(basis(scenario, flatten="channel"), basis(scenario, flatten="image"))
    assert basis(scenario, vectors=2).shape == (8, 8)
    assert not torch.equal(basis(scenario), basis(scenario, split="train"))


def test_no_more_vectors_than_the_data_span():
    x = torch.tensor([[1.0, 2.0, 0.0], [1.0, 2.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    assert leading_vectors(x, 3).shape == (4, 1)
    assert leading_vectors(torch.zeros(4, 3), 3).shape == (4, 0)


def test_singular_vectors_have_no_sign_except_in_the_public_code():
    a, b = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]), torch.tensor([[-0.8], [0.0], [0.6]])
    assert smallest_angle(a, b) == pytest.approx(np.degrees(np.arccos(0.8)))
    assert smallest_angle(a, b, signed=True) == pytest.approx(90.0)
    assert make("pacfl", preset="reference").sign == "signed"
    assert smallest_angle(a, -b) == smallest_angle(a, b)


def test_clusters_are_found_before_training_and_stay():
    fed, _, state, serving = run("pacfl", rounds=2)
    assert adjusted_rand(truth(fed), serving.clusters) == 1.0
    _, _, oracle, _ = run("oracle", rounds=2)
    assert torch.equal(state.models, oracle.models)
    assert state.bases == {}
    angles = state.angles
    assert torch.equal(angles, angles.T) and float(angles.diagonal().abs().max()) < 0.1
    same = torch.tensor([[a == b for b in truth(fed)] for a in truth(fed)])
    assert angles[~same].min() > 12 >= angles[same].max()


def test_a_threshold_of_nothing_leaves_everybody_alone_and_one_of_all_is_fedavg():
    _, _, alone, _ = run("pacfl", rounds=1, threshold=0.0)
    assert len(alone.models) == 9
    _, _, together, _ = run("pacfl", rounds=2, threshold=90.0)
    _, _, fedavg, _ = run("fedavg", rounds=2)
    assert torch.equal(together.models[0], fedavg.theta)


def test_newcomers_join_the_nearest_cluster_or_found_one():
    """Rounds of three: later clients are placed without moving the earlier ones, starting from their cluster's model."""
    fed = federation(toy(per_group=[3, 3, 1]), participants=3, seed=1)
    method = make("pacfl", threshold=12.0)
    state = method.init(fed, fed.begin(0))
    sizes = []
    for index in range(1, 9):
        before, state = state, method.step(fed, state, fed.begin(index))
        assert {c: state.labels[c] for c in before.labels} == before.labels
        sizes.append(len(state.models))
    assert sizes[0] < sizes[-1] == 3
    assert set(state.labels) == set(fed.clients)
    assert adjusted_rand(truth(fed), method.serve(state).clusters) == 1.0
    assert accuracies(fed, method.serve(state)).min() > 0.8


def test_a_newcomer_starts_from_its_clusters_model():
    fed = federation(toy(groups=1, per_group=3), on_failure="continue", fails={"site-2": 1})
    method = make("pacfl", threshold=90.0)
    first = method.step(fed, method.init(fed, fed.begin(0)), fed.begin(1))
    assert set(first.labels) == {"site-0", "site-1"}
    second = method.step(fed, first, fed.begin(2))
    local = fed.train(dict.fromkeys(fed.clients, first.models[0]))
    assert torch.equal(second.models[0], average(local.column("theta").values(), local.column("n").values()))


def test_a_newcomers_update_is_what_it_adds_to_its_clusters_model():
    """So a model that it alone averages holds the others' updates too, and an honest update is not flagged as a long one."""
    fed = federation(toy(groups=1, per_group=4), on_failure="continue", fails={"site-3": (1, 2, 3), **{f"site-{i}": 4 for i in range(3)}})
    fed.quorum = 0.1
    _, serving = play(fed, make("pacfl", threshold=90.0), 4)
    assert serving.shares[0].tolist() == [0, 0, 0, 1] and serving.reached.all()
    fed = federation(toy(groups=1, per_group=6), on_failure="continue", fails={"site-5": (1, 2, 3)})
    play(fed, make("pacfl", threshold=90.0), 4)
    assert fed.guard.ledger.flags == {}


def test_a_cluster_whose_members_are_absent_keeps_its_model():
    fed = federation(toy(per_group=[3, 1, 2]), on_failure="continue", fails={"site-3": 2})
    method = make("pacfl")
    first = method.step(fed, method.init(fed, fed.begin(0)), fed.begin(1))
    second = method.step(fed, first, fed.begin(2))
    k = first.labels["site-3"]
    assert first.sets[k] == ["site-3"]
    assert torch.equal(second.models[k], first.models[k]) and not torch.equal(second.models[0], first.models[0])


def test_what_cannot_work_says_so():
    scenario = toy(per_group=1)
    nothing = Split(torch.zeros(0, 8), torch.zeros(0, dtype=torch.int64))
    zeros = Split(torch.zeros(5, 8), torch.zeros(5, dtype=torch.int64))
    for val, match in ((nothing, "no val data"), (zeros, "only zeros")):
        broken = replace(scenario, sites=tuple(replace(s, val=val) for s in scenario.sites))
        with pytest.raises(ClientError, match=match):
            play(federation(broken), make("pacfl"), 1)
    wide = replace(
        scenario.sites[2], val=Split(torch.randn(9, 5, generator=torch.Generator().manual_seed(0)), torch.zeros(9, dtype=torch.int64))
    )
    with pytest.raises(ClientError, match="client 'site-2'.*8 features"):
        play(federation(replace(scenario, sites=(*scenario.sites[:2], wide))), make("pacfl"), 1)
