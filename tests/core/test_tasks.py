from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.tiny import TRAINING, client, federation, same_bits, tiny
from torch import Tensor

from emdcfl.core import tasks
from emdcfl.core.client import TASKS, Client
from emdcfl.core.errors import ClientError, DataError
from emdcfl.core.schema import check
from emdcfl.core.tasks import Fit, Training, local_sgd, sample_losses
from emdcfl.data.types import Scenario, Site, Split
from emdcfl.privacy.exchange import public_key

STEEP = Training(local_epochs=2, batch_size=16, lr=0.05, momentum=0.9, weight_decay=0.01)


def plain_sgd(c: Client, theta: Tensor, training: Training, extra: Any = None, weights: Tensor | None = None) -> Tensor:
    """The same training with torch's own optimiser and autograd, on an ordinary module."""
    module = tiny().model()
    state = c.network.state_dict(theta)
    module.load_state_dict(state)
    start = [p.detach().clone() for p in module.parameters()]
    optimiser = torch.optim.SGD(module.parameters(), lr=training.lr, momentum=training.momentum, weight_decay=training.weight_decay)
    data, rng = c.split("train"), c.generator("shuffle")
    w = torch.ones(len(data)) if weights is None else weights
    for _ in range(training.local_epochs):
        order = rng.permutation(len(data))
        for at in range(0, len(order), training.batch_size):
            index = torch.from_numpy(order[at : at + training.batch_size])
            loss = (F.cross_entropy(module(data.x[index]), data.y[index], reduction="none") * w[index]).sum() / len(index)
            if extra is not None:
                loss = loss + extra(list(module.parameters()), start)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def start(c: Client) -> Tensor:
    c.begin(1)
    return c.network.theta.clone()


def test_local_sgd_is_torchs() -> None:
    c = client()
    theta = start(c)
    reply = local_sgd(c, Fit(theta, STEEP))
    torch.testing.assert_close(reply["theta"], plain_sgd(c, theta, STEEP), rtol=1e-5, atol=1e-6)
    assert (reply["n"], reply["steps"]) == (80, 2 * 5)
    assert not torch.allclose(reply["theta"], theta)
    check(reply, tasks.TRAINED, {"P": c.network.layout.size, "max_n": 10**6})


def flat(parameters: list[Tensor]) -> Tensor:
    return torch.cat([p.reshape(-1) for p in parameters])


def squared(now: list[Tensor], anchor: Tensor) -> Tensor:
    return 0.35 * (flat(now) - anchor).square().sum()  # mu / 2


def layer_norms(now: list[Tensor], anchor: Tensor) -> Tensor:
    sizes = [p.numel() for p in now]
    return 0.7 * sum((p.reshape(-1) - a).norm() for p, a in zip(now, anchor.split(sizes), strict=True))  # type: ignore[return-value]


def cosine(now: list[Tensor], anchor: Tensor) -> Tensor:
    return -0.7 * torch.cosine_similarity(flat(now), anchor, dim=0)


