"""Clustered federated learning that finds the groups by itself.

>>> import emdcfl
>>> scenario = emdcfl.scenarios.build("rotated-digits")
>>> len(scenario.sites)
8
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from emdcfl import methods
    from emdcfl.api import Comparison, Result, compare, fit, load
    from emdcfl.core.client import Client
    from emdcfl.core.federation import Federation
    from emdcfl.data import scenarios
    from emdcfl.methods.emdcfl import EMDCFL

__all__ = ["EMDCFL", "Client", "Comparison", "Federation", "Result", "compare", "fit", "load", "methods", "scenarios"]

_HOMES = {
    "EMDCFL": "emdcfl.methods.emdcfl",
    "Client": "emdcfl.core.client",
    "Federation": "emdcfl.core.federation",
    "Comparison": "emdcfl.api",
    "Result": "emdcfl.api",
    "compare": "emdcfl.api",
    "fit": "emdcfl.api",
    "load": "emdcfl.api",
    "methods": "emdcfl.methods",
    "scenarios": "emdcfl.data.scenarios",
}


def __getattr__(name: str) -> Any:
    """Import on first use: ``emdcfl --version`` does not wait for torch. The version is that of the installation."""
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("emdcfl")
        except PackageNotFoundError:  # the source on a path, not installed
            return "0+unknown"
    if name not in _HOMES:
        raise AttributeError(f"module 'emdcfl' has no attribute {name!r}")
    home = importlib.import_module(_HOMES[name])
    return home if name in ("methods", "scenarios") else getattr(home, name)
