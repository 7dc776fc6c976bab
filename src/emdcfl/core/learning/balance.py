r"""Scores that a frequent class cannot dominate: balanced accuracy and the area under the ROC curve (AUC), with effective sample sizes.

Balanced accuracy is the mean over classes of the share of their samples that is recognised. The AUC of a class is the probability that a
sample of it gets a higher score for it than another sample; of several classes it is their mean.

An effective number of samples :math:`n^* = p(1-p)/V` has the variance V of a share p of so many samples, so that these scores get the
intervals of accuracies (``runs.verdict.intervals``). V of an AUC is Hanley and McNeil's [1]_.

References
----------
.. [1] Hanley, McNeil. The meaning and use of the area under a receiver operating characteristic (ROC) curve. Radiology 143, 1982.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

MIN_RATIO, MIN_Z = 1.4, 3.0
"""Classes are unbalanced where the largest has so many times its even share of the samples, and so many standard errors more."""

SCORES = ("balanced", "auc")
"""Each with its effective number of samples, ``<name>_n``."""


def unbalanced(labels: Tensor) -> bool:
    """Whether one class is so frequent that accuracy says little about the others.

    Examples
    --------
    >>> unbalanced(torch.tensor([0] * 80 + [1] * 20)), unbalanced(torch.tensor([0] * 60 + [1] * 40))
    (True, False)
    """
    counts = torch.bincount(labels)
    k = int((counts > 0).sum())
    if k < 2:
        return False
    largest, even = int(counts.max()), len(labels) / k
    return largest >= MIN_RATIO * even and largest - even > MIN_Z * math.sqrt(even * (1 - 1 / k))


def balance(p: Tensor, y: Tensor) -> dict[str, float]:
    """Return balanced accuracy and AUC of class probabilities ``p`` with their effective sizes; nothing where only one class occurs.

    Examples
    --------
    >>> p = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.6, 0.4], [0.3, 0.7], [0.7, 0.3]])
    >>> found = balance(p, torch.tensor([0, 0, 0, 1, 1]))
    >>> found["balanced"], round(found["auc"], 3)
    (0.75, 0.833)
    """
    found = [int(k) for k in y.unique()]
    if len(found) < 2:
        return {}
    counts = [int((y == k).sum()) for k in found]
    right = [float((p.argmax(1) == k)[y == k].double().mean()) for k in found]
    recall = sum(right) / len(found)
    shrunk = [(r * n + 4 * recall) / (n + 4) for r, n in zip(right, counts, strict=True)]  # a class without an error is not certain
    variance = sum(r * (1 - r) / n for r, n in zip(shrunk, counts, strict=True)) / len(found) ** 2
    limit = len(found) ** 2 / sum(1 / n for n in counts)
    curves = [_auc(p[:, k].double().numpy(), (y == k).numpy()) for k in (found[1:] if len(found) == 2 else found)]
    area = sum(a for a, _ in curves) / len(curves)
    spread = sum(v for _, v in curves) / len(curves)  # of the mean, at most: the classes' curves share their samples
    return {
        "balanced": recall,
        "balanced_n": recall * (1 - recall) / variance if variance > 0 else limit,
        "auc": area,
        "auc_n": area * (1 - area) / spread if spread > 0 else float(min(counts)),
    }


def _auc(score: np.ndarray[tuple[int], np.dtype[np.float64]], positive: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> tuple[float, float]:
    """Return the AUC of one class, ties counting half, and Hanley and McNeil's variance."""
    _, rank, counts = np.unique(score, return_inverse=True, return_counts=True)
    middle = np.cumsum(counts) - (counts - 1) / 2
    n, m = int(positive.sum()), int((~positive).sum())
    a = float((middle[rank][positive].sum() - n * (n + 1) / 2) / (n * m))
    q, r = a / (2 - a), 2 * a * a / (1 + a)
    return a, max((a * (1 - a) + (n - 1) * (q - a * a) + (m - 1) * (r - a * a)) / (n * m), 0.0)


def possible(scores: Mapping[str, float]) -> bool:
    """Whether these can be scores: shares, each with a positive size; all of them or none."""
    if not scores:
        return True
    if set(scores) != {key for name in SCORES for key in (name, f"{name}_n")}:
        return False
    return all(0 <= scores[name] <= 1 and 0 < scores[f"{name}_n"] < math.inf for name in SCORES)
