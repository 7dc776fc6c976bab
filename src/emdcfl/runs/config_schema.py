"""The config as a JSON schema, for editors that complete and check TOML. ``emdcfl init --schema`` prints it."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from emdcfl.core.checks import NONE
from emdcfl.data import scenarios
from emdcfl.methods import METHODS
from emdcfl.methods.base import PRESETS
from emdcfl.models import BUILDERS
from emdcfl.runs.config import CHOICES, PRIVACY, Config

Schema = dict[str, Any]


def config_schema() -> Schema:
    """Return the schema: every table with its keys, and for each built-in scenario, method and model the options that it declares."""
    hints = typing.get_type_hints(Config)
    tables = {f.name: _options(hints[f.name]) for f in dataclasses.fields(Config) if f.name not in CHOICES}
    preset = {"enum": list(PRESETS)}
    own = _options(METHODS["emdcfl"])
    tables[PRIVACY] = {name.removeprefix(f"{PRIVACY}_"): schema for name, schema in own.items() if name.startswith(f"{PRIVACY}_")}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "emdcfl run config",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            **{name: {"type": "object", "properties": keys, "additionalProperties": False} for name, keys in tables.items()},
            "scenario": _choice({name: _scenario(name) for name in sorted(scenarios.names()) if scenarios.is_built_in(name)}),
            "method": _choice({name: {**_options(cls), "preset": preset} for name, cls in sorted(METHODS.items()) if _ours(cls)}),
            "model": _choice({name: _options(builder) for name, builder in sorted(BUILDERS.items()) if _ours(builder)}, closed=False),
        },
    }


def _ours(made: Any) -> bool:
    return str(made.__module__).startswith("emdcfl.")


def _choice(known: Mapping[str, Mapping[str, Schema]], *, closed: bool = True) -> Schema:
    """A table whose ``name`` decides which other keys it has; only of models, ``package.module:function`` is a name too."""
    name: Schema = {"enum": list(known)}
    branches = [
        {
            "if": {"properties": {"name": {"const": key}}, "required": ["name"]},
            "then": {"properties": {"name": {}, **options}, "additionalProperties": False},
        }
        for key, options in known.items()
    ]
    return {"type": "object", "properties": {"name": name if closed else {"anyOf": [name, {"type": "string"}]}}, "allOf": branches}


def _scenario(name: str) -> dict[str, Schema]:
    hints = scenarios.option_types(name)
    return {option: _default(_type(hints.get(option, Any)), default) for option, default in scenarios.options(name).items()}


def _options(target: Callable[..., Any]) -> dict[str, Schema]:
    hints = typing.get_type_hints(target)
    if dataclasses.is_dataclass(target):
        return {f.name: _default(_type(hints[f.name]), f.default) for f in dataclasses.fields(target) if f.init}
    named = (p for p in inspect.signature(target).parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD)
    return {p.name: _default(_type(hints.get(p.name, Any)), p.default) for p in named}


def _default(schema: Schema, value: Any) -> Schema:
    return {**schema, "default": value} if isinstance(value, bool | int | float | str) else schema


def _type(hint: Any) -> Schema:
    """Return the schema of a type hint, as ``core.checks`` reads it.

    Examples
    --------
    >>> _type(float | None)
    {'anyOf': [{'type': 'number'}, {'const': 'none'}]}
    """
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if hint in (None, type(None)):
        return {"const": NONE}
    if origin is typing.Literal:
        return {"enum": list(inside)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_type(part) for part in inside]}
    simple = {bool: "boolean", int: "integer", float: "number", str: "string"}
    if hint in simple:
        return {"type": simple[hint]}
    container = origin or hint
    if container in (list, tuple, Sequence):
        kinds = [part for part in inside if part is not Ellipsis]
        return {"type": "array", "items": _type(kinds[0])} if len(set(map(repr, kinds))) == 1 else {"type": "array"}
    return {"type": "object"} if container in (dict, Mapping) else {}
