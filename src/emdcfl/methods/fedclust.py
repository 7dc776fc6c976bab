r"""FedClust: one-shot hierarchical clustering of clients by the distance between locally trained weights.

After the first round, trained from the common θ⁰, the server cuts a complete-linkage dendrogram:

.. math:: D_{ij} = \|v(\theta_i) - v(\theta_j)\|_2, \qquad d(S, S') = \max_{i\in S, j\in S'} D_{ij} \le \lambda \Rightarrow \text{merge}

and every round averages inside clusters, :math:`\theta_k = \sum_{c\in S_k} n_c\theta_c / \sum_{c\in S_k} n_c`, over the members that took
part (a cluster without any keeps its model). A client first seen later trains from θ⁰, and its state is compared with the states the
others had after *their* first training: it joins the cluster at the smallest complete-linkage distance if that is at most λ, and founds
one otherwise; no other client moves.

Clients send their state and :math:`n_c`, as in FedAvg, and learn their cluster's model, with which they are served; one never seen
holds θ⁰. The server sees every local state.

Islam, Javaherian, Xu, Yuan, Chen, Tzeng. *FedClust: Tackling Data Heterogeneity in Federated Learning through Weight-Driven Client
Clustering.* ICPP 2024.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from emdcfl.clustering import cut, first_gap
from emdcfl.core.federation import Federation, Round
from emdcfl.core.params import Scope, squared_distances
from emdcfl.methods.base import Clustered, ClusteredMethod, register
from emdcfl.methods.shared.vectors import average_present, expect, sets_of, update_gram


@dataclass(frozen=True)
class FedClustState(Clustered):
    """``Clustered``, and what every client sent first, kept only until the last client has been seen."""

    first: dict[str, Tensor] = field(default_factory=dict)
    first_steps: dict[str, int] = field(default_factory=dict)


@register
@dataclass(frozen=True)
class FedClust(ClusteredMethod):
    r"""FedClust.

    Parameters
    ----------
    threshold : float or "auto"
        :math:`\lambda`, the largest distance inside a cluster. It depends on network and training; the EMD-CFL paper's, which its scenarios
        use, with the full state: Rotated MNIST 5, Rotated CIFAR10 45, PACS 8, Backdoor MNIST 4, Backdoor CIFAR10 28. ``"auto"``: below
        the first merge that is 1.3 times or more as far as the one before (``clustering.first_gap``), among all clients seen so far.
        Clients stay in the clusters they were given, so the first round's participants should show it.
    vector_scope : "F", "P", "H" or "state"
        What is compared: all floating state (what the thresholds above were chosen for), trainable parameters, the last layer (the
        method's own definition; the threshold must be chosen again), or the state with BatchNorm's counters.
    aggregate : "every-round" or "first-round"
        ``"first-round"``: cluster models stay those of round 1 whatever is trained later, as in the public code.
    """

    threshold: float | Literal["auto"] = "auto"
    vector_scope: Scope = "F"
    aggregate: Literal["every-round", "first-round"] = "every-round"

    name: ClassVar[str] = "fedclust"
    citation: ClassVar[str] = "Islam et al., ICPP 2024"
    original: ClassVar[Mapping[str, Any]] = {"vector_scope": "H", "threshold": "auto"}
    reference: ClassVar[Mapping[str, Any]] = {"aggregate": "first-round", "vector_scope": "state"}
    State: ClassVar[type] = FedClustState

    def init(self, fed: Federation, round: Round) -> FedClustState:
        expect(isinstance(self.threshold, str) or self.threshold > 0, "threshold", "above 0", self.threshold)
        return FedClustState(list(fed.clients), fed.initial())

    def step(self, fed: Federation, state: FedClustState, round: Round) -> FedClustState:
        replies = fed.train({c: state.start(c) for c in round.participants})
        newcomers = [c for c in replies.clients if c not in state.labels]
        first = {**state.first, **{c: replies[c]["theta"] for c in newcomers}}
        steps = {**state.first_steps, **{c: replies[c]["steps"] for c in newcomers}}
        state = replace(state, n={**state.n, **replies.column("n")}, first=first, first_steps=steps)
        labels = self._place(fed, state, newcomers) if newcomers else state.labels
        sets = sets_of(state.clients, labels, max(labels.values()) + 1)
        local = replies.column("theta")
        if self.aggregate == "first-round":
            local = {c: theta for c, theta in local.items() if labels[c] >= len(state.sets)}
        models = average_present(state, sets, local, state.models, fed.guard)
        state = replace(state, labels=labels, sets=sets, models=models)
        return replace(state, first={}, first_steps={}) if len(labels) == len(state.clients) else state

    def _place(self, fed: Federation, state: FedClustState, newcomers: list[str]) -> dict[str, int]:
        """Cut the dendrogram of the first participants; later ones join the nearest cluster within λ, or found one."""
        who = list(state.first)
        G = update_gram(fed.layout, list(state.first.values()), state.theta0, [state.first_steps[c] for c in who], self.vector_scope)
        D = squared_distances(G).sqrt()
        threshold = first_gap(D.numpy()) if isinstance(self.threshold, str) else self.threshold
        if not state.labels:
            return {c: int(label) for c, label in zip(who, cut(D.numpy(), threshold), strict=True)}
        labels = dict(state.labels)
        at = {c: i for i, c in enumerate(who)}
        for c in newcomers:
            sets = sets_of(state.clients, labels, max(labels.values()) + 1)
            apart = torch.stack([D[at[c], [at[d] for d in members]].max() for members in sets])
            nearest = int(apart.argmin())
            labels[c] = nearest if float(apart[nearest]) <= threshold else len(sets)
        return labels
