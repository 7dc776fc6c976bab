r"""The tasks every client answers: ``describe``, ``train``, ``evaluate``, ``embed``, ``test``, ``personalize``, ``profile``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from emdcfl.core.client import LOSS_BATCH, Client, Stages, staged_task, task
from emdcfl.core.errors import ClientError, DataError, EmdcflError
from emdcfl.core.learning import objective
from emdcfl.core.learning.balance import SCORES
from emdcfl.core.learning.profile import profile  # noqa: F401  registers the task
from emdcfl.core.learning.terms import loss_terms
from emdcfl.core.schema import Field, Reply, finite
from emdcfl.privacy.crafted import MIN_SAMPLES, suspicion
from emdcfl.privacy.exchange import KEY, announced_key


@dataclass(frozen=True)
class Training:
    """Local SGD: E epochs of batches of B, with a fresh optimiser every round."""

    local_epochs: int = 10
    batch_size: int = 64
    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 1e-6

    _latest: ClassVar[tuple[Mapping[str, Any], Training | None]] = {}, None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Training:
        """Return the settings of a request: one object for all clients of this process that it asks."""
        known, training = cls._latest
        if training is None or known != settings:
            training = cls(**settings)
            cls._latest = dict(settings), training
        return training


@task(
    phase="evaluate",
    returns={"n": Field(int, low=1, high="max_n"), "m": Field(int, low=0, high="max_n"), "key": Field(bytes, low=KEY, high=2 * KEY)},
)
def describe(client: Client) -> Reply:
    """Sizes of the train and validation splits, and the key that the node announces in this run."""
    return {"n": len(client.site.train), "m": len(client.site.val), "key": announced_key(client.secret, client.session)}


MAX_LOSS = 1e6
"""Of a training or a test; a model that does worse has diverged."""

MAX_STEPS = 10**9

TRAINED = {
    "theta": Field(torch.float32, ("P",)),
    "n": Field(int, low=1, high="max_n"),
    "loss": Field(float, low=-1e-3, high=MAX_LOSS, blamed=False),
    "steps": Field(int, low=1, high=MAX_STEPS),
}


@dataclass(slots=True)
class Fit:
    """Local SGD as a piece of work; ``local_sgd`` says what the fields do."""

    theta: Tensor
    training: Training
    prox: Mapping[str, Any] | None = None
    cosine: Mapping[str, Any] | None = None
    sample_weights: Tensor | None = None
    purpose: str = "shuffle"

    def __call__(self, client: Client) -> Reply:
        return local_sgd(client, self)


LOOKED_AT = 64
"""Samples that a client embeds to judge a model (``Client.checks_models``), where it is asked for too few to tell."""


@dataclass(frozen=True)
class Embed:
    """Embedding as a piece of work: the arguments of ``Client.embeddings``, and a matrix that the embeddings are multiplied with.

    The result ``z`` lies where the engine computes. A client that ``checks_models`` says under ``suspicious`` why the model looks made to
    show the matrix.
    """

    state: Tensor
    split: str
    indices: Tensor
    mode: Literal["eval", "train"] = "eval"
    matrix: Tensor | None = None

    def __call__(self, client: Client) -> Reply:
        z = client.embeddings(self.state, self.split, self.indices, mode=self.mode)
        if client.checks_models:  # an infinite entry times a row of the matrix would show the signs of that row
            z[~z.isfinite().all(1)] = torch.nan
        reply: Reply = {"z": z if self.matrix is None else z @ self.matrix}
        if client.checks_models and (reason := self._suspicion(client, z)) is not None:
            reply["suspicious"] = f"the embeddings under this model are not released: {reason}; it looks made to show the projection"
        return reply

    def _suspicion(self, client: Client, z: Tensor) -> str | None:
        split, indices = self.split, self.indices
        if len(indices) < MIN_SAMPLES:  # so few tell nothing: look at more of the site's samples, which are not sent
            split, indices = "all", torch.arange(min(LOOKED_AT, len(client.site.val) + len(client.site.train)))
            z = client.embeddings(self.state, split, indices)
        return suspicion(z.cpu().numpy(), client.rows(split, indices).cpu().numpy())


@staged_task(phase="train", returns=TRAINED)
def train(
    client: Client,
    *,
    theta: Tensor,
    training: Mapping[str, Any],
    prox: Mapping[str, Any] | None = None,
    cosine: Mapping[str, Any] | None = None,
    sample_weights: Tensor | None = None,
) -> Stages:
    """Run E epochs of SGD on the train split from ``theta``; see ``local_sgd``."""
    (reply,) = yield [Fit(theta, Training.of(training), prox, cosine, sample_weights)]
    return reply


def local_sgd(client: Client, fit: Fit) -> Reply:
    r"""Minimise :math:`\frac1{|b|}\sum_{s\in b} w_s\,\ell(\theta; x_s, y_s) + \text{terms}` by SGD with momentum.

    ``prox`` adds :math:`\frac\mu2\|P(\theta) - P(a)\|^2`, or with the kind ``"layer_norm"`` :math:`\mu\sum_l\|\theta_l - a_l\|` over
    tensors; ``cosine`` adds :math:`-\mu\cos(P(\theta), P(a))`. Each is a dict with ``mu`` and the ``anchor`` a, by default the start state.
    The weights :math:`w_s` are by train index, 1 by default; the sum is divided by the batch size, not by them. ``purpose`` is the key of
    the order of batches: two trainings of one round do not share it.

    Returns ``theta`` after training, ``n`` samples, mean ``loss`` of the last epoch, number of ``steps``.
    """
    net, data, training = client.network, client.split("train"), fit.training
    if len(data) == 0:
        raise DataError(f"client {client.name!r} has no training data; give it some or leave it out")
    net.load(fit.theta)
    where = net.layout.trainable
    weights = net.theta[where]
    velocity = torch.zeros_like(weights)
    terms = loss_terms(net, fit.prox, fit.cosine)
    rng = client.generator(fit.purpose)
    device = net.device
    w = torch.ones(len(data), device=device) if fit.sample_weights is None else fit.sample_weights.to(device)
    steps, loss_sum = 0, torch.zeros((), device=device)
    with client.mode(training=True, purpose="dropout" if fit.purpose == "shuffle" else f"{fit.purpose} dropout"):
        for _ in range(training.local_epochs):
            loss_sum.zero_()
            for batch in batches(rng.permutation(len(data)), training.batch_size, needs_two=net.layout.batch_statistics, client=client):
                index = torch.from_numpy(batch).to(device)
                losses = objective.losses(net(client.preprocess(data.x[index])), data.y[index])
                net.grad.zero_()
                ((losses * w[index]).sum() / len(batch)).backward()
                with torch.no_grad():
                    if objective.is_regression(data.y):
                        net.grad.copy_(objective.bounded([net.grad[None]])[0][0])
                    for term in terms:
                        term(weights, net.grad)
                    velocity.mul_(training.momentum).add_(net.grad.add_(weights, alpha=training.weight_decay))
                    weights.sub_(velocity, alpha=training.lr)
                    loss_sum += losses.sum()
                steps += 1
    return trained(net.theta.detach(), len(data), loss_sum.item() / len(data), steps, training)


def trained(theta: Tensor, n: int, loss: float, steps: int, training: Training, *, known_finite: bool = False, own: bool = False) -> Reply:
    """Return the reply of a training, the state copied to the CPU unless it is its ``own`` already, or refuse one that diverged."""
    if not math.isfinite(loss):
        raise ClientError(f"the training loss became {loss}; lower the learning rate (training.lr is {training.lr:g}) or check the data")
    if not known_finite and not finite(theta):
        raise ClientError(f"the model is no longer finite after training; lower the learning rate (training.lr is {training.lr:g})")
    return {"theta": theta if own else theta.to("cpu", copy=True), "n": n, "loss": loss, "steps": steps}


def batches(order: np.ndarray[Any, Any], size: int, *, needs_two: bool, client: Client) -> Iterator[np.ndarray[Any, Any]]:
    """Cut a permutation into batches; a last batch of one joins its predecessor where BatchNorm would fail on it."""
    cuts = list(range(size, len(order), size))
    if needs_two and len(order) % size == 1:
        if not cuts:
            raise DataError(
                f"client {client.name!r} has one training sample in a batch, and BatchNorm needs two; use a larger batch or more data"
            )
        cuts.pop()
    yield from np.split(order, cuts)


Reduction = Literal["mean", "per_batch", "per_sample", "argmin_counts"]


@torch.no_grad()
def sample_losses(client: Client, theta: Tensor, split: str) -> tuple[Tensor, Tensor]:
    """Return per-sample loss and correctness (of numbers: false) in fixed order, evaluation mode."""
    net, data = client.network, client.split(split)
    net.load(theta)
    losses, correct = [], []
    with client.mode(training=False):
        for index in torch.arange(len(data), device=net.device).split(client.evaluation_batch):
            logits = net(client.preprocess(data.x[index]))
            losses.append(objective.losses(logits, data.y[index]))
            correct.append(logits.argmax(1) == data.y[index])
    return torch.cat(losses).float().cpu(), torch.cat(correct).cpu()


@dataclass(frozen=True)
class Score:
    """Scoring as a piece of work: L states on a split; the result has ``losses`` and ``correct``, both (L, n)."""

    models: Sequence[Tensor]
    split: str

    def __call__(self, client: Client) -> Reply:
        scored = [sample_losses(client, theta, self.split) for theta in self.models]
        return {"losses": torch.stack([losses for losses, _ in scored]), "correct": torch.stack([correct for _, correct in scored])}


EVALUATED = {
    "table": Field(torch.float32, ("K", None), low=0, blamed=False),
    "accuracy": Field(torch.float32, ("K",), low=0, high=1),
    "n": Field(int, low=1, high="max_n"),
}


@task(phase="evaluate", returns=EVALUATED)
def evaluate(client: Client, *, models: Tensor, split: str = "val", reduction: Reduction = "mean") -> Reply:
    """Score K states on a split in fixed order, in evaluation mode.

    Returns ``accuracy`` (K,), ``n``, and the losses as ``table``: by ``reduction``, ``mean`` → (K, 1), each sample counting alike;
    ``per_batch`` → (K, batches of 64); ``per_sample`` → (K, n); ``argmin_counts`` → (K, 1), how many samples each state explains best.
    """
    if len(client.split(split)) == 0:
        raise DataError(f"client {client.name!r} has no {split} data to score models on; give it a validation share")
    scored = [sample_losses(client, theta, split) for theta in models]
    table = torch.stack([losses for losses, _ in scored])
    reply: Reply = {"accuracy": torch.stack([correct.float().mean() for _, correct in scored]), "n": table.shape[1]}
    if reduction == "mean":
        reply["table"] = table.double().mean(1, keepdim=True).float()
    elif reduction == "per_batch":
        reply["table"] = torch.stack([part.mean(1) for part in table.split(LOSS_BATCH, dim=1)], dim=1)
    elif reduction == "per_sample":
        reply["table"] = table
    else:
        reply["table"] = torch.bincount(table.argmin(0), minlength=table.shape[0])[:, None].float()
    return reply


@task(phase="embed", returns={"embeddings": Field(torch.float32, (None, None))})
def embed(client: Client, *, theta: Tensor, split: str = "val", cap: int = 512) -> Reply:
    """Embed at most ``cap`` samples of a split. Unprojected: for simulation and for what stays on the node."""
    return {"embeddings": client.embeddings(theta, split, client.sample(split, cap))}


MAX_R2 = 1e12
"""R² of a site whose targets hardly differ may be far below zero; it is cut here."""

TESTED = {
    "accuracy": Field(float, low=0, high=1, each=True),
    "loss": Field(float, low=-1e-3, high=MAX_LOSS, each=True, blamed=False),  # rounding may lift a probability over 1
    "n": Field(int, low=0, high="max_n", each=True),
    **{name: Field(float, low=0, high=1, each=True, optional=True) for name in SCORES},
    **{f"{name}_n": Field(float, low=0, high="max_n", each=True, optional=True) for name in SCORES},
    "r2": Field(float, low=-MAX_R2, high=1, each=True, optional=True, blamed=False),
    "r2_error": Field(float, low=0, high=MAX_R2, each=True, optional=True, blamed=False),
}


@task(phase="evaluate", returns=TESTED)
@torch.no_grad()
def test(client: Client, *, models: Tensor, weights: Tensor) -> Reply:
    r"""Score one state, or the mixture :math:`\sum_k \pi_k\,\mathrm{softmax}(f_{\theta_k}(x))`, on every test variant.

    Where the site's classes are unbalanced, also by scores that a frequent class cannot dominate (``learning.balance``). Numbers are scored
    by squared error and R² instead of accuracy.
    """
    reply: Reply = objective.tested(client.site, lambda variant: mixture(client, models, weights, f"test:{variant}"))
    if "r2" in reply:
        reply["r2"] = {variant: max(value, -MAX_R2) for variant, value in reply["r2"].items()}
        reply["r2_error"] = {variant: min(value, MAX_R2) for variant, value in reply["r2_error"].items()}
    return reply


def mixture(client: Client, models: Tensor, weights: Tensor, split: str) -> tuple[Tensor, Tensor]:
    """Return class probabilities (or numbers) of a weighted mixture of states on a split, and the targets."""
    data, net = client.split(split), client.network
    total: Tensor | None = None
    for theta, weight in zip(models, weights.tolist(), strict=True):
        net.load(theta)
        with client.mode(training=False):
            parts = [objective.predictions(net(client.preprocess(x)), data.y) for x in data.x.split(client.evaluation_batch)]
        p = torch.cat(parts).float().cpu() * weight if parts else torch.zeros(0, 1)
        total = p if total is None else total + p
    assert total is not None
    return total, data.y.cpu()


MAX_GAIN = 1e6
"""Of validation loss by fine-tuning; losses may be larger, and a sum of squares must not overflow."""

PERSONALIZED = {
    "theta": Field(torch.float32, ("P",), optional=True),
    "m": Field(int, low=0, high="max_n"),
    "gain": Field(float, low=-MAX_GAIN, high=MAX_GAIN),
    "error": Field(float, low=0.0, high=MAX_GAIN),
}


@staged_task(phase="personalize", returns=PERSONALIZED)
def personalize(client: Client, *, models: Tensor, weights: Tensor, training: Mapping[str, Any], always: bool = False) -> Stages:
    r"""Fine-tune the served model on the train split; return the state ``theta``, and what that gains on the validation split.

    With the loss :math:`\ell_s` of the served model (or mixture) and :math:`\ell'_s` of the fine-tuned one on the m validation samples,

    .. math:: d_s = \ell_s - \ell'_s, \qquad \mathtt{gain} = \bar d, \qquad \mathtt{error} = \mathrm{sd}(d) / \sqrt m

    Of a mixture of predictions, the component with the largest weight is fine-tuned: an average of components that began from different
    models is no model. A training that diverges, or has no data, or (unless ``always``) a loss that overflows, leaves no ``theta``.
    """
    reply: Reply = {"m": len(client.site.val), "gain": 0.0, "error": 0.0}
    try:
        (fit,) = yield [Fit(models[int(weights.argmax())], Training.of(training), purpose="personalize")]
    except EmdcflError:
        return reply
    gain, error = validation_gain(client, models, weights, fit["theta"])
    if math.isfinite(gain) and math.isfinite(error):
        gain, error = max(-MAX_GAIN, min(gain, MAX_GAIN)), min(error, MAX_GAIN)
        return {**reply, "theta": fit["theta"], "gain": gain, "error": error}
    return {**reply, "theta": fit["theta"]} if always else reply


@torch.no_grad()
def validation_gain(client: Client, models: Tensor, weights: Tensor, theta: Tensor) -> tuple[float, float]:
    """Return what a state gains over the served model: mean paired loss difference on the validation split, and its standard error.

    Both are 0 with fewer than two samples.
    """
    if len(client.site.val) < 2:
        return 0.0, 0.0
    if len(models) == 1:
        before = sample_losses(client, models[0], "val")[0]
    else:
        p, y = mixture(client, models, weights, "val")
        before = objective.mixed_losses(p, y)
    gain = before.double() - sample_losses(client, theta, "val")[0].double()
    return float(gain.mean()), float(gain.std()) / math.sqrt(len(gain))
