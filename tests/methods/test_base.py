from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np
import pytest
import torch
from tests.tiny import federation, same_bits

from emdcfl.core.errors import ConfigError
from emdcfl.methods import METHODS, find, make
from emdcfl.methods.base import PRESETS, Clustered, average_sets, clusters_wanted, preset_of, preset_values, serve_clusters
from emdcfl.trust import Guard
from emdcfl.trust.policy import Trust

T = torch.arange(12.0).reshape(4, 3)
STATE = Clustered(["a", "b", "c", "d"], torch.full((3,), 9.0), n={"a": 1, "b": 3, "c": 2})


def test_methods_are_found_by_name_and_mistakes_get_a_hint() -> None:
    assert {"emdcfl", "oracle", "fedavg", "local"} <= set(METHODS)
    with pytest.raises(ConfigError, match="unknown method 'emdclf': did you mean 'emdcfl'"):
        find("emdclf")
    with pytest.raises(ConfigError, match="emdcfl has no option 'tolerence': did you mean 'tolerance'"):
        make("emdcfl", tolerence=1)
    with pytest.raises(ConfigError, match="unknown preset 'paper'"):
        make("emdcfl", preset="paper")


def test_every_method_says_what_it_is() -> None:
    for name, cls in METHODS.items():
        assert cls.name == name and cls.citation and cls.family in ("global", "hard", "soft", "personal", "alone")
        assert dataclasses.is_dataclass(cls) and dataclasses.is_dataclass(cls.State)
        assert all(f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING for f in dataclasses.fields(cls))
        with pytest.raises(dataclasses.FrozenInstanceError):
            cls().name = "x"  # type: ignore[misc]


def test_the_reference_preset_turns_the_switches_and_own_options_win() -> None:
    method = make("emdcfl", preset="reference", projection="row")
    assert (method.force_diagonal, method.recompute, method.projection) == (False, "if-partial", "row")  # type: ignore[attr-defined]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_preset_is_recognised_by_its_settings(name: str, preset: str) -> None:
    settings = dataclasses.asdict(make(name, preset=preset))  # type: ignore[call-overload]
    kept = {key: value for key, value in settings.items() if value is not None}  # as in rows of older versions
    for written in (kept, {key: "none" if value is None else value for key, value in settings.items()}):
        assert preset_of(name, written) == (preset if preset_values(METHODS[name], preset) else None)
    assert preset_of(name, {}) is None


def test_sets_average_by_size_and_may_overlap() -> None:
    local = {"a": T[0], "b": T[1], "c": T[2]}
    state = average_sets(STATE, [["a", "b"], ["b", "c"]], {"a": 0, "b": 0, "c": 1}, local, keep=False)
    torch.testing.assert_close(state.models, torch.stack([(T[0] + 3 * T[1]) / 4, (3 * T[1] + 2 * T[2]) / 5]))
    assert state.latest == {} and STATE.sets == []


def test_the_absent_count_with_their_latest_state_or_not_at_all() -> None:
    before = dataclasses.replace(
        STATE, latest={"a": T[0], "b": T[1], "c": T[2]}, labels={"a": 0, "b": 0, "c": 1}, models=torch.stack([T[0], T[3]])
    )
    sets, labels = [["a", "b"], ["c"]], {"a": 0, "b": 0, "c": 1}
    latest = average_sets(before, sets, labels, {"a": T[3]}, keep=True)
    torch.testing.assert_close(latest.models[0], (T[3] + 3 * T[1]) / 4)
    assert same_bits(latest.latest["a"], T[3]) and same_bits(latest.latest["b"], T[1])
    present = average_sets(before, sets, labels, {"a": T[3]}, keep=True, members="participants")
    assert same_bits(present.models[0], T[3])
    assert same_bits(present.models[1], before.models[1])  # nobody was there: the model stays


@pytest.mark.parametrize("members", ["latest", "participants"])
@pytest.mark.parametrize("policy", [Trust(), Trust(max_share=0.4)])
def test_whose_updates_a_model_holds_is_what_the_averages_did(members: Literal["latest", "participants"], policy: Trust) -> None:
    # every client adds to an entry of its own, so the model itself shows whose updates reached it, and with which weight
    rng, names, own = np.random.default_rng(0), list("abcdef"), torch.eye(6)
    state = Clustered(names, torch.zeros(6), n={c: int(n) for c, n in zip(names, rng.integers(1, 50, 6), strict=True)})
    indirect = 0
    for _ in range(6):
        here = {c for c in names if not state.labels or rng.random() < 0.6}
        local = {c: state.start(c) + own[names.index(c)] for c in names if c in here}
        sets = [[c for c in names if rng.random() < 0.5 or c == names[k]] for k in range(3)]
        labels = {c: int(rng.integers(3)) if c not in names[:3] else names.index(c) for c in names}
        known = local if members == "participants" else {**state.latest, **local}
        before, state = state, average_sets(state, sets, labels, local, keep=True, members=members, guard=Guard(policy))
        assert torch.equal(state.reached, state.models > 0)
        for k in range(3):
            mixed = sum((float(state.shares[k, i]) * known[c] for i, c in enumerate(names) if state.shares[k, i] > 0), torch.zeros(6))
            averaged = bool(state.shares[k].sum() > 0)
            torch.testing.assert_close(state.models[k], mixed if averaged else before.start(names[k]))
            indirect += int((state.reached[k] & (state.shares[k] == 0)).sum())
    assert indirect  # updates that came through others are among those that were found
    serving = serve_clusters(dataclasses.replace(state, labels={c: k for c, k in state.labels.items() if c != "f"}))
    assert serving.reached is not None and serving.shares is not None
    assert torch.equal(serving.reached, serving.models > 0) and serving.shares.shape == serving.reached.shape


def test_the_unseen_are_served_theta0_each_alone() -> None:
    state = dataclasses.replace(STATE, labels={"b": 0}, sets=[["b"]], models=T[:1])
    serving = serve_clusters(state)
    assert serving.clusters is not None and serving.clusters.tolist() == [0, 1, 2, 3]
    assert serving.models[serving.weights.argmax(1)].tolist() == [[9.0] * 3, T[0].tolist(), [9.0] * 3, [9.0] * 3]
    nobody = serve_clusters(STATE)
    assert nobody.models.shape == (1, 3) and nobody.weights.shape == (4, 1)


def test_clusters_are_numbered_by_first_appearance() -> None:
    state = dataclasses.replace(STATE, labels={"a": 1, "b": 0, "c": 1, "d": 0}, models=T[:2])
    serving = serve_clusters(state)
    assert serving.clusters is not None and serving.clusters.tolist() == [0, 1, 0, 1]
    assert serving.weights.argmax(1).tolist() == [1, 0, 1, 0]


def test_k_comes_from_the_method_or_the_scenario() -> None:
    fed = federation()
    assert clusters_wanted(None, fed, "x") == 2 and clusters_wanted(3, fed, "x") == 3
    with pytest.raises(ConfigError, match=r"expected method.k between 1 and 4 .* got 5"):
        clusters_wanted(5, fed, "x")
    fed.k = None
    with pytest.raises(ConfigError, match="x needs the number of clusters"):
        clusters_wanted(None, fed, "x")
