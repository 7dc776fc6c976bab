"""How FedSoft's clients vote: which of K cluster models explains their samples best."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from emdcfl.core.client import LOSS_BATCH

Votes = Literal["sample", "batch"]


def smooth(counts: Tensor, *, smoothing: float, votes: Votes = "sample") -> Tensor:
    r"""Return :math:`a_c`: the votes of m samples, where a cluster without any gets :math:`\sigma m`.

    With ``votes="batch"`` it gets ⌊σm⌋, and one at least, as in the public code.

    Examples
    --------
    >>> smooth(torch.tensor([60, 40, 0]), smoothing=0.01)
    tensor([60., 40.,  1.], dtype=torch.float64)
    """
    m = float(counts.sum())
    least = smoothing * m if votes == "sample" else max(1.0, float(int(smoothing * m)))
    return torch.where(counts > 0, counts.double(), least)


def batch_votes(table: Tensor, n: int) -> Tensor:
    """Credit the cluster with the lowest mean loss on a batch with all samples of the batch.

    Parameters
    ----------
    table : (K, batches) tensor
        Mean losses on batches of 64, the last one holding what is left of n.

    Examples
    --------
    >>> batch_votes(torch.tensor([[0.1, 0.9, 0.9], [0.5, 0.5, 0.5]]), 130)
    tensor([64., 66.], dtype=torch.float64)
    """
    K, batches = table.shape
    sizes = torch.full((batches,), float(LOSS_BATCH), dtype=torch.float64)
    sizes[-1] = n - LOSS_BATCH * (batches - 1)
    return torch.zeros(K, dtype=torch.float64).index_add_(0, table.argmin(0), sizes)
