r"""FedProx: FedAvg whose clients are held near the global model.

.. math:: \theta_c \leftarrow \arg\min_w\; L_c(w) + \frac\mu2\,\|P(w) - P(\theta)\|^2 \;\text{(by SGD from } \theta), \qquad
          \theta \leftarrow \sum_c n_c\,\theta_c / \sum_c n_c

The anchor is the round's global model; the penalty covers the trainable parameters only. :math:`\mu = 0` is FedAvg. Clients send
their state and :math:`n_c`, and learn the global model. Every client is served the global model.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith. *Federated Optimization in Heterogeneous Networks.* MLSys 2020.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from emdcfl.core.federation import Federation, Round
from emdcfl.methods.base import register
from emdcfl.methods.fedavg import FedAvg, GlobalState, train_and_average
from emdcfl.methods.shared.vectors import expect


@register
@dataclass(frozen=True)
class FedProx(FedAvg):
    r"""FedProx.

    Parameters
    ----------
    mu : float
        :math:`\mu`, the pull towards the global model. The EMD-CFL paper uses 0.01; the method's authors tune it over
        {0.001, 0.01, 0.1, 0.5, 1}.
    prox : "squared" or "layer_norm"
        :math:`\frac\mu2\|w - \theta\|^2`, or :math:`\mu\sum_l\|w_l - \theta_l\|` over parameter tensors as in the public code, which
        freezes every tensor whose loss gradient is shorter than μ.
    """

    mu: float = 0.01
    prox: Literal["squared", "layer_norm"] = "squared"

    name: ClassVar[str] = "fedprox"
    citation: ClassVar[str] = "Li et al., MLSys 2020"
    reference: ClassVar[Mapping[str, Any]] = {"prox": "layer_norm"}

    def init(self, fed: Federation, round: Round) -> GlobalState:
        expect(self.mu >= 0, "mu", "of at least 0", self.mu)
        return super().init(fed, round)

    def step(self, fed: Federation, state: GlobalState, round: Round) -> GlobalState:
        prox = {"mu": self.mu, "kind": self.prox}  # the anchor is where training starts, so it need not be sent
        return train_and_average(fed, state, round, prox=prox)
