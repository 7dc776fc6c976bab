"""The states of many trainings as stacked tensors: one forward and backward pass and one SGD step for all of them.

Each tensor of the network is one contiguous ``(F, *shape)`` block, allocated once per engine: allocating blocks of this size at every
step takes longer than the arithmetic of a small model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from emdcfl.core.keys import global_seed
from emdcfl.core.learning import objective
from emdcfl.core.params import Network
from emdcfl.core.tasks import Training
from emdcfl.engines.local.update import Terms, fused_sgd


class Buffers:
    """Float32 blocks by name; a block grows to the largest size asked for and is never cleared.

    The network's own tensors have their names, without a space; all other names have one, so that no two are the same.

    Examples
    --------
    >>> buffers = Buffers()
    >>> a = buffers("x", 2, 3, device=torch.device("cpu"))
    >>> a.data_ptr() == buffers("x", 3, 1, device=torch.device("cpu")).data_ptr()
    True
    """

    def __init__(self) -> None:
        self._blocks: dict[str, Tensor] = {}
        self._shaped: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int, device: torch.device) -> Tensor:
        """Return uninitialised memory of this shape, the same as last time."""
        if name not in self._shaped or self._shaped[name].shape != shape:
            size = math.prod(shape)
            if name not in self._blocks or self._blocks[name].numel() < size:
                self._blocks[name] = torch.empty(size, device=device)
            self._shaped[name] = self._blocks[name][:size].view(shape)
        return self._shaped[name]


@dataclass
class Stack:
    """F states, tensor by tensor in the order of the layout, and the velocities of the trained ones (unset before the first step)."""

    network: Network
    tensors: list[Tensor]
    velocity: list[Tensor]

    @classmethod
    @torch.no_grad()
    def load(cls, network: Network, states: Sequence[Tensor], buffers: Buffers) -> Stack:
        entries, device = network.layout.entries, network.device
        tensors = [buffers(e.name, len(states), *e.shape, device=device) for e in entries]
        shared = all(state is states[0] for state in states)
        stacked = None if shared else buffers("start states", len(states), len(states[0]), device=states[0].device)
        rows = states[0].to(device)[None] if shared else torch.stack(list(states), out=stacked).to(device)
        for e, tensor in zip(entries, tensors, strict=True):
            tensor.copy_(rows[:, e.slice].view(-1, *e.shape))
        velocity = [buffers(f"velocity {e.name}", len(states), *e.shape, device=device) for e in entries if e.trainable]
        return cls(network, tensors, velocity).ready()

    def ready(self) -> Stack:
        """Mark what is trained."""
        for e, tensor in zip(self.network.layout.entries, self.tensors, strict=True):
            tensor.requires_grad_(e.trainable)
        return self

    @property
    def trained(self) -> list[Tensor]:
        """The trainable tensors, in the order of the layout."""
        return [t for e, t in zip(self.network.layout.entries, self.tensors, strict=True) if e.trainable]

    def rows(self, rows: slice | Tensor) -> Stack:
        """Return some of the trainings: a view of the first ones, or a copy of chosen ones (see ``put``)."""
        if isinstance(rows, slice) and rows.stop == len(self.tensors[0]):
            return self
        tensors, velocity = [t.detach()[rows] for t in self.tensors], [v[rows] for v in self.velocity]
        return Stack(self.network, tensors, velocity).ready()

    def put(self, rows: slice | Tensor, part: Stack) -> None:
        """Write a part back if it was a copy."""
        if isinstance(rows, slice):
            return
        with torch.no_grad():
            for mine, new in zip(self.tensors + self.velocity, part.tensors + part.velocity, strict=True):
                mine[rows] = new

    def gradients(self, x: Tensor, y: Tensor, scale: Tensor, *, low: bool) -> tuple[Tensor, Sequence[Tensor]]:
        r"""Return losses ``(F, b)`` and the gradients of :math:`\sum_s \text{scale}_s \ell_s`; BatchNorm's statistics move."""
        module, entries = self.network.module, self.network.layout.entries

        def one(state: dict[str, Tensor], batch: Tensor) -> Any:
            return functional_call(module, state, (batch,))

        mapped: Callable[..., Tensor] = vmap(one)
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=low):
            logits = mapped({e.name: t for e, t in zip(entries, self.tensors, strict=True)}, x)
            losses = objective.losses(logits.flatten(0, 1), y.flatten()).view(y.shape)
        return losses.detach(), torch.autograd.grad((losses * scale).sum(), self.trained)

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], terms: Terms, rows: slice | Tensor, training: Training, *, first: bool) -> None:
        """One step of SGD with momentum, as in ``local_sgd``; the first one finds no velocity."""
        w, g = self.trained, [t.contiguous() for t in gradients]  # the fused kernel reads all three in one order
        terms.add_gradient(w, g, rows)
        fused_sgd(w, g, self.velocity, training, first=first)

    @torch.no_grad()
    def flat(self) -> Tensor:
        """Return Θ ``(F, P)`` in memory of its own, on the CPU: its rows are the replies."""
        return torch.cat([t.reshape(len(t), -1) for t in self.tensors], 1).to("cpu")


