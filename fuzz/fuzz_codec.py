"""The Flower codec: any record, well formed or not, is read or refused with a ``ClientError`` of one line. Needs the extra ``flower``."""

from __future__ import annotations

import json

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as Proto

from emdcfl.core.codec import DTYPES
from emdcfl.core.errors import ClientError
from emdcfl.engines.flower.codec import FORMAT, STYPE, decode, encode
from fuzz.feed import Feed, one_line

WORDS = ("m", "l", "u", "t", "b", "f", "nan", "-inf", "theta", "")


def seeds() -> list[bytes]:
    """Messages as they are sent, and skeletons for the structured half."""
    values = [{"theta": torch.zeros(3), "n": 3, "key": b"k"}, [1.5, None, True, "é"], {"a": {"b": [torch.ones(2, 2, dtype=torch.bool)]}}]
    sent = [b"\x00" + recorddict_to_proto(encode(value)).SerializeToString() for value in values]
    made = [b"\x01\x03\x02" + bytes(range(64)), b"\x01" + bytes(200), b"\x02" + json.dumps({"m": {"x": {"t": 0}}}).encode()]
    return sent + made


def one(data: bytes) -> None:
    """Read what the bytes describe; a value that was read can be sent again and arrives the same."""
    feed = Feed(data)
    how = feed.number(3)
    try:
        if how == 0:
            proto = Proto()
            try:
                proto.ParseFromString(feed.rest())
                record = recorddict_from_proto(proto)
            except Exception:  # refused by Flower before the codec sees it
                return
        else:
            record = _record(feed, structured=how == 1)
        value = decode(record)
    except ClientError as error:
        one_line(error)
        return
    if sent(decode(encode(value))) != sent(value):
        raise AssertionError(f"changed on its way: {value!r}")


def sent(value: object) -> bytes:
    """Return what travels, which can be compared whatever is in it (tensors, NaN)."""
    return recorddict_to_proto(encode(value)).SerializeToString(deterministic=True)


def _record(feed: Feed, *, structured: bool) -> RecordDict:
    arrays = {}
    for i in range(feed.number(4)):
        dtype = feed.choice([*DTYPES, "object", "complex64", ""])
        shape = tuple(feed.number(5) - (feed.number(20) == 7) for _ in range(feed.number(4)))
        stype = feed.choice([STYPE, STYPE, STYPE, "numpy.ndarray"])
        size = feed.number(64)
        if feed.number(4):  # most arrays fit their description
            size = max(0, torch.Size([max(n, 0) for n in shape]).numel() * (DTYPES[dtype].itemsize if dtype in DTYPES else 1))
        arrays[str(i) if feed.number(16) else "x"] = Array(dtype=dtype, shape=shape, stype=stype, data=feed.piece(size).ljust(size, b"\1"))
    blobs = {str(i) if feed.number(16) else "y": feed.piece(feed.number(9)) for i in range(feed.number(3))}
    skeleton = json.dumps(_whole(feed, {"t": len(arrays), "b": len(blobs)})) if structured else feed.rest().decode(errors="replace")
    meta = ConfigRecord({"format": feed.choice([FORMAT, FORMAT, FORMAT, 2]), "skeleton": skeleton})
    return RecordDict({"meta": meta, "arrays": ArrayRecord(arrays), "blobs": ConfigRecord(blobs)})


def _whole(feed: Feed, parts: dict[str, int]) -> object:
    """Return a skeleton that mostly names every part once and in order: others are refused early."""
    used = dict.fromkeys(parts, 0)
    node = _node(feed, 24, used)
    rest = [{kind: i} for kind, number in parts.items() for i in range(used[kind], number)]
    return {"l": [node, *rest]} if rest and feed.number(8) else node


def _node(feed: Feed, depth: int, used: dict[str, int]) -> object:
    kind = feed.number(10)
    if kind < 2 and depth:
        return {"m": {feed.choice(WORDS) + str(i): _node(feed, depth - 1, used) for i in range(feed.number(4))}}
    if kind < 4 and depth:
        return {"l": [_node(feed, depth - 1, used) for _ in range(feed.number(4))]}
    if kind == 4:
        part = feed.choice("tb")
        used[part] += 1
        return {part: used[part] - 1}
    leaves: list[object] = [feed.number(4) - 1, 0.5, None, True, "x", 1 << (8 * feed.number(12))]
    if kind < 6:
        return {feed.choice("tb"): feed.choice(leaves)}
    if kind == 6:
        return {"f": feed.choice(WORDS)}
    if kind == 7:
        return {feed.choice(WORDS): feed.choice([0, {}, [], "a"]), **({"z": 1} if feed.number(4) == 0 else {})}
    return feed.choice([*leaves, [], [1], {}])
