r"""What pFedGraph and FedSaC share: personal models, the cosines of what clients learned, and averages along a graph.

Every client i has a model of its own. After local training the method turns the cosines :math:`s_{ij}` of the clients' updates into a row
:math:`x_i` of weights on the simplex, and the client receives :math:`\theta_i \leftarrow \sum_j x_{ij}\theta_j`. The graph spans those who
answered in the round; the others keep their model. All local states of a round lie in one fresh ``(C, P)`` matrix, which becomes the
personal models block of columns by block of columns: beside it only the old state's matrix is held.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from emdcfl.core import tasks
from emdcfl.core.client import NodeNeeds, Task
from emdcfl.core.errors import DataError
from emdcfl.core.federation import Federation, Round
from emdcfl.core.params import Layout, Scope, blocks, cosines
from emdcfl.core.schema import Reply
from emdcfl.methods.base import Family, Serving
from emdcfl.methods.shared.vectors import expect, update_gram

Aggregate = Literal["snapshot", "in-place"]


@dataclass(frozen=True)
class PersonalModels:
    """A model for every client."""

    clients: list[str]
    theta0: Tensor
    """(P,): the common initial model θ⁰, which clients hold until they first take part."""
    models: Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    """(C, P): personal models in client order; empty before round 1."""
    batches: dict[str, float] = field(default_factory=dict)
    """Client → batches its personal model has seen (averaged along the graph as the model is), of the clients seen. This is what
    BatchNorm's counters hold, which are outside θ."""
    best: Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    """(C, P): model of each client with the best validation accuracy so far, kept only for ``scored="best-validation"``."""
    best_accuracy: Tensor = field(default_factory=lambda: torch.zeros(0))

    def start(self, client: str) -> Tensor:
        """Return the model a client trains from."""
        return self.models[self.clients.index(client)] if len(self.models) else self.theta0


@dataclass(frozen=True)
class Trained:
    """A round's local states: ``models`` (C, P) in client order; ``rows``, who answered; ``replies``, the rest of their answers."""

    models: Tensor
    rows: list[int]
    replies: list[Reply]

    @property
    def shares(self) -> Tensor:
        r""":math:`p_j = n_j / \sum_j n_j` over those who answered."""
        n = torch.tensor([float(reply["n"]) for reply in self.replies], dtype=torch.float64)
        return n / n.sum()


def project_simplex(v: Any) -> np.ndarray[Any, Any]:
    r"""Project a vector, or each row of a matrix, on the probability simplex.

    .. math:: \arg\min_x \lVert x - v\rVert^2 \quad\text{s.t.}\quad x \ge 0,\ \textstyle\sum_j x_j = 1

    The solution is :math:`x_j = \max(v_j - \theta, 0)` with the one threshold :math:`\theta` for which the entries sum to one (Held, Wolfe
    and Crowder, 1974). The quadratic programs of both methods are such projections.

    Examples
    --------
    >>> project_simplex([0.5, 0.5]), project_simplex([[2.0, 0.0], [0.2, 0.4]])
    (array([0.5, 0.5]), array([[1. , 0. ],
           [0.4, 0.6]]))
    """
    x = np.asarray(v, dtype=np.float64)
    if x.ndim not in (1, 2) or x.shape[-1] == 0 or not np.isfinite(x).all():
        raise DataError(f"expected finite vectors of length >= 1 to project on the simplex, got shape {x.shape}")
    rows = np.atleast_2d(x)
    # A shift leaves the projection as it is, and keeps the sums small.
    rows = rows - rows.max(axis=1, keepdims=True)
    descending = -np.sort(-rows, axis=1)
    counts = np.arange(1, rows.shape[1] + 1)
    thresholds = (np.cumsum(descending, axis=1) - 1.0) / counts
    kept = (descending > thresholds).sum(axis=1)
    theta = np.take_along_axis(thresholds, kept[:, None] - 1, axis=1)
    return np.asarray(np.maximum(rows - theta, 0.0).reshape(x.shape))


def mix_rows(models: Tensor, rows: Sequence[int], x: Tensor, aggregate: Aggregate) -> None:
    r"""Replace the chosen rows by :math:`\theta_i \leftarrow \sum_j x_{ij}\theta_j`, in float64, block of columns by block of columns.

    Parameters
    ----------
    models : (C, P) tensor
        Changed in place.
    rows : which rows, and which row of the (A, A) weights ``x`` belongs to which
    aggregate : "snapshot" or "in-place"
        All averages from the rows as they are, or one after the other, each from what those before it have become.

    Examples
    --------
    >>> theta = torch.tensor([[0.0], [4.0], [8.0]])
    >>> mix_rows(theta, [0, 2], torch.tensor([[0.5, 0.5], [0.25, 0.75]], dtype=torch.float64), "snapshot"); theta.flatten()
    tensor([4., 4., 6.])
    """
    chosen = torch.tensor(list(rows))
    for columns in blocks(models.shape[1], len(rows)):
        part = models[:, columns]
        block = part[chosen].double()
        if aggregate == "snapshot":
            block = x @ block
        else:
            for i in range(len(rows)):
                block[i] = x[i] @ block
        part[chosen] = block.to(models.dtype)


def personalise(state: PersonalModels, trained: Trained, x: Tensor, aggregate: Aggregate) -> PersonalModels:
    """Average along the graph's rows ``x`` (A, A) of those who answered; consumes ``trained.models``."""
    who = [state.clients[i] for i in trained.rows]
    counted = [[state.batches.get(c, 0.0) + reply["steps"]] for c, reply in zip(who, trained.replies, strict=True)]
    batches = torch.tensor(counted, dtype=torch.float64)
    mix_rows(batches, range(len(who)), x, aggregate)
    mix_rows(trained.models, trained.rows, x, aggregate)
    seen = dict(zip(who, batches.flatten().tolist(), strict=True))
    return replace(state, models=trained.models, batches={**state.batches, **seen})


