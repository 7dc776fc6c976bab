from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.methods.toy import history
from tests.tiny import federation, same_bits, tiny

from emdcfl.core.errors import ConfigError
from emdcfl.data.types import Scenario
from emdcfl.methods import make
from emdcfl.runs.scoring import agreement


def play(fed: Any, rounds: int, name: str = "oracle") -> Any:
    return history(fed, make(name), rounds)[-1]


def test_each_true_group_is_fedavg_of_its_own() -> None:
    scenario = tiny(n=(80, 49, 64, 33))
    state = play(federation(scenario), 3)
    for group, at in enumerate((slice(0, 2), slice(2, 4))):
        part = federation(Scenario(**{**vars(scenario), "sites": scenario.sites[at]}))
        assert same_bits(state.models[group], play(part, 3, "fedavg").theta)


def test_the_unseen_stay_alone_with_theta0_and_count() -> None:
    fed = federation(tiny(clients_per_group=4), participants=4)
    state = play(fed, 1)
    serving = make("oracle").serve(state)
    unseen = [i for i, c in enumerate(fed.clients) if c not in state.labels]
    assert len(unseen) == 4
    clusters = serving.clusters.tolist()  # type: ignore[union-attr]
    for i in unseen:
        assert clusters.count(clusters[i]) == 1
        assert same_bits(serving.models[int(serving.weights[i].argmax())], state.theta0)
    ari = agreement(serving.clusters, fed.clients, fed.truth)
    assert ari is not None and ari < 1.0
    assert torch.equal(serving.weights.sum(1), torch.ones(8))
    later = play(federation(tiny(clients_per_group=4), participants=4), 6)
    assert agreement(make("oracle").serve(later).clusters, fed.clients, fed.truth) == 1.0


def test_without_a_truth_there_is_no_oracle() -> None:
    fed = federation(Scenario(**{**vars(tiny()), "groups": None}))
    with pytest.raises(ConfigError, match="oracle needs the true groups"):
        make("oracle").init(fed, fed.begin(0))
