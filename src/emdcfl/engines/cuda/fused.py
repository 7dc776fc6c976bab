"""Convolutions in bfloat16 with what follows them: ReLU after one that reads few channels; bias, ReLU and a 2×2 max-pool after a 3×3 one.
And max-pools whose windows overlap.

Each is an operator that torch's compiler leaves alone, with a kernel of its own on a GPU (``kernels``) and plain torch elsewhere. Between a
convolution and its pool, nothing is written to memory: the operator keeps the place of every maximum, a byte each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_weight

from emdcfl.core.params import Network, find_head
from emdcfl.engines.cuda.layers import (
    SMALL_PATCH,
    BiasedMaxPool2d,
    NarrowConv2d,
    SkippedReLU,
    UnbiasedConv2d,
    copy_low,
    exchange,
    multiply_narrow,
    plain,
    pool_first,
)
from emdcfl.engines.local.pooling import halves, whole_chains

CORNERS = 4
"""Pixels of a pool; as a place, that no pixel of it came through the ReLU."""

COUNTED = 2**30
"""Most numbers of an image batch that the kernels take: they count in 32 bits."""


@torch.library.custom_op("emdcfl::narrow_relu", mutates_args=())
def narrow_relu(x: Tensor, weight: Tensor, bias: Tensor, stride: int, padding: int) -> Tensor:
    """Return relu(conv(x)) for contiguous images and weights, channels last."""
    if x.is_cuda:
        from emdcfl.engines.cuda import kernels

        return kernels.narrow_forward(x, weight, bias, stride, padding)
    return F.relu(F.conv2d(x, weight, bias, stride, padding)).contiguous(memory_format=torch.channels_last).clone()


@narrow_relu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, stride: int, padding: int) -> Tensor:
    high, wide = ((size + 2 * padding - kernel) // stride + 1 for size, kernel in zip(x.shape[2:], weight.shape[2:], strict=True))
    return x.new_empty(len(x), high, wide, len(weight)).permute(0, 3, 1, 2)


@torch.library.custom_op("emdcfl::narrow_relu_sums", mutates_args=())
def narrow_relu_sums(gradient: Tensor, out: Tensor, x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    """Return sums that add up to the gradients: ``(parts, K, outputs)``, in rows those of a filter's weights, then that of its bias."""
    if x.is_cuda:
        from emdcfl.engines.cuda import kernels

        return kernels.narrow_backward(gradient, out, x, weight, stride, padding)
    alive = torch.where(out > 0, gradient, 0).float()
    of_weight = conv2d_weight(x.float(), weight.shape, alive, stride=stride, padding=padding)
    return torch.cat([of_weight.flatten(1).T, alive.sum((0, 2, 3))[None]])[None]


