"""A method's state as JSON and tensors, and back, without any code in the method.

A state is a dataclass of tensors, numbers, strings, booleans, ``None``, bytes, and lists, tuples, dicts (string keys) and dataclasses of
them. What JSON lacks is written as an object whose first key begins with ``$``; dicts are written as ``{"$dict": …}``, so nothing can be
mistaken. No class is looked up by a name from the file: the dataclasses that may occur are those the state's type hints lead to.

Imports errors, torch and files only.
"""

from __future__ import annotations

import base64
import dataclasses
import itertools
import math
import typing
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from emdcfl.core.errors import StoreError
from emdcfl.runs.store.files import DTYPES, plain_tensor, tensor_bytes

Classes = dict[str, type]
INLINE = 1024
"""Tensors of at most this many bytes are written into the JSON: a file each would cost more than it holds."""


_KNOWN: dict[type, Classes] = {}


def dataclasses_of(cls: type) -> Classes:
    """The dataclass and all dataclasses that its type hints lead to, by name. Only to look at: the result is shared."""
    if cls in _KNOWN:
        return _KNOWN[cls]
    found: Classes = {}

    def visit(hint: Any) -> None:
        for argument in typing.get_args(hint):
            visit(argument)
        if not isinstance(hint, type) or not dataclasses.is_dataclass(hint) or found.get(hint.__qualname__) is hint:
            return
        if hint.__qualname__ in found:
            raise StoreError(f"{cls.__name__}: two dataclasses named {hint.__qualname__}; rename one")
        found[hint.__qualname__] = hint
        for inner in typing.get_type_hints(hint).values():
            visit(inner)

    visit(cls)
    _KNOWN[cls] = found
    return found


def encode(value: Any, classes: Classes, keep: Callable[[Tensor], str], where: str) -> Any:
    """The value as JSON. ``keep`` puts a plain tensor somewhere and returns its address; ``where`` names the value in errors."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise StoreError(f"{where}: the number is {value}, which JSON cannot hold; make it a tensor")
        return float(value)
    if isinstance(value, Tensor):
        return {"$tensor": _encode_tensor(plain_tensor(value, where), keep)}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, list):
        return [encode(item, classes, keep, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [encode(item, classes, keep, f"{where}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise StoreError(f"{where}: keys must be strings (clients by name), got {key!r} ({type(key).__name__})")
        return {"$dict": {key: encode(item, classes, keep, f"{where}[{key!r}]") for key, item in value.items()}}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        name = type(value).__qualname__
        if classes.get(name) is not type(value):
            raise StoreError(
                f"{where}: dataclass {name} is not in the type hints of the state, so it could not be read back; name it there"
            )
        inner = {f.name: encode(getattr(value, f.name), classes, keep, f"{where}.{f.name}") for f in dataclasses.fields(value) if f.init}
        return {"$class": name, "fields": inner}
    expected = "a tensor, number, string, boolean, None, bytes, list, tuple, dict or dataclass"
    raise StoreError(f"{where}: a state holds only {expected}, got {type(value).__name__}")


def _encode_tensor(tensor: Tensor, keep: Callable[[Tensor], str]) -> str | dict[str, Any]:
    if tensor.numel() * tensor.element_size() > INLINE:
        return keep(tensor)
    data = base64.b64encode(tensor_bytes(tensor)).decode()
    return {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data": data}


def decode(node: Any, classes: Classes, fetch: Callable[[str], Tensor]) -> Any:
    """The value that ``encode`` was given. ``fetch`` returns the tensor at an address."""
    if isinstance(node, list):
        return [decode(item, classes, fetch) for item in node]
    if not isinstance(node, dict):
        return node
    if "$tensor" in node:
        return fetch(node["$tensor"]) if isinstance(node["$tensor"], str) else _decode_tensor(node["$tensor"])
    if "$bytes" in node:
        return base64.b64decode(node["$bytes"])
    if "$tuple" in node:
        return tuple(decode(item, classes, fetch) for item in node["$tuple"])
    if "$dict" in node:
        return {key: decode(item, classes, fetch) for key, item in node["$dict"].items()}
    return _decode_dataclass(node, classes, fetch)


def _decode_tensor(node: dict[str, Any]) -> Tensor:
    dtype = next(dtype for dtype, name in DTYPES.items() if name == node["dtype"])
    data = bytearray(base64.b64decode(node["data"]))
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(node["shape"])


def _decode_dataclass(node: dict[str, Any], classes: Classes, fetch: Callable[[str], Tensor]) -> Any:
    name, fields = node["$class"], node["fields"]
    if name not in classes:
        raise StoreError(f"the saved state holds a {name}, which this method does not know; resume with the version that started the run")
    cls = classes[name]
    valid = {field.name for field in dataclasses.fields(cls) if field.init}
    if set(fields) != valid:
        differing = ", ".join(sorted(set(fields) ^ valid))
        raise StoreError(f"the saved {name} and this version differ in {differing}; resume with the version that started the run")
    return cls(**{key: decode(item, classes, fetch) for key, item in fields.items()})


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in a state.

    Examples
    --------
    >>> [len(t) for t in tensors({"a": torch.zeros(2), "b": [torch.ones(3), "x"]})]
    [2, 3]
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        yield from itertools.chain.from_iterable(map(tensors, value))
    elif isinstance(value, dict):
        yield from itertools.chain.from_iterable(map(tensors, value.values()))
    elif dataclasses.is_dataclass(value):
        yield from itertools.chain.from_iterable(tensors(getattr(value, f.name)) for f in dataclasses.fields(value))


def addresses(node: Any) -> set[str]:
    """All tensor addresses in an encoded value."""
    if isinstance(node, list):
        return set().union(*map(addresses, node))
    if not isinstance(node, dict):
        return set()
    if "$tensor" in node:
        return {node["$tensor"]} if isinstance(node["$tensor"], str) else set()
    inner = node.get("$dict") or node.get("fields") or node.get("$tuple") or []
    return set().union(*map(addresses, inner.values() if isinstance(inner, dict) else inner))
