r"""pFedGraph: a model for every client, averaged with weights the server learns from similarity and data size.

Each client trains its own model with a term that keeps its direction. The server compares what the clients have learned since θ⁰ and
chooses, for every client i, weights on the simplex that lean towards similar clients and stay near the data shares p:

.. math:: \theta_i \leftarrow \mathrm{Train}_i(a_i)\ \text{ with loss }\ \ell(w) - \mu\cos(P(w), P(a_i)), \qquad
          s_{ij} = \cos\bigl(P(\theta_i) - P(\theta^0),\ P(\theta_j) - P(\theta^0)\bigr)

.. math:: x_i = \arg\min_{x\in\Delta}\ \alpha\lVert x - p\rVert^2 - s_i^\top x
          = \mathrm{Proj}_\Delta\Bigl(p + \frac{s_i}{2\alpha}\Bigr), \qquad a_i \leftarrow \sum_j x_{ij}\theta_j

The closed form is a sort, no solver. The term is left out the first time a client takes part: its model is still θ⁰. (The method's code
adds it with the opposite sign, which pushes the model away.) Identical updates give :math:`x_i = p`, which is FedAvg. In a round the graph
spans those who answered; the others keep their model.

A client sends its state and :math:`n_c`; it learns its own average only. It is served that personal model, θ⁰ before its first round.

Ye, Ni, Wu, Chen, Wang. *Personalized Federated Learning with Inferred Collaboration Graphs.* ICML 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from emdcfl.core.federation import Federation, Round
from emdcfl.core.params import Layout
from emdcfl.methods.base import register
from emdcfl.methods.shared.graph import GraphOptions, PersonalModels, Trained, project_simplex
from emdcfl.methods.shared.vectors import expect


@register
@dataclass(frozen=True)
class PFedGraph(GraphOptions):
    """PFedGraph; ``GraphOptions`` describes the options that it shares with FedSaC.

    Parameters
    ----------
    alpha : float
        How strongly the weights are held at the data shares; the paper uses 0.8.
    """

    alpha: float = 0.8

    name: ClassVar[str] = "pfedgraph"
    citation: ClassVar[str] = "Ye et al., ICML 2023"

    def init(self, fed: Federation, round: Round) -> PersonalModels:
        expect(self.alpha > 0, "alpha", "> 0", self.alpha)
        return super().init(fed, round)

    def weights(self, layout: Layout, state: PersonalModels, trained: Trained) -> Tensor:
        s = self.cosines(layout, state, trained)
        return torch.from_numpy(project_simplex((trained.shares + s / (2 * self.alpha)).numpy()))
