r"""FedAvg: one model for all.

.. math:: \theta_c \leftarrow \mathrm{Train}_c(\theta), \qquad \theta \leftarrow \sum_c n_c\,\theta_c / \sum_c n_c

Every participant trains from the global model; the server averages the results by train size. Clients send their state and
:math:`n_c`, and learn the global model. Every client is served the global model.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas. *Communication-Efficient Learning of Deep Networks from Decentralized Data.* AISTATS 2017.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from emdcfl.core.federation import Federation, Round
from emdcfl.core.schema import Reply
from emdcfl.methods.base import Family, Serving, register


@dataclass(frozen=True)
class GlobalState:
    """One model for all clients, and whose updates went into it in any round."""

    clients: list[str]
    theta: Tensor
    reached: list[str] = field(default_factory=list)


def train_and_average(fed: Federation, state: GlobalState, round: Round, **terms: Any) -> GlobalState:
    """Let the participants train from the global model, with loss terms if any are given, and average what they send."""
    mean = fed.average()

    def fold(client: str, reply: Reply) -> None:
        mean.add(reply["theta"], reply["n"], client=client, start=state.theta)

    replies = fed.train(dict.fromkeys(round.participants, state.theta), fold=fold, **terms)
    reached = {*state.reached, *replies.valid}
    return GlobalState(state.clients, mean.result(), [c for c in state.clients if c in reached])


@register
@dataclass(frozen=True)
class FedAvg:
    """Federated averaging. It has no hyper-parameters."""

    name: ClassVar[str] = "fedavg"
    family: ClassVar[Family] = "global"
    citation: ClassVar[str] = "McMahan et al., AISTATS 2017"
    late_updates: ClassVar[bool] = True
    State: ClassVar[type] = GlobalState

    def init(self, fed: Federation, round: Round) -> GlobalState:
        return GlobalState(list(fed.clients), fed.initial())

    def step(self, fed: Federation, state: GlobalState, round: Round) -> GlobalState:
        return train_and_average(fed, state, round)

    def serve(self, state: GlobalState) -> Serving:
        reached = torch.tensor([[c in state.reached for c in state.clients]])
        return Serving(state.theta[None], torch.ones(len(state.clients), 1), reached=reached)
