"""Named scenarios: ``build("rotated-digits", clients_per_group=3)``. Every module of this package is imported and registers its own."""

from __future__ import annotations

import importlib
import pkgutil

from emdcfl.data.scenarios.registry import build, describe, is_built_in, names, option_types, options, scenario

_IN_ORDER = ("digits", "rotated", "pacs", "backdoor", "natural", "custom")  # of ``names``; then what a contributor adds
for _name in (*_IN_ORDER, *(module.name for module in pkgutil.iter_modules(__path__))):
    importlib.import_module(f"{__name__}.{_name}")

__all__ = ["build", "describe", "is_built_in", "names", "option_types", "options", "scenario"]
