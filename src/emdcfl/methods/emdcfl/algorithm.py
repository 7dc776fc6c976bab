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
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np

from emdcfl.clustering import components, joined, links, neighbourhoods
from emdcfl.core.errors import ConfigError
from emdcfl.core.federation import Federation, Round
from emdcfl.methods.base import Family, Serving, average_sets, register, serve_clusters
from emdcfl.methods.emdcfl.client import project
from emdcfl.methods.emdcfl.comparison import comparable
from emdcfl.methods.emdcfl.pairing import EMDCFLState, compare, empty_state, warn_of_doubts
from emdcfl.methods.emdcfl.privacy_budget import check_noise, noise_epsilon, say_budget
from emdcfl.methods.emdcfl.problems import validation_sizes
from emdcfl.privacy.noise import DELTA
from emdcfl.transport import warm_up

Sets = list[list[str]]


@register
@dataclass(frozen=True)
class EMDCFL:
    r"""EMD-CFL.

    Parameters
    ----------
    tolerance : float or "auto"
        :math:`\epsilon`. ``"auto"``: each client calibrates its own at home (``transport.calibration``); clients with too few validation
        samples for that (about 10 to 25, by the number of clients) are compared with nobody. A number holds for all pairs; the paper keeps
        0.025 for most experiments, which is ``tolerance=0.025``.
    alpha : float
        Family-wise error of ``tolerance="auto"`` over all ordered pairs.
    match_classes : bool
        With ``tolerance="auto"``: partners draw their samples with the class counts of the row client's validation sample, which it
        seals for them, so that the luck of the draw of classes does not count (``transport.calibration``). W then compares what the
        classes look like, not how frequent they are. Not with projections per pair, label-aware costs, deposited samples,
        repeated measurements or privacy noise: there samples stay as drawn.
    average_blocks : bool, optional
        With ``tolerance="auto"``: average W over as many equal blocks of the partner's data, train and validation, as ``max_samples``
        hold. More power for small clients. On where classes are matched, unless switched off. Else it is only honest where validation
        samples are plain random draws: a split stratified by class is less noisy than a random block, so that partners of the same law
        look farther away than they are.
    projection_ratio : float
        Width of the projection over the embedding width; the paper uses 0.9.
    projection : "row", "pair" or "fresh"
        One R per row client (its noise cancels), one per pair (the paper's letter), or one per ordered pair with a square one for τ
        (the authors' public code).
    max_samples : int
        Most samples a side in a transport problem; the paper uses 512.
    min_validation : int
        Clients with fewer validation samples do not lower the common sample size; they are compared at their own size, with a warning.
        A value below what ``tolerance="auto"`` asks for lowers that too.
    cost : "cosine", "euclidean" or "label-aware"
        Ground cost. ``"label-aware"`` adds ``label_weight`` where labels differ: it sees concept shift and shows the labels to the server.
    label_weight : float
        What a different label costs, in units of the cosine distance.
    solver : "exact" or "sinkhorn"
    sinkhorn_reg : float
        Entropic regularisation; the paper uses 0.1.
    pairing : "all" or "representatives"
        Compare every pair, or clients with one member per known cluster, with spot checks: O(C·K) exchanges, the same clusters
        where the links are a union of cliques (``representatives.py``).
    exchange : "peer" or "server-samples"
        Models travel to the partners, or every client deposits a raw sample with the server once, which embeds it under each model: O(C)
        models on the wire instead of O(C²), at the price that the server sees those samples and unprojected embeddings.
    joining : "regroup" or "keep"
        When clients appear in later rounds: neighbourhoods of all links anew (the paper), or clusters stay and a newcomer joins the one
        whose compared members it is all linked with, or founds one.
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
    privacy_epsilon, privacy_delta : float
        :math:`(\varepsilon, \delta)` per record and per release of Gaussian noise on the projected embeddings, ``[privacy]`` in a config
        (``disclosure.py``, ``docs/privacy.md``). ``None``: no noise.
    """

    tolerance: float | Literal["auto"] = "auto"
    alpha: float = 0.005
    match_classes: bool = True
    average_blocks: bool | None = None
    projection_ratio: float = 0.9
    projection: Literal["row", "pair", "fresh"] = "row"
    max_samples: int = 512
    min_validation: int = 64
    cost: Literal["cosine", "euclidean", "label-aware"] = "cosine"
    label_weight: float = 1.0
    solver: Literal["exact", "sinkhorn"] = "exact"
    sinkhorn_reg: float = 0.1
    pairing: Literal["all", "representatives"] = "all"
    exchange: Literal["peer", "server-samples"] = "peer"
    joining: Literal["regroup", "keep"] = "regroup"
    grouping: Literal["neighbourhoods", "components"] = "neighbourhoods"
    force_diagonal: bool = True
    recompute: Literal["once", "every-round"] = "once"
    aggregate: Literal["latest", "participants"] = "latest"
    distances: Literal["needed", "all"] = "needed"
    embedding_mode: Literal["eval", "train"] = "eval"
    privacy_epsilon: float | None = None
    privacy_delta: float = DELTA

    name: ClassVar[str] = "emdcfl"
    family: ClassVar[Family] = "hard"
    needs_k: ClassVar[bool] = False
    citation: ClassVar[str] = "Zhang, Williams, Toni, 2025"
    reference: ClassVar[Mapping[str, Any]] = {
        "tolerance": 0.025,
        "projection": "fresh",
        "force_diagonal": False,
        "recompute": "every-round",
        "embedding_mode": "train",
    }
    State: ClassVar[type] = EMDCFLState

    def init(self, fed: Federation, round: Round) -> EMDCFLState:
        """Algorithm 1, lines 2–3: everybody holds θ⁰ and is alone; W is empty."""
        self._check()
        warm_up(fed.device if fed.device.type == "cuda" else None)
        fed.expect(project)
        about = comparable(self, fed, fed.clients, say=True)  # a site without validation data is told before anybody trains
        validation_sizes({c: reply["m"] for c, reply in about.items()}, cap=self.max_samples, at_least=self.min_validation)
        return replace(empty_state(fed), shrunk=say_budget(self, fed))

    def step(self, fed: Federation, state: EMDCFLState, round: Round) -> EMDCFLState:
        """Algorithm 1, lines 5–21."""
        # Lines 6–9: ClientUpdate.
        replies = fed.train({c: state.start(c) for c in round.participants})
        local = {**state.latest, **replies.column("theta")}
        state = replace(state, n={**state.n, **replies.column("n")})

        # Lines 10–19: every pair of known clients whose W is still unset, in both directions.
        before, state = state, compare(self, fed, state, local, round)

        # Line 20: Neighbourhoods(M).
        sets, labels = self._groups(state)
        if self.tolerance == "auto" and state is not before:
            warn_of_doubts(state, labels)

        # Line 21: AggregateModels.
        keep = not fed.everyone_answers
        return average_sets(state, sets, labels, replies.column("theta"), keep=keep, members=self.aggregate, guard=fed.guard)

    def serve(self, state: EMDCFLState) -> Serving:
        """Serve every client its cluster's model."""
        return serve_clusters(state, state.distances())

    @property
    def several_blocks(self) -> bool:
        """Whether W is a mean over blocks. Not if pairs are measured again: by then the models have seen the partners' train data."""
        wanted = self.matched if self.average_blocks is None else self.average_blocks
        return self.tolerance == "auto" and wanted and self.recompute == "once"

    @property
    def matched(self) -> bool:
        """Whether partners draw samples with a row client's class counts."""
        return self.tolerance == "auto" and self.match_classes and not self.unmatched

    @property
    def plain(self) -> bool:
        """Whether distances are the paper's, so that its tolerance means something: no labels, no noise, cosines."""
        return self.cost == "cosine" and noise_epsilon(self) is None

    @property
    def unmatched(self) -> list[str]:
        """Settings with which classes are not matched: they, or the labels of samples, would be shown, or models have seen the data."""
        against = {
            f"projection = {self.projection!r}": self.projection != "row",
            f"cost = {self.cost!r}": self.cost == "label-aware",
            f"exchange = {self.exchange!r}": self.exchange != "peer",
            f"recompute = {self.recompute!r}": self.recompute != "once",
            "privacy noise": noise_epsilon(self) is not None,
        }
        return [setting for setting, holds in against.items() if holds]

    def _groups(self, state: EMDCFLState) -> tuple[Sets, dict[str, int]]:
        """From links to the members each cluster averages over, and to each client's cluster."""
        seen = [i for i, c in enumerate(state.clients) if c in state.n]
        W = state.W[seen][:, seen].numpy()
        M = links(W, state.epsilon[seen][:, seen].numpy(), force_diagonal=self.force_diagonal)
        names = [state.clients[i] for i in seen]
        if self.joining == "keep" and state.labels:
            found, members = joined(np.where(np.isnan(W), np.nan, M), [state.labels.get(c, -1) for c in names])
            before = [*state.sets, *([] for _ in range(len(members) - len(state.sets)))]
            sets = [[*old, *(names[j] for j in new if names[j] not in old)] for old, new in zip(before, members, strict=True)]
        else:
            found, members = (neighbourhoods if self.grouping == "neighbourhoods" else components)(M)
            sets = [[names[j] for j in s] for s in members]
        return sets, {c: int(label) for c, label in zip(names, found, strict=True)}

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
            ("exchange", self.exchange, self.exchange == "peer" or self.embedding_mode == "eval", "'peer' with embedding_mode 'train'"),
            (
                "pairing",
                self.pairing,
                self.pairing == "all" or (self.force_diagonal and self.recompute == "once"),
                "'all' where the diagonal is not forced or pairs are measured again",
            ),
        ]
        for name, got, fine, expected in limits:
            if not fine:
                raise ConfigError(f"expected method.{name} {expected}, got {got}")
        check_noise(self)
