r"""EMD-CFL: find the groups in one shot from the transport distance between embedding distributions.

After its first local training, every client c compares its own train sample with each partner's validation sample, both
embedded by c's model :math:`g_{\omega_c}` and hidden behind a random projection R:

.. math:: W[c,c'] = W_1\bigl(Z_{c|c}R,\; Z_{c'|c}R\bigr) - \tau_c, \qquad
          \tau_c = W_1\bigl(Z_{c|c}R,\; Z^{val}_{c|c}R\bigr)

:math:`\tau_c` is how far the client's *own* unseen data lie, so W is what the partner's data add to that. Two clients are linked if both
directions stay under the tolerance; clients with the same neighbourhood form a cluster, and every later round is FedAvg inside clusters:

.. math:: M[c,c'] = 1\{W[c,c'] < \epsilon \wedge W[c',c] < \epsilon\}, \qquad
          \theta_k = \sum_{c\in S_k} n_c\theta_c \big/ \sum_{c\in S_k} n_c

A client sends its state, :math:`n_c`, :math:`\tau_c` with its variance, and projected embeddings; it learns its cluster's model and,
through the server, the partners' embedding models (never their heads). The server learns no R and no raw embedding. Clients are
served their cluster's model; one never seen holds θ⁰.

Zhang, Williams, Toni. *Clustered Federated Learning via Embedding Distributions.* 2025.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from emdcfl.clustering import components, links, neighbourhoods
from emdcfl.errors import ConfigError
from emdcfl.federation import Federation, Round
from emdcfl.methods.base import Clustered, Distances, Family, Serving, average_sets, register, serve_clusters
from emdcfl.methods.measure import Measured, measure


@dataclass(frozen=True)
class EMDCFLState(Clustered):
    """``Clustered``, and the matrices of ``Distances`` (NaN where a pair is not known yet)."""

    W: Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    tau: Tensor = field(default_factory=lambda: torch.zeros(0))
    epsilon: Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    kind: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.int8))


@register
@dataclass(frozen=True)
class EMDCFL:
    r"""EMD-CFL.

    Parameters
    ----------
    tolerance : float or "auto"
        :math:`\epsilon`. The paper keeps 0.025 for most experiments. ``"auto"``: each client calibrates its own at home
        (``transport.calibration``).
    alpha : float
        Family-wise error of ``tolerance="auto"`` over all ordered pairs.
    projection_ratio : float
        Width of the projection over the embedding width; the paper uses 0.9.
    projection : "row", "pair" or "fresh"
        One R per row client (its noise cancels), one per pair (the paper's letter), or one per ordered pair with a square one for τ
        (the authors' public code).
    max_samples : int
        Most samples a side in a transport problem; the paper uses 512.
    min_validation : int
        Clients with fewer validation samples do not lower the common sample size; they are compared at their own size, with a warning.
    cost : "cosine", "euclidean" or "label-aware"
        Ground cost. ``"label-aware"`` adds ``label_weight`` where labels differ: it sees concept shift and shows the labels to the server.
    label_weight : float
        What a different label costs, in units of the cosine distance.
    solver : "exact" or "sinkhorn"
    sinkhorn_reg : float
        Entropic regularisation; the paper uses 0.1.
    grouping : "neighbourhoods" or "components"
        Clusters are clients with equal neighbourhoods (the paper's rule), or connected components of the links.
    force_diagonal : bool
        Link every client with itself whatever its own distance says. Off in the authors' public code.
    recompute : "once" or "every-round"
        Measure a pair once, or measure all known pairs in every round as the authors' public code does under partial participation.
    aggregate : "latest" or "participants"
        Under partial participation: average every member's latest local state, or only this round's.
    distances : "needed" or "all"
        Solve only what bounds leave open (the links are the same, bit for bit; entries that were only bounded are marked), or every pair.
    embedding_mode : "eval" or "train"
        Mode of the network while embedding. ``"train"`` (batch statistics, dropout) is what the authors' public code does.
    """

    tolerance: float | Literal["auto"] = 0.025
    alpha: float = 0.01
    projection_ratio: float = 0.9
    projection: Literal["row", "pair", "fresh"] = "row"
    max_samples: int = 512
    min_validation: int = 64
    cost: Literal["cosine", "euclidean", "label-aware"] = "cosine"
    label_weight: float = 1.0
    solver: Literal["exact", "sinkhorn"] = "exact"
    sinkhorn_reg: float = 0.1
    grouping: Literal["neighbourhoods", "components"] = "neighbourhoods"
    force_diagonal: bool = True
    recompute: Literal["once", "every-round"] = "once"
    aggregate: Literal["latest", "participants"] = "latest"
    distances: Literal["needed", "all"] = "needed"
    embedding_mode: Literal["eval", "train"] = "eval"

    name: ClassVar[str] = "emdcfl"
    family: ClassVar[Family] = "hard"
    needs_k: ClassVar[bool] = False
    citation: ClassVar[str] = "Zhang, Williams, Toni, 2025"
    reference: ClassVar[Mapping[str, Any]] = {
        "projection": "fresh",
        "force_diagonal": False,
        "recompute": "every-round",
        "embedding_mode": "train",
    }
    State: ClassVar[type] = EMDCFLState

    def init(self, fed: Federation, round: Round) -> EMDCFLState:
        """Algorithm 1, lines 2–3: everybody holds θ⁰ and is alone; W is empty."""
        self._check()
        C = len(fed.clients)
        return EMDCFLState(
            list(fed.clients),
            fed.initial(),
            W=torch.full((C, C), torch.nan, dtype=torch.float64),
            tau=torch.full((C,), torch.nan, dtype=torch.float64),
            epsilon=torch.full((C, C), torch.nan, dtype=torch.float64),
            kind=torch.zeros(C, C, dtype=torch.int8),
        )

    def step(self, fed: Federation, state: EMDCFLState, round: Round) -> EMDCFLState:
        """Algorithm 1, lines 5–21."""
        # Lines 6–9: ClientUpdate.
        replies = fed.train({c: state.start(c) for c in round.participants})
        local = {**state.latest, **replies.column("theta")}
        state = replace(state, n={**state.n, **replies.column("n")})

        # Lines 10–19: every pair of known clients whose W is still unset, in both directions.
        pairs = self._pairs(state)
        if pairs:
            state = self._fill(state, measure(self, fed, pairs, local))

        # Line 20: Neighbourhoods(M).
        seen = [i for i, c in enumerate(state.clients) if c in state.n]
        M = links(state.W[seen][:, seen].numpy(), state.epsilon[seen][:, seen].numpy(), force_diagonal=self.force_diagonal)
        labels, members = (neighbourhoods if self.grouping == "neighbourhoods" else components)(M)
        sets = [[state.clients[seen[j]] for j in s] for s in members]
        assigned = {state.clients[i]: int(label) for i, label in zip(seen, labels, strict=True)}

        # Line 21: AggregateModels.
        keep = not fed.everyone_answers
        return average_sets(state, sets, assigned, replies.column("theta"), keep=keep, members=self.aggregate)

    def serve(self, state: EMDCFLState) -> Serving:
        """Serve every client its cluster's model."""
        found = Distances(state.W.numpy(), state.tau.numpy(), state.epsilon.numpy(), state.kind.numpy())
        return serve_clusters(state, found)

    def _pairs(self, state: EMDCFLState) -> list[tuple[str, str]]:
        """Ordered pairs (row, column) of seen clients to measure now: both directions, if one of them is unset."""
        seen = [(i, c) for i, c in enumerate(state.clients) if c in state.n]
        unset = torch.isnan(state.W) | torch.isnan(state.W.T) | (self.recompute == "every-round")
        return [(c, d) for i, c in seen for j, d in seen if (i != j or not self.force_diagonal) and bool(unset[i, j])]

    def _fill(self, state: EMDCFLState, found: Measured) -> EMDCFLState:
        where = {c: i for i, c in enumerate(state.clients)}
        new = replace(state, W=state.W.clone(), tau=state.tau.clone(), epsilon=state.epsilon.clone(), kind=state.kind.clone())
        for c, value in found.tau.items():
            new.tau[where[c]] = value
        for (c, d), entry in found.entries.items():
            at = where[c], where[d]
            new.W[at], new.epsilon[at], new.kind[at] = entry.W, entry.epsilon, entry.kind
        return new

    def _check(self) -> None:
        limits: list[tuple[str, Any, bool, str]] = [
            (
                "tolerance",
                self.tolerance,
                self.tolerance == "auto" or (not isinstance(self.tolerance, str) and np.isfinite(self.tolerance)),
                "a number or 'auto'",
            ),
            ("alpha", self.alpha, 0 < self.alpha < 1, "between 0 and 1"),
            ("projection_ratio", self.projection_ratio, 0 < self.projection_ratio <= 1, "in (0, 1]"),
            ("max_samples", self.max_samples, self.max_samples >= 2, "at least 2"),
            ("min_validation", self.min_validation, self.min_validation >= 1, "at least 1"),
            ("sinkhorn_reg", self.sinkhorn_reg, self.sinkhorn_reg > 0, "above 0"),
        ]
        for name, got, fine, expected in limits:
            if not fine:
                raise ConfigError(f"expected method.{name} {expected}, got {got}")
