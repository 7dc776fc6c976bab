r"""FedSaC: pFedGraph that also looks for clients who know something else.

Similar models, different feature subspaces: client i sends the first r principal directions :math:`B_i` of its train embeddings under its
trained model. With the principal angles :math:`\varphi` between two subspaces,

.. math:: c_{ij} = \cos\Bigl(\tfrac1r\sum_{l=1}^r \varphi_l(B_i, B_j)\Bigr), \qquad
          \cos\varphi_l = \sigma_l(B_i B_j^\top)

.. math:: x_i = \arg\min_{x\in\Delta}\ \lVert x - p\rVert^2 + (\lambda_1 c_i - \lambda_2 s_i)^\top x
          = \mathrm{Proj}_\Delta\Bigl(p + \frac{\lambda_2 s_i - \lambda_1 c_i}{2}\Bigr), \qquad a_i \leftarrow \sum_j x_{ij}\theta_j

Local training, the cosines :math:`s`, the data shares p and who is averaged are pFedGraph's.

A client sends its state, :math:`n_c` and r directions of its embedding space, which tell the server along which features its data vary (not
projected, unlike EMD-CFL's embeddings); it learns its own average only. It is served that personal model, θ⁰ before its first round.

Yan, Cui, Wuerkaixi, Zhang, Han, Niu, Sugiyama, Zhang. *Balancing Similarity and Complementarity for Federated Learning.* ICML 2024.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from emdcfl.core.client import Client, NodeNeeds, Stages, staged_task
from emdcfl.core.errors import ClientError
from emdcfl.core.federation import Federation, Round
from emdcfl.core.params import Layout
from emdcfl.core.schema import Field, Reply
from emdcfl.core.tasks import TRAINED, Fit, Training
from emdcfl.methods.base import register
from emdcfl.methods.shared.graph import GraphOptions, PersonalModels, Trained, project_simplex
from emdcfl.methods.shared.subspaces import MAX_ENTRY, Angles, complementarity, pca_basis
from emdcfl.methods.shared.vectors import expect


@staged_task(phase="train", returns={**TRAINED, "basis": Field(torch.float32, (None, "d"), low=-MAX_ENTRY, high=MAX_ENTRY)})
def train_and_basis(
    client: Client,
    *,
    theta: Tensor,
    training: Mapping[str, Any],
    components: int,
    mode: Literal["eval", "train"],
    cosine: Mapping[str, Any] | None = None,
) -> Stages:
    """Train as ``train`` does, and add the first principal directions of the train embeddings under the new state."""
    (reply,) = yield [Fit(theta, Training.of(training), cosine=cosine)]
    everything = torch.arange(reply["n"], device=client.network.device)
    return {**reply, "basis": pca_basis(client.embeddings(reply["theta"], "train", everything, mode=mode), components)}


@register
@dataclass(frozen=True)
class FedSaC(GraphOptions):
    r"""FedSaC; ``GraphOptions`` describes the options that it shares with pFedGraph.

    Parameters
    ----------
    lambda1 : float
        :math:`\lambda_1`, the wish for other subspaces. The authors' notes use 0.9 (0.5 where there is little to complement).
    lambda2 : float
        :math:`\lambda_2`, the wish for similar models. The authors' notes use 1.4 (1.6 with 0.5).
    components : int
        Principal directions r a client sends; the paper uses 3.
    angles : "principal" or "greedy"
        Principal angles, or signed angles between directions paired off greedily, in which a flipped direction counts as π (the method's
        code and the EMD-CFL authors').
    embedding_mode : "eval" or "train"
        Mode of the network while embedding. ``"train"`` (batch statistics, dropout) is what the EMD-CFL authors' public code does.
    """

    lambda1: float = 0.9
    lambda2: float = 1.4
    components: int = 3
    angles: Angles = "principal"
    embedding_mode: Literal["eval", "train"] = "eval"

    name: ClassVar[str] = "fedsac"
    node_needs: ClassVar[NodeNeeds] = NodeNeeds(("train_and_basis", "evaluate"), ("mean",))
    citation: ClassVar[str] = "Yan et al., ICML 2024"
    original: ClassVar[Mapping[str, Any]] = {**GraphOptions.original, "angles": "greedy"}
    reference: ClassVar[Mapping[str, Any]] = {**GraphOptions.reference, "mu": 1.0, "angles": "greedy", "embedding_mode": "train"}

    def init(self, fed: Federation, round: Round) -> PersonalModels:
        expect(self.components >= 1, "components", ">= 1", self.components)
        return super().init(fed, round)

    def train(self, fed: Federation, state: PersonalModels, round: Round, **options: Any) -> Trained:
        def verify(client: str, reply: Reply) -> None:
            if len(reply["basis"]) > self.components:
                raise ClientError(f"expected at most {self.components} principal directions, got {len(reply['basis'])}")

        asked: dict[str, Any] = {"verify": verify, "task": train_and_basis, "components": self.components, "mode": self.embedding_mode}
        return super().train(fed, state, round, **asked, **options)

    def likeness(self, trained: Trained) -> Tensor:
        """Return the ``complementarity`` of those who answered."""
        return complementarity([reply["basis"] for reply in trained.replies], self.angles)

    def weights(self, layout: Layout, state: PersonalModels, trained: Trained) -> Tensor:
        s, c = self.cosines(layout, state, trained), self.likeness(trained)
        return torch.from_numpy(project_simplex((trained.shares + (self.lambda2 * s - self.lambda1 * c) / 2).numpy()))
