from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from emdcfl.core.params import Network, find_head
from emdcfl.engines.cuda.layers import (
    NarrowConv2d,
    PixelOrder,
    copy_low,
    fold_strided,
    is_narrow,
    keep_permuted,
    multiply_narrow,
    multiply_strided,
    pool_first,
)
from emdcfl.models.recipe import ModelRecipe

POOLS = {
    "halving": {"kernel_size": 2},
    "overlapping": {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True},
    "dilated": {"kernel_size": 2, "dilation": 2},
}


def network(pool: str = "halving", *, linear: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 5, 3), nn.ReLU(), nn.MaxPool2d(**POOLS[pool])]
    flat = nn.Sequential(*layers, nn.Flatten())(torch.zeros(1, 2, 10, 12)).shape[1]
    return nn.Sequential(*layers, nn.Flatten(), *([nn.Linear(flat, 6)] if linear else []))


@pytest.mark.parametrize("pool", sorted(POOLS))
@pytest.mark.parametrize("shape", [(7, 2, 10, 12), (3, 2, 9, 11)])
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_values_and_gradients_are_the_same_with_the_pool_first(pool: str, shape: tuple[int, ...], order: torch.memory_format) -> None:
    linear = shape[2] == 10
    plain, changed = network(pool, linear=linear), network(pool, linear=linear)
    assert pool_first(changed) == 1
    x = torch.randn(shape).to(memory_format=order)
    expected, found = plain(x), changed(x)
    torch.testing.assert_close(found, expected)
    with torch.no_grad():
        torch.testing.assert_close(changed(x), expected)
    seed = torch.randn_like(expected)
    mine = torch.autograd.grad(found, list(changed.parameters()), seed)
    theirs = torch.autograd.grad(expected, list(plain.parameters()), seed)
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_the_network_keeps_its_parameters() -> None:
    changed = network()
    before = dict(changed.named_parameters())
    pool_first(changed)
    assert list(before) == list(dict(changed.named_parameters())) and all(before[n] is p for n, p in changed.named_parameters())


def test_a_bias_that_is_loaded_later_is_the_one_that_counts() -> None:
    plain, changed = network(), network()
    pool_first(changed)
    state = {name: torch.randn_like(value) for name, value in plain.state_dict().items()}
    plain.load_state_dict(state)
    changed.load_state_dict(state)
    x = torch.randn(3, 2, 10, 12)
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


def shared(layer: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    first = layer if isinstance(layer, nn.Conv2d) else nn.Conv2d(2, 2, 1)
    relu = layer if isinstance(layer, nn.ReLU) else nn.ReLU()
    pool = layer if isinstance(layer, nn.MaxPool2d) else nn.MaxPool2d(2)
    return nn.Sequential(first, relu, pool, nn.Conv2d(2, 2, 1), layer, nn.Flatten(), nn.LazyLinear(6))


@pytest.mark.parametrize("layer", [nn.Conv2d(2, 2, 1), nn.ReLU(), nn.MaxPool2d(2)])
def test_layers_that_are_used_twice_keep_their_work(layer: nn.Module) -> None:
    network, x = shared(layer), torch.randn(3, 2, 8, 12)
    expected = network(x)
    assert pool_first(network) == 0
    torch.testing.assert_close(network(x), expected)


def test_what_listens_to_layers_hears_what_it_heard_before() -> None:
    heard: list[torch.Tensor] = []
    for number in range(5):
        plain = network()
        plain[number].register_forward_hook(lambda _layer, _inputs, out: heard.append(out))
        x = torch.randn(3, 2, 10, 12)
        plain(x)
        pool_first(plain)
        plain(x)
        torch.testing.assert_close(*heard[-2:])


def test_a_sequence_with_a_way_of_its_own_is_left_alone() -> None:
    class Skipping(nn.Sequential):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return self[0](input) + super().forward(input).mean()

    assert pool_first(Skipping(*network()[:3])) == 0


def test_embeddings_that_the_head_reads_keep_their_order() -> None:
    net, x = Network(network), torch.randn(3, 2, 10, 12)
    expected = net.embed(x), net.module(x)
    assert pool_first(net.module, head=find_head(net.module)) == 1
    torch.testing.assert_close((net.embed(x), net.module(x)), expected)


@pytest.mark.parametrize(
    ("channels", "kernel", "stride", "padding", "bias"),
    [(1, 3, 1, 1, True), (3, 7, 2, 3, False), (2, (3, 5), (2, 1), (0, 2), True), (4, 1, 1, 0, True)],
)
def test_a_product_of_patches_is_the_convolution(channels: int, kernel: int, stride: int, padding: int, bias: bool) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(channels, 6, kernel, stride=stride, padding=padding, bias=bias)
    x = torch.randn(5, channels, 17, 14)
    expected = conv(x)
    seed = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, list(conv.parameters()), seed)
    assert multiply_narrow(conv) == 1
    assert isinstance(conv, NarrowConv2d)
    out = conv(x)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert out.is_contiguous(memory_format=torch.channels_last)
    for mine, theirs in zip(torch.autograd.grad(out, list(conv.parameters()), seed), gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("channels", "kernel", "stride", "padding"), [(3, 7, 2, 3), (4, (5, 4), 3, (2, 0)), (2, 6, 2, 1)])
