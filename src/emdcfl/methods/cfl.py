r"""CFL: train as FedAvg, and split a cluster in two where its clients have stopped agreeing.

In a round, the members of a cluster S train from its model :math:`\theta_S`; with their updates
:math:`\Delta_c = P(\theta_c) - P(\theta_S)`, the cluster is split if it is near a stationary point of the mean while some client is not,

.. math:: \Bigl\|\tfrac1{|S|}\sum_{c\in S}\Delta_c\Bigr\| < \epsilon_1 \ \wedge\ \max_{c\in S}\|\Delta_c\| > \epsilon_2
          \ \wedge\ |S| > 2 \ \wedge\ t \ge 2,

into the two parts of a complete-linkage clustering of the cosines
:math:`s_{ij} = \langle\Delta_i,\Delta_j\rangle / \|\Delta_i\|\|\Delta_j\|`. Each resulting cluster has the model
:math:`\theta_k = \sum_{c\in S_k} n_c\theta_c / \sum_{c\in S_k} n_c`. Only members that took part in the round count in all of this.
``shared/split_tree.py`` places clients that were absent when their cluster split.

Clients send their state and :math:`n_c`, and learn their cluster's model, with which they are served (the method's demonstration takes the
best model on the way down the client's splits); one never seen holds θ⁰. The server sees every local state.

Sattler, Müller, Samek. *Clustered Federated Learning: Model-Agnostic Distributed Multitask Optimization Under Privacy Constraints.*
IEEE TNNLS 2021.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np

from emdcfl.clustering import bipartition
from emdcfl.core.federation import Federation, Replies, Round
from emdcfl.core.params import Scope, cosines
from emdcfl.methods.base import ClusteredMethod, register
from emdcfl.methods.shared.split_tree import ROOT, SplitState, SplitTree
from emdcfl.methods.shared.vectors import expect, update_gram, warn_if_too_short


@dataclass(frozen=True)
class CFLState(SplitState):
    """The tree of splits, and the largest norm of a mean update seen so far."""

    largest: float = 0.0


@register
@dataclass(frozen=True)
class CFL(ClusteredMethod):
    r"""CFL.

    Parameters
    ----------
    epsilon1 : float
        :math:`\epsilon_1`: a cluster is split only if the norm of its mean update is below. 0.4 in the method's demonstration and in the
        comparison; an absolute norm, which has little meaning for another network.
    epsilon2 : float
        :math:`\epsilon_2`: and only if some member's update is longer than this; 1.6.
    thresholds : "cosines", "absolute" or "relative"
        When a cluster is split. ``"cosines"``: where its mean update is shorter than ``stationary`` times the longest, and mean cosines
        within the two parts exceed those across by ``separation``. It depends on no lengths, and is the default outside the EMD-CFL paper's
        scenarios, which use ``"absolute"``: :math:`\epsilon_1` and :math:`\epsilon_2` as above. ``"relative"``: these are ``relative1`` and
        ``relative2`` times the largest mean update seen.
    separation, stationary : float
        With ``thresholds="cosines"``. On rotated digits with an MLP, before any split, the two parts differ by 0.1 at most for clients of
        one rotation, and by 0.3 at least for those of several; with a small CNN, a rotation was split once more in 2 of 9 runs.
    relative1, relative2 : float
        The paper's advice is about 0.1, and between 0.1 and 1.
    first_split : int or "quarter"
        First round in which a cluster may split; 2 in the comparison. ``"quarter"``: the one after a quarter of the rounds, as in the
        method's demonstration, 21 of 80.
    weights : "train" or "equal"
        Clusters average their members by train size, or all alike (the method's demonstration).
    vector_scope : "P", "F", "H" or "state"
        What an update is taken over: trainable parameters, all floating state, the last layer, or the state with BatchNorm's
        counters, which are so large that no cluster ever splits (the public code of the comparison).
    """

    epsilon1: float = 0.4
    epsilon2: float = 1.6
    thresholds: Literal["cosines", "absolute", "relative"] = "cosines"
    separation: float = 0.2
    stationary: float = 0.6
    relative1: float = 0.1
    relative2: float = 0.5
    first_split: int | Literal["quarter"] = 2
    weights: Literal["train", "equal"] = "train"
    vector_scope: Scope = "P"

    name: ClassVar[str] = "cfl"
    citation: ClassVar[str] = "Sattler, Müller, Samek, IEEE TNNLS 2021"
    original: ClassVar[Mapping[str, Any]] = {"thresholds": "absolute", "first_split": "quarter", "weights": "equal"}
    reference: ClassVar[Mapping[str, Any]] = {"thresholds": "absolute", "vector_scope": "state"}
    State: ClassVar[type] = CFLState

    def init(self, fed: Federation, round: Round) -> CFLState:
        for name in ("epsilon1", "epsilon2", "separation", "stationary", "relative1", "relative2"):
            expect(getattr(self, name) > 0, name, "above 0", getattr(self, name))
        expect(isinstance(self.first_split, str) or self.first_split >= 1, "first_split", "at least 1", self.first_split)
        warn_if_too_short(round.total, self._first(round), "first_split")
        theta0 = fed.initial()
        return CFLState(list(fed.clients), theta0, sets=[[]], models=theta0[None], paths=[ROOT])

    def step(self, fed: Federation, state: CFLState, round: Round) -> CFLState:
        tree, largest = SplitTree.from_state(state), state.largest
        cluster, n = tree.descend(fed, round.participants, self.vector_scope)
        replies = fed.train({c: tree.models[path] for c, path in cluster.items()})
        fed.check_quorum(replies, len(round.participants))
        n = {**state.n, **n, **replies.column("n")}
        tree.at |= {c: path for c, path in cluster.items() if c in n}
        for path in sorted(set(cluster.values())):
            members = [c for c in replies.clients if cluster[c] == path]
            if members:
                largest = self._advance(fed, tree, path, members, replies, round, largest)
        return replace(tree.to_state(state, n), largest=largest)

    def _first(self, round: Round) -> int:
        """Return the first round in which a cluster may split."""
        return (round.total or 4) // 4 + 1 if isinstance(self.first_split, str) else self.first_split

    def _advance(
        self, fed: Federation, tree: SplitTree, path: str, members: list[str], replies: Replies, round: Round, largest: float
    ) -> float:
        """Average a cluster, or split it and average its parts; return the largest mean update seen."""
        start = tree.models[path]
        local = fed.guard.clip_updates({c: replies[c]["theta"] for c in members}, dict.fromkeys(members, start), [members])
        steps = {c: float(replies[c]["steps"]) for c in members}
        G = update_gram(fed.layout, list(local.values()), start, list(steps.values()), self.vector_scope)
        mean, top = float(G.sum().clamp_min(0).sqrt()) / len(members), float(G.diagonal().max().sqrt())
        largest = max(largest, mean)
        parts = [members]
        if len(members) > 2 and round.index >= self._first(round):
            alike = cosines(G).numpy()
            side = bipartition(1 - alike)
            apart = self._disagree(mean, top, largest) and (self.thresholds != "cosines" or separation(alike, side) > self.separation)
            parts = [[c for c, half in zip(members, side, strict=True) if half == which] for which in (0, 1)] if apart else parts
        for which, part in enumerate(parts):
            model = fed.guard.average([local[c] for c in part], [replies[c]["n"] if self.weights == "train" else 1 for c in part])
            if len(parts) == 1:
                tree.models[path] = model
            else:
                tree.split_off(f"{path}{which}", model, {c: local[c] for c in part}, [steps[c] for c in part])
        return largest

    def _disagree(self, mean: float, top: float, largest: float) -> bool:
        if self.thresholds == "cosines":
            return mean < self.stationary * top
        if self.thresholds == "relative":
            return mean < self.relative1 * largest and top > self.relative2 * largest
        return mean < self.epsilon1 and top > self.epsilon2


def separation(alike: np.ndarray[Any, Any], side: np.ndarray[Any, Any]) -> float:
    """Return by how much the mean cosine of clients on one side exceeds that of clients on different sides.

    Examples
    --------
    >>> separation(np.array([[1.0, 0.5, 0.1], [0.5, 1.0, 0.1], [0.1, 0.1, 1.0]]), np.array([0, 0, 1]))
    0.4
    """
    same, pairs = side[:, None] == side[None, :], np.triu(np.ones(alike.shape, dtype=bool), 1)
    return float(alike[same & pairs].mean() - alike[~same & pairs].mean())
