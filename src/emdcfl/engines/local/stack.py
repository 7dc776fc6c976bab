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
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, vmap

from emdcfl.core.params import Network
from emdcfl.core.tasks import Training
from emdcfl.engines.local.update import Terms, fused_sgd


class Buffers:
    """Float32 blocks by name; a block grows to the largest size asked for and is never cleared.

    Examples
    --------
    >>> buffers = Buffers()
    >>> a = buffers("x", 2, 3, device=torch.device("cpu"))
    >>> a.data_ptr() == buffers("x", 3, 1, device=torch.device("cpu")).data_ptr()
    True
    """

    def __init__(self) -> None:
        self._blocks: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int, device: torch.device) -> Tensor:
        """Return uninitialised memory of this shape, the same as last time."""
        size = math.prod(shape)
        if name not in self._blocks or self._blocks[name].numel() < size:
            self._blocks[name] = torch.empty(size, device=device)
        return self._blocks[name][:size].view(shape)


@dataclass
class Stack:
    """F states, tensor by tensor in the order of the layout, and the velocities of the trained ones (unset before the first step)."""

    network: Network
    tensors: list[Tensor]
    velocity: list[Tensor]

    @classmethod
    def load(cls, network: Network, states: Sequence[Tensor], buffers: Buffers) -> Stack:
        entries, device = network.layout.entries, network.device
        tensors = [buffers(e.name, len(states), *e.shape, device=device) for e in entries]
        shared = all(state is states[0] for state in states)
        rows = states[0].to(device)[None] if shared else torch.stack(list(states), out=_matrix(states, buffers)).to(device)
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
        r"""Return cross-entropies ``(F, b)`` and the gradients of :math:`\sum_s \text{scale}_s \ell_s`; BatchNorm's statistics move."""
        module, entries = self.network.module, self.network.layout.entries

        def one(state: dict[str, Tensor], batch: Tensor) -> Any:
            return functional_call(module, state, (batch,))

        mapped: Callable[..., Tensor] = vmap(one)
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=low):
            logits = mapped({e.name: t for e, t in zip(entries, self.tensors, strict=True)}, x)
            losses = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view(y.shape)
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
        return torch.cat([t.flatten(1) for t in self.tensors], 1).to("cpu")


def _matrix(states: Sequence[Tensor], buffers: Buffers) -> Tensor:
    return buffers("theta", len(states), len(states[0]), device=states[0].device)
