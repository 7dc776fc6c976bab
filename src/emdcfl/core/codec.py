"""Nested values as JSON and tensors, and back, without pickle: what runs save and what Flower's messages carry.

``pack`` takes a value apart into a *skeleton* (JSON), its tensors and its byte strings; ``unpack`` puts it together again. In the skeleton
a dict is ``{"m": {...}}``, a list ``{"l": [...]}``, a tuple ``{"u": [...]}``, tensor number i ``{"t": i}``, byte string number i
``{"b": i}`` and a number that JSON lacks ``{"f": "nan"}``. A skeleton may come from a stranger: ``unpack`` checks all of it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emdcfl.core.errors import ClientError, EmdcflError
from emdcfl.core.replies import brief

AXES = 32
NUMBERS = 1 << 40
"""Most axes of a tensor, and the most its sizes may multiply to with zeros left out: torch can address that."""
INTEGER = 1 << 63
"""Whole numbers stay below this in size, as in a tensor."""

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    )
}


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What a value may hold. The limits are far above any need, and low enough that junk exhausts neither memory nor stack."""

    entries: int = 1 << 20
    """Entries of dicts and lists, in all."""
    parts: int = 1 << 16
    """Tensors, and byte strings."""
    name: int = 1024
    """Characters of a key."""
    depth: int = 16
    """Levels of nesting."""
    tuples: bool = False
    """Whether tuples come back as tuples; otherwise as lists."""
    error: type[EmdcflError] = ClientError
    """What is raised for a value that breaks a rule."""

    def check_parts(self, tensors: Sized, blobs: Sized) -> None:
        """Refuse too many tensors or byte strings."""
        for what, held in (("tensors", tensors), ("byte strings", blobs)):
            if len(held) > self.parts:
                raise self.error(f"expected at most {self.parts} {what}, got {len(held)}")


MESSAGE = Rules()


@dataclass
class Packed:
    """A value taken apart."""

    skeleton: Any
    tensors: list[Tensor] = field(default_factory=list)
    blobs: list[bytes] = field(default_factory=list)


def pack(value: Any, rules: Rules = MESSAGE) -> Packed:
    """Take a value apart.

    Examples
    --------
    >>> packed = pack({"theta": torch.zeros(2), "n": 3})
    >>> packed.skeleton, len(packed.tensors)
    ({'m': {'theta': {'t': 0}, 'n': 3}}, 1)
    """
    walk = _Pack(rules)
    packed = Packed(walk.node(value, "value", rules.depth), walk.tensors, walk.blobs)
    rules.check_parts(packed.tensors, packed.blobs)
    return packed


def unpack(packed: Packed, rules: Rules = MESSAGE) -> Any:
    """Put a value together again. Each tensor and each byte string must occur once and in order, as ``pack`` leaves them."""
    rules.check_parts(packed.tensors, packed.blobs)
    walk = _Unpack(rules, packed)
    value = walk.value(packed.skeleton, rules.depth)
    if any(walk.left.values()):
        raise rules.error("expected every tensor and byte string in its place, got some in none")
    return value


class _Walk:
    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.entries = 0

    def enter(self, content: Collection[Any], left: int) -> None:
        """Count the entries of one more dict or list, and check a dict's keys."""
        rules = self.rules
        self.entries += len(content)
        if left < 1:
            raise rules.error(f"expected at most {rules.depth} levels of dicts and lists, got more")
        if self.entries > rules.entries:
            raise rules.error(f"expected at most {rules.entries} entries of dicts and lists, got more")
        for name in content if isinstance(content, Mapping) else ():
            if not isinstance(name, str):
                raise rules.error(f"expected text as keys, got {brief(repr(name), 40)} ({type(name).__name__})")
            if len(name) > rules.name:
                raise rules.error(f"expected keys of at most {rules.name} characters, got one of {len(name)}")

    def integer(self, value: int) -> int:
        if not -INTEGER <= value < INTEGER:
            raise self.rules.error(f"expected whole numbers of 64 bits, got one of {value.bit_length()}")
        return value


