"""Values on the wire and on disk: nested dicts and lists of tensors, numbers, text and bytes, without pickle.

A value is taken apart into a *skeleton* (JSON), its tensors and its byte strings. On the wire these are three records of a Flower
``RecordDict``; on a node's disk, one safetensors file. Tensors travel as raw little-endian bytes with dtype and shape beside them; both
ends check that the three agree, and that nothing exceeds the ``Limits``, before anything is allocated. What is refused is refused in one
short line, whatever was sent.

Tuples arrive as lists. Imports torch and errors; Flower only where a record is made.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from emdcfl.core.errors import ClientError
from emdcfl.core.replies import brief
from emdcfl.engines.flower.limits import AXES, LIMITS, MEGABYTE, NUMBERS, Limits

if TYPE_CHECKING:
    from flwr.app import Array, RecordDict

FORMAT = 1
STYPE = "emdcfl.raw"
INTEGER = 1 << 63
"""Whole numbers stay below this in size, as in a tensor."""

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    )
}


@dataclass
class Packed:
    """A value taken apart: its skeleton, its tensors, its byte strings; ``limits`` holds on the way in and on the way out."""

    skeleton: Any
    tensors: list[Tensor] = field(default_factory=list)
    blobs: list[bytes] = field(default_factory=list)
    limits: Limits = LIMITS
    entries: int = 0

    def enter(self, content: Sequence[Any] | Mapping[Any, Any], left: int) -> None:
        """Count the entries of one more dict or list, and look at a dict's keys."""
        self.entries += len(content)
        if left < 1:
            raise ClientError(f"expected at most {self.limits.depth} levels of dicts and lists in a message, got more")
        if self.entries > self.limits.entries:
            raise ClientError(f"expected at most {self.limits.entries} entries of dicts and lists in a message, got more")
        for name in content if isinstance(content, Mapping) else ():
            if not isinstance(name, str):
                raise ClientError(f"expected text as keys in a message, got {brief(repr(name), 40)} ({type(name).__name__})")
            if len(name) > self.limits.name:
                raise ClientError(f"expected keys of at most {self.limits.name} characters in a message, got one of {len(name)}")


def pack(value: Any) -> Packed:
    """Take a value apart; refuse what no task sends.

    Examples
    --------
    >>> packed = pack({"theta": torch.zeros(2), "n": 3})
    >>> packed.skeleton, len(packed.tensors)
    ({'m': {'theta': {'t': 0}, 'n': 3}}, 1)
    """
    packed = Packed(None)
    packed.skeleton = _pack(value, packed, "value", packed.limits.depth)
    packed.limits.check_parts(packed.tensors, packed.blobs)
    return packed


def _pack(value: Any, packed: Packed, where: str, left: int) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return _integer(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else {"f": repr(value)}
    if isinstance(value, Tensor):
        if _name(value.dtype) not in DTYPES:
            raise ClientError(f"expected one of the dtypes {', '.join(DTYPES)} at {where}, got {value.dtype}")
        packed.tensors.append(value)
        return {"t": len(packed.tensors) - 1}
    if isinstance(value, bytes):
        packed.blobs.append(value)
        return {"b": len(packed.blobs) - 1}
    if isinstance(value, Mapping):
        packed.enter(value, left)
        return {"m": {key: _pack(item, packed, f"{where}.{key}", left - 1) for key, item in value.items()}}
    if isinstance(value, (list, tuple)):
        packed.enter(value, left)
        return {"l": [_pack(item, packed, f"{where}[{i}]", left - 1) for i, item in enumerate(value)]}
    raise ClientError(f"expected tensors, numbers, text, bytes, dicts and lists in a message, got {type(value).__name__} at {where}")


def unpack(packed: Packed) -> Any:
    """Put a value together again; everything in the skeleton is checked, because it came from elsewhere."""
    packed.limits.check_parts(packed.tensors, packed.blobs)
    return _unpack(packed.skeleton, packed, packed.limits.depth)


def _unpack(node: Any, packed: Packed, left: int) -> Any:
    if node is None or isinstance(node, (bool, str, float)):
        return node
    if isinstance(node, int):
        return _integer(node)
    if not isinstance(node, dict) or len(node) != 1:
        raise ClientError(f"expected a message of this program, got a skeleton with {type(node).__name__} in it")
    ((kind, content),) = node.items()
    if kind == "m" and isinstance(content, dict):
        packed.enter(content, left)
        return {key: _unpack(item, packed, left - 1) for key, item in content.items()}
    if kind == "l" and isinstance(content, list):
        packed.enter(content, left)
        return [_unpack(item, packed, left - 1) for item in content]
    if kind == "f" and content in ("nan", "inf", "-inf"):
        return float(content)
    stores: dict[str, Sequence[Any]] = {"t": packed.tensors, "b": packed.blobs}
    if kind in stores and type(content) is int and 0 <= content < len(stores[kind]):
        return stores[kind][content]
    raise ClientError(f"expected a message of this program, got an unknown or dangling part {brief(repr(kind), 20)}")


def _integer(value: int) -> int:
    if not -INTEGER <= value < INTEGER:
        raise ClientError(f"expected whole numbers of 64 bits in a message, got one of {value.bit_length()}")
    return value


def to_bytes(tensor: Tensor) -> bytes:
    """Return the raw little-endian bytes of a tensor."""
    if sys.byteorder != "little":
        raise ClientError("tensors are sent as little-endian bytes, and this machine is big-endian; run the node elsewhere")
    return bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data) if tensor.numel() else b""


