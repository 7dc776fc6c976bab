r"""What is predicted: a class, or a number. The targets of a split say which, and everything that depends on it is here.

Class indices (int64) have the cross-entropy loss, numbers (float32, standardised over all sites) the squared error
:math:`\ell = (f_\theta(x) - y)^2`. A network has one output per class, or one. Squared errors have no bound, and a few extreme
numbers could make training diverge: ``bounded`` shortens the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from emdcfl.core.learning.balance import balance, unbalanced
from emdcfl.data.types import Site

MAX_GRADIENT_NORM = 5.0
"""Norm to which gradients of squared errors are shortened; with standardised numbers without heavy tails few are as long."""


def is_regression(y: Tensor) -> bool:
    """Whether targets are numbers instead of classes."""
    return y.is_floating_point()


def losses(outputs: Tensor, y: Tensor) -> Tensor:
    """Return the loss of every sample.

    Examples
    --------
    >>> import torch
    >>> losses(torch.tensor([[1.0], [2.0]]), torch.tensor([0.0, 2.0])).tolist()
    [1.0, 0.0]
    """
    if is_regression(y):
        return (outputs[:, 0] - y) ** 2
    return F.cross_entropy(outputs, y, reduction="none")


def bounded(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return gradients of squared errors, the tensors of each training (a row) shortened together to ``MAX_GRADIENT_NORM``.

    Examples
    --------
    >>> import torch
    >>> [g.tolist() for g in bounded([torch.tensor([[3.0], [6.0]]), torch.tensor([[4.0], [8.0]])])]
    [[[3.0], [3.0]], [[4.0], [4.0]]]
    """
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients]).norm(dim=0)
    factors = (MAX_GRADIENT_NORM / norms).clamp(max=1.0)
    return [g * factors.view(-1, *[1] * (g.dim() - 1)) for g in gradients]


def predictions(outputs: Tensor, y: Tensor) -> Tensor:
    """Return what models are mixed by: class probabilities, or the predicted number as one column."""
    return outputs if is_regression(y) else outputs.softmax(1)


def mixed_losses(predicted: Tensor, y: Tensor) -> Tensor:
    """Return the loss of every sample under a mixture of ``predictions``, in float64."""
    if is_regression(y):
        return (predicted[:, 0].double() - y.double()) ** 2
    return -predicted.double().clamp_min(1e-12).log().gather(1, y[:, None])[:, 0]


def r_squared(squared_errors: Tensor, y: Tensor) -> float:
    r"""Return :math:`R^2 = 1 - \sum_s e_s^2 / \sum_s (y_s - \bar y)^2`; 0 where the targets are all alike.

    Examples
    --------
    >>> import torch
    >>> r_squared(torch.tensor([0.0, 0.0, 1.0]), torch.tensor([1.0, 2.0, 3.0]))
    0.5
    """
    spread = float(((y.double() - y.double().mean()) ** 2).sum()) if len(y) else 0.0
    return 1.0 - float(squared_errors.double().sum()) / spread if spread > 0 else 0.0


def r_squared_error(squared_errors: Tensor, y: Tensor) -> float:
    r"""Return the standard error of :math:`R^2`, a ratio of two means, by the delta method.

    With :math:`d_s = y_s - \bar y` it is :math:`\mathrm{sd}(u)/\sqrt n`, :math:`u_s = (e_s^2 - (1 - R^2) d_s^2) / \overline{d^2}`.

    Examples
    --------
    >>> import torch
    >>> y = torch.tensor([1.0, 2.0, 3.0, 4.0])
    >>> r_squared_error(torch.zeros(4), y), round(r_squared_error(torch.tensor([0.0, 0.0, 1.0, 0.0]), y), 3)
    (0.0, 0.264)
    """
    deviations = (y.double() - y.double().mean()) ** 2
    if len(y) < 2 or float(deviations.sum()) <= 0:
        return 0.0
    u = (squared_errors.double() - (1.0 - r_squared(squared_errors, y)) * deviations) / deviations.mean()
    return float(u.std()) / math.sqrt(len(y))


def tested(site: Site, predicted: Callable[[str], tuple[Tensor, Tensor]]) -> dict[str, dict[str, float]]:
    """Score a site's test variants: score → variant → value; ``predicted`` returns the ``predictions`` of a variant and its targets.

    Of classes accuracy and, where the site's are unbalanced, ``balance``; of numbers R² with its standard error. Of both loss and samples.
    """
    numbers = is_regression(site.train.y)
    uneven = not numbers and unbalanced(torch.cat([site.train.y, site.val.y, *(split.y for split in site.tests.values())]))
    found: dict[str, dict[str, float]] = {name: {} for name in ("accuracy", "loss", "n", *(("r2", "r2_error") if numbers else ()))}
    for variant in site.tests:
        p, y = predicted(variant)
        errors = mixed_losses(p, y)
        scores: dict[str, float] = {"n": len(y), "loss": float(errors.mean()) if len(y) else 0.0}
        if numbers:
            scores |= {"r2": r_squared(errors, y), "r2_error": r_squared_error(errors, y)}
        else:
            scores["accuracy"] = float((p.argmax(1) == y).double().mean()) if len(y) else 0.0
            scores |= balance(p, y) if uneven else {}
        for name, value in scores.items():
            found.setdefault(name, {})[variant] = value
    return found
