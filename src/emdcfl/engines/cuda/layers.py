r"""Layers that compute the same numbers faster on a GPU; the engine puts them in place of torch's own.

*Narrow convolutions* read few channels. Tensor cores want many, so the first convolution of the paper's CNN took over a quarter of a
compiled step. As a product :math:`Y = \mathrm{patches}(X)\,W^\top + b` it costs no more than writing its output. Large patches are worth it
only in a compiled step, which never writes them out.

*Pooling first*: :math:`\max_i \mathrm{relu}(c_i + b) = \mathrm{relu}(b + \max_i c_i)`, bit for bit: adding a bias, rounding and ReLU keep
the order of numbers. Bias and ReLU then pass over a quarter of the numbers (2×2 pools).

*Pixels in memory order*: flattening a channels-last image would copy it. Instead, the linear layer after it permutes its weights.

The last two halve the time the paper's CNN takes to embed. Layers that are used twice or have hooks stay as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from emdcfl.core.params import Layout
from emdcfl.engines.local.pooling import halves, whole_chains

MAX_CHANNELS = 4
"""Most input channels of a narrow convolution."""

ALIGNMENT = 8
"""Patches are padded to a multiple of this many numbers, which is 16 bytes in bfloat16."""

SMALL_PATCH = 32
"""Largest patch for which a narrow convolution is a matrix product without compilation too."""


class NarrowConv2d(nn.Conv2d):
    """A ``Conv2d`` as a matrix product over patches: same parameters, same output up to rounding, channels last."""

    def forward(self, input: Tensor) -> Tensor:
        (kh, kw), (sh, sw), padding = self.kernel_size, self.stride, self.padding
        assert not isinstance(padding, str)  # see ``is_narrow``
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
        and layer.in_channels <= MAX_CHANNELS
        and layer.groups == 1
        and layer.dilation == (1, 1)
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
    )


class FoldedConv2d(nn.Conv2d):
    r"""A ``Conv2d`` over few channels with stride s, as one without stride over the channels of s×s pixels: tensor cores want many.

    With padded input X: :math:`Y_{ij} = \sum_{uv} W_{uv} X_{si+u,\,sj+v} = \sum_{pq} W'_{pq} X'_{i+p,\,j+q}`, where W' and X' have the
    pixels of a square side by side as channels.
    """

    def forward(self, input: Tensor) -> Tensor:
        (high, wide), (s, _), padding = self.kernel_size, self.stride, self.padding
        assert not isinstance(padding, str)  # see ``is_narrow``
        fill = -self.in_channels * s * s % ALIGNMENT

        def after(size: int, kernel: int, pad: int) -> int:
            outputs = (size + 2 * pad - kernel) // s + 1
            return (outputs + -(-kernel // s) - 1) * s - size - pad

        bottom, right = (after(*sizes) for sizes in zip(input.shape[2:], (high, wide), padding, strict=True))
        squares = F.pad(input, (padding[1], right, padding[0], bottom)).unflatten(3, (-1, s)).unflatten(2, (-1, s))
        pixels = F.pad(squares.permute(0, 2, 4, 1, 3, 5).flatten(3), (0, fill)).permute(0, 3, 1, 2)
        taps = F.pad(self.weight, (0, -wide % s, 0, -high % s)).unflatten(3, (-1, s)).unflatten(2, (-1, s))
        weight = F.pad(taps.permute(0, 2, 4, 1, 3, 5).flatten(3), (0, fill)).permute(0, 3, 1, 2)
        return F.conv2d(pixels, weight, self.bias)


def fold_strided(module: nn.Module) -> int:
    """Fold the narrow convolutions of a network that have a stride and large patches, in place; returns how many there were."""
    narrow = [layer for layer in module.modules() if is_narrow(layer)]
    return exchange([layer for layer in narrow if layer.stride in ((2, 2), (3, 3)) and _patch(layer) > SMALL_PATCH], FoldedConv2d)


class StridedConv2d(nn.Conv2d):
    """A 1×1 ``Conv2d`` with a stride, as a matrix product over the pixels it reads: cuDNN's fixed algorithm is several times slower."""

    def forward(self, input: Tensor) -> Tensor:
        (down, right) = self.stride
        pixels = input[:, :, ::down, ::right].permute(0, 2, 3, 1)
        return F.linear(pixels, self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)


