"""The update of the fast engines: SGD with momentum for all tensors of a model, or of many, in one kernel. May import: tasks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from emdcfl.core.tasks import Training


def fused_sgd(weights: list[Any], gradients: list[Tensor], velocity: list[Tensor], training: Training, *, first: bool = False) -> None:
    r"""Update :math:`v \leftarrow \beta v + g + \lambda w`, :math:`w \leftarrow w - \eta v`; the ``first`` step finds no velocity.

    Weights, gradients and velocity must lie in memory in the same order; without momentum there is no velocity.
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
