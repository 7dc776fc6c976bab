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

from emdcfl.core.federation import Federation, Round
from emdcfl.methods.base import register
from emdcfl.methods.shared.em import Mixture, MixtureOptions


@register
@dataclass(frozen=True)
class FedEM(MixtureOptions):
    """FedEM; ``MixtureOptions`` describes the options, which it shares with FedRC."""

    name: ClassVar[str] = "fedem"
    citation: ClassVar[str] = "Marfoq et al., NeurIPS 2021"
    original: ClassVar[Mapping[str, Any]] = {"rate": 3.0}
    State: ClassVar[type] = Mixture

    def init(self, fed: Federation, round: Round) -> Mixture:
        """Start K components from K initial models; all weights are uniform."""
        return Mixture(list(fed.clients), self.components(fed, self.name))

    def step(self, fed: Federation, state: Mixture, round: Round) -> Mixture:
        return self.em_round(fed, state, round)[0]
