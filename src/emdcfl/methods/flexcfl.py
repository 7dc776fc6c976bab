r"""FlexCFL: group clients once by the cosines of their first updates with the K main directions, then FedAvg with a pull between groups.

Round 1 is the cold start: all clients train from θ⁰. With the updates :math:`\Delta_c` as rows of X and
:math:`XX^\top = V\operatorname{diag}(\sigma^2)V^\top`, client i is described by its cosines with the leading singular directions,
:math:`e_{ij} = \sigma_jV_{ij}/\|\Delta_i\|`, and K-means on the :math:`e_i` gives the groups for good. The first group model
is the plain mean of the members' states. From round 2 on, with the intra-group averages
:math:`\tilde\theta_k = \sum_{c\in S_k} n_c\theta_c / \sum_{c\in S_k} n_c`, all taken from one snapshot,

.. math:: \theta_k = \Bigl(\tilde\theta_k + \sum_{l\ne k}\frac{\eta_G}{\|\tilde\theta_l\|}\tilde\theta_l\Bigr)
          \Big/ \Bigl(1 + \sum_{l\ne k}\frac{\eta_G}{\|\tilde\theta_l\|}\Bigr)

A client first seen later trains from θ⁰ and joins the group whose mean cold-start update has the largest cosine with its own. Members
that do not take part in a round are not averaged; a group without any keeps its model. Nobody changes groups later: the paper's migration
after a shift of labels is left out.

Clients send their state and :math:`n_c`, and learn their group's model, with which they are served; one never seen holds θ⁰.
The server sees every local state.

Duan, Liu, Ji, Wu, Liang, Chen, Tan, Ren. *Flexible Clustered Federated Learning for Client-Level Data Distribution Shift.* IEEE TPDS 2022.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from emdcfl.clustering import edc, kmeans
from emdcfl.core.federation import Federation, Replies, Round
from emdcfl.core.keys import keyed_int
from emdcfl.core.params import Layout, Scope, blocks, cosines
from emdcfl.methods.base import Clustered, ClusteredMethod, clusters_wanted, register
from emdcfl.methods.shared.vectors import average_present, expect, sets_of, update_gram


@dataclass(frozen=True)
class FlexCFLState(Clustered):
    """``Clustered``, the groups' cold-start models (kept until all clients are placed), and BatchNorm's counters per group."""

    cold: Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    cold_steps: list[float] = field(default_factory=list)
    counters: list[float] = field(default_factory=list)


@register
@dataclass(frozen=True)
class FlexCFL(ClusteredMethod):
    r"""FlexCFL.

    Parameters
    ----------
    k : int or None
        Number of groups; the scenario's if not given.
    eta_g : float
        :math:`\eta_G`, the pull between groups. The method's usage notes give 0.1, its default is 0 (none); the public code
        of the comparison uses 5. Its code forms groups from 50 steps of up to 20 K clients before round 1; here from round 1.
    inter : "normalised" or "raw"
        ``"raw"`` leaves out the denominator, as the public code of the comparison does: weights then grow by about
        :math:`(K-1)\eta_G` in norm every round.
    vector_scope : "P", "F", "H" or "state"
        What updates and norms are taken over: trainable parameters, all floating state, the last layer, or the state with
        BatchNorm's counters (the public code of the comparison). The pull itself acts on all floating state.
    """

    k: int | None = None
    eta_g: float = 0.1
    inter: Literal["normalised", "raw"] = "normalised"
    vector_scope: Scope = "P"

    name: ClassVar[str] = "flexcfl"
    citation: ClassVar[str] = "Duan et al., IEEE TPDS 2022"
    reference: ClassVar[Mapping[str, Any]] = {"eta_g": 5.0, "inter": "raw", "vector_scope": "state"}
    State: ClassVar[type] = FlexCFLState

    def init(self, fed: Federation, round: Round) -> FlexCFLState:
        clusters_wanted(self.k, fed, self.name)
        expect(self.eta_g >= 0, "eta_g", "at least 0", self.eta_g)
        return FlexCFLState(list(fed.clients), fed.initial())

    def step(self, fed: Federation, state: FlexCFLState, round: Round) -> FlexCFLState:
        replies = fed.train({c: state.start(c) for c in round.participants})
        state = replace(state, n={**state.n, **replies.column("n")})
        state = self._average(fed, state, replies) if state.labels else self._cold_start(fed, state, replies, round)
        return replace(state, cold=torch.zeros(0, 0), cold_steps=[]) if len(state.labels) == len(state.clients) else state

    def _cold_start(self, fed: Federation, state: FlexCFLState, replies: Replies, round: Round) -> FlexCFLState:
        k = min(clusters_wanted(self.k, fed, self.name), len(replies))
        steps, local = replies.column("steps"), replies.column("theta")
        G = update_gram(fed.layout, list(local.values()), state.theta0, list(steps.values()), self.vector_scope)
        found = kmeans(edc(G.numpy(), k), k, seed=keyed_int(fed.seed, "", round.index, "k-means"), max_iter=20)
        labels = {c: int(label) for c, label in zip(local, found, strict=True)}
        sets = sets_of(state.clients, labels, max(labels.values()) + 1)
        local = fed.guard.clip_updates(local, dict.fromkeys(local, state.theta0), sets)
        models = torch.stack([fed.guard.average([local[c] for c in members], [1.0] * len(members)) for members in sets])
        mean_steps = [sum(steps[c] for c in members) / len(members) for members in sets]
        counters = [float(int(s)) for s in mean_steps]
        return replace(state, labels=labels, sets=sets, models=models, counters=counters, cold=models, cold_steps=mean_steps)

    def _average(self, fed: Federation, state: FlexCFLState, replies: Replies) -> FlexCFLState:
        """Average inside the groups, then pull them towards each other."""
        labels = self._place(fed, state, replies)
        sets = sets_of(state.clients, labels, len(state.sets))
        models = average_present(state, sets, replies.column("theta"), state.models, fed.guard)
        began = {c: state.counters[state.labels[c]] if c in state.labels else 0.0 for c in replies.clients}
        moved = {c: torch.tensor([began[c] + replies[c]["steps"]]) for c in replies.clients}
        counters = average_present(state, sets, moved, torch.tensor(state.counters)[:, None])
        joined = inter_group(fed.layout, torch.cat([models, counters], dim=1), self.eta_g, self.inter, self.vector_scope)
        return replace(state, labels=labels, sets=sets, models=joined[:, :-1].contiguous(), counters=joined[:, -1].floor().tolist())

    def _place(self, fed: Federation, state: FlexCFLState, replies: Replies) -> dict[str, int]:
        """Give first-time clients the group whose mean cold-start update is most aligned with theirs."""
        newcomers = [c for c in replies.clients if c not in state.labels]
        if not newcomers:
            return state.labels
        rows = [*state.cold, *(replies[c]["theta"] for c in newcomers)]
        steps = [*state.cold_steps, *(float(replies[c]["steps"]) for c in newcomers)]
        alike = cosines(update_gram(fed.layout, rows, state.theta0, steps, self.vector_scope))[len(state.cold) :, : len(state.cold)]
        return {**state.labels, **dict(zip(newcomers, alike.argmax(1).tolist(), strict=True))}


def inter_group(layout: Layout, models: Tensor, eta: float, inter: Literal["normalised", "raw"], scope: Scope) -> Tensor:
    """Pull every group model towards the directions of the others.

    ``models`` (K, P + 1) are intra-group averages, each followed by the value of its BatchNorm counters, which take part in the pull and,
    for the scope ``"state"``, in the norm.
    """
    if eta == 0 or len(models) == 1:
        return models
    norms = update_gram(layout, models[:, :-1], None, models[:, -1].tolist(), scope).diagonal().clamp_min(0).sqrt()
    pull = torch.where(norms > 0, eta / norms, torch.zeros_like(norms))
    mix = pull.repeat(len(models), 1).fill_diagonal_(1.0)
    if inter == "normalised":
        mix = mix / mix.sum(1, keepdim=True)
    out = torch.empty_like(models)
    for part in blocks(models.shape[1], len(models)):
        out[:, part] = (mix @ models[:, part].double()).float()
    return out
