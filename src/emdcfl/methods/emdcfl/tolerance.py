r"""The calibrated tolerance of EMD-CFL (``tolerance="auto"``): what a client computes for it, what the server makes of it, what is said.

A client solves its own train-to-validation problem and sends :math:`\tau_c` with the variance of the dual potential g, whole and inside
classes. The server makes :math:`\epsilon = q\sqrt{\operatorname{Var}(g)(1/m + 1/m')}` of it for each partner; why, and what q is:
``transport.calibration``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from emdcfl.core.client import Client
from emdcfl.core.errors import ConfigError
from emdcfl.core.learning.objective import is_regression
from emdcfl.core.schema import Reply
from emdcfl.data.split import largest_remainder
from emdcfl.methods.base import Distances
from emdcfl.methods.emdcfl.interpret import doubts
from emdcfl.methods.emdcfl.settings import CompareSettings, Options
from emdcfl.transport import cost_matrix, dual_variance, exact, min_samples, quantile, solve, tolerance

log = logging.getLogger("emdcfl")

MIXES = 16
"""Class mixes over which τ is averaged where classes are not matched."""

FEW_MIXES = 1.8
"""Factor on the variance between so few mixes: Student's quantile with 15 degrees of freedom over the normal one, squared, at 4e-5."""


@dataclass(frozen=True)
class Calibrate:
    """A piece of a client's work: τ and the variances of its dual potential, at each validation size. Needs neither network nor data."""

    z: Tensor
    """The client's train sample, embedded and projected."""
    v: Tensor
    """Its validation sample."""
    labels: tuple[Tensor, Tensor]
    """Of both."""
    sizes: list[int]
    settings: CompareSettings

    threads: ClassVar[bool] = True

    def __call__(self, client: Client) -> Reply:
        settings, (labels_a, labels_b) = self.settings, self.labels
        taus, variances, within, freedom = [], [], [], []
        as_drawn = settings.calibrated and not settings.match_classes and stratified(client)
        for size in self.sizes:
            labels: dict[str, Any] = {"labels_a": labels_a, "labels_b": labels_b[:size], "label_weight": settings.label_weight}
            cost = cost_matrix(self.z, self.v[:size], cost=settings.cost, **labels)
            plan = exact(cost, duals=True)  # for the variances whatever the solver: Sinkhorn's potentials vary too little
            taus.append(plan.value if settings.solver == "exact" else self._value(cost))
            variances.append(dual_variance(plan.g) if cost.shape[1] > 1 else 0.0)
            within.append(within_classes(plan.g, labels_b[:size]))
            freedom.append(cost.shape[1] - len(labels_b[:size].unique()))
            if as_drawn:
                values = [self._value(cost[:, index]) for index in other_mixes(client, labels_b[:size].numpy())]
                between = FEW_MIXES * float(np.var(values, ddof=1)) * (1 + 1 / MIXES) * cost.shape[1] / 2
                taus[-1], variances[-1] = float(np.mean(values)), within[-1] + between
        found = {"tau": taus, "variance": variances, "within": within}
        reply: Reply = {name: torch.tensor(values, dtype=torch.float64) for name, values in found.items()}
        return {**reply, "freedom": torch.tensor(freedom)}

    def _value(self, cost: Any) -> float:
        return solve(cost, solver=self.settings.solver, reg=self.settings.sinkhorn_reg).value


def stratified(client: Client) -> bool:
    """Whether the validation split has the class shares of the train split, as far as whole samples can."""
    if is_regression(client.site.train.y):
        return False
    train, val = (np.bincount(split.y.cpu().numpy(), minlength=2) for split in (client.site.train, client.site.val))
    classes = max(len(train), len(val))
    n, m = (np.pad(counts, (0, classes - len(counts))) for counts in (train, val))
    return bool((np.abs(m - m.sum() * (n + m) / (n + m).sum()) <= 1).all())


