from __future__ import annotations

import torch
from tests.tiny import federation, same_bits, tiny

from emdcfl.methods import make


def test_the_model_is_the_mean_by_train_size() -> None:
    fed = federation(tiny(n=(80, 49, 64, 33), model="tiny_bn"))
    method = make("fedavg")
    state = method.init(fed, fed.begin(0))
    assert same_bits(state.theta, fed.initial())
    after = method.step(fed, state, fed.begin(1))
    local = fed.train(dict.fromkeys(fed.clients, state.theta))
    n = torch.tensor(list(local.column("n").values()), dtype=torch.float64)
    torch.testing.assert_close(after.theta, (n @ local.stack("theta").double() / n.sum()).float())


def test_only_participants_count() -> None:
    fed = federation(participants=1)
    method = make("fedavg")
    state = method.init(fed, fed.begin(0))
    round = fed.begin(1)
    after = method.step(fed, state, round)
    assert same_bits(after.theta, fed.train({round.participants[0]: state.theta}).stack("theta")[0])


def test_everybody_is_served_the_one_model_and_there_are_no_clusters() -> None:
    fed = federation()
    serving = make("fedavg").serve(make("fedavg").init(fed, fed.begin(0)))
    assert serving.models.shape == (1, fed.layout.size) and serving.weights.tolist() == [[1.0]] * 4
    assert serving.clusters is None and serving.distances is None
