r"""Local: every client alone, the comparison that tells whether federating pays at all.

.. math:: \theta_c \leftarrow \mathrm{Train}_c(\theta_c)

Nothing is averaged. A client sends its state only so that the run can be resumed and scored like any other, and learns
nothing about the others. Each client is served its own model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from emdcfl.core.federation import Federation, Round
from emdcfl.methods.base import Family, Serving, register


@dataclass(frozen=True)
class LocalState:
    """One model per client; all start from θ⁰."""

    clients: list[str]
    theta0: Tensor
    own: dict[str, Tensor]


@register
@dataclass(frozen=True)
class Local:
    """Every client trains alone. It has no hyper-parameters."""

    name: ClassVar[str] = "local"
    family: ClassVar[Family] = "alone"
    citation: ClassVar[str] = "no federation"
    State: ClassVar[type] = LocalState

    def init(self, fed: Federation, round: Round) -> LocalState:
        return LocalState(list(fed.clients), fed.initial(), {})

    def step(self, fed: Federation, state: LocalState, round: Round) -> LocalState:
        replies = fed.train({c: state.own.get(c, state.theta0) for c in round.participants})
        return LocalState(state.clients, state.theta0, {**state.own, **replies.column("theta")})

    def serve(self, state: LocalState) -> Serving:
        models = torch.stack([state.own.get(c, state.theta0) for c in state.clients])
        trained = torch.tensor([c in state.own for c in state.clients])
        return Serving(models, torch.eye(len(state.clients)), reached=torch.diag(trained))
