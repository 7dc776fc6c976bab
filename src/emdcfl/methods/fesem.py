r"""FeSEM: federated stochastic EM. Each client belongs to the nearest of K cluster models in weight space.

Round 1 is a warm-up: all clients train from θ⁰, K-means (k-means++, best of ten) on the states gives the clusters. Then, in every round,

.. math:: \theta_c \leftarrow \arg\min_\theta L_c(\theta) + \tfrac\mu2\|P(\theta) - P(\theta_{\pi(c)})\|^2 \ \text{from}\ \theta_{\pi(c)},
          \qquad \text{E: } \pi(c) = \arg\min_k\|v(\theta_c) - v(\theta_k)\|,
          \qquad \text{M: } \theta_k = \sum_{\pi(c)=k} n_c\theta_c \Big/ \sum_{\pi(c)=k} n_c

over the clients that took part; a cluster without any keeps its model. A client first seen later trains from θ⁰ without the
proximal term and is placed by the E-step. All distances come from Gram matrices.

Clients send their state and :math:`n_c`, and learn the model of their cluster, with which they are served; one never seen
holds θ⁰. The server sees every local state.

Long, Xie, Shen, Zhou, Wang, Jiang. *Multi-Center Federated Learning: Clients Clustering for Better Personalization.* World Wide Web 2023.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from emdcfl.clustering import gram_features, kmeans
from emdcfl.core.federation import Federation, Replies, Round
from emdcfl.core.keys import keyed_int
from emdcfl.core.params import Layout, Scope, squared_distances
from emdcfl.methods.base import Clustered, ClusteredMethod, initial_models, register
from emdcfl.methods.shared.vectors import average_present, expect, sets_of, update_gram
from emdcfl.trust import Guard

ROUNDING = 1e-6
"""What single precision leaves of the distance between two equal states; ``order="cluster-first"`` clusters on it."""


@dataclass(frozen=True)
class FeSEMState(Clustered):
    """``Clustered`` with K models, and the value of BatchNorm's counters of each model and of each client's latest state."""

    counters: list[float] = field(default_factory=list)
    latest_counters: dict[str, float] = field(default_factory=dict)


@register
@dataclass(frozen=True)
class FeSEM(ClusteredMethod):
    r"""FeSEM.

    Parameters
    ----------
    k : int or None
        Number of clusters; the scenario's if not given.
    mu : float
        :math:`\mu`, the pull to the cluster's model; 0.1 in the comparison, 0 in the base method.
    prox : "squared" or "layer_norm"
        :math:`\frac\mu2\|\cdot\|^2`, or a sum of norms over tensors, which freezes layers with small gradients (the public code
        of the comparison).
    order : "train-first" or "cluster-first"
        Warm-up, then train → E → M; or, as the public code of the comparison does, K-means on models that are still equal (rounding
        decides), then E → M → train: the last round's training never reaches the cluster models.
    start : "k-means" or "random"
        How clients are first divided, with ``order="train-first"``: by K-means on the states after round 1, or at random (the method's
        code).
    vector_scope : "P", "F", "H" or "state"
        What is compared: trainable parameters, all floating state, the last layer (the method's code), or the state with BatchNorm's
        counters.
    """

    k: int | None = None
    mu: float = 0.1
    prox: Literal["squared", "layer_norm"] = "squared"
    order: Literal["train-first", "cluster-first"] = "train-first"
    start: Literal["k-means", "random"] = "k-means"
    vector_scope: Scope = "P"

    name: ClassVar[str] = "fesem"
    citation: ClassVar[str] = "Long et al., World Wide Web 2023"
    original: ClassVar[Mapping[str, Any]] = {"mu": 0.0, "start": "random", "vector_scope": "H"}
    reference: ClassVar[Mapping[str, Any]] = {"prox": "layer_norm", "order": "cluster-first", "vector_scope": "state"}
    State: ClassVar[type] = FeSEMState

    def init(self, fed: Federation, round: Round) -> FeSEMState:
        expect(self.mu >= 0, "mu", "at least 0", self.mu)
        models = initial_models(self.k, fed, self.name)
        return FeSEMState(list(fed.clients), models[0], sets=[[] for _ in models], models=models, counters=[0.0] * len(models))

    def step(self, fed: Federation, state: FeSEMState, round: Round) -> FeSEMState:
        seed = keyed_int(fed.seed, "", round.index, "k-means")
        if self.order == "cluster-first":
            return self._cluster_first(fed, state, round, seed)
        replies, counters = self._train(fed, state, round.participants)
        local = replies.column("theta")
        state = replace(state, n={**state.n, **replies.column("n")})
        return self._m_step(state, self._e_step(fed.layout, state, local, counters, seed), local, counters, fed.guard)

    def _train(self, fed: Federation, state: FeSEMState, clients: Sequence[str]) -> tuple[Replies, dict[str, float]]:
        """Train from each client's cluster model, pulled towards it; return also where each client's counters now stand."""
        pulled = [c for c in clients if c in state.labels] if self.mu > 0 else []
        terms = {c: {"prox": {"mu": self.mu, "kind": self.prox}} for c in pulled}
        replies = fed.train({c: state.start(c) for c in clients}, own=terms)
        began = {c: state.counters[state.labels[c]] if c in state.labels else 0.0 for c in replies.clients}
        return replies, {c: began[c] + replies[c]["steps"] for c in replies.clients}

    def _e_step(
        self, layout: Layout, state: FeSEMState, local: Mapping[str, Tensor], counters: Mapping[str, float], seed: int
    ) -> dict[str, int]:
        """Assign each client to the nearest cluster model; the first time, there being none, by K-means."""
        if not local:
            return state.labels
        rows, moved = list(local.values()), [counters[c] for c in local]
        if state.labels:
            G = update_gram(layout, [*rows, *state.models], state.theta0, [*moved, *state.counters], self.vector_scope)
            found = squared_distances(G)[: len(rows), len(rows) :].numpy().argmin(1)
        elif self.start == "random" and self.order == "train-first":
            found = np.random.default_rng(seed).permutation(len(rows)) % len(state.models)
        else:
            G = update_gram(layout, rows, state.theta0, moved, self.vector_scope)
            found = kmeans(self._features(G), len(state.models), seed=seed, max_iter=20 if self.order == "cluster-first" else 300)
        return {**state.labels, **{c: int(label) for c, label in zip(local, found, strict=True)}}

    def _features(self, G: Tensor) -> np.ndarray[Any, Any]:
        if self.order == "train-first":
            return gram_features(G.numpy(), len(G))  # all directions: distances between features are those between states
        return (squared_distances(G).sqrt() + ROUNDING * (1 - torch.eye(len(G)))).numpy()

    def _m_step(
        self,
        state: FeSEMState,
        labels: dict[str, int],
        local: Mapping[str, Tensor],
        counters: Mapping[str, float],
        guard: Guard | None = None,
    ) -> FeSEMState:
        sets = sets_of(state.clients, labels, len(state.models))
        models = average_present(state, sets, local, state.models, guard)
        moved = average_present(state, sets, {c: torch.tensor([v]) for c, v in counters.items()}, torch.tensor(state.counters)[:, None])
        return replace(state, labels=labels, sets=sets, models=models, counters=moved[:, 0].floor().tolist())

    def _cluster_first(self, fed: Federation, state: FeSEMState, round: Round, seed: int) -> FeSEMState:
        """E and M on what clients sent last, then train: what is trained now is averaged in the next round only."""
        n = {c: reply["n"] for c, reply in fed.describe(round.participants).items()}
        state = replace(state, n={**state.n, **n})
        local = {c: state.latest.get(c, state.theta0) for c in n}
        counters = {c: state.latest_counters.get(c, 0.0) for c in n}
        state = self._m_step(state, self._e_step(fed.layout, state, local, counters, seed), local, counters)
        replies, trained = self._train(fed, state, list(n))
        fed.check_quorum(replies, len(round.participants))
        latest = {**state.latest, **replies.column("theta")}
        return replace(state, latest=latest, latest_counters={**state.latest_counters, **trained})
