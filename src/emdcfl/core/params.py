r"""Flat model states: a network's floating-point state is one vector :math:`\theta \in R^P`.

The vector is laid out so that every part a method asks for is one slice::

    [ statistics and frozen weights of ω | trainable ω | trainable φ | statistics and frozen weights of φ ]
      └──────────────── embedding ω ─────────────────┘   └─────────────────── head φ ───────────────────┘
                                           └─── trainable P(θ) ────┘

Integer and boolean buffers are not part of θ. They are constants of the architecture, or counters that nothing reads
(BatchNorm's *batches seen*, unless its momentum is ``None``, which is an error).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from emdcfl.core.errors import ModelError

CHUNK = 1 << 17
"""Columns of Θ handled at a time: their float64 copy (1 MiB) stays in the processor's cache."""

PIECE = 1 << 15
"""Columns of a state that are added at a time: with more, torch would wake other threads, which takes longer than to add."""

LAUNCHED = 1 << 20
"""Columns of a block of states on a GPU."""

TOGETHER, ROW = 1 << 19, 1 << 13
"""Most numbers of states that are summed together, and of one of them: for small models the calls cost more than the arithmetic."""

WIDE = 1 << 12
"""Fewest columns of a block, however many rows it has."""

Scope = Literal["P", "F", "H", "state"]
"""What represents a client: trainable parameters, all floating state, the head, or all floating state and BatchNorm's counters."""


@dataclass(frozen=True)
class LayoutEntry:
    """One tensor of the network and the slice of θ that holds it."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    trainable: bool
    head: bool

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)


@dataclass(frozen=True)
class Layout:
    """Where each tensor lies in θ."""

    entries: tuple[LayoutEntry, ...]
    """In the order of the vector."""
    counters: tuple[str, ...]
    """Names of BatchNorm's integer counters, which stay outside θ."""
    embedding_width: int
    """Number of inputs of the head, ``dim Z``."""
    batch_statistics: bool = False
    """Whether a layer normalises by its batch while training: batches must not be padded, and need two samples."""

    @property
    def size(self) -> int:
        """P, the length of θ."""
        return self.entries[-1].stop if self.entries else 0

    @property
    def outputs(self) -> int:
        """Outputs of the head: the number of classes, or 1 for a number to predict."""
        return next((e.shape[0] for e in reversed(self.entries) if e.head and e.shape), 0)

    @property
    def trainable(self) -> slice:
        """Where the trainable parameters P(θ) lie."""
        return _span(self.entries, lambda e: e.trainable)

    @property
    def embedding(self) -> slice:
        """Where ω lies: everything below the head, statistics included."""
        return _span(self.entries, lambda e: not e.head)

    @property
    def head(self) -> slice:
        """Where φ lies: the final linear layer."""
        return _span(self.entries, lambda e: e.head)

    def scope(self, scope: Scope) -> slice:
        """Return the slice of θ that ``scope`` names: ``"P"`` trainable, ``"F"`` and ``"state"`` all, ``"H"`` head."""
        whole = slice(0, self.size)
        return {"P": self.trainable, "F": whole, "state": whole, "H": self.head}[scope]


def _span(entries: Sequence[LayoutEntry], wanted: Callable[[LayoutEntry], bool]) -> slice:
    chosen = [e for e in entries if wanted(e)]
    return slice(chosen[0].start, chosen[-1].stop) if chosen else slice(0, 0)


def find_head(module: nn.Module) -> nn.Linear:
    """Return the final linear layer: ``module.head`` if it is one, else the last ``nn.Linear`` registered."""
    head = getattr(module, "head", None)
    if isinstance(head, nn.Linear):
        return head
    linears = [m for m in module.modules() if isinstance(m, nn.Linear)]
    if not linears:
        raise ModelError(
            f"expected a network whose last layer is nn.Linear (its input is the embedding), got {type(module).__name__} with none; "
            "add a linear `head`"
        )
    return linears[-1]


