"""What every method must do, whatever its idea: repeat itself, go on without an absent client, cope with awkward federations, and pay."""

from __future__ import annotations

import copy
import re
import sys
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from tests.methods.toy import accuracies, federation, play, run, toy, truth
from torch import Tensor

from emdcfl.clustering import adjusted_rand
from emdcfl.core.errors import ConfigError
from emdcfl.data.types import Scenario
from emdcfl.methods import METHODS, Method, Serving, make
from emdcfl.methods.base import PRESETS, preset_values

NAMES = sorted(METHODS)
HARD = [name for name in NAMES if METHODS[name].family == "hard"]
SHARING = [name for name in NAMES if METHODS[name].family in ("soft", "personal")]

PROPER: dict[str, dict[str, Any]] = {
    "fedce": {"delta": 5.0},  # one validation batch a client: loss vectors of length one are close together
}
"""Hyper-parameters for the toy where the paper's are meant for larger networks."""


def options(name: str) -> dict[str, Any]:
    return PROPER.get(name, {})


def leaves(value: Any, at: str = "state") -> dict[str, Any]:
    """Everything a state holds, by path."""
    if is_dataclass(value) and not isinstance(value, type):
        return {k: v for f in fields(value) for k, v in leaves(getattr(value, f.name), f"{at}.{f.name}").items()}
    if isinstance(value, dict):
        assert all(isinstance(key, str) for key in value), f"{at} has keys that are not text"
        return {k: v for key, item in value.items() for k, v in leaves(item, f"{at}[{key}]").items()}
    if isinstance(value, (list, tuple)):
        return {k: v for i, item in enumerate(value) for k, v in leaves(item, f"{at}[{i}]").items()}
    return {at: value}


def assert_same(a: Any, b: Any) -> None:
    """Bit for bit, NaN equal to NaN."""
    left, right = leaves(a), leaves(b)
    assert list(left) == list(right)
    for at, value in left.items():
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(value, right[at], err_msg=at)
        elif isinstance(value, Tensor):
            assert value.dtype == right[at].dtype, at
            torch.testing.assert_close(value, right[at], rtol=0, atol=0, equal_nan=True, msg=lambda m, at=at: f"{at}: {m}")
        else:
            assert value == right[at], at


def check_serving(serving: Serving, clients: int) -> None:
    assert serving.weights.shape == (clients, serving.models.shape[0])
    assert torch.isfinite(serving.models).all() and (serving.weights >= 0).all()
    torch.testing.assert_close(serving.weights.sum(1), torch.ones(clients))
    assert serving.clusters is None or serving.clusters.shape == (clients,)


def small() -> Scenario:
    """Two groups of two: enough for everything but accuracy."""
    return toy(groups=2, per_group=2, n=32)


def test_the_methods_are_those_of_the_comparison():
    assert set(NAMES) >= {
        *("cfl", "cflgp", "emdcfl", "fedavg", "fedce", "fedclust", "fedem", "fedprox", "fedrc", "fedsac", "fedsoft", "fesem"),
        *("flexcfl", "ifca", "local", "oracle", "pacfl", "pfedgraph"),
    }
    assert len(HARD) >= 9 and len(SHARING) >= 6


@pytest.mark.parametrize("name", NAMES)
def test_every_option_is_documented_and_the_presets_exist(name):
    cls = METHODS[name]
    module = sys.modules[cls.__module__]
    assert module.__doc__
    own = [f.name for f in fields(cls)]
    for option in own:
        assert any(re.search(rf"\b{option}\b", c.__doc__ or "") for c in cls.__mro__), f"{name}.{option} is not described"
    for preset in PRESETS:
        wanted = dict(preset_values(cls, preset))
        method = make(name, preset=preset)
        assert {option: getattr(method, option) for option in wanted} == wanted


OUT_OF_RANGE: list[tuple[str, dict[str, Any]]] = [
    *(("cfl", {option: 0.0}) for option in ("epsilon1", "epsilon2", "separation", "stationary", "relative1", "relative2")),
    *(("fedsoft", option) for option in ({"lam": -1.0}, {"smoothing": -0.1}, {"interval": 0})),
    *((name, {"mu": -1.0}) for name in ("fedprox", "fesem", "pfedgraph", "fedsac")),
    *((name, {"threshold": -1.0}) for name in ("fedclust", "pacfl")),
    *((name, {"rate": 0.0}) for name in ("fedem", "fedrc")),
    *((name, {"k": 10}) for name in NAMES if "k" in METHODS[name].__dataclass_fields__),
    *(("cfl", {"first_split": 0}), ("cflgp", {"period": 0}), ("cflgp", {"period": 2, "last_clustering": 1}), ("pacfl", {"vectors": 0})),
    *(("fedce", {"delta": -0.1}), ("fedrc", {"floor": 0.0}), ("fedsac", {"components": 0}), ("flexcfl", {"eta_g": -1.0})),
    *(("ifca", {"min_share": 0.6}), ("ifca", {"max_restarts": -1}), ("pfedgraph", {"alpha": 0.0}), ("pfedgraph", {"snap": 2.0})),
]


