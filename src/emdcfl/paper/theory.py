r"""The paper's bounds, evaluated: what merging two clients or clusters can cost, from the transport distance of their embeddings.

Hypotheses are linear heads with a softmax, :math:`h(z) = \mathrm{softmax}(Az + b)`, over one common embedding g. Norms are Euclidean, the
transport distance :math:`W_1` is exact with the Euclidean ground cost on *unprojected* embeddings (a simulation has them, a server does
not), and expectations are means over samples, for which the bounds hold as they stand.

.. math::
    \epsilon_c(h, h') = \mathbb E_{z\sim\mu_c}\|h(z) - h'(z)\|, \qquad \epsilon_c(h) = \mathbb E_{(z,y)\sim\mu_c}\|h(z) - e_y\|

====================  ==================================================================================================================
disagreement          :math:`|\epsilon_i(h,h') - \epsilon_j(h,h')| \le (L_h + L_{h'})\,W_1`
merging               :math:`\epsilon_T(h) \le \alpha\,\epsilon_j(h) + (1-\alpha)\,\epsilon_i(h) + (L_h + L_{h^*})\,W_1 + \lambda(h^*)`
gradient              :math:`\|\nabla_i - \nabla_j\| \le W_M`, transport with cost :math:`M\|z-z'\| + \sqrt2\,r\,[y \ne y']`
parameters            :math:`\|\phi_i - \phi_j\| \le \kappa\,W_M` after one gradient step of length κ from a common head
====================  ==================================================================================================================

with :math:`T = \alpha\mu_i + (1-\alpha)\mu_j`, :math:`L_h = \tfrac12\|A\|_2` (softmax is ½-Lipschitz), :math:`\lambda(h^*) =
\epsilon_i(h^*) + \epsilon_j(h^*)` for *any* head :math:`h^*` (the best one makes the bound tight), r the largest
:math:`\|(z, 1)\|` and :math:`M = \tfrac12\|A\|_2\,r + \sqrt2`.

Where this differs from the printed statements: M bounds the slope of the *gradient* of the loss, not of the loss; labels jump where
embeddings do not, so the gradient's cost has a term for them; the learning rate multiplies (one step is κ times a gradient); the parameter
bound is for one plain step, not for epochs with momentum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from emdcfl.core.errors import DataError
from emdcfl.transport import cost_matrix, exact

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Sample:
    """Embeddings ``(n, d)`` and labels ``(n,)`` of one client or cluster."""

    z: Array
    y: Array

    def __post_init__(self) -> None:
        if self.z.ndim != 2 or len(self.z) == 0 or self.y.shape != (len(self.z),):
            raise DataError(f"expected embeddings (n, d) and n labels, got {self.z.shape} and {self.y.shape}")


@dataclass(frozen=True)
class Head:
    """A linear head with softmax: ``weight`` (K, d), ``bias`` (K,)."""

    weight: Array
    bias: Array

    def __call__(self, z: Array) -> Array:
        """Return class probabilities ``(n, K)``."""
        logits = z.astype(np.float64) @ self.weight.T.astype(np.float64) + self.bias
        shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
        return np.asarray(shifted / shifted.sum(axis=1, keepdims=True))

    @property
    def lipschitz(self) -> float:
        r"""Return :math:`L = \tfrac12\|A\|_2`: the Jacobian of softmax has spectral norm at most ½."""
        return 0.5 * float(np.linalg.norm(self.weight.astype(np.float64), 2))


@dataclass(frozen=True)
class Ensemble:
    r"""The ensemble :math:`h_e = \alpha h_i + (1-\alpha) h_j`."""

    first: Head
    second: Head
    alpha: float

    def __call__(self, z: Array) -> Array:
        """Return class probabilities ``(n, K)``."""
        return np.asarray(self.alpha * self.first(z) + (1 - self.alpha) * self.second(z))


def residuals(h: Head | Ensemble, sample: Sample) -> Array:
    """Return :math:`h(z) - e_y` of every sample, ``(n, K)``."""
    p = h(sample.z)
    return p - np.eye(p.shape[1])[sample.y]


def error(h: Head | Ensemble, sample: Sample) -> float:
    r"""Return :math:`\epsilon_c(h) = \mathbb E\|h(z) - e_y\|`: 0 for sure and right, :math:`\sqrt2` for sure and wrong."""
    return float(np.linalg.norm(residuals(h, sample), axis=1).mean())


def w1(a: Array, b: Array) -> float:
    r"""Return :math:`W_1` between two samples with the Euclidean cost."""
    return exact(cost_matrix(a, b, cost="euclidean")).value


@dataclass(frozen=True)
class Bound:
    """A measured quantity, the bound above it, and the terms it is the sum of, where there are several."""

    measured: float
    bound: float
    terms: dict[str, float] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Whether the bound is respected, up to rounding."""
        return self.measured <= self.bound + 1e-5 * max(1.0, abs(self.bound))