def test_a_folded_convolution_is_the_convolution(channels: int, kernel: int, stride: int, padding: int) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(channels, 6, kernel, stride=stride, padding=padding)
    x = torch.randn(5, channels, 17, 14)
    expected = conv(x)
    seed = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, list(conv.parameters()), seed)
    assert fold_strided(conv) == 1
    found = conv(x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.autograd.grad(found, list(conv.parameters()), seed), gradients, rtol=1e-4, atol=1e-4)


def test_only_plain_convolutions_over_few_channels_are_narrow() -> None:
    assert is_narrow(nn.Conv2d(3, 8, 3))
    for other in (
        nn.Conv2d(16, 8, 3),
        nn.Conv2d(2, 8, 3, groups=2),
        nn.Conv2d(1, 8, 3, dilation=2),
        nn.Conv2d(1, 8, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(1, 8, 3, padding="same"),
        nn.Linear(3, 8),
    ):
        assert not is_narrow(other)


def test_names_and_parameters_of_the_network_stay() -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Conv2d(5, 4, 3))
    before = dict(net.named_parameters())
    assert multiply_narrow(net) == 2
    after = dict(net.named_parameters())
    assert list(before) == list(after)
    assert all(before[name] is after[name] for name in before)


def test_weights_that_are_kept_permuted_give_the_same_and_come_back_as_they_were() -> None:
    recipe = ModelRecipe("small_cnn", {"channels": 1, "classes": 10, "size": 8})
    plain, fast = Network(recipe), Network(recipe)
    pool_first(fast.module)
    order = PixelOrder(plain.layout, keep_permuted(fast.module))
    theta = plain.theta.clone()
    fast.load(order.stored(theta))
    x = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(fast.module(x), plain.module(x))
    assert not torch.equal(fast.theta, theta)
    assert torch.equal(order.restored(fast.theta), theta)


def test_layers_compute_with_copies_of_parameters_that_only_they_use() -> None:
    module = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 8), nn.Linear(8, 8))
    module[4].weight = module[3].weight
    before = dict(module.named_parameters())
    full = copy_low(module)
    assert set(full) == {"0.weight", "0.bias"} and all(torch.equal(value, before[name]) for name, value in full.items())
    low = {name for name, p in module.named_parameters() if p.dtype == torch.bfloat16}
    assert low == set(full)


def test_a_strided_convolution_of_single_pixels_is_a_product() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(6, 4, 1, stride=2, bias=False), nn.Conv2d(4, 4, 3, stride=2), nn.Conv2d(4, 4, 1))
    fast = copy.deepcopy(plain)
    assert multiply_strided(fast) == 1
    x = torch.randn(3, 6, 9, 12).to(memory_format=torch.channels_last).requires_grad_()
    found, expected = fast(x), plain(x)
    torch.testing.assert_close(found, expected)
    mine = torch.autograd.grad(found.square().sum(), [x, *fast.parameters()])
    theirs = torch.autograd.grad(expected.square().sum(), [x, *plain.parameters()])
    torch.testing.assert_close(mine, theirs)
