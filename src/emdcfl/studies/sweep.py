"""Distances of a snapshot under any projection, cost and solver, and how well every tolerance recovers the groups. Nothing is trained."""

from __future__ import annotations

import csv
import io
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from emdcfl.clustering import adjusted_rand, links, neighbourhoods
from emdcfl.core import keys
from emdcfl.core.errors import ConfigError, StoreError, nearest
from emdcfl.methods.emdcfl import EMDCFL
from emdcfl.runs.store.files import read_arrays, write_arrays, write_file
from emdcfl.studies.snapshot import Snapshot, SnapshotRow
from emdcfl.transport import COSTS, SOLVERS, SolverPool, cost_matrix, dual_variance, exact, projected_width, projection, solve
from emdcfl.transport.calibration import quantile, tolerance

log = logging.getLogger("emdcfl")

Array = np.ndarray[Any, Any]

RATIOS = (0.1, 0.25, 0.5, 0.75, 0.9)
EPSILONS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5)


@dataclass(frozen=True)
class Setting:
    """One way to measure distances."""

    ratio: float = 0.9
    cost: str = "cosine"
    solver: str = "exact"
    reg: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        for value, valid, what in ((self.cost, COSTS, "cost"), (self.solver, SOLVERS, "solver")):
            if value not in valid:
                raise ConfigError(f"unknown {what} {value!r}: {nearest(value, valid)}")
        if not 0 < self.ratio <= 1:
            raise ConfigError(f"expected a projection ratio in (0, 1], got {self.ratio}")

    @property
    def name(self) -> str:
        solver = self.solver if self.solver == "exact" else f"{self.solver}-{self.reg:g}"
        return f"{self.cost}-{solver}-{self.ratio:g}-seed{self.seed}"


@dataclass(frozen=True)
class Matrix:
    """W (C, C), τ (C,), the variance of τ's dual potential (C,), and the number of validation samples."""

    W: Array
    tau: Array
    variance: Array
    m: int

    def automatic(self) -> Array:
        """Return every client's own tolerance (``transport.calibration``), from one validation sample per pair."""
        q = quantile(EMDCFL.alpha, len(self.tau), max(1, self.m - 1))
        return np.array([tolerance(float(v), self.m, self.m, q) for v in self.variance])


def measure(snapshot: Snapshot, setting: Setting) -> Matrix:
    r"""Return :math:`W[c,c'] = W_1(Z_{c|c}R_c, Z_{c'|c}R_c) - \tau_c` for all pairs, one R per row client; kept beside the snapshot."""
    path = snapshot.folder / "distances" / f"{setting.name}.npz"
    try:
        stored = read_arrays(path) if path.exists() else {}
        return Matrix(stored["W"], stored["tau"], stored["variance"], int(stored["m"]))
    except StoreError as error:
        log.warning("%s; measured again", error)
    except KeyError:  # not measured yet
        pass
    with SolverPool() as pool:
        rows = [_row(snapshot.row(i), name, i, setting, pool) for i, name in enumerate(snapshot.clients)]
    found = Matrix(np.stack([r[0] for r in rows]), np.array([r[1] for r in rows]), np.array([r[2] for r in rows]), rows[0][3])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_arrays(path, {"W": found.W, "tau": found.tau, "variance": found.variance, "m": np.array(found.m)})
    return found


def _row(row: SnapshotRow, client: str, number: int, setting: Setting, pool: SolverPool) -> tuple[Array, float, float, int]:
    d = row.train.shape[1]
    R = projection(keys.digest("sweep", setting.seed, client), d, projected_width(setting.ratio, d))
    a, b = row.train @ R, row.val @ R

    def one(column: int) -> tuple[float, float]:
        labels = {"labels_a": row.train_labels, "labels_b": row.val_labels[column]}
        cost = cost_matrix(a, b[column], cost=setting.cost, **labels)
        value = solve(cost, solver=setting.solver, reg=setting.reg).value
        return value, dual_variance(exact(cost, duals=True).g) if column == number else 0.0

    solved = pool.map(one, range(len(b)))
    tau, variance = solved[number]
    return np.array([value - tau for value, _ in solved]), tau, variance, b.shape[1]


def ari(snapshot: Snapshot, matrix: Matrix, epsilon: Any) -> float:
    """Agreement of the paper's clusters at a tolerance (a number, or one per client) with the true groups."""
    labels, _ = neighbourhoods(links(matrix.W, epsilon))
    return adjusted_rand(_truth(snapshot), labels)


def _truth(snapshot: Snapshot) -> tuple[str, ...]:
    if snapshot.groups is None:
        raise ConfigError(f"{snapshot.folder}: the scenario has no true groups to compare with")
    return snapshot.groups


def interval(snapshot: Snapshot, matrix: Matrix) -> tuple[float, float]:
    """Return the tolerances that give the true groups, ``low < ε ≤ high``; empty where ``low ≥ high``.

    A pair is linked when both directions are below ε, so the larger of the two decides: all pairs inside groups must be below, all pairs
    across groups must not.
    """
    groups = _truth(snapshot)
    larger = np.maximum(matrix.W, matrix.W.T)
    same = np.array([[a == b for b in groups] for a in groups])
    off = ~np.eye(len(same), dtype=bool)
    low = float(larger[same & off].max()) if (same & off).any() else -np.inf
    high = float(larger[~same].min()) if (~same).any() else np.inf
    return low, high


def sweep(snapshot: Snapshot, setting: Setting, epsilons: Sequence[float] = EPSILONS) -> dict[str, Any]:
    """Return what a setting gives: ARI at every tolerance and at the automatic one, the interval of right tolerances, τ."""
    matrix = measure(snapshot, setting)
    low, high = interval(snapshot, matrix)
    return {
        "cost": setting.cost,
        "solver": setting.solver,
        "reg": setting.reg,
        "ratio": setting.ratio,
        "epsilons": list(epsilons),
        "ari": [ari(snapshot, matrix, e) for e in epsilons],
        "auto": ari(snapshot, matrix, matrix.automatic()),
        "low": low if np.isfinite(low) else None,
        "high": high if np.isfinite(high) else None,
        "tau": float(np.median(matrix.tau)),
    }


def write_sweep(records: Sequence[dict[str, Any]], out: Path) -> None:
    """Write ``sweep.json`` and ``sweep.csv`` (one line per setting and tolerance)."""
    out.mkdir(parents=True, exist_ok=True)
    write_file(out / "sweep.json", [(json.dumps(list(records), indent=1) + "\n").encode()])
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    names = ("scenario", "cost", "solver", "reg", "ratio")
    writer.writerow([*names, "epsilon", "ari"])
    for r in records:
        for epsilon, value in [*zip(r["epsilons"], r["ari"], strict=True), ("auto", r["auto"])]:
            writer.writerow([*(r[name] for name in names), epsilon, round(value, 6)])
    write_file(out / "sweep.csv", [buffer.getvalue().encode()])