@dataclass(frozen=True)
class GraphOptions:
    """Options and functions that both methods have.

    Parameters
    ----------
    mu : float
        Weight of the cosine term; the papers use 0.01.
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
    scored : "aggregated" or "best-validation"
        The model a client is served and tested with: its last average, or of all it has held, before and after local training, the one with
        the best validation accuracy (the methods' own code). The latter is fine-tuned at home, unlike the models of hard methods.
    """

    mu: float = 0.01
    since: Literal["initial", "round"] = "initial"
    snap: float | None = 0.9
    vector_scope: Scope = "P"
    aggregate: Aggregate = "snapshot"
    first_round_term: bool = False
    scored: Literal["aggregated", "best-validation"] = "aggregated"

    family: ClassVar[Family] = "personal"
    original: ClassVar[Mapping[str, Any]] = {"scored": "best-validation"}
    reference: ClassVar[Mapping[str, Any]] = {
        "since": "round",
        "snap": None,
        "vector_scope": "state",
        "aggregate": "in-place",
        "first_round_term": True,
    }
    node_needs: ClassVar[NodeNeeds] = NodeNeeds(("evaluate",), ("mean",))
    State: ClassVar[type] = PersonalModels

    def init(self, fed: Federation, round: Round) -> PersonalModels:
        """Every client holds θ⁰."""
        expect(self.mu >= 0, "mu", ">= 0", self.mu)
        expect(self.snap is None or -1.0 <= self.snap <= 1.0, "snap", "to be a cosine between -1 and 1, or None", self.snap)
        return PersonalModels(list(fed.clients), fed.initial())

    def step(self, fed: Federation, state: PersonalModels, round: Round) -> PersonalModels:
        """Train, and average along the graph."""
        trained = self.train(fed, state, round)
        x = self.weights(fed.layout, state, trained)
        return personalise(self.with_best_models(fed, state, trained), trained, x, self.aggregate)

    def train(self, fed: Federation, state: PersonalModels, round: Round, *, task: Task = tasks.train, **options: Any) -> Trained:
        r"""Train the participants from their own models with the term :math:`-\mu\cos(P(\theta), P(a_c))` towards them."""
        starts = {c: state.start(c) for c in round.participants}
        models = torch.empty(len(state.clients), state.theta0.shape[0])
        models.copy_(state.models if len(state.models) else state.theta0)
        index = {c: i for i, c in enumerate(state.clients)}
        replies: dict[str, Reply] = {}

        def fold(client: str, reply: Reply) -> None:
            models[index[client]] = reply["theta"]
            replies[client] = {name: value for name, value in reply.items() if name != "theta"}

        terms = {c: {"cosine": {"mu": self.mu}} for c in starts if self.mu and (self.first_round_term or c in state.batches)}
        fed.train(starts, task=task, fold=fold, own=terms, **options)
        return Trained(models, [index[c] for c in replies], list(replies.values()))

    def cosines(self, layout: Layout, state: PersonalModels, trained: Trained) -> Tensor:
        r"""Return :math:`s_{ij} = \cos(\Delta_i, \Delta_j)` of those who answered, as ``since``, ``vector_scope`` and ``snap`` say."""
        who = [state.clients[i] for i in trained.rows]
        origin = state.theta0 if self.since == "initial" else [state.start(c) for c in who]
        before = [state.batches.get(c, 0.0) if self.since == "initial" else 0.0 for c in who]
        steps = [counted + reply["steps"] for counted, reply in zip(before, trained.replies, strict=True)]
        s = cosines(update_gram(layout, [trained.models[i] for i in trained.rows], origin, steps, self.vector_scope))
        return s if self.snap is None else torch.where(s > self.snap, torch.ones_like(s), s)

    def weights(self, layout: Layout, state: PersonalModels, trained: Trained) -> Tensor:
        """Return the graph: in row i the weights :math:`x_i` (A, A) of those who answered."""
        raise NotImplementedError

    def with_best_models(self, fed: Federation, state: PersonalModels, trained: Trained) -> PersonalModels:
        """Return the state with each client's best model so far, where these are wanted; before ``trained.models`` are averaged."""
        if self.scored == "aggregated":
            return state
        C = len(state.clients)
        best = state.best.clone() if len(state.best) else state.theta0.repeat(C, 1)
        accuracy = state.best_accuracy.clone() if len(state.best) else torch.full((C,), -1.0)
        held = {state.clients[i]: torch.stack([state.start(state.clients[i]), trained.models[i]]) for i in trained.rows}
        scores = fed.run(
            tasks.evaluate, {c: {"models": models} for c, models in held.items()}, dims={"K": 2}, split="val", reduction="mean"
        )
        for i in trained.rows:
            c = state.clients[i]
            for model, reached in zip(held[c], scores[c]["accuracy"], strict=True) if c in scores.valid else ():
                if reached > accuracy[i]:
                    best[i], accuracy[i] = model, reached
        return replace(state, best=best, best_accuracy=accuracy)

    def serve(self, state: PersonalModels) -> Serving:
        """Every client is served its personal model, θ⁰ before it is first seen."""
        C = len(state.clients)
        if len(state.best):
            return Serving(state.best, torch.eye(C))
        return Serving(state.models, torch.eye(C)) if len(state.models) else Serving(state.theta0[None], torch.ones(C, 1))
