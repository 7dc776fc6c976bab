"""Terms that methods add to the loss of local SGD, as functions that add their gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from emdcfl.core.params import LayoutEntry, Network


def loss_terms(net: Network, prox: Mapping[str, Any] | None, cosine: Mapping[str, Any] | None) -> list[Callable[[Tensor, Tensor], None]]:
    where, terms = net.layout.trainable, []
    if prox is not None:
        anchor = _anchor(net, prox)
        mu, kind = float(prox["mu"]), prox.get("kind", "squared")
        if kind == "squared":
            terms.append(lambda w, g: g.add_(w - anchor, alpha=mu))
        else:
            entries = [e for e in net.layout.entries if e.trainable]
            terms.append(lambda w, g: _layer_norm_gradient(w - anchor, g, mu, entries, where.start))
    if cosine is not None:
        target = _anchor(net, cosine)
        scale = float(cosine["mu"])
        terms.append(lambda w, g: _cosine_gradient(w, target, g, scale))
    return terms


def _anchor(net: Network, term: Mapping[str, Any]) -> Tensor:
    where = net.layout.trainable
    return term["anchor"][where].to(net.device) if "anchor" in term else net.theta[where].clone()


def _layer_norm_gradient(difference: Tensor, g: Tensor, mu: float, entries: list[LayoutEntry], start: int) -> None:
    for e in entries:
        part = slice(e.start - start, e.stop - start)
        norm = difference[part].norm()
        g[part].add_(torch.where(norm > 0, difference[part] / norm, torch.zeros_like(difference[part])), alpha=mu)


def _cosine_gradient(w: Tensor, a: Tensor, g: Tensor, mu: float) -> None:
    r"""Add the gradient of :math:`-\mu\cos(w, a)`: :math:`-\mu\,(a/\|a\| - \cos\,w/\|w\|)/\|w\|`."""
    norm_w, norm_a = w.norm().clamp_min(1e-12), a.norm().clamp_min(1e-12)
    cos = (w @ a) / (norm_w * norm_a)
    g.sub_((a / norm_a - cos * w / norm_w) / norm_w, alpha=mu)
