from __future__ import annotations

import pytest
import torch
from torch import nn

from emdcfl.engines.local.pooled import pool_first
from emdcfl.models.recipe import ModelRecipe


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 5, 3), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True), nn.Flatten())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_and_gradients_are_the_same_with_the_pool_first(dtype: torch.dtype) -> None:
    plain, changed = network().to(dtype), network().to(dtype)
    assert pool_first(changed) == 1
    x = torch.randn(7, 2, 9, 10, dtype=dtype)
    expected, found = plain(x), changed(x)
    torch.testing.assert_close(found, expected)
    assert (expected == 0).any() and (expected > 0).any()
    seed = torch.randn_like(expected)
    mine = torch.autograd.grad(found, list(changed.parameters()), seed)
    theirs = torch.autograd.grad(expected, list(plain.parameters()), seed)
    torch.testing.assert_close(mine, theirs)


def test_the_network_keeps_its_parameters_and_what_it_says_of_itself() -> None:
    plain, changed = network(), network()
    before = dict(changed.named_parameters())
    pool_first(changed)
    assert list(before) == list(dict(changed.named_parameters())) and all(before[n] is p for n, p in changed.named_parameters())
    assert repr(plain) == repr(changed)


def test_a_bias_that_is_loaded_later_is_the_one_that_counts() -> None:
    plain, changed = network(), network()
    pool_first(changed)
    state = {name: torch.randn_like(value) for name, value in plain.state_dict().items()}
    plain.load_state_dict(state)
    changed.load_state_dict(state)
    x = torch.randn(3, 2, 9, 10)
    torch.testing.assert_close(changed(x), plain(x))


@pytest.mark.parametrize(
    "other",
    [
        nn.Sequential(nn.Conv2d(2, 5, 3, bias=False), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(2, 5, 3), nn.MaxPool2d(2), nn.ReLU()),
        nn.Sequential(nn.Conv2d(2, 5, 3), nn.ReLU(), nn.MaxPool2d(2, return_indices=True)),
        nn.Sequential(nn.Conv2d(2, 5, 3), nn.GELU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(2, 5, 3), nn.ReLU(), nn.AvgPool2d(2)),
    ],
)
def test_other_orders_are_left_alone(other: nn.Sequential) -> None:
    assert pool_first(other) == 0


def test_the_papers_network_has_one() -> None:
    assert pool_first(ModelRecipe("cnn", {"channels": 1, "classes": 10, "size": 28})()) == 1
