"""Optimal transport between samples of embeddings: pure functions on arrays.

``cost`` (ground costs), ``projection`` (seeded), ``exact`` (with ``simplex``) and ``sinkhorn`` (solvers), ``solve`` (either),
``pool`` (all cores), ``bounds`` and ``screening`` (links with few exact solves), ``batched`` and ``device`` (bounds of many problems at
once on a GPU), ``calibration`` (the tolerance a client computes at home), ``ahead`` (what takes long only the first time).
Imports numpy, scipy and POT; torch only inside the batched Sinkhorn and where a device is asked for.
"""

from __future__ import annotations

from emdcfl.transport.calibration import dual_variance, min_samples, quantile, tolerance
from emdcfl.transport.cost import COSTS, cost_matrix
from emdcfl.transport.exact import exact
from emdcfl.transport.pairs import EXACT, KINDS, LOWER, UNKNOWN, UPPER
from emdcfl.transport.plan import TransportPlan
from emdcfl.transport.pool import SolverPool
from emdcfl.transport.projection import projected_width, projection
from emdcfl.transport.screening import Decision, Screen, decide
from emdcfl.transport.sinkhorn import sinkhorn, sinkhorn_batch
from emdcfl.transport.solve import SOLVERS, solve
from emdcfl.transport.warmup import warm_up

__all__ = [
    "COSTS",
    "EXACT",
    "KINDS",
    "LOWER",
    "SOLVERS",
    "UNKNOWN",
    "UPPER",
    "Decision",
    "TransportPlan",
    "SolverPool",
    "Screen",
    "cost_matrix",
    "decide",
    "dual_variance",
    "exact",
    "min_samples",
    "warm_up",
    "projected_width",
    "projection",
    "quantile",
    "sinkhorn",
    "sinkhorn_batch",
    "solve",
    "tolerance",
]