def other_mixes(client: Client, labels: Any) -> list[Any]:
    r"""Return the sample, as indices, with the class mixes that sites of the same law could have instead of the client's own.

    Where splits are stratified, a client's train and validation samples have one class mix; a partner's sample has another, by chance.
    T is convex in the mix and smallest where both agree, so τ at the client's own mix lies below what a partner of the same law
    shows. The difference of two sites' shares of a class has variance :math:`p_k(1-p_k)(1/N + 1/N')`; N' is taken to be the client's N.
    """
    rng = client.generator("class mixes", round=0)
    classes, counts = np.unique(labels, return_counts=True)
    sites = max(2, (len(client.site.train) + len(client.site.val)) // 2)
    chosen = []
    for _ in range(MIXES):
        wanted = largest_remainder(rng.multinomial(sites, counts / counts.sum()) / sites * len(labels), len(labels))
        chosen.append(
            np.concatenate([np.resize(rng.permutation(np.flatnonzero(labels == k)), n) for k, n in zip(classes, wanted, strict=True)])
        )
    return chosen


def within_classes(g: Any, labels: Tensor) -> float:
    """Variance of a dual potential inside classes, pooled; 0 where no class has two samples."""
    values, y = np.asarray(g, dtype=np.float64), labels.cpu().numpy()
    _, index = np.unique(y, return_inverse=True)
    means = np.bincount(index, values) / np.bincount(index)
    freedom = len(values) - len(means)
    return float(((values - means[index]) ** 2).sum() / freedom) if freedom > 0 else 0.0


@dataclass(frozen=True)
class Level:
    """The family-wise error of a run's tolerances: α over the ordered pairs of its clients."""

    alpha: float
    clients: int

    def pair_tolerance(self, variance: float, m: int, blocks: int, *, within: float = 0.0, freedom: float = 0) -> float:
        """Return ε for a partner's sample of some blocks of m samples.

        ``within``, the variance inside classes, and its degrees of ``freedom`` count where classes are matched and ``within`` is not 0.
        """
        matched = within > 0 and freedom > 0
        q = quantile(self.alpha, self.clients, min(freedom, m - 1) if matched else max(1, m - 1))
        return tolerance(min(within, variance) if matched else variance, m, blocks * m, q)


def least_validation(options: Options, clients: int) -> int:
    """Fewest validation samples with which a calibrated tolerance can refuse a partner; 0 with a fixed one."""
    if not options.calibrated:
        return 0
    least = min(min_samples(options.alpha, clients), options.min_validation)
    if options.max_samples < least:
        raise ConfigError(
            f"expected method.max_samples of at least {least} with a calibrated tolerance and {clients} clients, "
            f"got {options.max_samples}: groups could not be told apart"
        )
    return least


@cache
def log_once(level: int, text: str) -> None:
    """Log a sentence once per process: a comparison of many runs would repeat it."""
    log.log(level, "%s", text)


def log_what_is_compared(options: Options) -> None:
    """Say what a calibrated tolerance compares, unless samples as drawn were asked for."""
    if not options.calibrated or not options.match_classes:
        return
    if options.unmatched:
        fixed = ", or choose method.tolerance = 0.025, the paper's" if options.papers_distances else ""
        log_once(
            logging.WARNING,
            f"tolerance auto: with {' and '.join(options.unmatched)} samples stay as drawn, so that distances are noisier than with equal "
            f"class counts; read the doubts about the clusters{fixed}",
        )
    else:
        log_once(
            logging.INFO,
            "tolerance auto compares samples of equal class counts: differences in class frequencies alone do not separate clients "
            "(match_classes)",
        )


def warn_of_doubts(distances: Distances, clients: Sequence[str], labels: Mapping[str, int]) -> None:
    """Warn where there is a reason not to call the clusters certain; in a logger of its own, as commands say it with the result."""
    clusters = [labels.get(c, -1 - i) for i, c in enumerate(clients)]  # clients never seen are clusters of their own
    for doubt in doubts(distances, clients, clusters):
        logging.getLogger("emdcfl.doubts").warning("%s", doubt)