def make_layout(module: nn.Module) -> Layout:
    """Describe where each floating tensor of ``module`` lies in θ; raise for tensors that are not float32."""
    head = find_head(module)
    in_head = {id(t) for t in head.parameters()} | {id(t) for t in head.buffers()}
    own = {id(t): name for name, t in head.named_parameters()}
    outside = [name for name, m in module.named_modules() if m is not head for t in m.parameters(recurse=False) if id(t) in own]
    if outside:
        raise ModelError(
            f"the head shares a weight with {outside[0]!r}: the embedding would depend on the head, which never leaves a client; untie them"
        )
    persistent = set(module.state_dict(keep_vars=True))
    held: list[tuple[str, Tensor, bool, bool]] = [(n, p, p.requires_grad, id(p) in in_head) for n, p in module.named_parameters()]
    held += [(n, b, False, id(b) in in_head) for n, b in module.named_buffers() if b.is_floating_point() and n in persistent]
    entries, start = [], 0
    # in the order of the module's docstring: what is trainable of ω beside what is trainable of φ
    for name, t, trainable, of_head in sorted(held, key=lambda one: (one[3], one[2] != one[3])):
        if t.dtype != torch.float32:
            raise ModelError(f"expected float32 tensors in the model, got {name!r} in {t.dtype}; convert it with .float()")
        entries.append(LayoutEntry(name, tuple(t.shape), start, start + t.numel(), trainable, of_head))
        start += t.numel()
    if not any(e.trainable for e in entries):
        raise ModelError(f"expected a network with trainable parameters, got {type(module).__name__} with none")
    # a BatchNorm without running statistics has no counter, and normalises by its batch even in evaluation
    statistics = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules())
    counters = tuple(_counters(module))
    return Layout(tuple(entries), counters, head.in_features, statistics or bool(counters))


def _counters(module: nn.Module) -> Iterator[str]:
    for name, m in module.named_modules():
        if isinstance(m, nn.modules.batchnorm._NormBase) and m.track_running_stats:
            if m.momentum is None:
                raise ModelError(
                    f"BatchNorm {name!r} has momentum=None: its statistics depend on a counter that is not averaged; set a momentum"
                )
            yield f"{name}.num_batches_tracked"


class Network:
    """A live module whose parameters and statistics are views of one flat vector ``theta``.

    Loading a state is one copy; reading it back is none. On the CPU, a module with a true attribute ``channels_last`` gets images whose
    channels lie side by side.

    Examples
    --------
    >>> net = Network(lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
    >>> net.theta.shape, net.layout.embedding_width
    (torch.Size([23]), 3)
    """

    def __init__(self, factory: Callable[[], nn.Module], device: str | torch.device = "cpu") -> None:
        self.factory = factory
        self.module = factory().to(device)
        self.layout = make_layout(self.module)
        self.device = torch.device(device)
        tensors = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        self.theta = torch.cat([tensors[e.name].detach().reshape(-1) for e in self.layout.entries])
        self.grad = torch.zeros(self.layout.trainable.stop - self.layout.trainable.start, device=device)
        offset = self.layout.trainable.start
        for e in self.layout.entries:
            tensors[e.name].data = self.theta[e.slice].view(e.shape)
            if e.trainable:
                tensors[e.name].grad = self.grad[e.start - offset : e.stop - offset].view(e.shape)
        self._head = find_head(self.module)
        self._arrange = self.device.type == "cpu" and getattr(self.module, "channels_last", False)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the module's output."""
        out: Tensor = self.module(channels_last(x) if self._arrange else x)
        return out

    def load(self, theta: Tensor) -> None:
        """Copy a state, or only its embedding part ω, into the module."""
        if theta.dim() != 1 or theta.shape[0] not in (self.layout.size, self.layout.embedding.stop):
            raise ModelError(
                f"expected a state of {self.layout.size} (or ω of {self.layout.embedding.stop}) numbers, got {tuple(theta.shape)}"
            )
        with torch.no_grad():
            self.theta[: theta.shape[0]].copy_(theta)

    def embed(self, x: Tensor) -> Tensor:
        """Return g(x), the input of the final linear layer, as ``(N, dim Z)``."""
        x = channels_last(x) if self._arrange else x
        embed = getattr(self.module, "embed", None)
        if callable(embed) and not isinstance(embed, nn.Module):  # a layer of that name is just a layer
            z = cast(Tensor, embed(x))
        else:
            seen: list[Tensor] = []
            hook = self._head.register_forward_pre_hook(lambda _m, inputs: seen.append(inputs[0]))
            try:
                self.module(x)
            finally:
                hook.remove()
            z = seen[-1]
        if z.dim() != 2 or z.shape[1] != self.layout.embedding_width:
            raise ModelError(
                f"expected embeddings of shape (N, {self.layout.embedding_width}), got {tuple(z.shape)}; check the model's embed()"
            )
        return z

    def state_dict(self, theta: Tensor) -> dict[str, Tensor]:
        """Return θ as an ordinary state dict, integer buffers with the values and dtypes of the architecture."""
        self.load(theta)
        return {name: t.detach().cpu().clone().contiguous() for name, t in self.module.state_dict().items()}


