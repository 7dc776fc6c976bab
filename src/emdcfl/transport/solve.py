"""One name for both solvers. Imports numpy only."""

from __future__ import annotations

from typing import Any

from emdcfl.core.errors import ConfigError, nearest
from emdcfl.transport.exact import exact
from emdcfl.transport.plan import TransportPlan
from emdcfl.transport.sinkhorn import sinkhorn

SOLVERS = ("exact", "sinkhorn")


def solve(cost: Any, *, solver: str = "exact", reg: float = 0.1, duals: bool = False) -> TransportPlan:
    """Solve a transport problem with uniform masses.

    Parameters
    ----------
    cost : (n, m) array_like
        Ground costs.
    solver : {"exact", "sinkhorn"}
        See :func:`emdcfl.transport.exact.exact` and :func:`emdcfl.transport.sinkhorn.sinkhorn`.
    reg : float
        Regularisation of Sinkhorn; the exact solver ignores it.
    duals : bool
        Also return feasible dual potentials.

    Examples
    --------
    >>> solve([[0.0, 1.0], [1.0, 0.0]]).value
    0.0
    >>> round(solve([[0.0, 1.0], [1.0, 0.0]], solver="sinkhorn", reg=0.1).value, 4)
    0.0
    """
    if solver == "exact":
        return exact(cost, duals=duals)
    if solver == "sinkhorn":
        return sinkhorn(cost, reg=reg, duals=duals)
    raise ConfigError(f"unknown transport solver {solver!r}; {nearest(solver, SOLVERS)}")
