r"""CFLGP: clustered learning by gradient partitioning. Updates accumulated over rounds are reduced by SVD and clustered.

Each client's profile is a running mean of its updates :math:`\Delta_c`,

.. math:: G_c \leftarrow (1-\beta_t)G_c + \beta_t\Delta_c, \qquad \beta_t = 1 / (\lfloor t/(Kp)\rfloor + 1),

and with :math:`G^\top G = V\operatorname{diag}(\sigma^2)V^\top` client c is described by
:math:`(\sigma_1V_{c1}, …, \sigma_KV_{cK})`. K-means on these gives the clusters of round t, renumbered to agree with the previous ones as
far as possible, and :math:`\theta_k = \sum_{c\in S_k} n_c\theta_c / \sum_{c\in S_k} n_c` over the members that took part (a cluster
without any keeps its model). In round 1 all clients train from θ⁰, as does a client first seen later, whose first update is its profile;
absent clients keep their profile.

The profile may instead have K blocks, :math:`G^\top G` being the sum over blocks: one for each cluster a client has been in, or one for
each model in turn on which *all* clients are asked for an update (see ``profile``).

Clients send their state and :math:`n_c` (and under ``"criterion"`` a second state), and learn their cluster's model (and the criterion
model), with which they are served; one never seen holds θ⁰. The server sees every local state.

Kim, Kim, de Veciana. *Clustered Federated Learning via Gradient-based Partitioning.* ICML 2024.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from emdcfl.clustering import gram_features, kmeans
from emdcfl.core import tasks
from emdcfl.core.federation import Federation, Replies, Round
from emdcfl.core.keys import keyed_int
from emdcfl.core.params import Scope
from emdcfl.core.schema import Reply
from emdcfl.methods.base import ClusteredMethod, initial_models, register
from emdcfl.methods.shared.profiles import CFLGPState, Fresh, ProfileUpdate, nearest_clusters, profile_coordinates, renumber
from emdcfl.methods.shared.vectors import average_present, expect, sets_of, warn_if_too_short


@register
@dataclass(frozen=True)
class CFLGP(ClusteredMethod):
    r"""CFLGP.

    Parameters
    ----------
    k : int or None
        Number of clusters; the scenario's if not given.
    period : int
        p: clusters are found again every p rounds. 1 in the comparison, 2 in the method's code.
    last_clustering : int, "half" or "never"
        Last round in which clusters are found again. ``"half"``: half of the rounds, as in the method's code, 10 of 20. ``"never"``: they
        are found again to the end (the public code of the comparison).
    profile : "shared", "own_block" or "criterion"
        Where an update is filed. ``"shared"``: one vector per client, whatever model the update was made on; what the method's released
        code amounts to. Once the cluster models have converged these updates are noise and the clusters may dissolve again, which
        ``last_clustering`` prevents. ``"own_block"``: the block of the client's own cluster (the public code of the comparison): from
        round 2 on clusters occupy different coordinates, which locks the first clustering in. ``"criterion"``: the paper's scheme, all
        clients are asked for an update on one model, block after block in turn; clients of other clusters train twice.
    vector_scope : "P", "F", "H" or "state"
        What an update is taken over: trainable parameters, all floating state, the last layer, or the state with BatchNorm's
        counters (the public code of the comparison).
    """

    k: int | None = None
    period: int = 1
    last_clustering: int | Literal["half", "never"] = "half"
    profile: Literal["shared", "own_block", "criterion"] = "shared"
    vector_scope: Scope = "P"

    name: ClassVar[str] = "cflgp"
    citation: ClassVar[str] = "Kim, Kim, de Veciana, ICML 2024"
    original: ClassVar[Mapping[str, Any]] = {"period": 2}
    reference: ClassVar[Mapping[str, Any]] = {"last_clustering": "never", "profile": "own_block", "vector_scope": "state"}
    State: ClassVar[type] = CFLGPState

    def init(self, fed: Federation, round: Round) -> CFLGPState:
        expect(self.period >= 1, "period", "at least 1", self.period)
        last = self.last_clustering
        expect(isinstance(last, str) or last >= self.period, "last_clustering", "at least the period", last)
        warn_if_too_short(round.total, self.period, "period")
        models = initial_models(self.k, fed, self.name)
        return CFLGPState(list(fed.clients), models[0], sets=[[] for _ in models], models=models)

    def step(self, fed: Federation, state: CFLGPState, round: Round) -> CFLGPState:
        replies = fed.train({c: state.start(c) for c in round.participants})
        k = len(state.models)
        where, share = profile_coordinates(fed, 1 if self.profile == "shared" else k, self.vector_scope)
        last = self._last(round)
        due = round.index % self.period == 0 and (last is None or round.index <= last)
        fresh = self._updates(fed, state, replies, where, due, round)
        beta = 1.0 / (round.index // (k * self.period) + 1)
        update = ProfileUpdate(state.profile, state.profile_steps, fresh, beta, from_zero=self.profile == "own_block")
        state = replace(state, n={**state.n, **replies.column("n")})
        labels = self._labels(fed, state, update, replies, due, share, round)
        sets = sets_of(state.clients, labels, k)
        models = average_present(state, sets, replies.column("theta"), state.models, fed.guard)
        replies.valid.clear()  # frees each state as soon as its profile has taken it in
        state = replace(state, labels=labels, sets=sets, models=models, clustered=state.clustered or due)
        over = last is not None and round.index >= last and len(labels) == len(state.clients)
        profile, steps = ({}, {}) if over else update.apply()
        return replace(state, profile=profile, profile_steps=steps)

    def _last(self, round: Round) -> int | None:
        """Return the last round in which clusters are found; they are found once at least, if the rounds are enough for it."""
        if self.last_clustering == "half":
            return None if round.total is None else max(self.period, round.total // 2)
        return None if self.last_clustering == "never" else self.last_clustering

    def _updates(
        self, fed: Federation, state: CFLGPState, replies: Replies, where: slice | Tensor, due: bool, round: Round
    ) -> dict[str, dict[str, Fresh]]:
        """Return block → client → new update; under ``"criterion"`` ask for the updates that are missing."""

        def update(start: Tensor, reply: Reply) -> Fresh:
            return Fresh(reply["theta"][where], start[where], float(reply["steps"]))

        fresh: dict[str, dict[str, Fresh]] = {}
        if self.profile != "criterion":
            for c in replies.clients:
                block = "shared" if self.profile == "shared" else str(state.labels.get(c, 0))
                fresh.setdefault(block, {})[c] = update(state.start(c), replies[c])
            return fresh
        criterion = (round.index - 1) // self.period % len(state.models)
        model = state.models[criterion]
        asked = [c for c in replies.clients if due or (state.clustered and c not in state.labels)]
        found = {c: update(model, replies[c]) for c in asked if torch.equal(state.start(c), model)}

        def fold(client: str, reply: Reply) -> None:
            found[client] = update(model, reply)

        missing = {c: {"theta": model} for c in asked if c not in found}
        if missing:
            fed.run(tasks.train, missing, fold=fold, training=fed.training.as_dict())
        return {str(criterion): found} if found else {}

    def _labels(
        self, fed: Federation, state: CFLGPState, update: ProfileUpdate, replies: Replies, due: bool, share: float, round: Round
    ) -> dict[str, int]:
        """Cluster all profiles; between clusterings, only give first-time clients the nearest cluster."""
        if not due and not state.clustered:
            return {**state.labels, **dict.fromkeys(replies.clients, 0)}
        if not due and all(c in state.labels for c in replies.clients):
            return state.labels
        who = [c for c in state.clients if update.knows(c)]
        k = len(state.models)
        counters = share * len(fed.layout.counters) if self.vector_scope == "state" else 0.0
        features = gram_features(update.gram(who, counters=counters).numpy(), k)
        if due:
            found = kmeans(features, k, seed=keyed_int(fed.seed, "", round.index, "k-means"))
            return {**state.labels, **renumber(dict(zip(who, found.tolist(), strict=True)), state.labels if state.clustered else {}, k)}
        return {**state.labels, **nearest_clusters(features, who, state.labels, k)}
