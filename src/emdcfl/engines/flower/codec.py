"""Messages as Flower records: the value's skeleton, its tensors and its byte strings (``core.codec``) as three records of a ``RecordDict``.

Tensors travel as raw little-endian bytes with dtype and shape beside them. The receiver checks that the three agree, and that nothing
exceeds the ``Limits``, before it allocates anything. Whatever was sent, the error is one short line. Tuples arrive as lists.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from emdcfl.core.codec import Packed, Rules, dtype_name, from_raw, pack, raw, unpack
from emdcfl.core.errors import ClientError
from emdcfl.core.replies import brief

if TYPE_CHECKING:
    from flwr.app import Array, RecordDict

MEGABYTE = 1 << 20
FORMAT = 1
STYPE = "emdcfl.raw"


@dataclass(frozen=True, kw_only=True)
class Limits(Rules):
    """What a message may hold at most."""

    size: int = 4096 * MEGABYTE
    """Bytes in all."""
    skeleton: int = 16 * MEGABYTE
    """Characters of the JSON text that holds the message's structure, names, numbers and words."""

    def check_text(self, text: str) -> None:
        """Refuse a skeleton that is too long; its length bounds what reading it can allocate."""
        if len(text) > self.skeleton:
            raise ClientError(f"expected at most {self.skeleton} characters of names, numbers and words in a message, got {len(text)}")


LIMITS = Limits()


class Encoder:
    """Makes records. One encoder per request to many clients: a tensor they share is converted and hashed once.

    Flower stores arrays by content, so a shared tensor is also uploaded once, however many messages refer to it.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, Array]] = {}

    def encode(self, value: Any) -> RecordDict:
        """Return the value as a ``RecordDict`` of three records: ``meta``, ``arrays``, ``blobs``."""
        from flwr.app import ArrayRecord, ConfigRecord, RecordDict

        packed = pack(value, LIMITS)
        arrays = ArrayRecord()
        for i, tensor in enumerate(packed.tensors):
            arrays[str(i)] = self._array(tensor)
        text = json.dumps(packed.skeleton, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        LIMITS.check_text(text)
        meta = ConfigRecord({"format": FORMAT, "skeleton": text})
        blobs = ConfigRecord({str(i): blob for i, blob in enumerate(packed.blobs)})
        return RecordDict({"meta": meta, "arrays": arrays, "blobs": blobs})

    def _array(self, tensor: Tensor) -> Array:
        from flwr.app import Array

        if id(tensor) not in self._known:  # the tensor is kept beside its array, so that its id is not given to another one
            array = Array(dtype=dtype_name(tensor), shape=tuple(tensor.shape), stype=STYPE, data=bytes(raw(tensor)))
            self._known[id(tensor)] = tensor, array
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
    tensors = [_tensor(arrays.get(str(i)), i) for i in range(len(arrays))]
    found = [blob for i in range(len(blobs)) if isinstance(blob := blobs.get(str(i)), bytes)]
    if len(found) != len(blobs):
        raise ClientError("expected byte strings numbered from 0 in a message, got something else")
    return unpack(Packed(skeleton, tensors, found), limits)


def _tensor(array: Array | None, number: int) -> Tensor:
    if array is None or array.stype != STYPE:
        found = "none" if array is None else brief(repr(array.stype), 40)
        raise ClientError(f"expected array {number} of a message in raw form, got {found}")
    return from_raw(array.data, array.dtype, list(array.shape))


def _skeleton(text: Any, limits: Limits) -> Any:
    if not isinstance(text, str):
        raise ClientError(f"expected a message with a JSON skeleton, got {type(text).__name__}")
    limits.check_text(text)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ClientError("expected a message with a JSON skeleton, got text that is not JSON") from error
