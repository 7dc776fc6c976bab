"""Check values from a file or a command line against the type hints of the dataclass or function that will take them."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from emdcfl.core.errors import ConfigError, nearest

NONE = "none"
"""How ``None`` is written where the format has no word for it (TOML)."""

NODE_NAME = "use letters, digits, '_', '.' and '-' only, the last two not at its beginning"

MAX_WHOLE = 1 << 1023
"""Whole numbers beyond it are no floats."""

MAX_DEPTH = 32
"""Levels of tables and lists in TOML; a run has three or four."""


def names_node(name: str) -> bool:
    """Whether a client's name can be that of a node in a federation: a folder's name, and a word on the command line."""
    return re.fullmatch(r"\w[\w.-]*", name) is not None


def read_toml(text: str) -> dict[str, Any]:
    """Parse TOML from anywhere; a ``ValueError`` says what is wrong, also of one so deep that reading it would exhaust the stack.

    Examples
    --------
    >>> read_toml("a.b = 1")
    {'a': {'b': 1}}
    >>> read_toml(".".join("a" * 1000) + " = 1")
    Traceback (most recent call last):
    ...
    ValueError: more than 32 levels of tables and lists
    """
    try:
        raw = tomllib.loads(text)
    except RecursionError as error:
        raise ValueError(f"more than {MAX_DEPTH} levels of tables and lists") from error
    level: list[Any] = [raw]
    for _ in range(MAX_DEPTH):
        inside = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, (dict, list))]
        level = [item for items in inside for item in items]
    if any(isinstance(one, (dict, list)) for one in level):
        raise ValueError(f"more than {MAX_DEPTH} levels of tables and lists")
    return raw


def check_options(target: Callable[..., Any], options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the options, coerced to the types that ``target`` declares; ``where`` begins the error message.

    The fields of a dataclass, or the keyword parameters of a function, are the valid names; their type hints are the valid types. An int is
    accepted for a float, a list for a tuple, and the word ``"none"`` for ``None``.

    Examples
    --------
    >>> @dataclasses.dataclass
    ... class Example:
    ...     tolerance: "float | typing.Literal['auto']" = 0.025
    >>> check_options(Example, {"tolerance": 1}, "config.toml: method")
    {'tolerance': 1.0}
    >>> check_options(Example, {"tolerence": 1}, "config.toml: method")
    Traceback (most recent call last):
    ...
    emdcfl.core.errors.ConfigError: config.toml: method has no key 'tolerence': did you mean 'tolerance'? (valid: tolerance)
    """
    names, open_ended = _names(target)
    hints = typing.get_type_hints(target)
    checked = {}
    for key, value in options.items():
        if key in names:
            checked[key] = _checked(value, hints.get(key, Any), f"{where}.{key}")
        elif open_ended:
            checked[key] = value
        else:
            raise ConfigError(f"{where} has no key {key!r}: {nearest(key, names) if names else 'it takes no options'}")
    return checked


