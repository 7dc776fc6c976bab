r"""FedEM: every client's data are a mixture of K distributions that all clients share.

Expectation–maximisation over per-sample responsibilities. In a round, client c with weights :math:`\pi_c \in \Delta^K` does

.. math:: q_{ks} \propto \pi_{ck}\, e^{-\ell(\theta_k; x_s, y_s)}, \qquad \pi_{ck} \leftarrow \tfrac1{n_c}\sum_s q_{ks}, \qquad
          \theta_{ck} \leftarrow \mathrm{Train}_c(\theta_k)\ \text{ with loss }\ \tfrac1{|b|}\sum_{s\in b} q_{ks}\,\ell(w; x_s, y_s)

and the server averages component by component over all of them, :math:`\theta_k \leftarrow \sum_c n_c\theta_{ck} / \sum_c n_c`: the
responsibilities act through the loss alone. With K = 1 it is FedAvg. Local work is K times FedAvg's.

A client sends K states, :math:`n_c` and :math:`\pi_c` (how much of each distribution it holds; responsibilities stay with the client) and
learns the K components. It is served the mixture :math:`p(y|x) = \sum_k \pi_{ck}\,\mathrm{softmax}(f_{\theta_k}(x))`; one never seen
has uniform weights.

Marfoq, Neglia, Bellet, Kameni, Vidal. *Federated Multi-Task Learning under a Mixture of Distributions.* NeurIPS 2021.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from emdcfl.core.client import NodeNeeds
from emdcfl.core.federation import Federation, Round
from emdcfl.methods.base import Family, Serving, clusters_wanted, register
from emdcfl.methods.shared.em import Mixture, MixtureEval, Rate, expect_rate, serve_mixture, step_mixture


@register
@dataclass(frozen=True)
class FedEM:
    """FedEM.

    Parameters
    ----------
    k : int or None
        Number of components K; the scenario's by default. The paper uses 3.
    mixture_eval : "mixture" or "last-component"
        Serve the mixture of the K averaged components (the paper), or the K-th component alone, as the client itself last trained
        it and before any averaging (the EMD-CFL authors' public code).
    rate : float or "times-k"
        Learning rate of the components, in rates of the run; ``"times-k"``: K. The authors' commands train three components, and
        four, at 0.03, where FedAvg's are trained at 0.01.
    """

    k: int | None = None
    mixture_eval: MixtureEval = "mixture"
    rate: Rate = 1.0

    name: ClassVar[str] = "fedem"
    node_needs: ClassVar[NodeNeeds] = NodeNeeds(("em_step",))
    family: ClassVar[Family] = "soft"
    citation: ClassVar[str] = "Marfoq et al., NeurIPS 2021"
    original: ClassVar[Mapping[str, Any]] = {"rate": 3.0}
    reference: ClassVar[Mapping[str, Any]] = {"mixture_eval": "last-component"}
    State: ClassVar[type] = Mixture

    def init(self, fed: Federation, round: Round) -> Mixture:
        """Start K components from K initial models; all weights are uniform."""
        expect_rate(self.rate)
        K = clusters_wanted(self.k, fed, self.name)
        return Mixture(list(fed.clients), torch.stack([fed.initial(k) for k in range(K)]))

    def step(self, fed: Federation, state: Mixture, round: Round) -> Mixture:
        return step_mixture(fed, state, round, keep_last=self.mixture_eval == "last-component", rate=self.rate)[0]

    def serve(self, state: Mixture) -> Serving:
        return serve_mixture(state, self.mixture_eval)
