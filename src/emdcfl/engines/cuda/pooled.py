r"""Convolution, ReLU, max-pool, flatten, linear layer: the same numbers with fewer passes over them, for images in channels-last order.

*The pool first*: :math:`\max_i \mathrm{relu}(c_i + b) = \mathrm{relu}(b + \max_i c_i)`. Adding a bias, rounding and ReLU keep the order of
numbers, so the values are the same to the last bit; bias and ReLU then pass over a quarter of them (for 2×2 pools).

*The pixels as they lie*: flattening writes an image anew, channel by channel. The linear layer can read it pixel by pixel, if its
weights are put into that order, and those are few.

While clients are embedded, the paper's CNN takes half the time for it. A compiled step fuses such passes anyway. Layers that are used in
several places, or that somebody listens to, keep their work. Imports torch and ``narrow`` only.
"""

from __future__ import annotations

from collections import Counter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from emdcfl.engines.cuda.narrow import standing_for


class UnbiasedConv2d(nn.Conv2d):
    """A ``Conv2d`` whose bias somebody else adds."""

    _get_name = standing_for("Conv2d")

    def forward(self, input: Tensor) -> Tensor:
        out: Tensor = self._conv_forward(input, self.weight, None)
        return out


class Passing(nn.ReLU):
    """A ReLU whose work somebody else does."""

    _get_name = standing_for("ReLU")

    def forward(self, input: Tensor) -> Tensor:
        return input


class BiasedMaxPool2d(nn.MaxPool2d):
    """A pool that adds a convolution's bias to the maxima and takes their ReLU."""

    _get_name = standing_for("MaxPool2d")
    biased: tuple[nn.Conv2d]  # in a tuple, so that the convolution is not a part of this module

    def forward(self, input: Tensor) -> Tensor:
        maxima = self._maxima(input)
        bias = self.biased[0].bias
        assert bias is not None
        return F.relu(maxima + bias.to(maxima.dtype)[:, None, None])

    def _maxima(self, input: Tensor) -> Tensor:
        height, width = input.shape[2:]
        if torch.is_grad_enabled() or not self._is_halving() or height % 2 or width % 2:  # the gradient of amax is shared among equals
            found: Tensor = super().forward(input)
            return found
        # without the places of the maxima, which take four times their memory
        pixels = input.permute(0, 2, 3, 1).unflatten(2, (width // 2, 2)).unflatten(1, (height // 2, 2))
        maxima: Tensor = pixels.amax((2, 4))
        return maxima.permute(0, 3, 1, 2)

    def _is_halving(self) -> bool:
        pairs = [value if isinstance(value, tuple) else (value, value) for value in (self.kernel_size, self.stride, self.padding)]
        return pairs == [(2, 2), (2, 2), (0, 0)] and self.dilation in (1, (1, 1))


class PixelFlatten(nn.Flatten):
    """A ``Flatten`` that goes through images pixel by pixel."""

    _get_name = standing_for("Flatten")

    def forward(self, input: Tensor) -> Tensor:
        return input.permute(0, 2, 3, 1).flatten(1)


class PixelLinear(nn.Linear):
    """A ``Linear`` that reads what ``PixelFlatten`` wrote of images with so many channels."""

    _get_name = standing_for("Linear")
    channels: int

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.unflatten(1, (self.channels, -1)).transpose(1, 2).flatten(1), self.bias)


def pool_first(module: nn.Module, *, head: nn.Module | None = None) -> int:
    """Change the order wherever these layers follow each other in a ``Sequential``, in place; returns how often.

    ``head`` is a layer whose input somebody reads, number by number: what it is given keeps its order.
    """
    uses = Counter(id(m) for _, m in module.named_modules(remove_duplicate=False))
    changed = 0
    for chain in [m for m in module.modules() if isinstance(m, nn.Sequential) and type(m).forward is nn.Sequential.forward]:
        for i in range(len(chain) - 2):
            conv, relu, pool, *rest = own = list(chain)[i : i + 5]
            if not (type(conv) is nn.Conv2d and type(relu) is nn.ReLU and type(pool) is nn.MaxPool2d):
                continue
            alone = [uses[id(m)] == 1 and _plain(m) for m in own]
            if all(alone[:3]):
                changed += _pool_first(conv, relu, pool, rest if all(alone) and head not in rest else [])
    return changed


def _plain(layer: nn.Module) -> bool:
    """Whether nobody listens to a layer, or does its work in its place."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return "forward" not in vars(layer) and not any(getattr(layer, name) for name in hooks)


def _pool_first(conv: nn.Conv2d, relu: nn.ReLU, pool: nn.MaxPool2d, rest: list[nn.Module]) -> bool:
    if conv.bias is None or pool.return_indices:
        return False
    conv.__class__, relu.__class__, pool.__class__ = UnbiasedConv2d, Passing, BiasedMaxPool2d
    pool.biased = (conv,)  # type: ignore[assignment]
    flatten, linear = rest if len(rest) == 2 else (None, None)
    if type(flatten) is nn.Flatten and type(linear) is nn.Linear and (flatten.start_dim, flatten.end_dim) == (1, -1):
        flatten.__class__, linear.__class__ = PixelFlatten, PixelLinear
        linear.channels = conv.out_channels  # type: ignore[assignment]
    return True
