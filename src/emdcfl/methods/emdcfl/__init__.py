"""EMD-CFL, the method of this project: ``algorithm.py`` is the paper's Algorithm 1; the other modules are what it calls."""

from __future__ import annotations

from emdcfl.methods.emdcfl.algorithm import EMDCFL

__all__ = ["EMDCFL"]
