"""Clustered federated learning from Python: ``fit``, ``compare``, ``load``, and what they return."""

from __future__ import annotations

from emdcfl.api.comparison import Comparison, compare
from emdcfl.api.fitting import fit, load
from emdcfl.api.result import Result
from emdcfl.runs.result import Accuracy

__all__ = ["Accuracy", "Comparison", "Result", "compare", "fit", "load"]
