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

from emdcfl.core import tasks
from emdcfl.core.client import LOSS_BATCH, Client, NodeNeeds, Stages, staged_task
from emdcfl.core.errors import ClientError
from emdcfl.core.federation import Federation, Round
from emdcfl.core.params import average
from emdcfl.core.schema import Field, Reply
from emdcfl.core.tasks import TRAINED, Fit, Training
from emdcfl.methods.base import Family, Serving, clusters_wanted, register
from emdcfl.methods.shared.vectors import expect

Votes = Literal["sample", "batch"]


def smooth(counts: Tensor, *, smoothing: float, votes: Votes = "sample") -> Tensor:
    r"""Return :math:`a_c`: the votes of m samples, where a cluster without any gets :math:`\sigma m`.

    With ``votes="batch"`` it gets ⌊σm⌋, and one at least, as in the public code.

    Examples
    --------
    >>> smooth(torch.tensor([60, 40, 0]), smoothing=0.01)
    tensor([60., 40.,  1.], dtype=torch.float64)
    """
    m = float(counts.sum())
    least = smoothing * m if votes == "sample" else max(1.0, float(int(smoothing * m)))
    return torch.where(counts > 0, counts.double(), least)


def batch_votes(table: Tensor, n: int) -> Tensor:
    """Credit the cluster with the lowest mean loss on a batch with all samples of the batch.

    Parameters
    ----------
    table : (K, batches) tensor
        Mean losses on batches of 64, the last one holding what is left of n.

    Examples
    --------
    >>> batch_votes(torch.tensor([[0.1, 0.9, 0.9], [0.5, 0.5, 0.5]]), 130)
    tensor([64., 66.], dtype=torch.float64)
    """
    K, batches = table.shape
    sizes = torch.full((batches,), float(LOSS_BATCH), dtype=torch.float64)
    sizes[-1] = n - LOSS_BATCH * (batches - 1)
    return torch.zeros(K, dtype=torch.float64).index_add_(0, table.argmin(0), sizes)


@staged_task(phase="train", returns={**TRAINED, "a": Field(torch.float64, ("K",), low=0, high="max_n")})
def soft_train(
    client: Client,
    *,
    models: Tensor,
    training: Mapping[str, Any],
    method: Mapping[str, Any],
    a: Tensor | None = None,
    own: Tensor | None = None,
) -> Stages:
    """Count the votes (unless given), mix the cluster models by them and train near the mix."""
    if a is None:
        by_sample = method["votes"] == "sample"
        scored = tasks.evaluate(client, models=models, split=method["split"], reduction="argmin_counts" if by_sample else "per_batch")
        counts = scored["table"][:, 0] if by_sample else batch_votes(scored["table"], scored["n"])
        a = smooth(counts, smoothing=method["smoothing"], votes=method["votes"])
    mix = mix_models(models, a)
    prox = {"anchor": mix, "mu": method["lam"]} if method["lam"] > 0 else None
    (reply,) = yield [Fit(mix if own is None else own, Training.of(training), prox)]
    return {**reply, "a": a}


def mix_models(models: Tensor, a: Tensor) -> Tensor:
    r"""Return :math:`\bar w_c = \sum_k u_{ck}\,\theta_k`."""
    voted = torch.nonzero(a > 0).flatten().tolist()
    return average([models[k] for k in voted], [float(a[k]) for k in voted])  # rows, not a copy of them


def verify_votes(client: str, reply: Reply) -> None:
    """Refuse votes for no cluster at all: there is nothing to mix."""
    if not bool((reply["a"] > 0).any()):
        raise ClientError("expected votes for at least one cluster, got none")


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
        K = clusters_wanted(self.k, fed, self.name)
        for name, low in (("lam", 0), ("smoothing", 0), ("interval", 1)):
            expect(getattr(self, name) >= low, name, f"of at least {low}", getattr(self, name))
        return FedSoftState(list(fed.clients), fed.initial(), torch.stack([fed.initial(i) for i in range(K)]))

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
