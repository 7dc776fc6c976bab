r"""PACFL: cluster clients before training, by the angles between subspaces of their raw data.

Client c stacks the first p left singular vectors of the samples of each class into :math:`U_c`. Clients are as far apart as their closest
vectors, and the closest clusters are merged (plain mean of the merged distances, WPGMA) up to a threshold:

.. math:: A_{ij} = \min_{u\in U_i,\,v\in U_j} \arccos |u^\top v| \;\;\text{(degrees)}, \qquad
          \theta_k \leftarrow \sum_{c\in S_k} n_c\,\theta_c / \sum_{c\in S_k} n_c

Every cluster starts from θ⁰ and runs FedAvg among those who take part. A client first seen later joins the cluster with the
smallest mean angle to its members, or founds one if that exceeds the threshold; no other client moves.

A client sends :math:`U_c`, its state and :math:`n_c`; it learns its cluster's model. Singular vectors of raw samples look like
the samples: of all methods here this one shows the server most. Clients are served their cluster's model; one never seen holds θ⁰.

Vahidian, Morafah, Wang, Kungurtsev, Chen, Shah, Lin. *Efficient Distribution Similarity Identification in Clustered Federated Learning
via Principal Angles between Client Data Subspaces.* AAAI 2023.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from emdcfl.clustering import cut, first_gap
from emdcfl.core.client import NodeNeeds
from emdcfl.core.federation import Failure, Federation, Replies, Round
from emdcfl.methods.base import Clustered, ClusteredMethod, average_sets, register
from emdcfl.methods.shared.subspaces import Flatten, data_subspace, smallest_angle
from emdcfl.methods.shared.vectors import expect, sets_of


@dataclass(frozen=True)
class PACFLState(Clustered):
    """``Clustered``, the angles in degrees (NaN until both were seen), and the bases where somebody may come later."""

    angles: Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    bases: dict[str, Tensor] = field(default_factory=dict)


@register
@dataclass(frozen=True)
class PACFL(ClusteredMethod):
    """PACFL.

    Parameters
    ----------
    threshold : float or "auto"
        Largest angle, in degrees, at which clusters are merged. The EMD-CFL paper tunes it to the true number of clusters: 12 for rotated
        MNIST and CIFAR10, 11 for PACS, 2.5 and 10.5 for backdoor MNIST and CIFAR10. ``"auto"``: below the first merge
        that is 1.3 times or more as far as the one before (``clustering.first_gap``), among all clients seen so far. Clients stay in the
        clusters they were given, so the first round's participants should show it.
    vectors : int
        p, singular vectors per class; the EMD-CFL paper uses 3.
    split : "val" or "train"
        Whose subspaces: validation data as in the EMD-CFL paper, or training data as in PACFL's own.
    flatten : "channel" or "image"
        An image is one column per channel (the EMD-CFL paper's thresholds assume it), or one column. Tables have one column per sample.
    sign : "abs" or "signed"
        Whether u and −u are the same direction. Singular vectors have no sign; the public code minds it all the same.
    """

    threshold: float | Literal["auto"] = "auto"
    vectors: int = 3
    split: Literal["val", "train"] = "val"
    flatten: Flatten = "channel"
    sign: Literal["abs", "signed"] = "abs"

    name: ClassVar[str] = "pacfl"
    node_needs: ClassVar[NodeNeeds] = NodeNeeds(("data_subspace",))
    citation: ClassVar[str] = "Vahidian et al., AAAI 2023"
    original: ClassVar[Mapping[str, Any]] = {"split": "train", "flatten": "image"}
    reference: ClassVar[Mapping[str, Any]] = {"sign": "signed"}
    State: ClassVar[type] = PACFLState

    def init(self, fed: Federation, round: Round) -> PACFLState:
        expect(isinstance(self.threshold, str) or 0 <= self.threshold <= 180, "threshold", "between 0 and 180 degrees", self.threshold)
        expect(self.vectors >= 1, "vectors", "of at least 1", self.vectors)
        C = len(fed.clients)
        return PACFLState(list(fed.clients), fed.initial(), angles=torch.full((C, C), torch.nan, dtype=torch.float64))

    def step(self, fed: Federation, state: PACFLState, round: Round) -> PACFLState:
        new: dict[str, dict[str, Any]] = {c: {} for c in round.participants if c not in state.labels}
        subspaces = fed.run(data_subspace, new, split=self.split, vectors=self.vectors, flatten=self.flatten) if new else Replies()
        _leave_out_other_sizes(fed, subspaces, state.bases)
        state, labels = self._place(state, subspaces.column("basis"))
        if fed.everyone_answers:
            state = replace(state, bases={})
        state = replace(state, labels={c: k for c, k in labels.items() if k < len(state.models)})  # newcomers too train from it
        replies = fed.train({c: state.start(c) for c in labels if c in round.participants})
        replies.failures |= subspaces.failures
        fed.check_quorum(replies, len(round.participants))
        state = replace(state, n={**state.n, **replies.column("n")})
        sets = sets_of(state.clients, labels, max(labels.values()) + 1)
        return average_sets(state, sets, labels, replies.column("theta"), keep=False, members="participants", guard=fed.guard)

    def _place(self, state: PACFLState, new: Mapping[str, Tensor]) -> tuple[PACFLState, dict[str, int]]:
        """Cluster the first clients seen, or place newcomers into what there is; return the angles known now and the labels."""
        bases, angles, where = dict(state.bases), state.angles.clone(), {c: i for i, c in enumerate(state.clients)}
        for c, basis in new.items():
            bases[c] = basis
            for d, other in bases.items():
                angles[where[c], where[d]] = angles[where[d], where[c]] = smallest_angle(basis, other, signed=self.sign == "signed")
        labels, seen = dict(state.labels), [where[c] for c in bases]
        if not new:
            return state, labels
        apart = angles[seen][:, seen].numpy()
        threshold = first_gap(apart, linkage="weighted") if isinstance(self.threshold, str) else self.threshold
        if not labels:
            found = cut(apart, threshold, linkage="weighted")
            labels = {c: int(label) for c, label in zip(new, found, strict=True)}
        for c in (c for c in new if c not in labels):
            labels[c] = _nearest(angles[where[c]], {d: where[d] for d in labels}, labels, threshold)
        return replace(state, angles=angles, bases=bases), labels


def _nearest(angles: Tensor, placed: Mapping[str, int], labels: Mapping[str, int], threshold: float) -> int:
    """The cluster with the smallest mean angle to its members, or a new one if that is above the threshold."""
    clusters = max(labels.values()) + 1
    means = [float(angles[[i for d, i in placed.items() if labels[d] == k]].mean()) for k in range(clusters)]
    best = int(np.argmin(means))
    return best if means[best] <= threshold else clusters


def _leave_out_other_sizes(fed: Federation, replies: Replies, known: Mapping[str, Tensor]) -> None:
    """Leave out empty bases, and those whose number of features is not that of most clients."""
    new = replies.column("basis")
    sizes = Counter(basis.shape[0] for basis in (*known.values(), *new.values()) if basis.shape[1])
    features, times = sizes.most_common(1)[0] if sizes else (0, 0)
    for c, basis in new.items():
        if basis.shape[0] != features or basis.shape[1] == 0:
            text = f"expected a subspace of {features} features as from most clients, got {tuple(basis.shape)}; its data differ in size"
            del replies.valid[c]
            replies.failures[c] = Failure(c, "data_subspace", fed.index, text)
            fed.accuse(c, "data_subspace", text, proven=2 * times > sizes.total() or basis.shape[1] == 0)
