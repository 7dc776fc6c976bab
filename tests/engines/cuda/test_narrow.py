from __future__ import annotations

import pytest
import torch
from torch import nn

from emdcfl.engines.cuda.narrow import NarrowConv2d, is_narrow, multiply_narrow


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