def multiply_strided(module: nn.Module) -> int:
    """Turn the 1×1 convolutions of a network that have a stride into matrix products, in place; returns how many there were."""
    found = [layer for layer in module.modules() if type(layer) is nn.Conv2d and layer.stride != (1, 1)]
    return exchange([layer for layer in found if (layer.kernel_size, layer.padding, layer.groups) == ((1, 1), (0, 0), 1)], StridedConv2d)


def exchange(layers: Sequence[nn.Module], kind: type[nn.Module]) -> int:
    """Make layers those of another kind, in place; returns how many there were."""
    for layer in layers:
        layer.__class__ = kind
    return len(layers)


def _patch(layer: nn.Module) -> int:
    assert isinstance(layer, nn.Conv2d)
    return layer.in_channels * layer.kernel_size[0] * layer.kernel_size[1]


def multiply_narrow(module: nn.Module, *, patch: int | None = None) -> int:
    """Turn the narrow convolutions of a network into matrix products, in place; returns how many there were.

    Convolutions with more than ``patch`` numbers per patch stay as they are: without compilation, writing the patches costs too much.
    """
    return exchange([layer for layer in module.modules() if is_narrow(layer) and (patch is None or _patch(layer) <= patch)], NarrowConv2d)


class UnbiasedConv2d(nn.Conv2d):
    """A ``Conv2d`` without its bias, which ``BiasedMaxPool2d`` adds."""

    def forward(self, input: Tensor) -> Tensor:
        out: Tensor = self._conv_forward(input, self.weight, None)
        return out


class SkippedReLU(nn.ReLU):
    """A ReLU that does nothing, because ``BiasedMaxPool2d`` applies it."""

    def forward(self, input: Tensor) -> Tensor:
        return input