@pytest.mark.parametrize(("name", "chosen"), OUT_OF_RANGE, ids=str)
def test_settings_out_of_range_are_refused_before_anybody_trains(name, chosen):
    fed = federation(small())
    with pytest.raises(ConfigError, match=rf"method\.{list(chosen)[-1]} "):
        make(name, **chosen).init(fed, fed.begin(0))


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        *((name, {}) for name in NAMES),
        *((name, {"preset": preset}) for name in NAMES for preset in PRESETS if preset_values(METHODS[name], preset)),
        ("cflgp", {"profile": "criterion"}),
    ],
    ids=str,
)
def test_a_state_is_all_a_round_needs(name, chosen):
    """Two runs are equal; a step leaves the old state alone; fresh clients go on from a state as the old ones would have."""
    method: Method = make(name, **{**options(name), **chosen})
    first, second = federation(small()), federation(small())
    (a, _), (b, _) = play(first, method, 2), play(second, method, 2)
    assert_same(a, b)
    for at, value in leaves(a).items():
        storable = value is None or isinstance(value, (Tensor, int, float, str, bool))
        assert storable, f"{at} is a {type(value).__name__}, which cannot be stored"
    before = copy.deepcopy(a)
    c = method.step(first, a, first.begin(3))
    assert_same(a, before)
    resumed = federation(small())
    assert_same(c, method.step(resumed, before, resumed.begin(3)))
    assert_same(method.serve(c), method.serve(c))


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_reply_costs_one_round_of_one_client(name):
    fed, _, _, serving = run(name, small(), rounds=3, on_failure="continue", fails={"site-2": 1, "site-3": 2}, **options(name))
    assert {(f.client, f.round) for f in fed.failures} == {("site-2", 1), ("site-3", 2)}
    check_serving(serving, 4)
    assert accuracies(fed, serving).shape == (4,)


@pytest.mark.parametrize("name", NAMES)
def test_partial_participation(name):
    scenario = toy(groups=2, per_group=3, n=32)
    fed, _, state, serving = run(name, scenario, rounds=2, participants=2, **options(name))
    check_serving(serving, 6)
    seen = {c for index in (1, 2) for c in fed.begin(index).participants}
    for i in (i for i, c in enumerate(fed.clients) if c not in seen):
        if METHODS[name].family in ("hard", "personal", "alone"):
            assert torch.equal(serving.weights[i] @ serving.models, fed.initial()), "who never trained is served the initial model"
        assert serving.clusters is None or int((serving.clusters == serving.clusters[i]).sum()) == 1
    _, _, again, _ = run(name, scenario, rounds=2, participants=2, **options(name))
    assert_same(state, again)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_cluster_of_one_and_clients_of_unequal_size(name):
    scenario = toy(per_group=[3, 1, 2], n=[96, 50, 17, 80, 96, 33])
    fed, _, _, serving = run(name, scenario, rounds=3, **options(name))
    check_serving(serving, 6)
    if name in ("oracle", "emdcfl", "pacfl", "flexcfl", "fesem", "cflgp"):
        assert int((serving.clusters == serving.clusters[3]).sum()) == 1
        assert adjusted_rand(truth(fed), serving.clusters) == 1.0


@pytest.mark.parametrize("name", [name for name in NAMES if "k" in METHODS[name].__dataclass_fields__])
@pytest.mark.parametrize("k", [1, 4])
def test_more_clusters_than_groups_and_a_single_one(name, k):
    """Clients that are all alike leave clusters empty; with K = 1 there is nothing to choose."""
    fed, _, _, serving = run(name, toy(groups=1, per_group=4, n=32), rounds=3, k=k, **options(name))
    check_serving(serving, 4)
    if k == 1 and serving.clusters is not None:
        assert serving.clusters.tolist() == [0, 0, 0, 0]
    assert accuracies(fed, serving).min() > 0.4


@pytest.mark.slow
@pytest.mark.parametrize("name", HARD)
def test_hard_methods_find_the_groups(name):
    """ARI 1.00 on at least four of five seeds."""
    rounds = 5 if name == "cfl" else 3
    chosen = {"min_share": 0.2} if name == "ifca" else options(name)  # otherwise a model may be nobody's favourite from the start
    found = []
    for seed in range(5):
        fed, _, _, serving = run(name, rounds=rounds, seed=seed, **chosen)
        found.append(adjusted_rand(truth(fed), serving.clusters) == 1.0)
        if sum(found) == 4:
            return
    pytest.fail(f"{name} found the groups in {sum(found)} of 5 runs")


@cache
def worst(name: str, seed: int, *, long: bool = False) -> float:
    """Lowest accuracy among the clients; ``long`` gives less noise and more rounds."""
    scenario, rounds = (toy(per_group=2, noise=0.25), 12) if long else (toy(), 5)
    fed, _, _, serving = run(name, scenario, rounds=rounds, seed=seed, **options(name))
    return float(accuracies(fed, serving).min())


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARING)
@pytest.mark.parametrize("seed", [0, 1])
def test_soft_and_personal_methods_help_the_worst_client(name, seed):
    long = name in ("fedem", "fedrc")  # mixtures of models learn slowly, and noise sets their limit
    assert worst(name, seed, long=long) >= worst("fedavg", seed, long=long) + 0.05


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_one_model_for_all_suffers_where_groups_do_not(seed):
    assert worst("fedavg", seed) + 0.1 < worst("oracle", seed)
    assert worst("oracle", seed) > 0.85


@pytest.mark.parametrize(("name", "chosen"), [("oracle", {}), ("fedprox", {"mu": 0.0}), ("pacfl", {"threshold": 90.0}), ("ifca", {"k": 1})])
def test_what_reduces_to_fedavg_is_fedavg_bit_for_bit(name, chosen):
    scenario = toy(groups=1, per_group=3, n=[32, 64, 48])
    _, _, _, plain = run("fedavg", scenario, rounds=3)
    _, _, _, serving = run(name, scenario, rounds=3, **chosen)
    assert torch.equal(serving.models[0], plain.models[0]) and serving.models.shape[0] == 1