@pytest.mark.parametrize(
    ("options", "term"),
    [
        ({"prox": {"mu": 0.7}}, squared),
        ({"prox": {"mu": 0.7, "kind": "layer_norm"}}, layer_norms),
        ({"cosine": {"mu": 0.7}}, cosine),
    ],
)
@pytest.mark.parametrize("own_anchor", [True, False])
def test_terms_have_the_gradient_autograd_finds(options: dict[str, Any], term: Any, own_anchor: bool) -> None:
    c = client()
    theta = start(c)
    anchor = theta if own_anchor else torch.randn(theta.shape, generator=torch.Generator().manual_seed(3))
    if not own_anchor:
        options = {name: {**value, "anchor": anchor} for name, value in options.items()}
    reply = local_sgd(c, Fit(theta, STEEP, **options))
    expected = plain_sgd(c, theta, STEEP, extra=lambda now, _: term(now, anchor))
    torch.testing.assert_close(reply["theta"], expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(reply["theta"], local_sgd(c, Fit(theta, STEEP))["theta"], rtol=1e-4, atol=1e-5)


def test_the_layer_norm_term_is_still_where_it_starts() -> None:
    c = client()
    theta = start(c)
    once = Training(local_epochs=1, batch_size=80, lr=0.05)
    assert same_bits(
        local_sgd(c, Fit(theta, once, prox={"mu": 5.0, "kind": "layer_norm"}))["theta"], local_sgd(c, Fit(theta, once))["theta"]
    )


def test_sample_weights_divide_by_the_batch_and_ones_change_no_bit() -> None:
    c = client()
    theta = start(c)
    plain = local_sgd(c, Fit(theta, STEEP))
    assert same_bits(local_sgd(c, Fit(theta, STEEP, sample_weights=torch.ones(80)))["theta"], plain["theta"])
    w = torch.linspace(0, 2, 80)
    weighted = local_sgd(c, Fit(theta, STEEP, sample_weights=w))
    torch.testing.assert_close(weighted["theta"], plain_sgd(c, theta, STEEP, weights=w), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(weighted["theta"], plain["theta"], atol=1e-3)


def test_the_optimiser_is_fresh_every_round() -> None:
    c = client()
    theta = start(c)
    first = local_sgd(c, Fit(theta, STEEP))["theta"]
    again = local_sgd(c, Fit(theta, STEEP))["theta"]
    assert same_bits(first, again)
    c.begin(2)
    assert not torch.equal(local_sgd(c, Fit(theta, STEEP))["theta"], first)  # another round shuffles anew


@pytest.mark.parametrize("model", ["mlp", "tiny_bn", "tiny_dropout"])
def test_a_reply_depends_on_no_other_client(model: str) -> None:
    scenario = tiny(model=model)
    alone = federation(Scenario(**{**vars(scenario), "sites": scenario.sites[2:3]}))
    theta = alone.initial()
    alone.begin(1)
    expected = alone.train({"site-2": theta})["site-2"]["theta"]
    everybody = federation(scenario)
    everybody.begin(1)
    replies = everybody.train(dict.fromkeys(reversed(everybody.clients), theta))
    assert same_bits(replies["site-2"]["theta"], expected)
    everybody.evaluate(everybody.clients, theta[None])
    assert same_bits(everybody.train({"site-2": theta})["site-2"]["theta"], expected)
    torch.rand(7)  # nor on torch's global generator
    assert same_bits(everybody.train({"site-3": theta, "site-2": theta})["site-2"]["theta"], expected)


def test_batchnorm_never_sees_a_batch_of_one() -> None:
    c = client(tiny(model="tiny_bn", n=(33,)))
    reply = local_sgd(c, Fit(start(c), Training(local_epochs=1, batch_size=16)))
    assert reply["steps"] == 2  # 16 and 17
    plain = client(tiny(n=(33,)))
    assert local_sgd(plain, Fit(start(plain), Training(local_epochs=1, batch_size=16)))["steps"] == 3
    untracked = client(tiny(model="tiny_untracked", n=(33,)))
    assert local_sgd(untracked, Fit(start(untracked), Training(local_epochs=1, batch_size=16)))["steps"] == 2
    lonely = client(tiny(model="tiny_bn", n=(1,)))
    with pytest.raises(DataError, match="client 'site-0' has one training sample in a batch, and BatchNorm needs two"):
        local_sgd(lonely, Fit(start(lonely), TRAINING))


def test_a_client_without_training_data_is_named() -> None:
    c = client(tiny(n=(0,)))
    with pytest.raises(DataError, match="client 'site-0' has no training data"):
        local_sgd(c, Fit(start(c), TRAINING))


def test_divergence_is_reported_with_advice() -> None:
    c = client()
    wild = Training(local_epochs=3, batch_size=16, lr=1e30)
    with pytest.raises(ClientError, match=r"the training loss became (nan|inf); lower the learning rate \(training.lr is 1e\+30\)"):
        local_sgd(c, Fit(start(c), wild))
    last_step = Training(local_epochs=1, batch_size=80, lr=1e38, weight_decay=1e3)
    c = client()
    with pytest.raises(ClientError, match=r"no longer finite after training; lower the learning rate"):
        local_sgd(c, Fit(start(c), last_step))


def test_reductions_of_evaluate_agree() -> None:
    c = client(tiny(val=(70,)))
    models = torch.stack([c.network.theta.clone(), torch.randn(c.network.layout.size, generator=torch.Generator().manual_seed(0))])
    table = tasks.evaluate(c, models=models, reduction="per_sample")["table"]
    assert table.shape == (2, 70)
    mean = tasks.evaluate(c, models=models)
    torch.testing.assert_close(mean["table"][:, 0], table.mean(1))
    batches = tasks.evaluate(c, models=models, reduction="per_batch")["table"]
    assert batches.shape == (2, 2)
    torch.testing.assert_close(batches, torch.stack([table[:, :64].mean(1), table[:, 64:].mean(1)], 1))
    counts = tasks.evaluate(c, models=models, reduction="argmin_counts")["table"][:, 0]
    assert counts.tolist() == [(table[0] <= table[1]).sum().item(), (table[1] < table[0]).sum().item()]
    c.network.load(models[1])
    right = (c.network.module(c.split("val").x).argmax(1) == c.split("val").y).float().mean()
    assert mean["accuracy"][1].item() == pytest.approx(right.item()) and mean["n"] == 70
    for reduction in ("mean", "per_batch", "per_sample", "argmin_counts"):
        check(tasks.evaluate(c, models=models, reduction=reduction), TASKS["evaluate"].returns, {"K": 2, "max_n": 10**6})  # type: ignore[arg-type]
    assert tasks.evaluate(c, models=models, split="train")["n"] == 80


def test_evaluation_leaves_statistics_alone_and_needs_data() -> None:
    c = client(tiny(model="tiny_bn", val=(0,)))
    theta = c.network.theta.clone()
    with pytest.raises(DataError, match="client 'site-0' has no val data to score models on"):
        tasks.evaluate(c, models=theta[None])
    tasks.evaluate(c, models=theta[None], split="train")
    assert same_bits(c.network.theta, theta)


def test_a_one_hot_mixture_is_the_single_model_and_averages_probabilities() -> None:
    c = client()
    models = torch.randn(3, c.network.layout.size, generator=torch.Generator().manual_seed(0))
    single = tasks.test(c, models=models[1:2], weights=torch.ones(1))
    assert tasks.test(c, models=models, weights=torch.tensor([0.0, 1.0, 0.0])) == single
    c.network.load(models[1])
    test = c.site.tests["test"]
    logits = c.network.module(test.x)
    assert single["accuracy"]["test"] == pytest.approx((logits.argmax(1) == test.y).float().mean().item())
    assert single["loss"]["test"] == pytest.approx(F.cross_entropy(logits, test.y).item(), rel=1e-5)
    assert single["n"] == {"test": 40}
    p, _ = tasks.mixture(c, models, torch.tensor([0.2, 0.3, 0.5]), "test:test")
    parts = []
    for theta in models:
        c.network.load(theta)
        parts.append(c.network.module(test.x).softmax(1))
    torch.testing.assert_close(p, 0.2 * parts[0] + 0.3 * parts[1] + 0.5 * parts[2])


def test_every_variant_is_tested_and_an_empty_one_counts_no_samples() -> None:
    scenario = tiny()
    site = scenario.sites[0]
    empty = Split(site.val.x[:0], site.val.y[:0])
    more = Site(site.name, site.train, site.val, {"clean": site.tests["test"], "backdoor": site.val, "none": empty})
    c = client(Scenario(**{**vars(scenario), "sites": (more,)}))
    reply = tasks.test(c, models=c.network.theta[None].clone(), weights=torch.ones(1))
    assert list(reply["accuracy"]) == ["clean", "backdoor", "none"]
    assert reply["n"] == {"clean": 40, "backdoor": 70, "none": 0}
    check(reply, tasks.TESTED, {"max_n": 10**6})


def test_describe_and_embed() -> None:
    c = client(tiny(n=(80,), val=(70,)))
    assert tasks.describe(c) == {"n": 80, "m": 70, "key": public_key(c.secret)}
    theta = c.network.theta.clone()
    z = tasks.embed(c, theta=theta, split="val", cap=30)["embeddings"]
    assert torch.equal(z, c.embeddings(theta, "val", c.sample("val", 30)))
    assert np.isfinite(sample_losses(c, theta, "val")[0].numpy()).all()


def test_the_settings_of_a_request_are_read_once_and_those_of_another_anew() -> None:
    first = {"local_epochs": 2, "lr": 0.1}
    training = Training.of(first)
    assert training == Training(local_epochs=2, lr=0.1) and Training.of(dict(first)) is training
    first["lr"] = 0.2
    assert Training.of(first) == Training(local_epochs=2, lr=0.2) and Training.of({}) == Training()
