r"""What FedEM and FedRC share: K component models, one EM step per client and round, and how the mixture is served.

A client's data are a mixture of K distributions with weights :math:`\pi_c`. In one request the client computes each sample's
responsibilities from the K states, its new weights, and K trained components

.. math:: q_{ks} = \mathrm{softmax}_k\bigl(\log\pi_{ck} - \ell(\theta_k; x_s, y_s) - \log\rho_k(y_s)\bigr), \qquad
          \pi_{ck} = \tfrac1{n_c}\sum_s q_{ks}, \qquad
          \theta_{ck} \leftarrow \mathrm{Train}_c(\theta_k;\ \text{weights } q_{ks})

with :math:`\rho = 1` for FedEM. The server folds the K states of every reply into K running means, so it never holds more than the means
and one reply; the q never leave the client.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from emdcfl.core.client import Client, NodeNeeds, Stages, staged_task
from emdcfl.core.errors import ClientError
from emdcfl.core.federation import Federation, Round
from emdcfl.core.schema import Field, Reply
from emdcfl.core.tasks import MAX_LOSS, MAX_STEPS, Fit, Training, sample_losses
from emdcfl.methods.base import Family, Serving, initial_models
from emdcfl.methods.shared.vectors import expect

MIN_WEIGHT = 1e-12
"""A component's weight before the logarithm is never taken to be less: one that died out may come back."""


def responsibilities(losses: Tensor, pi: Tensor, log_rho: Tensor | None = None) -> Tensor:
    r"""Return the E-step :math:`q_{ks} = \mathrm{softmax}_k(\log\pi_k - \ell_{ks} - \log\rho_k(y_s))` in float64.

    Parameters
    ----------
    losses : (K, n) tensor
        Cross-entropy of every sample under every component.
    pi : (K,) tensor
    log_rho : (K, n) tensor, optional
        :math:`\log\rho_k(y_s)` of every sample's label; 0 by default.

    Examples
    --------
    >>> responsibilities(torch.tensor([[0.0, 1.0], [0.0, 1.0]]), torch.tensor([0.25, 0.75]))[0]
    tensor([0.2500, 0.2500], dtype=torch.float64)
    """
    logits = pi.double().clamp_min(MIN_WEIGHT).log()[:, None] - losses.double()
    return (logits if log_rho is None else logits - log_rho).softmax(0)


def label_mass(q: Tensor, y: Tensor, classes: int) -> Tensor:
    r"""Return :math:`Q_k(y) = \sum_{s: y_s = y} q_{ks}` as ``(K, classes)``.

    Examples
    --------
    >>> label_mass(torch.tensor([[0.5, 1.0, 0.25]]), torch.tensor([2, 0, 2]), 3)
    tensor([[1.0000, 0.0000, 0.7500]])
    """
    return torch.zeros(q.shape[0], classes, dtype=q.dtype).index_add_(1, y, q)


STEPPED = {
    "models": Field(torch.float32, ("K", "P")),
    "pi": Field(torch.float64, ("K",), low=0, high=1 + 1e-6, blamed=False),
    "mass": Field(torch.float64, ("K", "Y"), low=0, high="max_n", optional=True, blamed=False),
    "n": Field(int, low=1, high="max_n"),
    "loss": Field(float, low=-1e-3, high=MAX_LOSS, blamed=False),
    "steps": Field(int, low=1, high=MAX_STEPS),
}


@staged_task(phase="train", returns=STEPPED)
def em_step(client: Client, *, models: Tensor, pi: Tensor, training: Mapping[str, Any], rho: Tensor | None = None) -> Stages:
    r"""Do one EM step on the train split: responsibilities, weights :math:`\pi_c`, K trained components.

    Returns ``models`` (K, P) after training; ``pi`` (K,); ``n``; ``loss``, the components' last train losses weighted by π; ``steps`` of
    all components together; and, where ``rho`` (K, classes) came with the request, the label mass ``mass`` (K, classes).
    """
    y = client.site.train.y.cpu()
    losses = torch.stack([sample_losses(client, theta, "train")[0] for theta in models])
    q = responsibilities(losses, pi, None if rho is None else rho.double().log()[:, y])
    weights = q.mean(1)
    options = Training.of(training)
    trained = yield [Fit(theta, options, sample_weights=w) for theta, w in zip(models, q.float(), strict=True)]
    reply: Reply = {
        "models": torch.stack([t["theta"] for t in trained]),
        "pi": weights,
        "n": trained[0]["n"],
        "loss": sum(w * t["loss"] for w, t in zip(weights.tolist(), trained, strict=True)),
        "steps": sum(t["steps"] for t in trained),
    }
    return reply if rho is None else {**reply, "mass": label_mass(q, y, rho.shape[1])}


