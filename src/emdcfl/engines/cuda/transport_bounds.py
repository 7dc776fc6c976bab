r"""Bounds of many transport problems at once, as torch code for any device; the same certificates as ``transport.bounds``.

*Below*: potentials after a c-transform. *Above*: the Sinkhorn plan rounded to uniform marginals in float64 (Altschuler, Weed and Rigollet,
2017). Iterations are cheap on a GPU, so the regularisation is much smaller than on a CPU, where a matching replaces the rounding.

Cosines are computed in float64 and rounded to float32, so that reduced precision (TF32) does not affect them.
The exact solver works on costs that the CPU computed in float32. Both differ by rounding, at most by :func:`rounding`, which the margins
of the bounds contain.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from emdcfl.transport.cost import FARTHEST

STAGES = ((0.3, 10), (0.1, 30), (0.03, 100), (0.01, 300))
"""(regularisation as a share of the first lower bound, iterations): warm-started one from the other."""

ELEMENTS = 2**27
"""Most entries of the cost matrices in one go: 512 MiB, and about eight times that with all intermediate results."""

BYTES = 128
"""GPU memory per entry, four times what one takes. Of the total memory: with the free memory, the last digits of bounds would vary."""


def costs(a: Tensor, b: Tensor, *, cost: str, labels: tuple[Tensor, Tensor] | None = None, label_weight: float = 1.0) -> Tensor:
    """Ground costs of P problems: (P, n, d) and (P, m, d) samples, (P, n) and (P, m) labels, to (P, n, m) float32.

    Examples
    --------
    >>> costs(torch.tensor([[[1.0, 0.0], [0.0, 0.0]]]), torch.tensor([[[2.0, 0.0], [0.0, 1.0], [0.0, 0.0]]]), cost="cosine")
    tensor([[[0., 1., 1.],
             [1., 1., 0.]]])
    """
    x, y = a.double(), b.double()
    if cost == "euclidean":
        squared = x.square().sum(2)[:, :, None] + y.square().sum(2)[:, None, :] - 2.0 * torch.bmm(x, y.transpose(1, 2))
        return squared.clamp_(0.0, FARTHEST**2).sqrt_().float()
    x, y = _unit(x), _unit(y)
    c = torch.bmm(x, y.transpose(1, 2)).neg_().add_(1.0).clamp_min_(0.0).float()
    c.masked_fill_(~x.any(2)[:, :, None] & ~y.any(2)[:, None, :], 0.0)
    if labels is not None:
        c += label_weight * (labels[0][:, :, None] != labels[1][:, None, :]).float()
    return c


def _unit(z: Tensor) -> Tensor:
    tiny = torch.finfo(torch.float64).tiny
    z = z / z.abs().amax(2, keepdim=True).clamp_min(tiny)
    return z / z.square().sum(2, keepdim=True).sqrt().clamp_min(tiny)


def rounding(c: Tensor, d: int) -> Tensor:
    """How far rounding may move a bound of each problem away from the exact value on the CPU's float32 costs.

    As ``bounds.slack``, plus the worst case of two vectors of width d normalised and multiplied in float32.
    """
    largest = c.flatten(1).amax(1).double()
    return 1e-6 + 4e-6 * largest + (2 * d + 16) * 2.0**-24 * largest.clamp_min(1.0)


def minima(c: Tensor) -> Tensor:
    """Lower bounds from minima, rows first or columns first, whichever is larger: (P,) float64; see ``bounds.minima``.

    Examples
    --------
    >>> minima(torch.tensor([[[1.0, 2.0], [1.0, 3.0]]]))
    tensor([1.5000], dtype=torch.float64)
    """
    f = c.amin(2)
    rows_first = _dual(f, (c - f[:, :, None]).amin(1))
    g = c.amin(1)
    return torch.maximum(rows_first, _dual((c - g[:, None, :]).amin(2), g))


def refine(
    c: Tensor, low: Tensor, *, upper: bool = True, stages: Sequence[tuple[float, int]] = STAGES
) -> Generator[tuple[Tensor, Tensor], Tensor | None, None]:
    """Lower and upper bounds of each problem, (P,) float64, one pair per stage, each at least as tight as the one before.

    A tensor of positions that is sent back leaves only these problems to the later stages, in that order. The costs ``c`` (P, n, m) are
    non-negative float32; ``low`` is ``minima(c)``, which sets the scale of the regularisation. With ``upper``, bounds are also from above,
    from the second stage on: a plan of the first is too blurred to be of use.
    """
    low, high = low.clone(), torch.full_like(low, torch.inf)
    # With identical samples the minima vanish; the regularisation must not.
    scale = torch.maximum(low, 0.01 * c.mean(dim=(1, 2), dtype=torch.float64)).clamp_min(1e-12).float()
    f = c.amin(2)
    for number, (share, iterations) in enumerate(stages):
        reg = (share * scale)[:, None]
        f, _, reduced = _conjugate(c, f)
        kernel = (reduced / -reg[:, :, None]).clamp_min_(-60.0).exp_()
        u, v = _scalings(kernel, iterations)
        better = f + reg * u.log()
        fine = better.isfinite().all(1) & v.isfinite().all(1)
        f, g, _ = _conjugate(c, torch.where(fine[:, None], better, f))
        low = torch.maximum(low, _dual(f, g))
        if upper and number:
            high = torch.where(fine, torch.minimum(high, _rounded(c, kernel, u, v).nan_to_num(torch.inf)), high)
        kept = yield low, high
        if kept is not None:
            c, f, low, high, scale = (values[kept] for values in (c, f, low, high, scale))


def _dual(f: Tensor, g: Tensor) -> Tensor:
    return f.mean(1, dtype=torch.float64) + g.mean(1, dtype=torch.float64)


def _conjugate(c: Tensor, f: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Feasible potentials from any row potentials, and the reduced costs."""
    g = (c - f[:, :, None]).amin(1)
    reduced = c - g[:, None, :]
    f = reduced.amin(2)
    return f, g, reduced.sub_(f[:, :, None])


def _scalings(kernel: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """Row and column scalings after some iterations; columns are matched last. May overflow, which the caller checks."""
    batch, n, m = kernel.shape
    u, v = kernel.new_empty(batch, n, 1), kernel.new_ones(batch, m, 1)
    kernel, ratio = kernel * n, n / m  # so that most half iterations take two kernel launches, which are their cost
    across = kernel.transpose(1, 2)
    for _ in range(iterations):
        torch.bmm(kernel, v, out=u).reciprocal_()
        torch.bmm(across, u, out=v).reciprocal_()
        if n != m:
            v *= ratio
    return u[:, :, 0], v[:, :, 0]


def _rounded(c: Tensor, kernel: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """Costs of the plans after scaling excess rows and columns down and spreading what is missing as a product, in float64."""
    n, m = c.shape[1:]
    plan = kernel.double().mul_(u.double()[:, :, None]).mul_(v.double()[:, None, :])
    plan *= ((1.0 / n) / plan.sum(2)).clamp_max_(1.0)[:, :, None]
    plan *= ((1.0 / m) / plan.sum(1)).clamp_max_(1.0)[:, None, :]
    rows, columns = (1.0 / n - plan.sum(2)).clamp_min_(0.0), (1.0 / m - plan.sum(1)).clamp_min_(0.0)
    missing = torch.maximum(rows.sum(1), columns.sum(1))
    spread = (rows[:, :, None] * c.double() * columns[:, None, :]).sum((1, 2)) / missing.clamp_min(1e-300)
    return plan.mul_(c).sum((1, 2)) + spread
