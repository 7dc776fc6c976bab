r"""Solvers of the transport problem with uniform masses: ``exact``, ``sinkhorn``, and ``solve`` for either by name.

.. math:: \min_{P \ge 0} \sum_{ij} c_{ij} P_{ij} \quad \text{s.t.} \quad
          P\mathbf 1 = \tfrac1n \mathbf 1,\; P^\top\mathbf 1 = \tfrac1m \mathbf 1
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, Thread
from types import ModuleType
from typing import Any

import numpy as np

from emdcfl.core.errors import ConfigError, EmdcflError, nearest
from emdcfl.transport.bounds import potentials
from emdcfl.transport.pool import Array, one_blas_thread

SOLVERS = ("exact", "sinkhorn")
ASSIGNMENT_LIMIT = 1024
REDUCED_FROM = 192
"""Samples from which computing potentials first makes an assignment problem quicker to solve: twice as quick at 512 between groups."""

MAX_ITERATIONS = 10_000_000

MAX_SCALING = 1e60
"""Sinkhorn's scalings beyond this are absorbed into the potentials, long before float64 overflows."""


@dataclass(frozen=True)
class TransportPlan:
    r"""The value of a transport problem with uniform masses and, where asked for, its dual potentials.

    The potentials are feasible, :math:`f_i + g_j \le c_{ij}`, so :math:`\bar f + \bar g` never exceeds the exact value.
    """

    value: float
    """Transport cost, computed in float64."""
    f: Array | None = None
    """(n,): potential on the rows (the source sample)."""
    g: Array | None = None
    """(m,): potential on the columns (the target sample)."""


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


def _checked(cost: Any) -> Array:
    """Return the cost as an array; raises if it is empty or not finite."""
    c = np.asarray(cost)
    if c.ndim != 2 or c.shape[0] == 0 or c.shape[1] == 0:
        raise EmdcflError(
            f"expected a cost matrix with at least one row and one column, got shape {c.shape}; check that both samples have data"
        )
    if not np.isfinite(c).all():
        raise EmdcflError("expected finite transport costs, got NaN or infinity; check the embeddings for NaN (a diverged model)")
    return c


def solve(cost: Any, *, solver: str = "exact", reg: float = 0.1) -> TransportPlan:
    """Solve a transport problem with uniform masses by :func:`exact` or :func:`sinkhorn`, with its regularisation ``reg``.

    Examples
    --------
    >>> solve([[0.0, 1.0], [1.0, 0.0]]).value
    0.0
    >>> round(solve([[0.0, 1.0], [1.0, 0.0]], solver="sinkhorn", reg=0.1).value, 4)
    0.0
    """
    if solver == "exact":
        return exact(cost)
    if solver == "sinkhorn":
        return sinkhorn(cost, reg=reg)
    raise ConfigError(f"unknown transport solver {solver!r}; {nearest(solver, SOLVERS)}")


def exact(cost: Any, *, duals: bool = False) -> TransportPlan:
    """Solve the transport problem exactly, in float64.

    Samples of equal size up to 1024 go to SciPy's assignment solver, because their optimum is a permutation; the others, and problems
    whose potentials are asked for, to POT's network simplex. Measured on one core with cosine costs of ReLU features, the simplex takes
    3-8 times as long at n = 32-64, 1.7-3.2 times at 128-512, and 1.1-2.7 times at 1024. Both release Python's interpreter lock.

    Parameters
    ----------
    cost : (n, m) array_like
        Ground costs; any finite numbers.
    duals : bool
        Also return the potentials f, g, feasible and with ``f.mean() + g.mean() == value`` to 1e-6.

    Raises
    ------
    EmdcflError
        The solver did not reach an optimum. A value that is not optimal is never returned.

    Examples
    --------
    >>> exact([[0.0, 1.0], [1.0, 0.0]]).value
    0.0
    >>> plan = exact([[1.0, 3.0, 2.0], [2.0, 1.0, 4.0]], duals=True)
    >>> round(plan.value, 6), round(float(plan.f.mean() + plan.g.mean()), 6)
    (1.5, 1.5)
    """
    c = _checked(cost).astype(np.float64)
    if not duals and c.shape[0] == c.shape[1] <= ASSIGNMENT_LIMIT:
        return TransportPlan(_assignment(c))
    return _simplex(c, duals=duals)