class _Pack(_Walk):
    def __init__(self, rules: Rules) -> None:
        super().__init__(rules)
        self.tensors: list[Tensor] = []
        self.blobs: list[bytes] = []

    def node(self, value: Any, where: str, left: int) -> Any:
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, int):
            return self.integer(value)
        if isinstance(value, float):
            return value if math.isfinite(value) else {"f": repr(float(value))}
        if isinstance(value, Tensor):
            if dtype_name(value) not in DTYPES or value.layout is not torch.strided:
                raise self.rules.error(f"expected a dense tensor of {', '.join(DTYPES)} at {where}, got {value.layout} {value.dtype}")
            self.tensors.append(value)
            return {"t": len(self.tensors) - 1}
        if isinstance(value, bytes):
            self.blobs.append(value)
            return {"b": len(self.blobs) - 1}
        if isinstance(value, Mapping):
            self.enter(value, left)
            return {"m": {key: self.node(item, f"{where}.{key}", left - 1) for key, item in value.items()}}
        if isinstance(value, (list, tuple)):
            self.enter(value, left)
            items = [self.node(item, f"{where}[{i}]", left - 1) for i, item in enumerate(value)]
            return {"u" if self.rules.tuples and isinstance(value, tuple) else "l": items}
        raise self.rules.error(f"expected tensors, numbers, text, bytes, dicts and lists, got {type(value).__name__} at {where}")


class _Unpack(_Walk):
    def __init__(self, rules: Rules, packed: Packed) -> None:
        super().__init__(rules)
        self.parts: dict[str, list[Any]] = {"t": packed.tensors, "b": packed.blobs}
        self.left = {kind: len(parts) for kind, parts in self.parts.items()}

    def value(self, node: Any, left: int) -> Any:
        if node is None or isinstance(node, (bool, str, float)):
            return node
        if isinstance(node, int):
            return self.integer(node)
        if not isinstance(node, dict) or len(node) != 1:
            raise self.rules.error(f"expected a value of this program, got a skeleton with {type(node).__name__} in it")
        ((kind, content),) = node.items()
        if kind == "m" and isinstance(content, dict):
            self.enter(content, left)
            return {key: self.value(item, left - 1) for key, item in content.items()}
        if kind == "l" and isinstance(content, list):
            return self.items(content, left)
        if kind == "u" and isinstance(content, list) and self.rules.tuples:
            return tuple(self.items(content, left))
        if kind == "f" and content in ("nan", "inf", "-inf"):
            return float(content)
        # in order and once: a part with many names would cost whoever checks the value a multiple of what was sent
        if kind in self.parts and type(content) is int and self.left[kind] and content == len(self.parts[kind]) - self.left[kind]:
            self.left[kind] -= 1
            return self.parts[kind][content]
        raise self.rules.error(f"expected a value of this program, got an unknown, repeated or missing part {brief(repr(kind), 20)}")

    def items(self, content: list[Any], left: int) -> list[Any]:
        self.enter(content, left)
        return [self.value(item, left - 1) for item in content]


def dtype_name(tensor: Tensor) -> str:
    """Return the name of a tensor's type, as in ``DTYPES``."""
    return str(tensor.dtype).removeprefix("torch.")


def on_host(tensor: Tensor) -> Tensor:
    """Return the tensor detached, in the host's memory and contiguous; itself, where it is so already."""
    return tensor.detach().cpu().resolve_neg().contiguous()


def raw(tensor: Tensor) -> memoryview:
    """Return the little-endian bytes of a tensor; without a copy, where it is contiguous and in the host's memory."""
    if sys.byteorder != "little":
        raise EmdcflError("expected a little-endian machine, got a big-endian one; run emdcfl elsewhere")
    array: Any = on_host(tensor).reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def from_raw(data: bytes, dtype: str, shape: Sequence[int], error: type[EmdcflError] = ClientError) -> Tensor:
    """Read what ``raw`` gave; dtype, shape and number of bytes must agree."""
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise error(f"expected one of the dtypes {', '.join(DTYPES)}, got {brief(repr(dtype), 40)}")
    if len(shape) > AXES or not all(type(n) is int and n >= 0 for n in shape) or math.prod(max(n, 1) for n in shape) > NUMBERS:
        shown = brief(repr(tuple(shape[:AXES])), 80)
        raise error(f"expected a shape of at most {AXES} sizes from 0 and at most {NUMBERS} numbers, got {shown}")
    kind = DTYPES[dtype]
    expected = math.prod(shape) * kind.itemsize
    if len(data) != expected:
        raise error(f"expected {expected} bytes for {dtype} of shape {tuple(shape)}, got {len(data)}")
    if kind is torch.bool and set(bytes(data)) - {0, 1}:
        raise error("expected truth values as bytes 0 and 1, got others")
    # Torch's own memory is aligned; a buffer that is not may change the last bits of a matrix product.
    tensor = torch.empty(tuple(shape), dtype=kind)
    if expected:
        tensor.view(-1).view(torch.uint8).numpy()[:] = np.frombuffer(data, dtype=np.uint8)
    return tensor
