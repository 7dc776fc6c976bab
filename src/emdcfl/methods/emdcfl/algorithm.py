r"""EMD-CFL: find the groups in one shot from the transport distance between embedding distributions.

After its first local training, every client c compares its own train sample with each partner's sample of unseen data, both
embedded by c's model :math:`g_{\omega_c}` and projected by a random matrix R:

.. math:: W[c,c'] = W_1\bigl(Z_{c|c}R,\; Z_{c'|c}R\bigr) - \tau_c, \qquad
          \tau_c = W_1\bigl(Z_{c|c}R,\; Z^{val}_{c|c}R\bigr)

:math:`\tau_c` is how far the client's *own* unseen data lie, so W is what the partner's data add to that. Two clients are linked if both
directions stay under the tolerance; clients with the same neighbourhood form a cluster, and every later round is FedAvg inside clusters:

.. math:: M[c,c'] = 1\{W[c,c'] < \epsilon \wedge W[c',c] < \epsilon\}, \qquad
          \theta_k = \sum_{c\in S_k} n_c\theta_c \big/ \sum_{c\in S_k} n_c

With ``grouping="benefit"``, the default for data of one's own, W only proposes groups, and validation losses decide (``benefit.py``).

A client sends its state, :math:`n_c`, :math:`\tau_c` with its variance, and projected embeddings; it learns its cluster's model and,
through the server, the partners' embedding models (never their heads). The server learns no R and no raw embedding. Clients are
served their cluster's model; one never seen holds θ⁰.

Zhang, Williams, Toni. *Clustered Federated Learning via Embedding Distributions.* 2025.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from emdcfl.clustering import links, neighbourhoods
from emdcfl.core.client import NodeNeeds
from emdcfl.core.federation import Federation, Round
from emdcfl.methods.base import Family, Serving, average_sets, register, serve_clusters
from emdcfl.methods.emdcfl.benefit import regroup
from emdcfl.methods.emdcfl.client.tasks import project
from emdcfl.methods.emdcfl.comparison import comparable
from emdcfl.methods.emdcfl.pairing import EMDCFLState, compare, empty_state, keep_clusters
from emdcfl.methods.emdcfl.placing import place, unplaced
from emdcfl.methods.emdcfl.privacy_budget import log_budget
from emdcfl.methods.emdcfl.problems import validation_sizes
from emdcfl.methods.emdcfl.settings import PAPER_TOLERANCE, Options
from emdcfl.methods.emdcfl.tolerance import warn_of_doubts
from emdcfl.transport import warm_up


@register
@dataclass(frozen=True)
class EMDCFL(Options):
    """EMD-CFL, Algorithm 1 of the paper; ``settings.Options`` describes its options.

    Examples
    --------
    >>> EMDCFL(tolerance=0.025).projection_ratio
    0.9
    """

    name: ClassVar[str] = "emdcfl"
    node_needs: ClassVar[NodeNeeds] = NodeNeeds(("evaluate", "reference", "recalibrate", "project", "loss_moments"), ("mean",))
    family: ClassVar[Family] = "hard"
    citation: ClassVar[str] = "Zhang, Williams, Toni, 2025"
    original: ClassVar[Mapping[str, Any]] = {"tolerance": PAPER_TOLERANCE, "projection": "paper"}
    reference: ClassVar[Mapping[str, Any]] = {
        "tolerance": PAPER_TOLERANCE,
        "projection": "fresh",
        "force_diagonal": False,
        "recompute": "if-partial",
        "embedding_mode": "train",
    }
    State: ClassVar[type] = EMDCFLState

    def init(self, fed: Federation, round: Round) -> EMDCFLState:
        """Lines 2–3: every client holds θ⁰ and is a cluster of its own; W is empty."""
        self.check()
        warm_up()
        fed.expect(project)
        about = comparable(self, fed, fed.clients, warn=True)  # a site without validation data is named before anybody trains
        validation_sizes({c: reply["m"] for c, reply in about.items()}, cap=self.max_samples, at_least=self.min_validation)
        by_rows = self.by_benefit and not self.all_pairs(len(fed.clients))
        return replace(empty_state(fed, by_rows=by_rows), noise_factor=log_budget(self, fed))

    def step(self, fed: Federation, state: EMDCFLState, round: Round) -> EMDCFLState:
        """Lines 5–21: one round."""
        # Lines 6–9: every participant trains from its model (ClientUpdate) and sends θ_c.
        replies = fed.train({c: state.start(c) for c in round.participants})
        local = {**state.latest, **replies.column("theta")}
        state = replace(state, n={**state.n, **replies.column("n")})

        # Lines 10–16: the clients c, c' of every pair whose W is unset agree on R, exchange ω_c and ω_c', and send τ, Z_{c|c}R and
        # Z_{c'|c}R. The server sets W[c,c'] = W_1(Z_{c|c}R, Z_{c'|c}R) − τ_c, in both directions.
        before, state = state, compare(self, fed, state, local, round)

        if self.by_benefit:  # not the paper's: validation losses decide instead of ε
            with fed.clock("decide"):
                sets, labels, splits = regroup(self, fed, state, replies.column("theta"), round)
            state = replace(state, splits=splits)
        else:
            sets, labels = self._linked(fed, state, local)
        if self.calibrated and state is not before:
            warn_of_doubts(state.distances(), state.clients, labels)

        # Line 21: AggregateModels, θ_k = Σ n_c θ_c / Σ n_c over c in S_k.
        keep = not fed.everyone_answers
        return average_sets(state, sets, labels, replies.column("theta"), keep=keep, members=self.aggregate, guard=fed.guard)

    def _linked(self, fed: Federation, state: EMDCFLState, local: Mapping[str, Tensor]) -> tuple[list[list[str]], dict[str, int]]:
        """Lines 17–20: who is linked with whom, and so which sets train together."""
        # Line 17: M[c,c'] = 1{W[c,c'] < ε and W[c',c] < ε}, among the clients seen so far.
        seen = [i for i, c in enumerate(state.clients) if c in state.n]
        W, epsilon = (matrix[seen][:, seen].numpy() for matrix in (state.W, state.epsilon))
        M = links(W, epsilon, force_diagonal=self.force_diagonal)
        clients = [state.clients[i] for i in seen]
        who, M = unplaced(self, fed, clients, W, M)

        # Line 20: S_1, …, S_K = Neighbourhoods(M).
        if self.joining == "keep" and state.labels:
            return keep_clusters(state, clients, W, M)
        found, members = neighbourhoods(M)
        sets = [[clients[i] for i in S] for S in members]
        labels = {c: int(k) for c, k in zip(clients, found, strict=True)}
        return place(fed, state, local, sets, labels, who)

    def serve(self, state: EMDCFLState) -> Serving:
        """Output: every client is served its cluster's model."""
        return serve_clusters(state, state.distances())
