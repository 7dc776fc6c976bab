"""Networks and their recipes. Importing this package registers the built-in builders."""

from __future__ import annotations

from emdcfl.models import networks, vision  # noqa: F401  registers the builders
from emdcfl.models.recipe import BUILDERS, ModelRecipe, register

__all__ = ["BUILDERS", "ModelRecipe", "register"]
