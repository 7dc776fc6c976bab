"""Fused convolutions give the values and gradients of plain torch; without a GPU, this tests all but the kernels."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from emdcfl.core.params import Network
from emdcfl.engines.cuda import fused
from emdcfl.engines.cuda.fused import LowNetwork, PooledConv2d, conv_pool, exchange_pools, fuse, narrow_relu, pool
from emdcfl.engines.cuda.layers import copy_low, multiply_narrow, pool_first
from emdcfl.models.recipe import ModelRecipe

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))]


def drawn(*shape: int, device: str, order: torch.memory_format = torch.contiguous_format) -> Tensor:
    rng = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=rng).to(device, torch.bfloat16).to(memory_format=order)


def gradients(out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    upstream = drawn(*out.shape, device=str(out.device.type), order=torch.channels_last)
    return [g.float() for g in torch.autograd.grad(out, leaves, upstream)]


def close(found: Tensor, expected: Tensor) -> None:
    error = (found.float() - expected.float()).norm() / expected.float().norm()
    assert error < 1e-2, f"relative error {error:.2g}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("channels", "kernel", "stride", "padding"), [(1, 3, 1, 1), (3, 5, 2, 0)])
def test_a_narrow_convolution_with_relu(device: str, channels: int, kernel: int, stride: int, padding: int) -> None:
    x, w, b = (drawn(*s, device=device) for s in ((5, channels, 28, 26), (32, channels, kernel, kernel), (32,)))
    leaves = [w.requires_grad_(), b.requires_grad_()]
    out = narrow_relu(x, w, b, stride, padding)
    assert out.is_contiguous(memory_format=torch.channels_last)
    exact = [t.detach().double().requires_grad_() for t in leaves]  # torch on a GPU rounds before it adds the bias, and ReLUs flip
    expected = F.conv2d(x.double(), *exact, stride, padding)
    close(out, F.relu(expected))
    alive = (out > 0) * drawn(*out.shape, device=device, order=torch.channels_last)
    for mine, theirs in zip(gradients(out, leaves), torch.autograd.grad(expected, exact, alive.double()), strict=True):
        close(mine, theirs)


@pytest.mark.parametrize("device", DEVICES)
def test_a_convolution_with_bias_pool_and_relu(device: str) -> None:
    last = torch.channels_last
    x, w, b = drawn(3, 64, 10, 14, device=device, order=last), drawn(128, 64, 3, 3, device=device, order=last), drawn(128, device=device)
    leaves = [x.requires_grad_(), w.requires_grad_(), b.requires_grad_()]
    out, expected = conv_pool(x, w, b)[0], F.relu(F.max_pool2d(F.conv2d(x, w, padding=1), 2) + b[:, None, None])
    close(out, expected)
    for mine, theirs in zip(gradients(out, leaves), gradients(expected, leaves), strict=True):
        close(mine, theirs)


@pytest.mark.parametrize("device", DEVICES)
def test_a_pool_of_windows_that_overlap(device: str) -> None:
    layer = nn.MaxPool2d(3, 2, 1)
    x = drawn(3, 32, 12, 18, device=device, order=torch.channels_last).requires_grad_()
    expected = layer(x)
    assert exchange_pools(layer) == 1
    found = layer(x)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(found, expected)
    close(gradients(found, [x])[0], gradients(expected, [x])[0])


@pytest.mark.slow
def test_operators_can_be_compiled() -> None:
    x, w, b = drawn(2, 1, 8, 8, device="cpu"), drawn(16, 1, 3, 3, device="cpu"), drawn(16, device="cpu")
    torch.library.opcheck(narrow_relu, (x, w.requires_grad_(), b.requires_grad_(), 1, 1))
    last = torch.channels_last
    x, w = drawn(2, 8, 4, 4, device="cpu", order=last), drawn(8, 8, 3, 3, device="cpu", order=last)
    torch.library.opcheck(pool, (x.clone().requires_grad_(),))
    torch.library.opcheck(conv_pool, (x.requires_grad_(), w.requires_grad_(), drawn(8, device="cpu").requires_grad_()))


def test_the_papers_network_is_fused_and_computes_the_same() -> None:
    plain = ModelRecipe("cnn", {"channels": 1, "classes": 10, "size": 28})().to(memory_format=torch.channels_last)
    fast = copy.deepcopy(plain)
    multiply_narrow(fast)
    pool_first(fast)
    copy_low(fast)
    assert fuse(fast) == 2
    x = drawn(2, 1, 28, 28, device="cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        close(fast(x), plain(x))


def test_images_of_odd_size_and_layers_in_float32_are_left_to_torch() -> None:
    chain = nn.Sequential(nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)).to(memory_format=torch.channels_last)
    fast = copy.deepcopy(chain)
    pool_first(fast)
    assert fuse(fast) == 0
    copy_low(fast)
    assert fuse(fast) == 1 and isinstance(fast[0], PooledConv2d)
    x = drawn(2, 64, 7, 6, device="cpu", order=torch.channels_last)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        close(fast(x), chain(x))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("whole", [True, False])
def test_a_network_for_evaluation_follows_the_states_it_loads(device: str, whole: bool) -> None:
    build = ModelRecipe("cnn", {"channels": 1, "classes": 10, "size": 28}).untrained()
    plain, low = Network(build, device), LowNetwork(build, device)
    assert any(isinstance(layer, PooledConv2d) for layer in low.module.modules())
    plain.module.eval()
    state, x = plain.theta.clone(), drawn(64, 1, 28, 28, device=device).float()
    end = plain.layout.size if whole else plain.layout.embedding.stop
    for factor in (1.0, -0.5):
        with torch.no_grad(), torch.autocast(device, dtype=torch.bfloat16, cache_enabled=False):
            for network in (plain, low):
                network.load((factor * state)[:end])
            close(low.embed(x), plain.embed(x))
            if whole:
                close(low(x), plain(x))


def test_images_that_the_kernels_cannot_count_take_the_plain_way(monkeypatch: pytest.MonkeyPatch) -> None:
    low = LowNetwork(ModelRecipe("cnn", {"channels": 1, "classes": 10, "size": 28}).untrained())
    x = drawn(4, 1, 28, 28, device="cpu").float()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = low(x)
        monkeypatch.setattr(fused, "COUNTED", 0)
        for name in ("narrow_relu", "conv_pool"):
            monkeypatch.delattr(fused, name)
        close(low(x), expected)
