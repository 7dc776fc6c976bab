from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.tiny import client, same_bits, tiny

from emdcfl.core import client as clients
from emdcfl.core.client import TASKS, task
from emdcfl.core.errors import DataError
from emdcfl.core.schema import Field


def test_samples_are_drawn_once_nest_and_do_not_follow_the_order_of_the_data() -> None:
    c = client(tiny(val=(70,), sort=True))
    large, small = c.sample("val", 60), c.sample("val", 20)
    assert len(large) == 60 and len(set(large.tolist())) == 60
    assert large[:20].equal(small)
    c.begin(7)
    assert c.sample("val", 60).equal(large)
    assert len(c.sample("val", 1000)) == 70
    assert len(c.split("val").y[small].unique()) == 4  # the first 20 of the data in order would be of one or two classes
    assert not c.sample("train", 60).equal(large)


def test_generators_are_keyed_by_client_round_and_purpose() -> None:
    a, b = client(index=0), client(index=1)
    draws = []
    for who in (a, b):
        for round in (1, 2):
            who.begin(round)
            draws += [tuple(who.generator(p).random(3)) for p in ("x", "y")]
    assert len(set(draws)) == 8
    assert np.array_equal(a.generator("x", round=1).random(3), draws[0])


def test_embeddings_in_evaluation_mode_depend_on_the_sample_alone() -> None:
    c = client(tiny(model="tiny_bn"))
    theta = c.network.theta.clone()
    index = torch.arange(30)
    together = c.embeddings(theta, "val", index)
    alone = torch.cat([c.embeddings(theta, "val", index[i : i + 1]) for i in range(30)])
    torch.testing.assert_close(together, alone)
    assert same_bits(c.network.theta, theta)


def test_embeddings_in_training_mode_use_batch_statistics_and_leave_the_running_ones() -> None:
    c = client(tiny(model="tiny_bn", val=(130,)))
    theta = c.network.theta.clone()
    index = torch.arange(130)
    z = c.embeddings(theta, "val", index, mode="train")
    assert same_bits(c.network.theta, theta)
    x = c.split("val").x
    hidden = torch.nn.functional.linear(x[:64], *(c.network.module[0].weight, c.network.module[0].bias))  # type: ignore[index]
    expected = ((hidden - hidden.mean(0)) / (hidden.var(0, unbiased=False) + 1e-5).sqrt()).relu()
    torch.testing.assert_close(z[:64], expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(z, c.embeddings(theta, "val", index))


@pytest.mark.parametrize(("size", "last"), [(129, 65), (65, 65), (130, 2), (64, 64)])
def test_embeddings_in_training_mode_never_meet_a_batch_of_one(size: int, last: int) -> None:
    c = client(tiny(model="tiny_bn", val=(130,)))
    theta, index = c.network.theta.clone(), torch.arange(size)
    z = c.embeddings(theta, "val", index, mode="train")
    assert len(z) == size
    assert same_bits(z[-last:], c.embeddings(theta, "val", index[-last:], mode="train"))


def test_networks_without_batch_norm_keep_their_batches_in_training_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    c = client(tiny(val=(130,)))
    seen: list[int] = []
    embed = c.network.embed
    monkeypatch.setattr(c.network, "embed", lambda x: (seen.append(len(x)), embed(x))[1])
    c.embeddings(c.network.theta.clone(), "val", torch.arange(129), mode="train")
    assert seen == [64, 64, 1]


def test_bf16_computes_in_half_precision_and_keeps_float32_states() -> None:
    full, half = client(), client(precision="bf16")
    index = torch.arange(20)
    theta = full.network.theta.clone()
    a, b = full.embeddings(theta, "val", index), half.embeddings(theta, "val", index)
    assert b.dtype == torch.float32
    assert not torch.equal(a, b)
    torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)


def test_all_samples_are_the_validation_samples_and_then_the_train_samples() -> None:
    c = client(tiny(n=(40,), val=(20,)))
    index = torch.tensor([59, 0, 20, 19, 3, 20])
    every = torch.cat([c.site.val.x, c.site.train.x])
    assert torch.equal(c.rows("all", index), every[index])
    theta = c.network.theta.clone()
    apart = torch.cat([c.embeddings(theta, "val", index[1:2]), c.embeddings(theta, "train", index[2:3] - 20)])
    torch.testing.assert_close(c.embeddings(theta, "all", index[1:3]), apart)


def test_an_unknown_split_is_named() -> None:
    with pytest.raises(DataError, match=r"client 'site-0' has no split 'tset'; it has train, val, test:test"):
        client().split("tset")


def test_a_task_name_is_taken_once() -> None:
    def describe(client: clients.Client) -> dict[str, int]:
        return {"n": 1}

    before = dict(TASKS)
    with pytest.raises(ValueError, match=r"a task named 'describe' exists already, in emdcfl\.core\.tasks"):
        task(phase="evaluate", returns={"n": Field(int)})(describe)
    assert before == TASKS