@dataclass(frozen=True)
class Chain:
    r"""A perceptron, whose passes need neither ``vmap`` nor autograd: its linear layers in order.

    Each layer is one batched matrix product with features first, :math:`Z_f = W_f H_f + b_f` with :math:`H_f \in R^{in\times b}`, so that
    the gradient :math:`\partial W_f = \partial Z_f H_f^\top` has the layout of :math:`W_f`.
    """

    layers: tuple[tuple[int, int | None, bool], ...]
    """Index of weight and bias among the network's trained tensors, and whether a ReLU follows."""

    def logits(self, w: Sequence[Tensor], x: Tensor, buffers: Buffers, inputs: list[Tensor] | None = None) -> Tensor:
        """Return logits ``(F, classes, b)`` in shared memory; ``inputs`` receives what goes into each layer."""
        rows, b = x.shape[:2]
        h = x.reshape(rows, b, -1).transpose(1, 2)
        for i, (weight, bias, relu) in enumerate(self.layers):
            if inputs is not None:
                inputs.append(h)
            h = torch.bmm(w[weight], h, out=buffers(f"layer {i}", rows, w[weight].shape[1], b, device=x.device))
            if bias is not None:
                h += w[bias][:, :, None]
            if relu:
                h.clamp_min_(0)
        return h

    @torch.no_grad()
    def gradients(self, w: Sequence[Tensor], x: Tensor, y: Tensor, scale: Tensor, buffers: Buffers) -> tuple[Tensor, Sequence[Tensor]]:
        r"""Return losses ``(F, b)`` and the gradients of :math:`\sum_s \text{scale}_s \ell_s` for every tensor of ``w``."""
        device, (rows, b) = x.device, y.shape
        inputs: list[Tensor] = []
        p = self.logits(w, x, buffers, inputs)
        if objective.is_regression(y):
            d = p.sub(y[:, None])
            losses = d.squeeze(1) ** 2
            d.mul_(2 * scale[:, None])
        else:
            p = p.log_softmax(1)
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


FAR = 1e3
"""Factor of the inputs by which a network that is linear between bounds (``clamp``) is told from one that is linear."""


def find_chain(network: Network, x: Tensor) -> Chain | None:
    """Return the network as a chain if it is one: recorded in one forward pass of ``x``, and checked in both modes and far from ``x``."""
    module, seen = network.module, list[nn.Module]()
    leaves = [m for m in module.modules() if not list(m.children())]
    if not all(isinstance(m, (nn.Linear, nn.ReLU, nn.Flatten, nn.Identity)) for m in leaves):
        return None
    hooks = [m.register_forward_hook(lambda m, _i, _o: seen.append(m)) for m in leaves]
    try:
        with torch.no_grad():
            evaluated = module.eval()(x)
    finally:
        for hook in hooks:
            hook.remove()
    with torch.no_grad(), global_seed(0):  # dropout may be a function call, which no list of layers shows
        trained, far = module.train()(x), module(FAR * x)
    chain = _read(network, seen)
    outputs = ((evaluated, 1.0), (trained, 1.0), (far, FAR))
    return chain if chain is not None and all(_agrees(chain, network, x, expected, scale) for expected, scale in outputs) else None


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
def _agrees(chain: Chain, network: Network, x: Tensor, expected: Tensor, scale: float) -> bool:
    """Whether chain and network have the same outputs for ``scale * x``; they differ if there is anything between the layers."""
    w = [network.theta[e.slice].view(1, *e.shape) for e in network.layout.entries if e.trainable]
    if expected.shape[:1] != x.shape[:1] or expected.dim() != 2:
        return False
    return bool(torch.allclose(chain.logits(w, scale * x[None], Buffers())[0].T, expected, rtol=1e-4, atol=1e-5 * scale))