class BiasedMaxPool2d(nn.MaxPool2d):
    """A max-pool that then adds the convolution's bias and applies the ReLU."""

    biased: tuple[nn.Conv2d]  # in a tuple, so that torch does not register it as a submodule

    def forward(self, input: Tensor) -> Tensor:
        maxima = self._maxima(input)
        bias = self.biased[0].bias
        assert bias is not None
        return F.relu(maxima + bias.to(maxima.dtype)[:, None, None])

    def _maxima(self, input: Tensor) -> Tensor:
        height, width = input.shape[2:]
        if torch.is_grad_enabled() or not halves(self) or height % 2 or width % 2:  # amax shares the gradient among equal maxima
            found: Tensor = super().forward(input)
            return found
        # amax stores no indices of the maxima, which would take four times their memory
        pixels = input.permute(0, 2, 3, 1).unflatten(2, (width // 2, 2)).unflatten(1, (height // 2, 2))
        maxima: Tensor = pixels.amax((2, 4))
        return maxima.permute(0, 3, 1, 2)


class PixelFlatten(nn.Flatten):
    """A ``Flatten`` that keeps channels-last images in memory order, pixel by pixel."""

    def forward(self, input: Tensor) -> Tensor:
        return input.permute(0, 2, 3, 1).flatten(1)


class PixelLinear(nn.Linear):
    """A ``Linear`` whose input comes from ``PixelFlatten``, for images with ``channels`` channels."""

    channels: int

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.unflatten(1, (self.channels, -1)).transpose(1, 2).flatten(1), self.bias)


def pool_first(module: nn.Module, *, head: nn.Module | None = None) -> int:
    """Pool before bias and ReLU wherever these layers follow each other in a chain (``whole_chains``), in place; returns how often.

    The input of ``head`` is the embedding, whose numbers keep their order.
    """
    uses = Counter(id(m) for _, m in module.named_modules(remove_duplicate=False))
    changed = 0
    for chain in whole_chains(module):
        for i in range(len(chain) - 2):
            conv, relu, pool, *rest = own = list(chain)[i : i + 5]
            if not (type(conv) is nn.Conv2d and type(relu) is nn.ReLU and type(pool) is nn.MaxPool2d):
                continue
            alone = [uses[id(m)] == 1 and plain(m) for m in own]
            if all(alone[:3]):
                changed += _pool_first(conv, relu, pool, rest if all(alone) and head not in rest else [])
    return changed


def keep_permuted(module: nn.Module) -> dict[str, int]:
    """Let every ``PixelLinear`` take its weights as already permuted, in place; returns channels by the name of the weights.

    What loads and reads these weights has to permute them (``PixelOrder``); steps then never do.
    """
    found = {name: layer for name, layer in module.named_modules() if isinstance(layer, PixelLinear)}
    for layer in found.values():
        layer.__class__ = nn.Linear  # type: ignore[assignment]
    return {f"{name}.weight": layer.channels for name, layer in found.items()}


class PixelOrder:
    """The order of θ in which the weights after a ``PixelFlatten`` go pixel by pixel.

    ``channels`` maps the names of these weights to the channels of the images that they multiply.
    """

    def __init__(self, layout: Layout, channels: Mapping[str, int]) -> None:
        self._parts = [(e.slice, e.shape[0], channels[e.name]) for e in layout.entries if e.name in channels]

    def stored(self, theta: Tensor) -> Tensor:
        """Return θ in this order."""
        return self._moved(theta, lambda part, rows, channels: part.view(rows, channels, -1))

    def restored(self, theta: Tensor) -> Tensor:
        """Return θ in its own order."""
        return self._moved(theta, lambda part, rows, channels: part.view(rows, -1, channels))

    def _moved(self, theta: Tensor, shaped: Callable[[Tensor, int, int], Tensor]) -> Tensor:
        if not self._parts:
            return theta
        moved = theta.clone()
        for where, rows, channels in self._parts:
            moved[where] = shaped(theta[where], rows, channels).transpose(1, 2).flatten()
        return moved


COPIED = (nn.Conv2d, nn.Linear, FoldedConv2d, NarrowConv2d, StridedConv2d, UnbiasedConv2d)
"""Layers that compute with bfloat16 copies of their parameters."""


def copy_low(module: nn.Module) -> dict[str, Tensor]:
    """Let layers compute with bfloat16 copies of their parameters, in place; returns the float32 parameters by name.

    Autocast makes such copies at every step. Whoever updates the parameters updates these too. Parameters that several layers share stay.
    """
    uses = Counter(id(p) for m in module.modules() for p in m.parameters(recurse=False))
    full = {}
    for name, layer in module.named_modules():
        own = dict(layer.named_parameters(recurse=False)) if type(layer) in COPIED and plain(layer) else {}
        for key, parameter in own.items() if all(uses[id(p)] == 1 for p in own.values()) else ():
            full[f"{name}.{key}" if name else key] = parameter.detach()
            setattr(layer, key, nn.Parameter(parameter.detach().to(torch.bfloat16)))
    return full


def plain(layer: nn.Module) -> bool:
    """Whether a layer has no hooks and no ``forward`` of its own."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return "forward" not in vars(layer) and not any(getattr(layer, name) for name in hooks)


def _pool_first(conv: nn.Conv2d, relu: nn.ReLU, pool: nn.MaxPool2d, rest: list[nn.Module]) -> bool:
    if conv.bias is None or pool.return_indices:
        return False
    conv.__class__, relu.__class__, pool.__class__ = UnbiasedConv2d, SkippedReLU, BiasedMaxPool2d
    pool.biased = (conv,)  # type: ignore[assignment]
    flatten, linear = rest if len(rest) == 2 else (None, None)
    if type(flatten) is nn.Flatten and type(linear) is nn.Linear and (flatten.start_dim, flatten.end_dim) == (1, -1):
        flatten.__class__, linear.__class__ = PixelFlatten, PixelLinear
        linear.channels = conv.out_channels  # type: ignore[assignment]
    return True