def channels_last(images: Tensor) -> Tensor:
    """Return images with the channels of a pixel side by side; on the CPU, convolutions read them faster so.

    Examples
    --------
    >>> channels_last(torch.zeros(8, 1, 5, 5)).stride(), channels_last(torch.zeros(8, 3, 5, 5)).stride()
    ((25, 1, 5, 1), (75, 1, 15, 3))
    """
    if images.dim() != 4:
        return images
    channels, height, width = images.shape[1:]
    if channels > 1:
        return images.contiguous(memory_format=torch.channels_last)
    # torch takes a single channel to be in either order, and would go on in its own
    return images.contiguous().as_strided(images.shape, (height * width, 1, width, 1))


class Average:
    r"""Running weighted mean :math:`\sum_i a_i\theta_i / \sum_i a_i`, in float64, in the order of ``add``.

    A single member comes back bit for bit: :math:`a\theta` is exact in float64 for integer weights below :math:`2^{29}`.

    Examples
    --------
    >>> mean = Average()
    >>> mean.add(torch.tensor([1.0, 2.0]), 1); mean.add(torch.tensor([4.0, 5.0]), 2)
    >>> mean.result()
    tensor([3., 4.])
    """

    def __init__(self) -> None:
        self.total = 0.0
        self._sum: Tensor | None = None

    def add(self, theta: Tensor, weight: float) -> None:
        if not weight > 0:
            raise ValueError(f"expected a positive weight, got {weight}")
        if self._sum is None:  # starting from zeros would change a single member: 0.0 + (-0.0) is 0.0
            self._sum = theta.double() * weight
        elif _whole(theta):
            self._sum.add_(theta, alpha=weight)
        else:
            for part in chunks(theta.shape[-1]):
                self._sum[..., part].add_(theta[..., part], alpha=weight)
        self.total += weight

    def add_all(self, thetas: Sequence[Tensor], weights: Sequence[float]) -> Average:
        """Add states in their order and return the average: bit-identical to ``add``, and faster for many small ones."""
        done = 0
        while done < len(thetas):
            part = slice(done, done + max(1, (TOGETHER if self._sum is None else CHUNK) // thetas[0].numel()))
            if not 1 < thetas[0].numel() <= ROW or not self._add_rows(thetas[part], weights[part]):
                for theta, weight in zip(thetas[part], weights[part], strict=True):
                    self.add(theta, weight)
            done = part.stop
        return self

    def _add_rows(self, thetas: Sequence[Tensor], weights: Sequence[float]) -> bool:
        """Add states on the CPU in one go, in the order of ``add``; returns whether that is possible, and exact."""
        exact = all(0 < w < 1 << 29 and w == int(w) for w in weights)  # so are products with float32, however they are rounded
        if not exact or len(thetas) < 8 or any(not t.is_cpu or t.dtype != torch.float32 for t in thetas):
            return False
        rows, factors = stacked(thetas).detach().view(len(thetas), -1).numpy(), list(weights)
        if self._sum is not None:
            rows, factors = np.concatenate([self._sum.view(1, -1).numpy(), rows]), [1.0, *factors]
        total = np.einsum("i,ij->j", np.array(factors), rows, dtype=np.float64)
        if not total.all():  # begun from zeros: the sign of -0.0 is lost
            return False
        self._sum, self.total = torch.from_numpy(total).view(thetas[0].shape), sum(weights, self.total)
        return True

    def result(self) -> Tensor:
        if self._sum is None:
            raise ValueError("expected at least one state to average, got none")
        if _whole(self._sum):
            return (self._sum / self.total).float()
        out = torch.empty(self._sum.shape, dtype=torch.float32, device=self._sum.device)
        for part in chunks(out.shape[-1]):
            out[..., part] = self._sum[..., part] / self.total
        return out


def average(thetas: Iterable[Tensor], weights: Iterable[float]) -> Tensor:
    """Return the weighted mean of the states, accumulated in float64 in the order given.

    Pass only the members: a zero weight does not remove a NaN.
    """
    states, factors = list(thetas), [float(weight) for weight in weights]
    if not states or _whole(states[0]):
        return Average().add_all(states, factors).result()
    out = torch.empty(states[0].shape, dtype=torch.float32, device=states[0].device)
    for part in chunks(out.shape[-1]):  # one part of all states after the other: the sum never leaves the cache
        out[..., part] = Average().add_all([theta[..., part] for theta in states], factors).result()
    return out


def stacked(states: Sequence[Tensor]) -> Tensor:
    """Return float32 states as one tensor, to be read only: a view if they lie one after the other in memory, as rows do; else a copy."""
    first, size = states[0], states[0].numel()
    inside = 4 * (first.storage_offset() + size * len(states)) <= first.untyped_storage().nbytes()
    start, step = first.data_ptr(), 4 * size
    side_by_side = inside and [s.data_ptr() for s in states] == list(range(start, start + step * len(states), step))
    if side_by_side and all(s.is_contiguous() for s in states):
        return first.as_strided((len(states), *first.shape), (size, *first.stride()))
    return torch.stack(list(states))


def gram(rows: Tensor | Sequence[Tensor], columns: slice | None = None, *, origin: Tensor | Sequence[Tensor] | None = None) -> Tensor:
    r"""Return the Gram matrix :math:`G_{ij} = \langle \theta_i - o, \theta_j - o\rangle` in float64, chunk by chunk.

    Parameters
    ----------
    rows : (C, P) tensor, or its rows
        Rows that lie apart need not be stacked first.
    columns : slice, optional
        Part of θ to use (``layout.trainable`` for P(θ)).
    origin : (P,) tensor, or (C, P) tensor or its rows, optional
        Subtracted from each row; gives the Gram matrix of updates without forming them.
    """
    C, columns = len(rows), columns or slice(0, rows[0].shape[0])
    shared = isinstance(origin, Tensor) and origin.dim() == 1
    origins = [] if origin is None else [cast(Tensor, origin)] if shared else list(origin)
    out = torch.zeros(C, C, dtype=torch.float64, device=rows[0].device)
    for part in blocks(columns.stop - columns.start, C, on_gpu=rows[0].is_cuda):
        at = slice(columns.start + part.start, columns.start + part.stop)
        block = torch.stack([row[at] for row in rows]).double()
        if origins:
            block -= origins[0][at] if shared else torch.stack([row[at] for row in origins])
        out.addmm_(block, block.T)
    out = out.cpu()
    return (out + out.T) / 2  # matrix kernels may round the two halves differently, and linkage needs symmetry


def blocks(length: int, rows: int, *, on_gpu: bool = False) -> Iterator[slice]:
    """Cut columns into blocks whose ``rows`` float64 rows fit the processor's cache, at least ``WIDE`` columns each."""
    return chunks(length, LAUNCHED if on_gpu else max(WIDE, 2 * CHUNK // rows))


def _whole(theta: Tensor) -> bool:
    """Whether nothing is gained by chunks: of a small state, slicing costs as much as adding; on a GPU, every chunk is a launch."""
    return theta.shape[-1] <= PIECE or theta.is_cuda


def chunks(length: int, size: int | None = None) -> Iterator[slice]:
    """Cut columns into pieces of ``size`` (``PIECE``)."""
    size = PIECE if size is None else size
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def cosines(gram_matrix: Tensor) -> Tensor:
    r"""Return :math:`\cos_{ij} = G_{ij} / \sqrt{G_{ii}G_{jj}}`; a zero vector is orthogonal to everything but itself."""
    norms = gram_matrix.diagonal().clamp_min(0).sqrt()
    scale = torch.where(norms > 0, 1.0 / norms, torch.zeros_like(norms))
    out = gram_matrix * scale[:, None] * scale[None, :]
    out.fill_diagonal_(1.0)
    return out.clamp(-1.0, 1.0)


def squared_distances(gram_matrix: Tensor) -> Tensor:
    r"""Return :math:`\|v_i - v_j\|^2 = G_{ii} + G_{jj} - 2G_{ij}` from a Gram matrix, never negative."""
    d = gram_matrix.diagonal()
    out = (d[:, None] + d[None, :] - 2 * gram_matrix).clamp_min(0)
    out.fill_diagonal_(0.0)
    return out