def from_bytes(data: bytes, dtype: str, shape: Sequence[int]) -> Tensor:
    """Read what ``to_bytes`` wrote; dtype, shape and number of bytes must agree."""
    if dtype not in DTYPES:
        raise ClientError(f"expected one of the dtypes {', '.join(DTYPES)}, got {brief(repr(dtype), 40)}")
    if len(shape) > AXES or not all(type(n) is int and n >= 0 for n in shape) or math.prod(max(n, 1) for n in shape) > NUMBERS:
        shown = brief(repr(tuple(shape[:AXES])), 80)
        raise ClientError(f"expected a shape of at most {AXES} sizes from 0 and at most {NUMBERS} numbers, got {shown}")
    kind = DTYPES[dtype]
    expected = math.prod(shape) * kind.itemsize
    if len(data) != expected:
        raise ClientError(f"expected {expected} bytes for {dtype} of shape {tuple(shape)}, got {len(data)}")
    if kind is torch.bool and set(bytes(data)) - {0, 1}:
        raise ClientError("expected truth values as bytes 0 and 1, got others")
    # Torch's own memory is aligned; a buffer that is not may change the last bits of a matrix product.
    tensor = torch.empty(tuple(shape), dtype=kind)
    if expected:
        tensor.view(-1).view(torch.uint8).numpy()[:] = np.frombuffer(data, dtype=np.uint8)
    return tensor


class Encoder:
    """Makes records. One encoder per request to many clients: a tensor they share is converted and hashed once.

    Flower stores arrays by content, so a shared tensor is also uploaded once, however many messages refer to it.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, Array]] = {}

    def encode(self, value: Any) -> RecordDict:
        """Return the value as a ``RecordDict`` of three records: ``meta``, ``arrays``, ``blobs``."""
        from flwr.app import ArrayRecord, ConfigRecord, RecordDict

        packed = pack(value)
        arrays = ArrayRecord()
        for i, tensor in enumerate(packed.tensors):
            arrays[str(i)] = self._array(tensor)
        text = json.dumps(packed.skeleton, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        packed.limits.check_text(text)
        meta = ConfigRecord({"format": FORMAT, "skeleton": text})
        blobs = ConfigRecord({str(i): blob for i, blob in enumerate(packed.blobs)})
        return RecordDict({"meta": meta, "arrays": arrays, "blobs": blobs})

    def _array(self, tensor: Tensor) -> Array:
        from flwr.app import Array

        if id(tensor) not in self._known:  # the tensor is kept beside its array, so that its id is not given to another one
            raw = Array(dtype=_name(tensor.dtype), shape=tuple(tensor.shape), stype=STYPE, data=to_bytes(tensor))
            self._known[id(tensor)] = tensor, raw
        return self._known[id(tensor)][1]


def encode(value: Any) -> RecordDict:
    """Return one value as a ``RecordDict``."""
    return Encoder().encode(value)


def size(record: RecordDict) -> int:
    """Bytes of a record's arrays, byte strings and text: what it costs to send, but for Flower's own few hundred bytes."""
    total = sum(len(array.data) for part in record.array_records.values() for array in part.values())
    for part in record.config_records.values():
        total += sum(len(v) if isinstance(v, bytes) else len(v.encode()) if isinstance(v, str) else 8 for v in part.values())
    return total


def decode(record: RecordDict, *, limits: Limits = LIMITS) -> Any:
    """Read a value back.

    Raises
    ------
    ClientError
        The record is not of this program, exceeds the limits, or contradicts itself.
    """
    if set(record) != {"meta", "arrays", "blobs"}:
        shown = brief(", ".join(repr(str(name)[:40]) for name in list(record)[:5]))
        raise ClientError(f"expected a message of this program, got records {shown or 'none'}")
    total = size(record)
    if total > limits.size:
        raise ClientError(f"expected a message of at most {limits.size / MEGABYTE:.0f} MB, got {total / MEGABYTE:.0f} MB")
    meta, arrays, blobs = record.config_records.get("meta"), record.array_records.get("arrays"), record.config_records.get("blobs")
    if meta is None or arrays is None or blobs is None or meta.get("format") != FORMAT:
        raise ClientError(f"expected a message of format {FORMAT}, got another; is the same version of emdcfl installed everywhere?")
    limits.check_parts(arrays, blobs)
    skeleton = _skeleton(meta.get("skeleton"), limits)
    tensors = []
    for i in range(len(arrays)):
        array = arrays.get(str(i))
        if array is None or array.stype != STYPE:
            raise ClientError(
                f"expected array {i} of a message in raw form, got {'none' if array is None else brief(repr(array.stype), 40)}"
            )
        tensors.append(from_bytes(array.data, array.dtype, list(array.shape)))
    found = [blobs.get(str(i)) for i in range(len(blobs))]
    if not all(isinstance(blob, bytes) for blob in found):
        raise ClientError("expected byte strings numbered from 0 in a message, got something else")
    return unpack(Packed(skeleton, tensors, [blob for blob in found if isinstance(blob, bytes)], limits))


def _skeleton(text: Any, limits: Limits) -> Any:
    if not isinstance(text, str):
        raise ClientError(f"expected a message with a JSON skeleton, got {type(text).__name__}")
    limits.check_text(text)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ClientError("expected a message with a JSON skeleton, got text that is not JSON") from error


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
