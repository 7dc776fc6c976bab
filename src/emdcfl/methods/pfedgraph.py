r"""pFedGraph: a model for every client, averaged with weights the server learns from similarity and data size.

Each client trains its own model with a term that keeps its direction. The server compares what the clients have learned since θ⁰ and
chooses, for every client i, weights on the simplex that lean towards similar clients and stay near the data shares p:

.. math:: \theta_i \leftarrow \mathrm{Train}_i(a_i)\ \text{ with loss }\ \ell(w) - \mu\cos(P(w), P(a_i)), \qquad
          s_{ij} = \cos\bigl(P(\theta_i) - P(\theta^0),\ P(\theta_j) - P(\theta^0)\bigr)

.. math:: x_i = \arg\min_{x\in\Delta}\ \alpha\lVert x - p\rVert^2 - s_i^\top x
          = \mathrm{Proj}_\Delta\Bigl(p + \frac{s_i}{2\alpha}\Bigr), \qquad a_i \leftarrow \sum_j x_{ij}\theta_j

The closed form is a sort, no solver. The term is left out the first time a client takes part: its model is still θ⁰. Identical updates give
:math:`x_i = p`, which is FedAvg. In a round the graph spans those who answered; the others keep their model.

A client sends its state and :math:`n_c`; it learns its own average only. It is served that personal model, θ⁰ before its first round.

Ye, Ni, Wu, Chen, Wang. *Personalized Federated Learning with Inferred Collaboration Graphs.* ICML 2023.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from emdcfl.core.federation import Federation, Round
from emdcfl.methods.base import Family, Serving, register
from emdcfl.methods.shared.graph import (
    Aggregate,
    Personal,
    Since,
    check_graph,
    personal_start,
    personalise,
    project_simplex,
    serve_personal,
    similarities,
    train_personal,
)
from emdcfl.methods.shared.vectors import VectorScope, expect


@register
@dataclass(frozen=True)
class PFedGraph:
    r"""PFedGraph.

    Parameters
    ----------
    alpha : float
        How strongly the weights are held at the data shares; the paper uses 0.8.
    mu : float
        Weight of the cosine term; the paper uses 0.01.
    since : "initial" or "round"
        Compare what was learned since θ⁰ (the paper), or in this round (the EMD-CFL authors' public code).
    snap : float or None
        Cosines above it count as 1; the paper's code uses 0.9, the EMD-CFL authors' none.
    vector_scope : "P", "F", "H" or "state"
        What is compared: trainable parameters, all floating state, the head, or the whole state with BatchNorm's counters, which
        drown everything else (the EMD-CFL authors' public code).
    aggregate : "snapshot" or "in-place"
        All averages from the local states, or client after client, each from what those before it have become, so that the result depends
        on the order of the clients (the EMD-CFL authors' public code).
    first_round_term : bool
        Whether the cosine term also acts when a client trains from θ⁰. On in the EMD-CFL authors' public code.
    """

    alpha: float = 0.8
    mu: float = 0.01
    since: Since = "initial"
    snap: float | None = 0.9
    vector_scope: VectorScope = "P"
    aggregate: Aggregate = "snapshot"
    first_round_term: bool = False

    name: ClassVar[str] = "pfedgraph"
    family: ClassVar[Family] = "personal"
    needs_k: ClassVar[bool] = False
    citation: ClassVar[str] = "Ye et al., ICML 2023"
    reference: ClassVar[Mapping[str, Any]] = {
        "since": "round",
        "snap": None,
        "vector_scope": "state",
        "aggregate": "in-place",
        "first_round_term": True,
    }
    State: ClassVar[type] = Personal

    def init(self, fed: Federation, round: Round) -> Personal:
        expect(self.alpha > 0, "alpha", "> 0", self.alpha)
        check_graph(mu=self.mu, snap=self.snap)
        return personal_start(fed)

    def step(self, fed: Federation, state: Personal, round: Round) -> Personal:
        trained = train_personal(fed, state, round, mu=self.mu, first_round_term=self.first_round_term)
        if not trained.rows:
            return state
        s = similarities(fed.layout, state, trained, since=self.since, scope=self.vector_scope, snap=self.snap)
        x = project_simplex((trained.shares + s / (2 * self.alpha)).numpy())
        return personalise(state, trained, torch.from_numpy(x), self.aggregate)

    def serve(self, state: Personal) -> Serving:
        return serve_personal(state)