def disagreement_bound(h: Head, other: Head, i: Sample, j: Sample) -> Bound:
    r"""Evaluate :math:`\epsilon_i(h,h') \le \epsilon_j(h,h') + (L_h + L_{h'})\,W_1`; the paper writes 2L for the larger L twice."""
    here, there = (float(np.linalg.norm(h(s.z) - other(s.z), axis=1).mean()) for s in (i, j))
    terms = {"disagreement there": there, "transport": (h.lipschitz + other.lipschitz) * w1(i.z, j.z)}
    return Bound(here, sum(terms.values()), terms)


def merging_bound(h: Head, i: Sample, j: Sample, alpha: float, ideals: Sequence[Head], distance: float | None = None) -> Bound:
    r"""Evaluate the bound on :math:`\epsilon_T(h)`, with the head among ``ideals`` that makes it smallest.

    Every :math:`h^*` gives a valid bound, so candidates may trade a small λ for a small Lipschitz constant.
    """
    if not 0 <= alpha <= 1:
        raise DataError(f"expected a share alpha between 0 and 1, got {alpha}")
    distance = w1(i.z, j.z) if distance is None else distance
    crossed = alpha * error(h, j) + (1 - alpha) * error(h, i)
    if not ideals:
        raise DataError("expected at least one candidate for the ideal head, got none; see ideal_heads")
    candidates = [
        {"crossed errors": crossed, "transport": (h.lipschitz + ideal.lipschitz) * distance, "lambda": error(ideal, i) + error(ideal, j)}
        for ideal in ideals
    ]
    terms = min(candidates, key=lambda terms: sum(terms.values()))
    return Bound(alpha * error(h, i) + (1 - alpha) * error(h, j), sum(terms.values()), terms)


def ensemble_bound(
    first: Head, second: Head, i: Sample, j: Sample, alpha: float, ideals: Sequence[Head], distance: float | None = None
) -> Bound:
    r"""Evaluate the bound on :math:`\epsilon_T(\alpha h_i + (1-\alpha) h_j)` that follows from convexity of the error."""
    distance = w1(i.z, j.z) if distance is None else distance
    one = merging_bound(first, i, j, alpha, ideals, distance)
    two = merging_bound(second, i, j, alpha, ideals, distance)
    terms = {name: alpha * one.terms[name] + (1 - alpha) * two.terms[name] for name in one.terms}
    ensemble = Ensemble(first, second, alpha)
    return Bound(alpha * error(ensemble, i) + (1 - alpha) * error(ensemble, j), sum(terms.values()), terms)


def gradient(head: Head, sample: Sample) -> Array:
    r"""Return the mean gradient of cross-entropy with respect to (A, b): :math:`\mathbb E\,(h(z) - e_y)(z, 1)^\top`, ``(K, d + 1)``."""
    return np.asarray(residuals(head, sample).T @ _with_one(sample.z) / len(sample.y))


def gradient_bound(head: Head, i: Sample, j: Sample) -> Bound:
    r"""Evaluate :math:`\|\nabla_i - \nabla_j\| \le W_M` at a common head.

    For one label, :math:`(h(z) - e_y)(z,1)^\top` moves by at most :math:`(\tfrac12\|A\|r + \sqrt2)\|z - z'\|`; another label adds at most
    :math:`\sqrt2\,r`.
    """
    r = max(float(np.linalg.norm(_with_one(s.z), axis=1).max()) for s in (i, j))
    slope, jump = head.lipschitz * r + math.sqrt(2), math.sqrt(2) * r
    cost = slope * cost_matrix(i.z, j.z, cost="euclidean").astype(np.float64) + jump * (i.y[:, None] != j.y[None, :])
    return Bound(float(np.linalg.norm(gradient(head, i) - gradient(head, j))), exact(cost).value)


