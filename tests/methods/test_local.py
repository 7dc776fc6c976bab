from __future__ import annotations

import torch
from tests.methods.toy import history
from tests.tiny import federation, same_bits, tiny

from emdcfl.methods import make


def test_nobody_learns_from_anybody() -> None:
    scenario = tiny()
    method = make("local")
    fed = federation(scenario)
    state = history(fed, method, 2)[-1]
    theta = fed.initial()
    for index in (1, 2):
        fed.begin(index)
        theta = fed.train({"site-3": theta})["site-3"]["theta"]
    assert same_bits(state.own["site-3"], theta)
    serving = method.serve(state)
    assert serving.clusters is None and torch.equal(serving.weights, torch.eye(4))
    assert same_bits(serving.models[3], theta)


def test_the_unseen_hold_theta0() -> None:
    fed = federation(participants=2)
    method = make("local")
    state = method.init(fed, fed.begin(0))
    round = fed.begin(1)
    serving = method.serve(method.step(fed, state, round))
    for i, client in enumerate(fed.clients):
        assert same_bits(serving.models[i], state.theta0) == (client not in round.participants)
