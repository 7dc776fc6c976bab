r"""Forward and backward passes of perceptrons for many clients at once, without ``vmap`` and autograd.

It serves networks that are a chain of linear layers and ReLUs. Each layer is one batched matrix product with features first,
:math:`Z_f = W_f H_f + b_f` with :math:`H_f \in R^{in\times b}`, so that the gradient :math:`\partial W_f = \partial Z_f H_f^\top`
has the layout of :math:`W_f`. Products are written to reused memory: for models this small, allocating costs more than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from emdcfl.core.params import Network
from emdcfl.engines.local.stack import Buffers


@dataclass(frozen=True)
class Chain:
    """The linear layers of a network in order: index of weight and bias (or ``None``) among its trained tensors, and ReLU after it."""

    layers: tuple[tuple[int, int | None, bool], ...]

    @torch.no_grad()
    def gradients(self, w: Sequence[Tensor], x: Tensor, y: Tensor, scale: Tensor, buffers: Buffers) -> tuple[Tensor, Sequence[Tensor]]:
        r"""Return cross-entropies ``(F, b)`` and the gradients of :math:`\sum_s \text{scale}_s \ell_s` for every tensor of ``w``."""
        device, (rows, b) = x.device, y.shape
        h = x.reshape(rows, b, -1).transpose(1, 2)
        inputs: list[Tensor] = []
        for i, (weight, bias, relu) in enumerate(self.layers):
            inputs.append(h)
            h = torch.bmm(w[weight], h, out=buffers(f"layer {i}", rows, w[weight].shape[1], b, device=device))
            if bias is not None:
                h += w[bias][:, :, None]
            if relu:
                h.clamp_min_(0)
        p = h.log_softmax(1)
        losses = -p.gather(1, y[:, None]).squeeze(1)
        p.exp_().scatter_add_(1, y[:, None], torch.full_like(y[:, None], -1.0, dtype=p.dtype))
        d = p.mul_(scale[:, None])
        g: list[Tensor] = [torch.empty(0)] * len(w)
        for i, (weight, bias, _) in reversed(list(enumerate(self.layers))):
            g[weight] = torch.bmm(d, inputs[i].transpose(1, 2), out=buffers(f"gradient {weight}", *w[weight].shape, device=device))
            if bias is not None:
                g[bias] = d.sum(2)
            if i:
                back = torch.bmm(w[weight].transpose(1, 2), d, out=buffers(f"back {i}", rows, w[weight].shape[2], b, device=device))
                if self.layers[i - 1][2]:  # a boolean mask would be a tensor of its own and several times slower
                    torch.ops.aten.threshold_backward.grad_input(back, inputs[i], 0, grad_input=back)
                d = back
        return losses, g


def find_chain(network: Network, x: Tensor) -> Chain | None:
    """Return the network as a chain if it is one: recorded in one forward pass of ``x``, and checked against its output."""
    module, seen = network.module, list[nn.Module]()
    leaves = [m for m in module.modules() if not list(m.children())]
    if not all(isinstance(m, (nn.Linear, nn.ReLU, nn.Flatten, nn.Identity)) for m in leaves):
        return None
    hooks = [m.register_forward_hook(lambda m, _i, _o: seen.append(m)) for m in leaves]
    try:
        with torch.no_grad():
            expected = module(x)
    finally:
        for hook in hooks:
            hook.remove()
    chain = _read(network, seen)
    return chain if chain is not None and _agrees(chain, network, x, expected) else None


def _read(network: Network, seen: Sequence[nn.Module]) -> Chain | None:
    index = {e.name: i for i, e in enumerate(e for e in network.layout.entries if e.trainable)}
    names = {m: name for name, m in network.module.named_modules()}
    layers: list[tuple[int, int | None, bool]] = []
    for m in seen:
        if isinstance(m, nn.Linear):
            weight, bias = index.get(f"{names[m]}.weight"), index.get(f"{names[m]}.bias")
            if weight is None or (m.bias is not None and bias is None):  # frozen or tied weights: not a chain
                return None
            layers.append((weight, bias, False))
        elif isinstance(m, nn.ReLU):
            if not layers:
                return None
            layers[-1] = (*layers[-1][:2], True)
    used = {i for weight, bias, _ in layers for i in (weight, bias) if i is not None}
    return Chain(tuple(layers)) if used == set(index.values()) and len({w for w, _, _ in layers}) == len(layers) else None


@torch.no_grad()
def _agrees(chain: Chain, network: Network, x: Tensor, expected: Tensor) -> bool:
    """Whether chain and network have the same cross-entropy; they differ if the network computes anything between its layers."""
    w = [network.theta[e.slice].view(1, *e.shape) for e in network.layout.entries if e.trainable]
    y = torch.zeros(1, len(x), dtype=torch.int64, device=x.device)
    losses, _ = chain.gradients(w, x[None], y, torch.ones(1, len(x), device=x.device), Buffers())
    if expected.shape[:1] != x.shape[:1] or expected.dim() != 2:
        return False
    return bool(torch.allclose(losses[0], -expected.log_softmax(1)[:, 0], rtol=1e-4, atol=1e-5))
