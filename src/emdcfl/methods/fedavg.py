r"""FedAvg: one model for all.

.. math:: \theta_c \leftarrow \mathrm{Train}_c(\theta), \qquad \theta \leftarrow \sum_c n_c\,\theta_c / \sum_c n_c

Every participant trains from the global model; the server averages the results by train size. Clients send their state and
:math:`n_c`, and learn the global model. Every client is served the global model.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas. *Communication-Efficient Learning of Deep Networks from Decentralized Data.* AISTATS 2017.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from emdcfl.core.federation import Federation, Round
from emdcfl.core.schema import Reply
from emdcfl.methods.base import Family, Serving, register
from emdcfl.trust.guard import TrustedMean


@dataclass(frozen=True)
class GlobalState:
    """One model for all clients, and whose updates went into it in any round."""

    clients: list[str]
    theta: Tensor
    reached: list[str] = field(default_factory=list)

    def after(self, mean: TrustedMean, folded: Sequence[str]) -> GlobalState:
        """Return the state after a round in which these clients' states were averaged."""
        return GlobalState(self.clients, mean.result(), sorted({*self.reached, *folded}, key=self.clients.index))


@register
@dataclass(frozen=True)
class FedAvg:
    """Federated averaging. It has no hyper-parameters."""

    name: ClassVar[str] = "fedavg"
    family: ClassVar[Family] = "global"
    needs_k: ClassVar[bool] = False
    citation: ClassVar[str] = "McMahan et al., AISTATS 2017"
    original: ClassVar[Mapping[str, Any]] = {}
    reference: ClassVar[Mapping[str, Any]] = {}
    late_updates: ClassVar[bool] = True
    State: ClassVar[type] = GlobalState

    def init(self, fed: Federation, round: Round) -> GlobalState:
        return GlobalState(list(fed.clients), fed.initial())

    def step(self, fed: Federation, state: GlobalState, round: Round) -> GlobalState:
        mean = fed.average()

        def fold(client: str, reply: Reply) -> None:
            mean.add(reply["theta"], reply["n"], client=client, start=state.theta)

        replies = fed.train(dict.fromkeys(round.participants, state.theta), fold=fold)
        return state.after(mean, list(replies.valid))

    def serve(self, state: GlobalState) -> Serving:
        reached = torch.tensor([[c in state.reached for c in state.clients]])
        return Serving(state.theta[None], torch.ones(len(state.clients), 1), reached=reached)