@narrow_relu_sums.register_fake
def _(gradient: Tensor, out: Tensor, x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    size = weight[0].numel() + 1
    if not x.is_cuda:
        return x.new_empty(1, size, len(weight), dtype=torch.float32)
    from emdcfl.engines.cuda import kernels

    parts, rows, _ = kernels.narrow_sums(out, weight)
    return x.new_empty(parts, rows, len(weight), dtype=torch.float32)


def _narrow_saved(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, ctx.stride, ctx.padding = inputs
    ctx.save_for_backward(x, weight, output)


def _narrow_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, out = ctx.saved_tensors
    gradient = gradient.contiguous(memory_format=torch.channels_last)
    sums = narrow_relu_sums(gradient, out, x, weight, ctx.stride, ctx.padding).sum(0)
    size = weight[0].numel()
    return None, sums[:size].T.reshape(weight.shape).to(weight.dtype), sums[size].to(weight.dtype), None, None


narrow_relu.register_autograd(_narrow_gradients, setup_context=_narrow_saved)


@torch.library.custom_op("emdcfl::conv_pool", mutates_args=())
def conv_pool(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return relu(pool(conv(x)) + bias) for channels-last images and weights, and the place of every maximum."""
    if x.is_cuda:
        from emdcfl.engines.cuda import kernels

        return kernels.conv_pool(x, weight, bias)
    maxima, index = F.max_pool2d(F.conv2d(x, weight, padding=1), 2, return_indices=True)
    out = F.relu(maxima + bias[:, None, None])
    width = x.shape[3]
    place = torch.where(out > 0, index // width % 2 * 2 + index % width % 2, CORNERS).to(torch.int8)
    return out.contiguous(memory_format=torch.channels_last), place.contiguous(memory_format=torch.channels_last)


@conv_pool.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    out = x.new_empty(len(x), x.shape[2] // 2, x.shape[3] // 2, len(weight)).permute(0, 3, 1, 2)
    return out, torch.empty_like(out, dtype=torch.int8)


def _pool_saved(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight, output[1])


def _pool_gradients(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, place = ctx.saved_tensors
    gradient, place = gradient.permute(0, 2, 3, 1), place.permute(0, 2, 3, 1)
    n, high, wide, channels = gradient.shape
    corner = torch.arange(CORNERS, device=x.device, dtype=torch.int8).view(2, 1, 2, 1)
    spread = torch.where(place[:, :, None, :, None] == corner, gradient[:, :, None, :, None], 0.0)
    spread = spread.reshape(n, 2 * high, 2 * wide, channels).permute(0, 3, 1, 2)
    of_bias = torch.where(place < CORNERS, gradient, 0.0).sum((0, 1, 2), dtype=torch.float32).to(weight.dtype)
    wanted = [ctx.needs_input_grad[0], True, False]
    of_x, of_weight, _ = torch.ops.aten.convolution_backward(
        spread, x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, wanted
    )  # fmt: skip
    return of_x, of_weight, of_bias


conv_pool.register_autograd(_pool_gradients, setup_context=_pool_saved)


@torch.library.custom_op("emdcfl::pool", mutates_args=())
def pool(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the maxima of 3×3 windows, two pixels apart, padded by one, of channels-last images, and their places in the windows."""
    if x.is_cuda:
        from emdcfl.engines.cuda import kernels

        return kernels.pool(x)
    maxima, index = F.max_pool2d(x, 3, 2, 1, return_indices=True)
    row, column = index // x.shape[3], index % x.shape[3]
    top, left = (2 * torch.arange(size, device=x.device) - 1 for size in maxima.shape[2:])
    place = ((row - top[:, None]) * 3 + column - left).to(torch.int8)
    return maxima.contiguous(memory_format=torch.channels_last), place.contiguous(memory_format=torch.channels_last)


@pool.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    out = x.new_empty(len(x), x.shape[2] // 2, x.shape[3] // 2, x.shape[1]).permute(0, 3, 1, 2)
    return out, torch.empty_like(out, dtype=torch.int8)


@torch.library.custom_op("emdcfl::pool_gradient", mutates_args=())
def pool_gradient(gradient: Tensor, place: Tensor) -> Tensor:
    """Return the gradient of what ``pool`` pooled."""
    if gradient.is_cuda:
        from emdcfl.engines.cuda import kernels

        return kernels.pool_backward(gradient, place)
    n, channels, high, wide = gradient.shape
    row, column = place // 3, place % 3
    top, left = (2 * torch.arange(size, device=place.device) - 1 for size in (high, wide))
    at = (row + top[:, None]) * (2 * wide) + column + left
    of_x = gradient.new_zeros(n, channels, 4 * high * wide).scatter_add_(2, at.flatten(2), gradient.flatten(2))
    return of_x.view(n, channels, 2 * high, 2 * wide).contiguous(memory_format=torch.channels_last)


@pool_gradient.register_fake
def _(gradient: Tensor, place: Tensor) -> Tensor:
    n, channels, high, wide = gradient.shape
    return gradient.new_empty(n, 2 * high, 2 * wide, channels).permute(0, 3, 1, 2)


def _places_saved(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])


def _places_gradient(ctx: Any, gradient: Tensor, _: Tensor) -> Tensor:
    found: Tensor = pool_gradient(gradient.contiguous(memory_format=torch.channels_last), *ctx.saved_tensors)
    return found


pool.register_autograd(_places_gradient, setup_context=_places_saved)


class OverlappingPool2d(nn.MaxPool2d):
    """A max-pool of 3×3 windows that overlap: torch's compiler finds every gradient's place anew, for every pixel."""

    def forward(self, input: Tensor) -> Tensor:
        _, channels, height, width = input.shape
        if height % 2 or width % 2 or channels not in (16, 32, 64, 128, 256):
            plain_out: Tensor = super().forward(input)
            return plain_out
        out: Tensor = pool(input.contiguous(memory_format=torch.channels_last))[0]
        return out


class NarrowReLUConv2d(NarrowConv2d):
    """A ``NarrowConv2d`` and the ReLU after it."""

    def forward(self, input: Tensor) -> Tensor:
        if input.requires_grad or self.bias is None or input.numel() * self.out_channels > COUNTED:
            return F.relu(super().forward(input))
        x, (stride, _), padding = input.to(self.weight.dtype).contiguous(), self.stride, self.padding
        assert not isinstance(padding, str)  # see ``is_narrow``
        out: Tensor = narrow_relu(x, self.weight.contiguous(), self.bias, stride, padding[0])
        return out


class PooledConv2d(UnbiasedConv2d):
    """A 3×3 convolution with bias, 2×2 max-pool and ReLU."""

    def forward(self, input: Tensor) -> Tensor:
        assert self.bias is not None
        if input.shape[2] % 2 or input.shape[3] % 2 or input.numel() > COUNTED:
            maxima = F.max_pool2d(super().forward(input), 2)
            return F.relu(maxima + self.bias[:, None, None])
        x = input.to(self.weight.dtype).contiguous(memory_format=torch.channels_last)
        out: Tensor = conv_pool(x, self.weight, self.bias)[0]
        return out


class SkippedPool2d(nn.MaxPool2d):
    """A max-pool that does nothing, because ``PooledConv2d`` pools."""

    def forward(self, input: Tensor) -> Tensor:
        return input


def fuse(module: nn.Module) -> int:
    """Fuse convolutions of a chain (``whole_chains``) with what follows them, in place, after ``multiply_narrow``, ``pool_first`` and
    ``copy_low``.

    Returns how many were fused. All parameters of a fused layer must be in bfloat16.
    """
    found = 0
    for chain in whole_chains(module):
        layers = list(chain)
        for layer, after, pool in zip(layers, layers[1:], [*layers[2:], None], strict=False):
            low = all(p.dtype == torch.bfloat16 for p in layer.parameters(recurse=False)) and plain(layer)
            if low and type(layer) is NarrowConv2d and type(after) is nn.ReLU and plain(after) and _square(layer):
                layer.__class__, after.__class__ = NarrowReLUConv2d, SkippedReLU
                found += 1
            elif low and type(layer) is UnbiasedConv2d and type(pool) is BiasedMaxPool2d and halves(pool) and _poolable(layer):
                layer.__class__, pool.__class__ = PooledConv2d, SkippedPool2d  # type: ignore[assignment]
                found += 1
    return found


class LowNetwork(Network):
    """A network that evaluates in bfloat16 with fused layers; they compute with copies of its parameters, made when a state is loaded."""

    def __init__(self, factory: Callable[[], nn.Module], device: str | torch.device = "cpu") -> None:
        super().__init__(factory, device)
        module = self.module.eval()
        multiply_narrow(module, patch=SMALL_PATCH)
        pool_first(module, head=find_head(module))
        full = copy_low(module)
        fuse(module)
        self._copies = [(module.get_parameter(name), parameter) for name, parameter in full.items()]
        for copy, _ in self._copies:
            if copy.dim() == 4:  # as the kernels read them
                copy.data = copy.data.contiguous(memory_format=torch.channels_last)

    @torch.no_grad()
    def load(self, theta: Tensor) -> None:
        super().load(theta)
        for copy, parameter in self._copies:
            copy.copy_(parameter)


def exchange_pools(module: nn.Module) -> int:
    """Make the max-pools of a network that ``pool`` can take ``OverlappingPool2d``, in place; returns how many there were."""
    shape = ((3, 2, 1, 1), ((3, 3), (2, 2), (1, 1), (1, 1)))
    pools = [m for m in module.modules() if type(m) is nn.MaxPool2d and plain(m) and not (m.return_indices or m.ceil_mode)]
    return exchange([m for m in pools if (m.kernel_size, m.stride, m.padding, m.dilation) in shape], OverlappingPool2d)


def _square(layer: nn.Conv2d) -> bool:
    """Whether both axes have the same stride and padding, and filters are few enough for one program."""
    return len(set(layer.stride)) == len(set(layer.padding)) == 1 and layer.out_channels in (16, 32, 64, 128)


def _poolable(layer: nn.Conv2d) -> bool:
    """Whether a convolution is 3×3, keeps the size of images, and has channels that fill the tiles of its kernel."""
    shape = (layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.groups, layer.padding_mode)
    plain_shape = ((3, 3), (1, 1), (1, 1), (1, 1), 1, "zeros")
    return shape == plain_shape and layer.in_channels % 64 == 0 and layer.out_channels % 128 == 0
