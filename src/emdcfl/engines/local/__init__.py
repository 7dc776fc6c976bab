"""Clients simulated on this machine.

``sequential`` is the reference: one client after the other. ``processes`` spreads it over worker processes, with bit-identical results.
``batched`` trains many clients with small models at once, equal to the reference up to rounding.
"""

from __future__ import annotations

from emdcfl.engines.local.processes import ProcessFederation
from emdcfl.engines.local.sequential import SequentialFederation

__all__ = ["ProcessFederation", "SequentialFederation"]