def parameter_bound(head: Head, i: Sample, j: Sample, kappa: float) -> Bound:
    r"""Evaluate :math:`\|\phi_i - \phi_j\| \le \kappa\,W_M` after one gradient step of length κ each from ``head``."""
    start = np.column_stack([head.weight, head.bias])
    one, two = (start - kappa * gradient(head, s) for s in (i, j))
    return Bound(float(np.linalg.norm(one - two)), kappa * gradient_bound(head, i, j).bound)


def _with_one(z: Array) -> Array:
    return np.concatenate([z.astype(np.float64), np.ones((len(z), 1))], axis=1)


def fit_head(sample: Sample, classes: int, *, penalty: float = 1e-3) -> Head:
    r"""Return the head that minimises cross-entropy plus :math:`\tfrac{\text{penalty}}2\|A\|^2`; a larger penalty gives a smaller L."""
    from scipy.optimize import minimize
    from scipy.special import log_softmax

    x, targets = _with_one(sample.z), np.eye(classes)[sample.y]
    decay = np.ones(x.shape[1])
    decay[-1] = 0.0  # the bias is free

    def objective(flat: Array) -> tuple[float, Array]:
        weights = flat.reshape(classes, -1)
        log_p = log_softmax(x @ weights.T, axis=1)
        slope = (np.exp(log_p) - targets).T @ x / len(x) + penalty * decay * weights
        value = -(targets * log_p).sum() / len(x) + 0.5 * penalty * float((decay * weights**2).sum())
        return float(value), slope.ravel()

    found = minimize(objective, np.zeros(classes * x.shape[1]), jac=True, method="L-BFGS-B", options={"maxiter": 500})
    weights = found.x.reshape(classes, -1)
    return Head(weights[:, :-1], weights[:, -1])


def ideal_heads(i: Sample, j: Sample, classes: int) -> list[Head]:
    """Return candidates for the ideal head: fitted on both samples, from tight to smooth."""
    both = Sample(np.concatenate([i.z, j.z]), np.concatenate([i.y, j.y]))
    return [fit_head(both, classes, penalty=penalty) for penalty in (1e-4, 1e-3, 1e-2, 1e-1, 1.0)]


@dataclass(frozen=True)
class Merging:
    """What merging two clusters could cost at most, and what it did cost, in units of the error (0 to √2)."""

    alone: float
    merged: Bound
    distance: float

    @property
    def at_most(self) -> float:
        """The bound on the rise of the error."""
        return self.merged.bound - self.alone

    @property
    def did(self) -> float:
        """The measured rise of the error (negative where merging helped)."""
        return self.merged.measured - self.alone

    def sentence(self, first: str = "the first", second: str = "the second") -> str:
        """Say it in words; a bound above what an error can rise at all says nothing, and is said to."""
        empty = ", more than an error can rise at all," if self.alone + self.at_most > math.sqrt(2) else ""
        return (
            f"merging {first} and {second} could raise the error by at most {self.at_most:.3f}{empty} and did raise it by {self.did:.3f} "
            f"(from {self.alone:.3f}; W1 = {self.distance:.3f}, lambda = {self.merged.terms['lambda']:.3f})"
        )


def merging(i: Sample, j: Sample, classes: int) -> Merging:
    r"""Fit a head on each sample, and one on both, over one embedding; compare each on its own with the ensemble on the mixture.

    α is the share of the first sample, and ``alone`` is :math:`\alpha\,\epsilon_i(h_i) + (1-\alpha)\,\epsilon_j(h_j)`.
    """
    alpha = len(i.y) / (len(i.y) + len(j.y))
    first, second = fit_head(i, classes, penalty=1e-2), fit_head(j, classes, penalty=1e-2)
    distance = w1(i.z, j.z)
    bound = ensemble_bound(first, second, i, j, alpha, ideal_heads(i, j, classes), distance)
    return Merging(alpha * error(first, i) + (1 - alpha) * error(second, j), bound, distance)
