"""Named scenarios: ``build("rotated-digits", clients_per_group=3)``. Every module of this package is imported and registers its own."""

from __future__ import annotations

import importlib
import pkgutil

from emdcfl.data.scenarios.registry import build, describe, is_built_in, names, option_types, options, scenario

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["build", "describe", "is_built_in", "names", "option_types", "options", "scenario"]
