"""A network as a name and options, which can be written to a file.

``ModelRecipe("cnn", {"channels": 1, "classes": 10})()`` builds a fresh module. Initial weights come from torch's global generator; callers
seed it (``keys.global_seed``).
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import nn

from emdcfl.core.errors import ModelError, nearest

Builder = TypeVar("Builder", bound=Callable[..., nn.Module])

BUILDERS: dict[str, Callable[..., nn.Module]] = {}
"""Name → function that builds the module from the recipe's options."""


def register(builder: Builder) -> Builder:
    """Make a builder available under its function name."""
    BUILDERS[builder.__name__] = builder
    return builder


def refuse_code(name: Any, where: object) -> None:
    """Refuse a model that is not a registered builder: files from elsewhere are data, and must not say which code runs."""
    if not isinstance(name, str) or name not in BUILDERS:
        raise ModelError(
            f"{where} names the model {name!r}, which is not one of emdcfl's own, so it is not run; "
            "if you trust its author, add --trust-model (in Python: trust_model=True)"
        )


@dataclass(frozen=True)
class ModelRecipe:
    """Name of a registered builder, or ``"package.module:function"``, with its keyword options (JSON values)."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self) -> nn.Module:
        builder = self.builder_function()
        try:
            inspect.signature(builder).bind(**self.options)
        except TypeError as error:
            raise ModelError(f"model {self.name!r} does not take these options ({error}): it has {inspect.signature(builder)}") from error
        module = builder(**self.options)
        if not isinstance(module, nn.Module):
            raise ModelError(f"model {self.name!r} must return a torch.nn.Module, got {type(module).__name__}")
        return module

    def untrained(self) -> ModelRecipe:
        """Return the same network without pretrained weights, for callers that load a state into it."""
        return ModelRecipe(self.name, {**self.options, "weights": None}) if "weights" in self.options else self

    def builder_function(self) -> Callable[..., nn.Module]:
        """Return the function that builds the network."""
        if self.name in BUILDERS:
            return BUILDERS[self.name]
        if ":" not in self.name:
            raise ModelError(f"unknown model {self.name!r}: {nearest(self.name, BUILDERS)}, or 'package.module:function'")
        module, _, function = self.name.partition(":")
        try:
            builder: Callable[..., nn.Module] = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError) as error:
            raise ModelError(f"cannot import model {self.name!r}: {error}") from error
        return builder

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "options": dict(self.options)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelRecipe:
        return cls(values["name"], dict(values["options"]))


@dataclass(frozen=True)
class FactoryRecipe(ModelRecipe):
    """A user's function that returns a network. A saved run can rebuild it only if the function can be imported."""

    factory: Callable[[], nn.Module] | None = None

    def builder_function(self) -> Callable[..., nn.Module]:
        assert self.factory is not None
        return self.factory


def recipe_of(model: str | ModelRecipe | Callable[[], nn.Module]) -> str | ModelRecipe:
    """Return a name or a recipe unchanged, and a recipe for a function that builds a network."""
    if isinstance(model, (str, ModelRecipe)):
        return model
    if isinstance(model, nn.Module) or not callable(model):
        raise ModelError(
            f"expected a model's name or a function that builds it, got {type(model).__name__}; pass lambda: {type(model).__name__}(…)"
        )
    return FactoryRecipe(f"{getattr(model, '__module__', '?')}:{getattr(model, '__qualname__', type(model).__name__)}", {}, model)
