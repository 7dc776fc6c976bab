r"""Convolutions that read few channels, as matrix products: :math:`Y = \mathrm{patches}(X)\,W^\top + b`.

Tensor cores want many input channels. A network's first convolution reads one or three; in the compiled step of the paper's CNN it took
over a quarter of the time, more than the second one with 128 times its arithmetic. As a product over the :math:`c\,k_h k_w` numbers of
a patch it costs what its output weighs; the patches are gathered in the same fused kernel that normalises the images.

Large patches are only worth it inside a compiled step: eagerly they are written out several times. Imports torch only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

WIDEST = 4
"""Input channels up to which a convolution is narrow."""

ALIGNMENT = 8
"""Numbers a patch is filled up to a multiple of: rows of 16 bytes in bfloat16."""


def standing_for(name: str) -> Callable[[nn.Module], str]:
    """Have a layer call itself what it stands for: privacy noise is drawn by what a network says of itself, whatever the engine."""
    return lambda _layer: name


class NarrowConv2d(nn.Conv2d):
    """A ``Conv2d`` that multiplies patches; same parameters, same output up to rounding, channels last."""

    _get_name = standing_for("Conv2d")

    def forward(self, input: Tensor) -> Tensor:
        (kh, kw), (sh, sw), padding = self.kernel_size, self.stride, self.padding
        assert not isinstance(padding, str)  # ``is_narrow`` lets no other in
        ph, pw = padding
        patches = F.pad(input, (pw, pw, ph, ph)).unfold(2, kh, sh).unfold(3, kw, sw).permute(0, 2, 3, 1, 4, 5)
        n, height, width = patches.shape[:3]
        size = self.in_channels * kh * kw
        fill = (0, -size % ALIGNMENT)
        rows = F.pad(patches.reshape(n * height * width, size), fill)
        out = F.linear(rows, F.pad(self.weight.reshape(self.out_channels, size), fill), self.bias)
        return out.view(n, height, width, self.out_channels).permute(0, 3, 1, 2)


def is_narrow(layer: nn.Module) -> bool:
    """Whether a layer is a plain convolution over few channels."""
    return (
        type(layer) is nn.Conv2d
        and layer.in_channels <= WIDEST
        and layer.groups == 1
        and layer.dilation == (1, 1)
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
    )


def _patch(layer: nn.Module) -> int:
    assert isinstance(layer, nn.Conv2d)
    return layer.in_channels * layer.kernel_size[0] * layer.kernel_size[1]


def multiply_narrow(module: nn.Module, *, patch: int | None = None) -> int:
    """Turn the narrow convolutions of a network into matrix products, in place; returns how many there were.

    ``patch`` leaves those alone whose patches hold more numbers: written out, they would take more memory than the product saves.
    """
    found = [layer for layer in module.modules() if is_narrow(layer) and (patch is None or _patch(layer) <= patch)]
    for layer in found:
        layer.__class__ = NarrowConv2d
    return len(found)
