"""Sites too small to be compared, or to tell groups apart, get a model that fits them, and move nobody else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.tiny import federation, tiny

from emdcfl.methods import make
from emdcfl.methods.base import Clustered
from emdcfl.methods.emdcfl.placing import Unplaced, ambiguous, place


def played(rounds: int = 1, **options: Any) -> Any:
    fed = federation(tiny(clients_per_group=3, val=(8, 70, 70, 70, 70, 70)))
    method, asked = make("emdcfl", **options), []
    state = method.init(fed, fed.begin(0))
    fed.observer = lambda task, client, reply: asked.append((task, client))
    for t in range(rounds):
        state = method.step(fed, state, fed.begin(t + 1))
    return state, method.serve(state), asked


def test_a_site_that_is_not_compared_is_served_its_group_and_not_averaged_into_it() -> None:
    state, serving, asked = played(rounds=2)
    assert serving.clusters.tolist() == [0, 0, 0, 1, 1, 1]
    assert state.sets == [["site-1", "site-2"], ["site-3", "site-4", "site-5"]]
    assert torch.equal(state.models[state.labels["site-0"]], state.models[state.labels["site-1"]])
    assert asked.count(("evaluate", "site-0")) == 2 and all(client == "site-0" for task, client in asked if task == "evaluate")


@pytest.mark.parametrize("options", [{"tolerance": 0.12}, {"require_validation": 16}, {"joining": "keep"}], ids=str)
def test_nobody_is_placed_where_distances_decide_or_the_operator_does(options: dict[str, Any]) -> None:
    state, serving, asked = played(**options)
    assert not any(task == "evaluate" for task, _ in asked)
    assert ("site-0" in state.sets[state.labels["site-1"]]) is ("tolerance" in options)
    assert (serving.clusters[0] == serving.clusters[1]) == ("tolerance" in options)


def test_with_one_group_nothing_is_asked_and_without_any_nothing_changes() -> None:
    fed = federation(tiny(groups=1, clients_per_group=3, val=(8, 70, 70)))
    state = Clustered(list(fed.clients), fed.initial())
    alone = {"site-0": 0, "site-1": 1, "site-2": 1}
    fed.run = None  # type: ignore[method-assign, assignment]
    sets, labels = place(fed, state, {}, [["site-0"], ["site-1", "site-2"]], alone, Unplaced(["site-0"]))
    assert (sets, set(labels.values())) == ([["site-1", "site-2"]], {0})
    every = [["site-0"], ["site-1"], ["site-2"]]
    assert place(fed, state, {}, every, {"site-0": 0, "site-1": 1, "site-2": 2}, Unplaced(fed.clients))[0] == every


def test_a_torn_site_joins_a_group_it_is_linked_with_whatever_it_says_of_others() -> None:
    """Site 0 follows the law of the first group. Linked with the second alone, it may choose that or the model for all."""
    fed = federation(tiny(clients_per_group=2, val=(70,)))
    fed.begin(1)
    local = fed.train(dict.fromkeys(fed.clients, fed.initial())).column("theta")
    state = Clustered(list(fed.clients), fed.initial(), n=dict.fromkeys(fed.clients, 80))
    sets, labels = [["site-0"], ["site-1"], ["site-2", "site-3"]], {"site-0": 0, "site-1": 1, "site-2": 2, "site-3": 2}
    free, bound = (
        place(fed, state, local, sets, labels, Unplaced(ambiguous={"site-0": linked}))
        for linked in ({"site-1", "site-2", "site-3"}, {"site-2", "site-3"})
    )
    assert "site-0" in free[0][free[1]["site-1"]] and free[1]["site-0"] == free[1]["site-1"]
    assert bound[1]["site-0"] != bound[1]["site-1"]


def test_only_smaller_samples_are_torn() -> None:
    linked = np.array([[1, 1, 0, 0, 1], [1, 1, 0, 0, 1], [0, 0, 1, 1, 1], [0, 0, 1, 1, 1], [1, 1, 1, 1, 1]], bool)
    compared = np.ones((5, 5), bool)
    assert ambiguous(linked, compared, [512, 512, 512, 512, 90]) == [4]
    assert ambiguous(linked, compared, [90] * 5) == [] and ambiguous(linked, compared, [90, 90, 90, 90, 512]) == []
    assert ambiguous(linked, linked, [512, 512, 512, 512, 90]) == []