@dataclass(frozen=True)
class Mixture:
    """K components and the weights of all clients."""

    clients: list[str]
    models: Tensor
    r"""(K, P): :math:`\theta_k`."""
    pi: dict[str, Tensor] = field(default_factory=dict)
    r"""Client → :math:`\pi_c` (K,), of the clients seen; the others' is uniform."""
    last: dict[str, Tensor] = field(default_factory=dict)
    """Client → its own trained component K, kept only for ``mixture_eval="last-component"``."""

    def weights(self, client: str) -> Tensor:
        K = self.models.shape[0]
        return self.pi.get(client, torch.full((K,), 1.0 / K, dtype=torch.float64))


AnyMixture = TypeVar("AnyMixture", bound=Mixture)


def verify_mass(client: str, reply: Reply) -> None:
    """Refuse label mass that is missing, or not that of the client's n samples."""
    total = float(reply["mass"].sum()) if "mass" in reply else 0.0
    if not math.isclose(total, reply["n"], rel_tol=1e-3):
        raise ClientError(f"expected a label mass of {reply['n']} samples, got {total:g}")


@dataclass(frozen=True)
class MixtureOptions:
    """Options and functions that both methods have.

    Parameters
    ----------
    k : int or None
        Number of components K; the scenario's by default. The papers use 3.
    mixture_eval : "mixture" or "last-component"
        Serve the mixture of the K averaged components (the papers), or the K-th component alone, as the client itself last trained
        it and before any averaging (the EMD-CFL authors' public code).
    rate : float or "times-k"
        Learning rate of the components, in rates of the run; ``"times-k"``: K. Where FedAvg trains at 0.01, the commands of FedEM's
        authors train three components, and four, at 0.03, and that of FedRC's trains three at 0.06.
    """

    k: int | None = None
    mixture_eval: Literal["mixture", "last-component"] = "mixture"
    rate: float | Literal["times-k"] = 1.0

    node_needs: ClassVar[NodeNeeds] = NodeNeeds(("em_step",))
    family: ClassVar[Family] = "soft"
    reference: ClassVar[Mapping[str, Any]] = {"mixture_eval": "last-component"}

    def components(self, fed: Federation, name: str) -> Tensor:
        """Return the K initial models (K, P), or raise ``ConfigError`` if an option is out of its range."""
        rate = self.rate
        expect(isinstance(rate, str) or rate > 0, "rate", "above 0 (in learning rates of the run) or 'times-k'", rate)
        return initial_models(self.k, fed, name)

    def em_round(
        self, fed: Federation, state: AnyMixture, round: Round, *, rho: Tensor | None = None
    ) -> tuple[AnyMixture, dict[str, Tensor]]:
        r"""Ask the participants for an EM step and average component by component, :math:`\theta_k = \sum_c n_c\theta_{ck}/\sum_c n_c`.

        Returns the state with new components and weights, and the label mass of each client that sent it.
        A sample's weights sum to 1 over the components, so each moves by about 1/K of a full step; a ``rate`` above 1 makes up for it.
        """
        mean = fed.average()
        pi, mass, last = dict(state.pi), {}, dict(state.last)

        def fold(client: str, reply: Reply) -> None:
            mean.add(reply["models"], reply["n"], client=client, start=state.models)
            total = float(reply["pi"].sum())
            if abs(total - 1.0) < 1e-3:  # invalid weights would leave only this client without a model
                pi[client] = reply["pi"] / total
            if "mass" in reply:
                mass[client] = reply["mass"]
            if self.mixture_eval == "last-component":
                last[client] = reply["models"][-1].clone()

        inputs = {c: {"pi": state.weights(c)} for c in round.participants}
        K = state.models.shape[0]
        dims = {"K": K, "Y": 0 if rho is None else rho.shape[1]}
        training = replace(fed.training, lr=fed.training.lr * (K if isinstance(self.rate, str) else self.rate))
        common: dict[str, Any] = {"models": state.models, "training": training.as_dict()} | ({} if rho is None else {"rho": rho})
        replies = fed.run(em_step, inputs, fold=fold, dims=dims, verify=None if rho is None else verify_mass, **common)
        fed.check_quorum(replies, len(inputs))
        return replace(state, models=mean.result(), pi=pi, last=last), mass

    def serve(self, state: Mixture) -> Serving:
        r"""Serve :math:`p(y|x) = \sum_k \pi_{ck}\,\mathrm{softmax}(f_{\theta_k}(x))`, or every client its own last trained component."""
        if self.mixture_eval == "mixture":
            return Serving(state.models, torch.stack([state.weights(c) for c in state.clients]).float(), mix="predictions")
        models = torch.stack([state.last.get(c, state.models[-1]) for c in state.clients])
        return Serving(models, torch.eye(len(state.clients)))
