"""Networks and their recipes. Importing this package registers the built-in builders."""

from __future__ import annotations

from emdcfl.models.cnn import cnn, small_cnn
from emdcfl.models.mlp import mlp
from emdcfl.models.recipe import BUILDERS, ModelRecipe, register

__all__ = ["BUILDERS", "ModelRecipe", "cnn", "mlp", "register", "small_cnn"]
