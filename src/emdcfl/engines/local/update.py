r"""The SGD update of the batched and the CUDA engine: gradients of the extra loss terms, then one kernel for all tensors.

Row f of every matrix is one client's training. The formulas are those of ``tasks.local_sgd``: :math:`\frac\mu2\|w - a\|^2`,
:math:`\mu\sum_l\|w_l - a_l\|` and :math:`-\mu\cos(w, a)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from emdcfl.core.params import Layout
from emdcfl.core.tasks import Fit, Training

Anchors = list[Tensor]


@dataclass(frozen=True)
class Terms:
    """Anchors, one ``(F, *shape)`` block per tensor, and strengths ``(F,)``; ``None`` where the trainings have no such term."""

    prox: tuple[Anchors, Tensor] | None
    by_layer: bool
    cosine: tuple[Anchors, Tensor] | None

    def add_gradient(self, w: Sequence[Tensor], g: Sequence[Tensor], rows: slice | Tensor) -> None:
        """Add the gradient of the terms at ``w`` to ``g``; both hold the given rows."""
        if self.prox is not None:
            mu = self.prox[1][rows]
            for weight, gradient, anchor in zip(w, g, self.prox[0], strict=True):
                difference = weight - anchor[rows]
                if self.by_layer:
                    norm = _columns(_norm(difference), weight)
                    difference = torch.where(norm > 0, difference / norm, 0.0)
                gradient.addcmul_(difference, _columns(mu, weight))
        if self.cosine is not None:
            _add_cosine(w, g, [a[rows] for a in self.cosine[0]], self.cosine[1][rows])


def _add_cosine(w: Sequence[Tensor], g: Sequence[Tensor], a: Sequence[Tensor], mu: Tensor) -> None:
    norm_w = torch.stack([_norm(t) for t in w]).norm(dim=0).clamp_min(1e-12)
    norm_a = torch.stack([_norm(t) for t in a]).norm(dim=0).clamp_min(1e-12)
    product = torch.stack([(t * s).reshape(len(t), -1).sum(1) for t, s in zip(w, a, strict=True)]).sum(0)
    along, across = mu * product / (norm_w.pow(3) * norm_a), -mu / (norm_w * norm_a)
    for weight, gradient, anchor in zip(w, g, a, strict=True):
        gradient.addcmul_(anchor, _columns(across, weight)).addcmul_(weight, _columns(along, weight))


def _norm(t: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(t.reshape(len(t), -1), dim=1)
    return norms


def _columns(values: Tensor, like: Tensor) -> Tensor:
    """One value per row, shaped to multiply ``like``."""
    return values.view(-1, *[1] * (like.dim() - 1))


def kind(fit: Fit) -> tuple[str | None, bool]:
    """Return which terms a training has; trainings of one kind can be stacked."""
    return (None if fit.prox is None else str(fit.prox.get("kind", "squared")), fit.cosine is not None)


def make_terms(fits: Sequence[Fit], start: Sequence[Tensor], layout: Layout) -> Terms:
    """Stack the terms of trainings of one kind; ``start`` holds their trainable tensors, the anchors of terms that name none."""
    name, cosine = kind(fits[0])
    entries = [e for e in layout.entries if e.trainable]

    def stacked(terms: Sequence[Mapping[str, Any]]) -> tuple[Anchors, Tensor]:
        anchors = [t.detach().clone() for t in start]
        for row, term in enumerate(terms):
            if "anchor" in term:
                for e, anchor in zip(entries, anchors, strict=True):
                    anchor[row].copy_(term["anchor"][e.slice].view(e.shape))
        return anchors, torch.tensor([float(term["mu"]) for term in terms], device=start[0].device)

    return Terms(
        stacked([fit.prox or {} for fit in fits]) if name is not None else None,
        name != "squared",
        stacked([fit.cosine or {} for fit in fits]) if cosine else None,
    )


def fused_sgd(weights: list[Any], gradients: list[Tensor], velocity: list[Tensor], training: Training, *, first: bool = False) -> None:
    r"""Update :math:`v \leftarrow \beta v + g + \lambda w`, :math:`w \leftarrow w - \eta v`; the ``first`` step finds no velocity.

    Weights, gradients and velocity must have the same strides; without momentum there is no velocity.
    """
    torch._fused_sgd_(
        weights,
        gradients,
        velocity if training.momentum else [],
        weight_decay=training.weight_decay,
        momentum=training.momentum,
        lr=training.lr,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=first,
    )
