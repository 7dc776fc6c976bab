"""Named scenarios: ``build("rotated-digits", clients_per_group=3)``. Importing this package registers the built-in ones."""

from __future__ import annotations

from emdcfl.data.scenarios import backdoor, custom, digits, folder, natural, pacs, rotated  # noqa: F401  (they register themselves)
from emdcfl.data.scenarios.registry import build, describe, is_built_in, names, option_types, options, scenario

__all__ = ["build", "describe", "is_built_in", "names", "option_types", "options", "scenario"]
