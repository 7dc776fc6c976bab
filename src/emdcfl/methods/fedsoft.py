r"""FedSoft: one personal model per client, held near a mix of K cluster models.

A client counts which cluster model explains each of its samples best, trains from the mix of the models by these shares and is held
near it; clusters average all clients by the shares:

.. math:: a_{ck} = |\{s : k = \arg\min_j \ell(\theta_j; x_s, y_s)\}| \;\text{ (} \sigma m_c \text{ instead of 0)}, \qquad
          u_{ck} = a_{ck} / \sum_j a_{cj}, \qquad \bar w_c = \sum_k u_{ck}\,\theta_k

.. math:: \theta_c \leftarrow \arg\min_w\; L_c(w) + \frac\lambda2 \sum_k u_{ck}\,\|w - \theta_k\|^2, \qquad
          \theta_k \leftarrow \sum_c u_{ck} n_c\,\theta_c / \sum_c u_{ck} n_c

As the shares sum to one, the penalty is :math:`\frac\lambda2\|w - \bar w_c\|^2` up to a constant: one ordinary anchor. A client
sends its votes, its state and :math:`n_c`, and learns all K cluster models. It is served its own model as trained in its last
round (a pass of fine-tuning that the hard methods do not have); one never seen holds θ⁰.

Ruan, Joe-Wong. *FedSoft: Soft Clustered Federated Learning with Proximal Local Updating.* AAAI 2022.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from emdcfl.core.client import NodeNeeds
from emdcfl.core.federation import Federation, Round
from emdcfl.core.schema import Reply
from emdcfl.methods.base import Family, Serving, initial_models, register
from emdcfl.methods.shared.vectors import expect
from emdcfl.methods.shared.votes import Votes, mix_models, soft_train, verify_votes


@dataclass(frozen=True)
class FedSoftState:
    """K cluster models; of the clients seen, their own model and their votes a. The others hold θ⁰."""

    clients: list[str]
    theta0: Tensor
    models: Tensor
    own: dict[str, Tensor] = field(default_factory=dict)
    a: dict[str, Tensor] = field(default_factory=dict)


@register
@dataclass(frozen=True)
class FedSoft:
    r"""FedSoft.

    Parameters
    ----------
    k : int or None
        Number of clusters K; the scenario's if ``None``.
    lam : float
        :math:`\lambda`, the pull towards the mix. FedSoft's authors use 0.1 for MNIST and 0.01 for CIFAR10; 0 in the public code of
        EMD-CFL, which leaves the pull out.
    votes : "sample" or "batch"
        Who votes for a cluster: each sample, or each batch of 64 as in the public code.
    split : "val" or "train"
        Whose votes count: validation data as in the EMD-CFL paper, or training data as in FedSoft's own.
    smoothing : float
        :math:`\sigma`, the share of a cluster without votes; 1e-4 in FedSoft's paper.
    interval : int
        :math:`\tau`, rounds between two counts; 1 in the EMD-CFL paper, 2 in FedSoft's CIFAR10 runs.
    start : "mix" or "own"
        Train from :math:`\bar w_c`, or from the client's own last model as in FedSoft's paper.
    weights : "train" or "votes"
        Clusters average by :math:`u_{ck} n_c`, or by the votes :math:`a_{ck}` as in the public code.
    """

    k: int | None = None
    lam: float = 0.1
    votes: Votes = "sample"
    split: Literal["val", "train"] = "val"
    smoothing: float = 1e-4
    interval: int = 1
    start: Literal["mix", "own"] = "mix"
    weights: Literal["train", "votes"] = "train"

    name: ClassVar[str] = "fedsoft"
    node_needs: ClassVar[NodeNeeds] = NodeNeeds(("soft_train",))
    family: ClassVar[Family] = "soft"
    citation: ClassVar[str] = "Ruan, Joe-Wong, AAAI 2022"
    original: ClassVar[Mapping[str, Any]] = {"split": "train", "start": "own"}
    reference: ClassVar[Mapping[str, Any]] = {"lam": 0.0, "votes": "batch", "smoothing": 1e-3, "weights": "votes"}
    State: ClassVar[type] = FedSoftState

    def init(self, fed: Federation, round: Round) -> FedSoftState:
        for name, low in (("lam", 0), ("smoothing", 0), ("interval", 1)):
            expect(getattr(self, name) >= low, name, f"of at least {low}", getattr(self, name))
        return FedSoftState(list(fed.clients), fed.initial(), initial_models(self.k, fed, self.name))

    def step(self, fed: Federation, state: FedSoftState, round: Round) -> FedSoftState:
        replies = fed.run(
            soft_train,
            {c: self._inputs(state, c, round) for c in round.participants},
            dims={"K": len(state.models)},
            verify=verify_votes,
            models=state.models,
            training=fed.training.as_dict(),
            method={"lam": self.lam, "votes": self.votes, "split": self.split, "smoothing": self.smoothing},
        )
        fed.check_quorum(replies, len(round.participants))
        models = []
        own = state.own if self.start == "own" else {}
        starts = {c: own[c] if c in own else mix_models(state.models, reply["a"]) for c, reply in replies.valid.items()}
        local = fed.guard.clip_updates(replies.column("theta"), starts, [replies.clients])
        for k, old in enumerate(state.models):
            weight = {c: self._weight(reply, k) for c, reply in replies.valid.items()}
            members = [c for c, w in weight.items() if w > 0]
            models.append(fed.guard.average([local[c] for c in members], [weight[c] for c in members]) if members else old)
        trained, a = {**state.own, **replies.column("theta")}, {**state.a, **replies.column("a")}
        return replace(state, models=torch.stack(models), own=trained, a=a)

    def serve(self, state: FedSoftState) -> Serving:
        models = torch.stack([state.own.get(c, state.theta0) for c in state.clients])
        return Serving(models, torch.eye(len(state.clients)))

    def _inputs(self, state: FedSoftState, client: str, round: Round) -> dict[str, Any]:
        """The votes of an earlier round between two counts, and the client's own model where it starts from it."""
        inputs: dict[str, Any] = {}
        if client in state.a and (round.index - 1) % self.interval:
            inputs["a"] = state.a[client]
        if client in state.own and self.start == "own":
            inputs["own"] = state.own[client]
        return inputs

    def _weight(self, reply: Reply, k: int) -> float:
        """What a client counts for in cluster k."""
        a: Tensor = reply["a"]
        return float(a[k] / a.sum()) * int(reply["n"]) if self.weights == "train" else float(a[k])
