from __future__ import annotations

from dataclasses import replace

import torch
from tests.methods.toy import TRAINING, federation, run, toy

from emdcfl.core import tasks


def drift(mu: float, prox: str = "squared") -> float:
    """How far the global model moves in one round."""
    fed, _, state, _ = run("fedprox", rounds=1, mu=mu, prox=prox)
    return float((state.theta - fed.initial()).norm())


def test_a_stronger_pull_keeps_the_model_closer():
    drifts = [drift(mu) for mu in (0.0, 0.1, 1.0, 5.0)]
    assert drifts == sorted(drifts, reverse=True)
    assert drifts[-1] < 0.5 * drifts[0]


def test_the_penalty_is_half_mu_times_the_squared_distance():
    """One full-batch step: from the anchor the pull is zero, after it the second step differs by μ times the first one's length."""
    fed = federation()
    theta, where = fed.initial(), fed.layout.trainable
    step = {"local_epochs": 1, "batch_size": 96, "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0}
    fed.begin(1)

    def train(epochs: int, mu: float) -> torch.Tensor:
        reply = fed.run(tasks.train, {"site-0": {"theta": theta}}, training={**step, "local_epochs": epochs}, prox={"mu": mu})
        return reply["site-0"]["theta"][where].double()

    assert torch.equal(train(1, 0.0), train(1, 2.0))
    first = train(1, 0.0) - theta[where].double()
    torch.testing.assert_close(train(2, 2.0) - train(2, 0.0), -0.1 * 2.0 * first, rtol=1e-3, atol=1e-6)


def test_the_public_codes_penalty_freezes_what_has_small_gradients():
    """A pull of constant length μ: where it exceeds the gradient the tensor never leaves its anchor. The squared one lets it go."""
    slow, one_each = replace(TRAINING, lr=0.0005, momentum=0.0, local_epochs=20), toy(per_group=1)
    fed, _, squared, _ = run("fedprox", one_each, rounds=1, mu=2.0, training=slow)
    _, method, frozen, _ = run("fedprox", one_each, rounds=1, mu=2.0, training=slow, preset="reference")
    assert method.prox == "layer_norm"
    start = fed.initial()
    assert (frozen.theta - start).norm() < 0.2 * (squared.theta - start).norm()
