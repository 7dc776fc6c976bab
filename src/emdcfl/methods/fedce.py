r"""FedCE: clusters average all clients, by how well each client has fitted them so far.

A running score :math:`h_{ck}` (0 at first) remembers how close cluster k came to client c's best cluster. Each round, with mean
validation losses :math:`L_k` and the vectors :math:`b_k` of their batch means:

.. math:: k^* = \arg\min_k L_k, \qquad h_{ck^*} \mathrel{+}= 1, \qquad
          h_{ck} \mathrel{+}= \exp(-\delta\,\|b_{k^*} - b_k\|_2) \;\; (k \ne k^*)

.. math:: \theta_c \leftarrow \mathrm{Train}_c(\theta_{k^*}), \qquad
          \theta_k \leftarrow \sum_c \alpha_{ck}\,\theta_c, \quad \alpha_{ck} = e^{h_{ck}} / \sum_i e^{h_{ik}}

The scores grow without bound, so clusters mix early and harden late. The sum runs over the round's participants; train sizes play no part.
A client sends a table of losses, its state and :math:`n_c`; it learns all K cluster models. It is served the cluster it chose in its
last round, after that round's averaging, which makes a membership although the averages are soft; one never seen holds θ⁰.

Cai, Chen, Cao, He, Li. *FedCE: Personalized Federated Learning Method based on Clustering Ensembles.* ACM Multimedia 2023. Its text
was not at hand: this follows the EMD-CFL authors' reading of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from emdcfl.core.client import NodeNeeds
from emdcfl.core.federation import Federation, Round
from emdcfl.methods.base import Clustered, ClusteredMethod, Family, initial_models, register
from emdcfl.methods.shared.vectors import expect, sets_of
from emdcfl.methods.shared.votes import batch_sizes
from emdcfl.trust import Guard


@dataclass(frozen=True)
class FedCEState(Clustered):
    """``Clustered``, and the scores h of the clients seen, one ``(K,)`` row each."""

    h: dict[str, Tensor] = field(default_factory=dict)


@register
@dataclass(frozen=True)
class FedCE(ClusteredMethod):
    r"""FedCE.

    Parameters
    ----------
    k : int or None
        Number of clusters K; the scenario's if ``None``.
    delta : float
        :math:`\delta`, how fast a cluster's credit falls with its loss distance; 0.5 in the EMD-CFL paper.
    loss_mean : "sample" or "batch"
        :math:`L_k` as the mean over samples, or the mean of batch means as in the public code.
    increment : "once" or "running"
        Credit the best cluster once; or, as the public code does, the best so far after each candidate: K times a round, the first
        cluster always among them.
    """

    k: int | None = None
    delta: float = 0.5
    loss_mean: Literal["sample", "batch"] = "sample"
    increment: Literal["once", "running"] = "once"

    name: ClassVar[str] = "fedce"
    node_needs: ClassVar[NodeNeeds] = NodeNeeds(("evaluate",), ("per_batch",))
    family: ClassVar[Family] = "soft"
    citation: ClassVar[str] = "Cai et al., ACM Multimedia 2023"
    reference: ClassVar[Mapping[str, Any]] = {"loss_mean": "batch", "increment": "running"}
    State: ClassVar[type] = FedCEState

    def init(self, fed: Federation, round: Round) -> FedCEState:
        expect(self.delta >= 0, "delta", "of at least 0", self.delta)
        return FedCEState(list(fed.clients), fed.initial(), models=initial_models(self.k, fed, self.name))

    def step(self, fed: Federation, state: FedCEState, round: Round) -> FedCEState:
        scores = fed.evaluate(round.participants, state.models, reduction="per_batch")
        credits = {c: self.credit(reply["table"], reply["n"]) for c, reply in scores.valid.items()}
        replies = fed.train({c: state.models[best] for c, (best, _) in credits.items()})
        replies.failures |= scores.failures
        fed.check_quorum(replies, len(round.participants))

        h = {**state.h, **{c: state.h.get(c, 0) + credits[c][1] for c in replies.clients}}
        labels = {**state.labels, **{c: credits[c][0] for c in replies.clients}}
        sets = sets_of(state.clients, labels, len(state.models))
        starts = {c: state.models[credits[c][0]] for c in replies.clients}
        local = fed.guard.clip_updates(replies.column("theta"), starts, [replies.clients])
        models = self._ensembles(local, h, fed.guard)
        return replace(state, sets=sets, labels=labels, models=models, n={**state.n, **replies.column("n")}, h=h)

    def credit(self, table: Tensor, n: int) -> tuple[int, Tensor]:
        """Return k* and what the round adds to h, from the ``(K, batches)`` table of batch-mean losses over n samples."""
        b = table.double()
        L = (b @ (batch_sizes(n) / n) if self.loss_mean == "sample" else b.mean(1)).numpy()
        best = int(np.argmin(L))
        gained = torch.exp(-self.delta * (b[best] - b).norm(dim=1))
        gained[best] = 0.0
        if self.increment == "once":
            gained[best] = 1.0
        else:
            for k in range(len(L)):
                gained[int(np.argmin(L[: k + 1]))] += 1.0
        return best, gained

    def _ensembles(self, local: Mapping[str, Tensor], h: Mapping[str, Tensor], guard: Guard) -> Tensor:
        r"""Return :math:`\theta_k = \sum_c \alpha_{ck}\theta_c` for every k."""
        H = torch.stack([h[c] for c in local])
        alpha = torch.exp(H - H.max(dim=0).values)  # the largest is 1 whatever h has grown to
        thetas = list(local.values())
        models = []
        for column in alpha.T.tolist():
            members = [(theta, a) for theta, a in zip(thetas, column, strict=True) if a > 0]
            models.append(guard.average([theta for theta, _ in members], [a for _, a in members]))
        return torch.stack(models)
