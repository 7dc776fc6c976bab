"""What a transport solver returns. Imports numpy only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class TransportPlan:
    r"""The value of a transport problem with uniform masses and, where asked for, its dual potentials.

    The potentials are feasible, :math:`f_i + g_j \le c_{ij}`, so :math:`\bar f + \bar g` never exceeds the exact value.

    Attributes
    ----------
    value : float
        Transport cost, computed in float64.
    f : (n,) float64 array or None
        Potential on the rows (the source sample).
    g : (m,) float64 array or None
        Potential on the columns (the target sample).
    """

    value: float
    f: Array | None = None
    g: Array | None = None


def conjugate(cost: Array, f: Array) -> tuple[Array, Array]:
    r"""Turn any row potential into a feasible pair by two c-transforms.

    :math:`g_j = \min_i (c_{ij} - f_i)`, then :math:`f_i = \min_j (c_{ij} - g_j)`. Neither step can lower the dual value of a feasible pair.

    Examples
    --------
    >>> f, g = conjugate(np.array([[0.0, 2.0], [1.0, 0.0]]), np.array([0.0, 5.0]))
    >>> f, g
    (array([4., 5.]), array([-4., -5.]))
    """
    g = (cost - f[:, None]).min(axis=0)
    return (cost - g[None, :]).min(axis=1), g


def checked(cost: Any) -> Array:
    """Return the cost as an array, refusing what no solver can use."""
    from emdcfl.core.errors import EmdcflError

    c = np.asarray(cost)
    if c.ndim != 2 or c.shape[0] == 0 or c.shape[1] == 0:
        raise EmdcflError(
            f"expected a cost matrix with at least one row and one column, got shape {c.shape}; check that both samples have data"
        )
    if not np.isfinite(c).all():
        raise EmdcflError("expected finite transport costs, got NaN or infinity; check the embeddings for NaN (a diverged model)")
    return c
