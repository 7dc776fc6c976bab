r"""Subspaces of PACFL (of raw data) and of FedSaC (of embeddings), and the angles between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from emdcfl.core.client import Client, task
from emdcfl.core.errors import DataError
from emdcfl.core.schema import Field, Reply

Flatten = Literal["channel", "image"]
Angles = Literal["principal", "greedy"]

MAX_ENTRY = 1.001
"""Largest entry of a basis whose vectors have unit length, rounding included."""


def leading_vectors(x: Tensor, number: int) -> Tensor:
    """Return the first left singular vectors of x as unit columns; no more than its rank, beyond which they are arbitrary.

    Examples
    --------
    >>> leading_vectors(torch.tensor([[3.0, 0.0], [0.0, 2.0], [0.0, 0.0]]), 1).abs()
    tensor([[1.], [0.], [0.]])
    """
    U, s, _ = torch.linalg.svd(x, full_matrices=False)
    rank = int((s > s[0] * max(x.shape) * torch.finfo(s.dtype).eps).sum())
    kept: Tensor = U[:, : min(number, rank)]
    unit: Tensor = kept / kept.norm(dim=0)
    return unit


@task(phase="evaluate", returns={"basis": Field(torch.float32, (None, None), low=-MAX_ENTRY, high=MAX_ENTRY)})
@torch.no_grad()
def data_subspace(client: Client, *, split: str = "val", vectors: int = 3, flatten: Flatten = "channel") -> Reply:
    """Left singular vectors of the split's network inputs, class by class, as ``(features, vectors · classes)`` or fewer columns."""
    data = client.split(split)
    if len(data) == 0:
        raise DataError(f"client {client.name!r} has no {split} data to take a subspace of; give it a {split} share or change method.split")
    parts = []
    for label in data.y.unique():
        x = client.preprocess(data.x[data.y == label])
        columns = x.flatten(0, 1).flatten(1) if flatten == "channel" and x.dim() == 4 else x.flatten(1)
        parts.append(leading_vectors(columns.T, vectors))
    basis = torch.cat(parts, dim=1)
    if basis.shape[1] == 0:
        raise DataError(f"client {client.name!r} has only zeros in its {split} data after preprocessing, which span no subspace")
    return {"basis": basis.cpu()}


def smallest_angle(a: Tensor, b: Tensor, *, signed: bool = False) -> float:
    """Return the smallest angle, in degrees, between a column of ``a`` and a column of ``b``; ``signed`` tells u from −u.

    Examples
    --------
    >>> smallest_angle(torch.tensor([[1.0], [0.0]]), torch.tensor([[-1.0], [0.0]]))
    0.0
    """
    cosines = a.double().T @ b.double()
    largest = (cosines if signed else cosines.abs()).max().clamp(-1.0, 1.0)
    return float(torch.rad2deg(torch.arccos(largest)))


def pca_basis(z: Tensor, r: int) -> Tensor:
    """Return the first r principal directions of the rows of ``z`` as orthonormal rows, fewer if the data span fewer.

    Each direction's largest entry is positive, so that the sign is a matter of the data and not of the library.

    Examples
    --------
    >>> pca_basis(torch.tensor([[0.0, 1.0], [0.0, 3.0], [0.0, -4.0]]), 2)
    tensor([[0., 1.]])
    """
    centred = (z - z.mean(0)).double() if len(z) else z.double()
    values, vectors = torch.linalg.eigh(centred.T @ centred)
    order = values.argsort(descending=True)[:r]
    spanned = values[order] > max(float(values[-1]), 0.0) * 1e-12
    basis = vectors[:, order[spanned]].T
    largest = basis.gather(1, basis.abs().argmax(1, keepdim=True)) if len(basis) else basis[:, :1]
    signed: Tensor = basis * largest.sign()
    return signed.float().contiguous()  # the order in memory decides the last bits of products, and no message carries it


def complementarity(bases: Sequence[Tensor], angles: Angles = "principal") -> Tensor:
    r"""Return :math:`c_{ij}`, the cosine of the mean angle between subspaces; 1 on the diagonal, 0 where one of them is empty.

    Parameters
    ----------
    bases : (r, d) tensors with orthonormal rows
    angles : "principal" or "greedy"
        Angles from the singular values of :math:`B_i B_j^\top`, or between directions paired off by their largest cosine, signs kept.

    Examples
    --------
    >>> complementarity([torch.eye(4)[:2], torch.eye(4)[1:3]])
    tensor([[1.0000, 0.7071],
            [0.7071, 1.0000]], dtype=torch.float64)
    """
    out = torch.eye(len(bases), dtype=torch.float64)
    for i, a in enumerate(bases):
        for j, b in enumerate(bases[:i]):
            table = a.double() @ b.double().T
            cosines = torch.linalg.svdvals(table).clamp(0.0, 1.0) if angles == "principal" else _pair_off(table).clamp(-1.0, 1.0)
            out[i, j] = out[j, i] = cosines.arccos().mean().cos() if len(cosines) else 0.0
    return out


def _pair_off(table: Tensor) -> Tensor:
    rest, found = table.clone(), []
    for _ in range(min(table.shape)):
        row, column = divmod(int(rest.argmax()), table.shape[1])
        found.append(float(table[row, column]))
        rest[row], rest[:, column] = -torch.inf, -torch.inf
    return torch.tensor(found, dtype=torch.float64)
