"""Networks and their recipes. Importing this package registers the built-in builders."""

from __future__ import annotations

from emdcfl.models.networks import cnn, mlp, pooled_cnn, small_cnn, smoke_model
from emdcfl.models.recipe import BUILDERS, ModelRecipe, register
from emdcfl.models.vision import convnext_base, efficientnet_b3, resnet18, resnet50, vit_b_16

__all__ = [
    "BUILDERS",
    "ModelRecipe",
    "cnn",
    "convnext_base",
    "efficientnet_b3",
    "mlp",
    "pooled_cnn",
    "register",
    "resnet18",
    "resnet50",
    "small_cnn",
    "smoke_model",
    "vit_b_16",
]