def _assignment(c: Array) -> float:
    """Solve an assignment problem; a large one by its reduced costs, on which the augmenting paths are short."""
    from scipy.optimize import linear_sum_assignment

    costs = c
    if len(c) >= REDUCED_FROM and np.abs(c).max() < 1e30:  # potentials are in float32
        f, g = (potential.astype(np.float64) for potential in potentials(c))
        costs = c - f[:, None] - g
    rows, columns = linear_sum_assignment(costs)
    return float(c[rows, columns].mean())


def _simplex(c: Array, *, duals: bool) -> TransportPlan:
    emd = network_simplex()
    n, m = c.shape
    with warnings.catch_warnings():
        # Non-convergence is an error here, reported below by result code.
        warnings.simplefilter("ignore", UserWarning)
        _, log = emd(np.full(n, 1.0 / n), np.full(m, 1.0 / m), c, numItermax=MAX_ITERATIONS, log=True)
    if log["result_code"] != 1 or not np.isfinite(log["cost"]):
        raise EmdcflError(
            f"exact transport of {n} x {m} samples did not converge ({log['warning']}); lower max_samples or use solver='sinkhorn'"
        )
    value = float(log["cost"])
    if not duals:
        return TransportPlan(value)
    f, g = conjugate(c, np.asarray(log["u"], dtype=np.float64))
    gap = value - float(f.mean() + g.mean())
    if abs(gap) > 1e-6 * max(1.0, abs(value)):
        raise EmdcflError(f"exact transport of {n} x {m} samples has a duality gap of {gap:.1e}; report this cost matrix as a bug")
    return TransportPlan(value, f, g)


def sinkhorn(cost: Any, *, reg: float = 0.1, tol: float = 1e-6, max_iter: int = 20_000) -> TransportPlan:
    r"""Transport cost of the entropy-regularised plan.

    .. math:: \min_P \langle C, P\rangle + \lambda \sum_{ij} P_{ij} \log\frac{P_{ij}}{1/(nm)},
              \qquad P_{ij} = \frac{1}{nm} \exp\frac{f_i + g_j - c_{ij}}{\lambda}

    The value is the transport cost :math:`\langle C, P\rangle` of the regularised plan, without the entropy. It is never below the exact
    value, and at :math:`\lambda = 0.1` on cosine costs up to about 0.1 above it: compare it only with values of the same kind (tau too).

    Potentials are kept in the log domain. Between two log-domain steps the kernel is fixed and the marginals are matched by
    scaling vectors (matrix-vector products instead of exponentials), which are absorbed before they grow large.

    Parameters
    ----------
    cost : (n, m) array_like
        Ground costs.
    reg : float
        Regularisation :math:`\lambda > 0`, in units of the cost.
    tol : float
        Largest L1 error of the column masses (which sum to one).
    max_iter : int
        Iterations after which :class:`EmdcflError` is raised.

    Examples
    --------
    >>> c = np.array([[0.0, 1.0], [1.0, 0.0]])
    >>> round(sinkhorn(c, reg=1.0).value, 4)  # 1 / (1 + e)
    0.2689
    """
    if not (reg > 0 and np.isfinite(reg)):
        raise ConfigError(f"expected a Sinkhorn regularisation > 0, got {reg}; the paper uses 0.1")
    c = _checked(cost).astype(np.float64)
    f, g = np.zeros(c.shape[0]), np.zeros(c.shape[1])
    left = max_iter
    with one_blas_thread():
        while left > 0:
            g = _soft_min(c - f[:, None], reg, axis=0)
            f = _soft_min(c - g[None, :], reg, axis=1)
            kernel = np.exp((f[:, None] + g[None, :] - c) / reg) / c.size
            u, v, used, done = _scale(kernel, tol, left)
            f, g, left = f + reg * np.log(u), g + reg * np.log(v), left - used - 1
            if done:
                return TransportPlan(float(((u[:, None] * kernel * v[None, :]) * c).sum()))
    raise EmdcflError(
        f"Sinkhorn on {c.shape[0]} x {c.shape[1]} samples did not reach {tol:.0e} in {max_iter} iterations; "
        f"raise the regularisation (now {reg:g}) or use solver='exact'"
    )


