"""POT's network simplex without the rest of POT.

``import ot`` loads every part of POT, and with its clustering tools scikit-learn: a second, in every process that solves a problem, where
the simplex itself takes some milliseconds.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Any

NAME = "emdcfl_pot"
"""Package name under which only the simplex is imported. ``import ot``, in any thread at any time, still gives all of POT."""

_lock = Lock()
_emd: Callable[..., Any] | None = None


def network_simplex() -> Callable[..., Any]:
    """Return ``ot.emd``."""
    global _emd
    with _lock:
        if _emd is None:
            for name in ("JAX", "CUPY", "TENSORFLOW"):  # POT imports every array library it finds; NumPy is enough here
                os.environ.setdefault(f"POT_BACKEND_DISABLE_{name}", "1")
            _emd = _found()
        return _emd


def _found() -> Callable[..., Any]:
    if "ot" not in sys.modules:
        with suppress(Exception):  # a version of POT with another layout
            return _alone()
    import ot

    emd: Callable[..., Any] = ot.emd
    return emd


def _alone() -> Callable[..., Any]:
    """Import the one module, with empty packages around it."""
    spec = importlib.util.find_spec("ot")
    root = Path((spec.submodule_search_locations or [""])[0]) if spec is not None else Path()
    try:
        for name, place in ((NAME, root), (f"{NAME}.lp", root / "lp")):
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__path__ = [str(place)]
        emd: Callable[..., Any] = importlib.import_module(f"{NAME}.lp._network_simplex").emd
        return emd
    finally:
        for name in [name for name in sys.modules if name.split(".", 1)[0] == NAME]:
            del sys.modules[name]