def _names(target: Callable[..., Any]) -> tuple[list[str], bool]:
    """Valid option names, and whether any other name is welcome too."""
    if dataclasses.is_dataclass(target):
        return [field.name for field in dataclasses.fields(target) if field.init], False
    parameters = inspect.signature(target).parameters.values()
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in parameters if p.kind in by_keyword], any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def check_size(value: Any, where: str) -> None:
    """Refuse a number that is not finite, or too large for a tensor; Python cannot even print an integer of thousands of digits."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{where} must be finite, got {value}")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise ConfigError(f"{where} must be below 2^63 in size, got a number of {value.bit_length()} bits")


def _checked(value: Any, hint: Any, where: str) -> Any:
    check_size(value, where)
    fits, result = _fit(value, hint)
    if not fits:
        raise ConfigError(f"{where} must be {describe(hint)}, got {value!r} ({type(value).__name__})")
    return result


def fits(value: Any, hint: Any) -> bool:
    """Whether a value has the type of a hint as it is; a whole number is a float, a bool is no number."""
    found, coerced = _fit(value, hint)
    return found and bool(coerced == value)


def fits_json(value: Any, hint: Any) -> bool:
    """Whether a value that was read as JSON ``fits``, and all its numbers are finite."""
    return fits(value, hint) and _finite(value)


def _finite(value: Any) -> bool:
    if isinstance(value, (dict, list)):
        return all(map(_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


def _fit(value: Any, hint: Any) -> tuple[bool, Any]:
    """Whether the value fits the hint, and the value coerced to it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True, value
    if hint is None or hint is type(None):
        return value is None or value == NONE, None
    if origin is typing.Literal:
        # 1 == True: without the type, a bool would pass for a number
        return any(value == choice and type(value) is type(choice) for choice in arguments), value
    if origin in (typing.Union, types.UnionType):
        return _fit_union(value, arguments)
    if hint is float:
        number = isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < MAX_WHOLE)
        return number, float(value) if number else value
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool), value
    if origin is typing.NotRequired:
        return _fit(value, arguments[0])
    if typing.is_typeddict(hint):
        return _fit_record(value, hint)
    container = origin or hint
    if container is tuple:
        return _fit_tuple(value, arguments)
    if container is list or container is Sequence:
        return _fit_items(value, arguments[0] if arguments else Any)
    if container is dict or container is Mapping:
        return _fit_mapping(value, arguments[1] if arguments else Any)
    return isinstance(container, type) and isinstance(value, container), value


def _fit_union(value: Any, hints: tuple[Any, ...]) -> tuple[bool, Any]:
    if type(None) in hints and (value is None or value == NONE):
        return True, None
    exact = [hint for hint in hints if isinstance(hint, type) and type(value) is hint]  # int | float keeps an int
    for hint in (*exact, *hints):
        fits, result = _fit(value, hint)
        if fits:
            return True, result
    return False, value


def _fit_tuple(value: Any, hints: tuple[Any, ...]) -> tuple[bool, Any]:
    if not isinstance(value, (list, tuple)):
        return False, value
    if not hints or hints[-1] is Ellipsis:
        fits, items = _fit_items(value, hints[0] if hints else Any)
        return fits, tuple(items)
    if len(value) != len(hints):
        return False, value
    pairs = [_fit(item, hint) for item, hint in zip(value, hints, strict=True)]
    return all(fits for fits, _ in pairs), tuple(item for _, item in pairs)


def _fit_items(value: Any, hint: Any) -> tuple[bool, Any]:
    if not isinstance(value, (list, tuple, range)) or any(isinstance(item, float) and not math.isfinite(item) for item in value):
        return False, value
    pairs = [_fit(item, hint) for item in value]
    return all(fits for fits, _ in pairs), [item for _, item in pairs]


def _fit_mapping(value: Any, hint: Any) -> tuple[bool, Any]:
    if not isinstance(value, Mapping):
        return False, value
    pairs = {key: _fit(item, hint) for key, item in value.items()}
    return all(fits for fits, _ in pairs.values()), {key: item for key, (_, item) in pairs.items()}


def _fit_record(value: Any, hint: Any) -> tuple[bool, Any]:
    """A typed dict: what it needs is there, what it knows fits, anything else is taken as it is."""
    hints = _hints_of_record(hint)
    needed = (key for key, one in hints.items() if typing.get_origin(one) is not typing.NotRequired)
    if not isinstance(value, Mapping) or not all(key in value for key in needed):
        return False, value
    pairs = {key: _fit(item, hints.get(key, Any)) for key, item in value.items()}
    return all(fits for fits, _ in pairs.values()), {key: item for key, (_, item) in pairs.items()}


@cache  # a run of many sites has thousands of records
def _hints_of_record(hint: Any) -> dict[str, Any]:
    return typing.get_type_hints(hint, include_extras=True)


def describe(hint: Any) -> str:
    """The hint in words, for error messages.

    Examples
    --------
    >>> describe(float | typing.Literal["auto"])
    "float or 'auto'"
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " or ".join(repr(choice) for choice in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(argument) for argument in arguments)
    if hint is type(None):
        return repr(NONE)
    if origin in (list, tuple, Sequence):
        return f"a list of {describe(arguments[0])}"
    if origin in (dict, Mapping):
        return f"a table of {describe(arguments[1])}"
    return str(getattr(hint, "__name__", hint))
