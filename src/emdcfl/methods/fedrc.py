r"""FedRC: FedEM whose responsibilities are corrected by how often a component sees each label.

A component that explains a label only because it has seen much of it gets no credit for it, so that components separate what
clients *mean* by a label and not which labels or looks they have:

.. math:: q_{ks} \propto \pi_{ck}\,\frac{e^{-\ell(\theta_k; x_s, y_s)}}{\rho_k(y_s)}, \qquad \pi_{ck} \leftarrow \tfrac1{n_c}\sum_s q_{ks},
          \qquad Q_{ck}(y) = \sum_{s:\,y_s = y} q_{ks}

.. math:: \theta_k \leftarrow \frac{\sum_c n_c\theta_{ck}}{\sum_c n_c}, \qquad \rho_k(y) \propto \max\Bigl(\sum_c Q_{ck}(y),\ 10^{-8}\Bigr),
          \quad \sum_y \rho_k(y) = 1

The components are trained as in FedEM, and :math:`\rho` counts from the round after; until then it is 1 and the first round is FedEM's.
Where clients miss rounds, the sum runs over the last label mass of all clients seen.

A client sends what it sends in FedEM and its label mass :math:`Q_c`, whose sum over k tells the server how many samples of each label
it has; it learns the K components and :math:`\rho`. It is served the mixture of FedEM.

Guo, Tang, Lin. *FedRC: Tackling Diverse Distribution Shifts Challenge in Federated Learning by Robust Clustering.* ICML 2024.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from emdcfl.core.federation import Federation, Round
from emdcfl.methods.base import register
from emdcfl.methods.shared.em import Mixture, MixtureOptions
from emdcfl.methods.shared.vectors import expect


@dataclass(frozen=True)
class FedRCState(Mixture):
    r"""``Mixture``, the label marginals :math:`\rho` (K, classes), and by client seen its label mass :math:`Q_c` (K, classes)."""

    rho: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.float64))
    mass: dict[str, Tensor] = field(default_factory=dict)


def marginals(masses: Iterable[Tensor], floor: float) -> Tensor:
    r"""Return :math:`\rho_k(y) = \max(\sum_c Q_{ck}(y), \text{floor})`, normalised over y.

    Examples
    --------
    >>> marginals([torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 1.0]])], 1e-8)
    tensor([[0.2500, 0.7500]])
    """
    total = torch.stack(list(masses)).sum(0).clamp_min(floor)
    return total / total.sum(1, keepdim=True)


@register
@dataclass(frozen=True)
class FedRC(MixtureOptions):
    r"""FedRC; ``MixtureOptions`` describes the options that it shares with FedEM.

    Parameters
    ----------
    floor : float
        Smallest label mass of a component, so that :math:`\rho` is positive for labels it never saw; the public code uses 1e-8.
    """

    floor: float = 1e-8

    name: ClassVar[str] = "fedrc"
    citation: ClassVar[str] = "Guo, Tang, Lin, ICML 2024"
    original: ClassVar[Mapping[str, Any]] = {"rate": 6.0}
    State: ClassVar[type] = FedRCState

    def init(self, fed: Federation, round: Round) -> FedRCState:
        """Start K components from K initial models; all weights are uniform and ρ is 1."""
        expect(self.floor > 0, "floor", "> 0 (the logarithm of ρ is taken)", self.floor)
        models = self.components(fed, self.name)
        return FedRCState(list(fed.clients), models, rho=torch.ones(len(models), fed.layout.outputs, dtype=torch.float64))

    def step(self, fed: Federation, state: FedRCState, round: Round) -> FedRCState:
        state, heard = self.em_round(fed, state, round, rho=state.rho)
        mass = {**state.mass, **heard}
        rho = marginals([mass[c] for c in state.clients if c in mass], self.floor) if mass else state.rho
        return replace(state, rho=rho, mass=mass)
