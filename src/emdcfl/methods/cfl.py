r"""CFL: train as FedAvg, and split a cluster in two where its clients have stopped agreeing.

In a round, the members of a cluster S train from its model :math:`\theta_S`; with their updates
:math:`\Delta_c = P(\theta_c) - P(\theta_S)`, the cluster is split if it is near a stationary point of the mean while some client is not,

.. math:: \Bigl\|\tfrac1{|S|}\sum_{c\in S}\Delta_c\Bigr\| < \epsilon_1 \ \wedge\ \max_{c\in S}\|\Delta_c\| > \epsilon_2
          \ \wedge\ |S| > 2 \ \wedge\ t \ge 2,

into the two parts of a complete-linkage clustering of the cosines
:math:`s_{ij} = \langle\Delta_i,\Delta_j\rangle / \|\Delta_i\|\|\Delta_j\|`. Each resulting cluster has the model
:math:`\theta_k = \sum_{c\in S_k} n_c\theta_c / \sum_{c\in S_k} n_c`. Only members that took part in the round count in all of this.
Whoever was absent when its cluster split keeps the model from before the split; when it next takes part it trains from that model once
more, goes to the side whose mean update has the larger cosine with its own, and trains again from there. A client first seen after a
split comes down the tree from the root in the same way.

Clients send their state and :math:`n_c`, and learn their cluster's model, with which they are served; one never seen holds θ⁰. The
server sees every local state.

Sattler, Müller, Samek. *Clustered Federated Learning: Model-Agnostic Distributed Multitask Optimization Under Privacy Constraints.*
IEEE TNNLS 2021.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from emdcfl.clustering import bipartition
from emdcfl.core import tasks
from emdcfl.core.federation import Federation, Replies, Round
from emdcfl.core.params import average, cosines
from emdcfl.core.schema import Reply
from emdcfl.methods.base import Clustered, Family, Serving, register, serve_clusters
from emdcfl.methods.shared.vectors import VectorScope, expect, sets_of, update_gram

ROOT = ""


@dataclass(frozen=True)
class CFLState(Clustered):
    """``Clustered`` over the nodes of the tree of splits.

    A node that has split is kept only while somebody may still come down through it; where everybody takes part in every round there
    are leaves alone.

    Attributes
    ----------
    paths : list of str
        For each model, the way to its node from the root: one character 0 or 1 for each split.
    founded : dict
        Path → plain mean of the members' states when the node was split off, for those who were absent then.
    founded_steps : dict
        Path → mean number of the steps they had made.
    largest : float
        Largest norm of a mean update seen so far.
    """

    paths: list[str] = field(default_factory=list)
    founded: dict[str, Tensor] = field(default_factory=dict)
    founded_steps: dict[str, float] = field(default_factory=dict)
    largest: float = 0.0


@dataclass
class Tree:
    """The tree of splits while a round is worked on: models by path, and where each client is."""

    models: dict[str, Tensor]
    at: dict[str, str]
    founded: dict[str, Tensor]
    founded_steps: dict[str, float]

    @classmethod
    def of(cls, state: CFLState) -> Tree:
        at = {c: state.paths[i] for c, i in state.labels.items()}
        return cls(dict(zip(state.paths, state.models, strict=True)), at, dict(state.founded), dict(state.founded_steps))

    def has_split(self, path: str) -> bool:
        return path + "0" in self.models

    def prune(self, *, unseen: bool) -> None:
        """Drop the nodes that have split and that nobody will come through again."""
        occupied = {*self.at.values(), *([ROOT] if unseen else [])}
        split = [p for p in self.models if self.has_split(p)]
        for path in split:
            if not any(path.startswith(above) for above in occupied):
                del self.models[path]
                for child in (path + "0", path + "1"):
                    del self.founded[child], self.founded_steps[child]


@register
@dataclass(frozen=True)
class CFL:
    r"""CFL.

    Parameters
    ----------
    epsilon1 : float
        :math:`\epsilon_1`: a cluster is split only if the norm of its mean update is below. 0.4 in the method's demonstration and in the
        comparison; an absolute norm, which has little meaning for another network.
    epsilon2 : float
        :math:`\epsilon_2`: and only if some member's update is longer than this; 1.6.
    thresholds : "absolute" or "relative"
        ``"relative"``: :math:`\epsilon_1` and :math:`\epsilon_2` are ``relative1`` and ``relative2`` times the largest mean update seen.
    relative1, relative2 : float
        The paper's advice is about 0.1, and between 0.1 and 1.
    first_split : int
        First round in which a cluster may split; 2 in the comparison, 20 in the method's demonstration.
    vector_scope : "P", "F", "H" or "state"
        What an update is taken over: trainable parameters, all floating state, the last layer, or the state with BatchNorm's
        counters, which are so large that no cluster ever splits (the public code of the comparison).
    """

    epsilon1: float = 0.4
    epsilon2: float = 1.6
    thresholds: Literal["absolute", "relative"] = "absolute"
    relative1: float = 0.1
    relative2: float = 0.5
    first_split: int = 2
    vector_scope: VectorScope = "P"

    name: ClassVar[str] = "cfl"
    family: ClassVar[Family] = "hard"
    needs_k: ClassVar[bool] = False
    citation: ClassVar[str] = "Sattler, Müller, Samek, IEEE TNNLS 2021"
    reference: ClassVar[Mapping[str, Any]] = {"vector_scope": "state"}
    State: ClassVar[type] = CFLState

    def init(self, fed: Federation, round: Round) -> CFLState:
        for name in ("epsilon1", "epsilon2", "relative1", "relative2"):
            expect(getattr(self, name) > 0, name, "above 0", getattr(self, name))
        expect(self.first_split >= 1, "first_split", "at least 1", self.first_split)
        theta0 = fed.initial()
        return CFLState(list(fed.clients), theta0, sets=[[]], models=theta0[None], paths=[ROOT])

    def step(self, fed: Federation, state: CFLState, round: Round) -> CFLState:
        tree = Tree.of(state)
        position, n = self._descend(fed, tree, {c: tree.at.get(c, ROOT) for c in round.participants})
        replies = fed.train({c: tree.models[path] for c, path in position.items()})
        n = {**state.n, **n, **replies.column("n")}
        tree.at |= {c: path for c, path in position.items() if c in n}
        largest = state.largest
        for path in sorted(set(position.values())):
            members = [c for c in replies.clients if position[c] == path]
            if members:
                largest = self._advance(fed, tree, path, members, replies, round, largest)
        tree.prune(unseen=len(tree.at) < len(state.clients))
        paths = sorted(tree.models)
        labels = {c: paths.index(tree.at[c]) for c in state.clients if c in tree.at}
        return replace(
            state,
            n=n,
            labels=labels,
            sets=sets_of(state.clients, labels, len(paths)),
            models=torch.stack([tree.models[path] for path in paths]),
            paths=paths,
            founded=tree.founded,
            founded_steps=tree.founded_steps,
            largest=largest,
        )

    def serve(self, state: CFLState) -> Serving:
        return serve_clusters(state)

    def _advance(self, fed: Federation, tree: Tree, path: str, members: list[str], replies: Replies, round: Round, largest: float) -> float:
        """Average a cluster, or split it and average its parts; return the largest mean update seen."""
        start = tree.models[path]
        sent = fed.guard.clip_updates({c: replies[c]["theta"] for c in members}, dict.fromkeys(members, start), [members])
        local, steps = list(sent.values()), [float(replies[c]["steps"]) for c in members]
        G = update_gram(fed.layout, local, start, steps, self.vector_scope)
        mean, top = float(G.sum().clamp_min(0).sqrt()) / len(members), float(G.diagonal().max().sqrt())
        largest = max(largest, mean)
        n = [replies[c]["n"] for c in members]
        if not (len(members) > 2 and round.index >= self.first_split and self._disagree(mean, top, largest)):
            tree.models[path] = fed.guard.average(local, n)
            return largest
        side = bipartition((1 - cosines(G)).numpy(), "complete")
        for half in (0, 1):
            part = [i for i in range(len(members)) if side[i] == half]
            child = f"{path}{half}"
            tree.models[child] = fed.guard.average([local[i] for i in part], [n[i] for i in part])
            tree.founded[child] = average([local[i] for i in part], [1.0] * len(part))
            tree.founded_steps[child] = sum(steps[i] for i in part) / len(part)
            tree.at |= {members[i]: child for i in part}
        return largest

    def _disagree(self, mean: float, top: float, largest: float) -> bool:
        if self.thresholds == "relative":
            return mean < self.relative1 * largest and top > self.relative2 * largest
        return mean < self.epsilon1 and top > self.epsilon2

    def _descend(self, fed: Federation, tree: Tree, position: dict[str, str]) -> tuple[dict[str, str], dict[str, int]]:
        """Lead the clients who stand at a node that has split down to a leaf; those who do not answer on the way take no part."""
        n: dict[str, int] = {}
        while walking := [c for c, path in position.items() if tree.has_split(path)]:

            def fold(client: str, reply: Reply) -> None:
                above = position[client]
                sides = [above + "0", above + "1"]
                rows = [reply["theta"], *(tree.founded[side] for side in sides)]
                steps = [float(reply["steps"]), *(tree.founded_steps[side] for side in sides)]
                alike = cosines(update_gram(fed.layout, rows, tree.models[above], steps, self.vector_scope))
                position[client] = sides[int(alike[0, 2] > alike[0, 1])]
                n[client] = reply["n"]

            inputs = {c: {"theta": tree.models[position[c]]} for c in walking}
            answered = fed.run(tasks.train, inputs, fold=fold, training=fed.training.as_dict())
            for c in walking:
                if c not in answered.valid:
                    del position[c]
        return position, n
