"""Optimal transport between samples of embeddings: pure functions on arrays.

``cost`` draws seeded projections and computes ground costs. ``solvers`` solves exactly or with Sinkhorn, ``pool`` spreads
solves over the cores. ``screening`` decides links from the certified bounds of ``bounds``, with few exact solves (``pairs``).
``calibration`` derives the tolerance that a client computes from its own data.
"""

from __future__ import annotations

from emdcfl.transport.bounds import cosine_lower_bounds, minima
from emdcfl.transport.calibration import dual_variance, min_samples, quantile, tolerance
from emdcfl.transport.cost import COSTS, cost_matrix, projected_width, projection, unit
from emdcfl.transport.pairs import EXACT, LOWER, UNKNOWN, UPPER, Source
from emdcfl.transport.pool import SolverPool
from emdcfl.transport.screening import Decision, QueueFactory, Screen
from emdcfl.transport.solvers import SOLVERS, TransportPlan, exact, sinkhorn, solve, warm_up

__all__ = [
    "COSTS",
    "EXACT",
    "LOWER",
    "SOLVERS",
    "UNKNOWN",
    "UPPER",
    "Decision",
    "TransportPlan",
    "SolverPool",
    "Screen",
    "Source",
    "QueueFactory",
    "cosine_lower_bounds",
    "cost_matrix",
    "dual_variance",
    "exact",
    "min_samples",
    "minima",
    "warm_up",
    "projected_width",
    "projection",
    "quantile",
    "sinkhorn",
    "solve",
    "tolerance",
    "unit",
]