def _soft_min(x: Array, reg: float, axis: int) -> Array:
    """``-reg * log(mean(exp(-x / reg)))`` along an axis."""
    low = x.min(axis=axis, keepdims=True)
    mean = np.exp((low - x) / reg).mean(axis=axis)
    return np.asarray(low.squeeze(axis) - reg * np.log(mean))


def _scale(kernel: Array, tol: float, limit: int) -> tuple[Array, Array, int, bool]:
    """Scale rows and columns to uniform masses; stop when done, out of iterations, or before float64 overflows.

    Rows are matched last, so the error is that of the columns.
    """
    n, m = kernel.shape
    u, v = np.ones(n), np.ones(m)
    columns = kernel.sum(axis=0)
    for used in range(limit):
        if float(np.abs(v * columns - 1.0 / m).sum()) <= tol:
            return u, v, used, True
        if columns.min() < 1.0 / MAX_SCALING:
            return u, v, used, False
        v_next = (1.0 / m) / columns
        rows = kernel @ v_next
        if rows.min() < 1.0 / MAX_SCALING or v_next.max() > MAX_SCALING or rows.max() > MAX_SCALING:
            return u, v, used, False
        u, v = (1.0 / n) / rows, v_next
        columns = u @ kernel
    return u, v, limit, False


def warm_up() -> Thread:
    """Import the solvers and find their BLAS in a thread, while clients train: both take long the first time."""
    thread = Thread(target=_import_solvers, name="emdcfl-warm-up")
    thread.start()
    return thread


def _import_solvers() -> None:
    with suppress(Exception):  # the first solve reports what is missing; a run that ends at once may stop the interpreter meanwhile
        import scipy.optimize  # noqa: F401

        network_simplex()
        with one_blas_thread():
            pass


POT_ALONE = "emdcfl_pot"
"""Package name under which only the simplex is imported. ``import ot``, in any thread at any time, still gives all of POT."""

_lock = Lock()
_emd: Callable[..., Any] | None = None


def network_simplex() -> Callable[..., Any]:
    """Return ``ot.emd``: POT's network simplex without the rest of POT.

    ``import ot`` loads every part of POT, and with its clustering tools scikit-learn: a second, in every process that solves a problem,
    where the simplex itself takes some milliseconds.
    """
    global _emd
    with _lock:
        if _emd is None:
            for name in ("JAX", "CUPY", "TENSORFLOW"):  # POT imports every array library it finds; NumPy is enough here
                os.environ.setdefault(f"POT_BACKEND_DISABLE_{name}", "1")
            _emd = _find_emd()
        return _emd


def _find_emd() -> Callable[..., Any]:
    if "ot" not in sys.modules:
        with suppress(Exception):  # a version of POT with another layout
            return _import_simplex()
    import ot

    emd: Callable[..., Any] = ot.emd
    return emd


def _import_simplex() -> Callable[..., Any]:
    """Import the one module, with empty packages around it."""
    spec = importlib.util.find_spec("ot")
    root = Path((spec.submodule_search_locations or [""])[0]) if spec is not None else Path()
    try:
        for name, place in ((POT_ALONE, root), (f"{POT_ALONE}.lp", root / "lp")):
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__path__ = [str(place)]
        emd: Callable[..., Any] = importlib.import_module(f"{POT_ALONE}.lp._network_simplex").emd
        return emd
    finally:
        for name in [name for name in sys.modules if name.split(".", 1)[0] == POT_ALONE]:
            del sys.modules[name]
