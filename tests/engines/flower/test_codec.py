"""Values survive the wire bit for bit, and what is not a message of this program is refused in words."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from tests.tiny import same
from torch import Tensor

pytest.importorskip("flwr", reason="needs the extra emdcfl[flower]")

from flwr import app as flwr_app
from flwr.proto.message_pb2 import Message as MessageProto
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from tests.engines.flower import loopback
from tests.engines.flower.loopback import LoopbackLink
from tests.engines.flower.test_federation import SCENARIO, fed_of, train

from emdcfl.core.codec import DTYPES, from_raw
from emdcfl.core.errors import ClientError
from emdcfl.engines.flower import polling
from emdcfl.engines.flower.codec import LIMITS, Encoder, Limits, decode, encode, size


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    content = draw(st.binary(min_size=math.prod(shape) * dtype.itemsize, max_size=math.prod(shape) * dtype.itemsize))
    if dtype is torch.bool:
        content = bytes(b & 1 for b in content)
    return from_raw(content, str(dtype).removeprefix("torch."), shape)


scalars = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1) | st.floats() | st.text(max_size=8) | st.binary(max_size=8)
values = st.recursive(
    scalars | tensors(), lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4), max_leaves=12
)


@settings(max_examples=150, deadline=None)
@given(values)
def test_what_is_sent_arrives_bit_for_bit(value: object) -> None:
    assert same(value, decode(encode(value)))


@settings(max_examples=30, deadline=None)
@given(values)
def test_flowers_own_serialisation_changes_nothing(value: object) -> None:
    from flwr.common.serde import recorddict_from_proto, recorddict_to_proto

    assert same(value, decode(recorddict_from_proto(recorddict_to_proto(encode(value)))))


def test_what_arrives_can_be_written_to_and_is_not_shared() -> None:
    theta = torch.zeros(3)
    arrived = decode(encode(theta))
    arrived += 1
    assert theta.sum() == 0


def test_a_tensor_shared_by_several_messages_is_converted_once() -> None:
    shared, encoder = torch.ones(1000), Encoder()
    first, second = (encoder.encode({"theta": shared, "n": i}) for i in range(2))
    assert first["arrays"]["0"] is second["arrays"]["0"]


def test_size_is_that_of_the_contents() -> None:
    record = encode({"theta": torch.zeros(1000), "key": b"12345"})
    assert 4005 <= size(record) < 4200


def test_a_message_larger_than_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(ClientError, match="at most 1 MB, got 4 MB"):
        decode(encode(torch.zeros(1 << 20)), limits=Limits(size=1 << 20))


def corrupt(**changes: object) -> object:
    record = encode({"theta": torch.zeros(3), "key": b"k"})
    for where, value in changes.items():
        if where == "drop":
            del record[value]
        elif where in ("arrays", "blobs"):
            record[where]["0"] = value
        else:
            record["meta"][where] = value
    return record


@pytest.mark.parametrize(
    "changes",
    [
        {"drop": "arrays"},
        {"drop": "meta"},
        {"skeleton": "{"},
        {"skeleton": 5},
        {"skeleton": "[" * 100000},
        {"skeleton": json.dumps({"t": 7})},
        {"skeleton": json.dumps({"t": True})},
        {"skeleton": json.dumps({"t": -1})},
        {"skeleton": json.dumps({"l": [{"t": 0}, {"t": 0}, {"b": 0}]})},
        {"skeleton": json.dumps({"t": 0})},
        {"skeleton": json.dumps({"u": []})},
        {"skeleton": json.dumps({"x": 0})},
        {"skeleton": json.dumps({"m": 0})},
        {"skeleton": json.dumps({"f": "1e3"})},
        {"skeleton": json.dumps([1])},
        {"skeleton": json.dumps({"k" * 10_000: 1})},
        {"skeleton": "9" * 10_000},
        {"skeleton": str(1 << 63)},
        {"format": 2},
        {"blobs": "text"},
        {"arrays": flwr_app.Array("float32", (3,), "numpy.ndarray", b"x" * 12)},
        {"arrays": flwr_app.Array("float32", (4,), "emdcfl.raw", b"x" * 12)},
    ],
)
def test_a_damaged_message_is_refused_in_words(changes: dict[str, object]) -> None:
    with pytest.raises(ClientError, match="expected") as refused:
        decode(corrupt(**changes))  # type: ignore[arg-type]
    assert one_line(refused.value)


def one_line(error: Exception) -> bool:
    return "\n" not in str(error) and len(str(error)) < 400 and str(error).isprintable()


def counted(value: object) -> Limits:
    """The smallest limits a value passes."""
    entries, parts, name, depth = 0, [0, 0], 0, 0
    stack = [(value, 0)]
    while stack:
        item, level = stack.pop()
        if isinstance(item, (dict, list)):
            entries, depth = entries + len(item), max(depth, level + 1)
            name = max([name, *(len(key) for key in item)]) if isinstance(item, dict) else name
            stack += [(inner, level + 1) for inner in (item.values() if isinstance(item, dict) else item)]
        parts[0] += isinstance(item, Tensor)
        parts[1] += isinstance(item, bytes)
    record = encode(value)
    text = record["meta"]["skeleton"]
    return Limits(size=size(record), skeleton=len(text), entries=entries, parts=max(parts), name=name, depth=depth)


@settings(max_examples=100, deadline=None)
@given(values)
def test_a_value_passes_limits_that_fit_and_is_refused_by_any_that_is_one_less(value: object) -> None:
    fitting, record = counted(value), encode(value)
    assert same(value, decode(record, limits=fitting))
    for limit in ("size", "skeleton", "entries", "parts", "name", "depth"):
        most = getattr(fitting, limit)
        if most:
            with pytest.raises(ClientError, match="expected .*at most") as refused:
                decode(record, limits=replace(fitting, **{limit: most - 1}))
            assert one_line(refused.value)


def test_the_sender_keeps_to_the_limits_too() -> None:
    for value, expected in (
        ([0] * (LIMITS.entries + 1), "entries"),
        ([b""] * (LIMITS.parts + 1), "byte strings"),
        ([torch.zeros(0)] * (LIMITS.parts + 1), "tensors"),
        ({"k" * (LIMITS.name + 1): 0}, "characters"),
        ("x" * (LIMITS.skeleton + 1), "characters"),
    ):
        with pytest.raises(ClientError, match=expected):
            encode(value)


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
junk_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["m", "l", "t", "b", "f"]) | texts, inner, max_size=2),
    max_leaves=10,
)
arrays = st.builds(
    flwr_app.Array,
    st.sampled_from([*DTYPES, "object"]) | texts,
    st.lists(st.integers(-1, 1 << 70) | st.integers(0, 3), max_size=3).map(tuple),
    st.sampled_from(["emdcfl.raw", "numpy.ndarray"]) | texts,
    st.binary(max_size=16),
)


@settings(max_examples=200, deadline=None)
@given(
    skeleton=junk_json.map(json.dumps) | texts | st.integers(0, 9),
    format_=st.sampled_from([1, 1, 1, 2]),
    held=st.dictionaries(st.sampled_from(["0", "1", "x"]), arrays, max_size=2),
    blobs=st.dictionaries(st.sampled_from(["0", "1", "x"]), st.binary(max_size=4) | texts, max_size=2),
)
def test_whatever_arrives_is_a_value_or_a_refusal_in_one_line(skeleton: object, format_: int, held: object, blobs: object) -> None:
    meta = flwr_app.ConfigRecord({"format": format_, "skeleton": skeleton})
    record = flwr_app.RecordDict({"meta": meta, "arrays": flwr_app.ArrayRecord(held), "blobs": flwr_app.ConfigRecord(blobs)})
    refusals = []
    try:
        decode(record)
    except ClientError as error:
        refusals.append(error)
    assert all(str(error).startswith("expected") and one_line(error) for error in refusals)


FORGED = {
    "no JSON": lambda kind, children, body: (children, b"no JSON" if kind == "Array" else body),
    "fewer records": lambda kind, children, body: (children, b"{}" if kind == "RecordDict" else body),
    "no content": lambda kind, children, body: ("" if kind == "Message" else children, body),
    "a bomb": lambda kind, children, body: (children, _repeated(body) if kind == "Array" else body),
    "another request": lambda kind, children, body: (children, _in_answer_to("another", body) if kind == "Message" else body),
}


def _repeated(body: bytes) -> bytes:
    return json.dumps({**json.loads(body), "arraychunk_ids": [0] * 10**5}).encode()


def _in_answer_to(identity: str, body: bytes) -> bytes:
    found = MessageProto.FromString(body)
    found.metadata.reply_to_message_id = identity
    return found.SerializeToString()


@pytest.mark.parametrize("forged", FORGED)
def test_a_reply_that_flower_cannot_put_together_costs_its_own_client_only(forged: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling, "LIMITS", replace(LIMITS, size=10**6))
    grid = loopback.loopback(SCENARIO)
    fed = fed_of(grid)

    class Link(LoopbackLink):
        def PullMessages(self, request: Any) -> Any:
            found = super().PullMessages(request)
            for message, tree in zip(found.messages_list, found.message_object_trees, strict=True):
                if (message.metadata.src_node_id, message.metadata.message_type) == (103, "query.train"):
                    for identity in [one.object_id for one in iterate_object_tree(tree)]:
                        head, _, body = self.parts[identity].partition(b"\x00")
                        kind, children, _ = head.decode().split(" ")
                        children, body = FORGED[forged](kind, children, body)
                        self.parts[identity] = f"{kind} {children} {len(body)}".encode() + b"\x00" + body
            return found

    grid._runtime_client = Link(grid._replies)
    replies = train(fed, 2)
    assert list(replies.failures) == ["site-3"] and "cannot be read" in replies.failures["site-3"].reason
    assert replies.clients == fed.clients[:3]


def test_a_reply_of_many_parts_is_refused_before_they_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling, "LIMITS", replace(LIMITS, size=10**6))
    grid = loopback.loopback(SCENARIO)
    fed = fed_of(grid)
    large, fetched, deleted = [], [], []

    class Link(LoopbackLink):
        def PullMessages(self, request: Any) -> Any:
            found = super().PullMessages(request)
            for message, tree in zip(found.messages_list, found.message_object_trees, strict=True):
                if (message.metadata.src_node_id, message.metadata.message_type) == (103, "query.train"):
                    self.parts |= {f"more {i}": bytes(10**5) for i in range(100)}
                    large.append(message.metadata.message_id)
                    tree.children.extend(type(tree)(object_id=f"more {i}") for i in range(100))
            return found

        def PullObject(self, request: Any) -> Any:
            part = super().PullObject(request)
            fetched.append(len(part.object_content))
            return part

        def ConfirmMessageReceived(self, request: Any) -> None:
            deleted.append(request.message_object_id)

    grid._runtime_client = Link(grid._replies)
    replies = train(fed, 2)
    assert list(replies.failures) == ["site-3"] and "more than 1000000 bytes" in replies.failures["site-3"].reason
    assert sum(fetched) < 5 * 10**6, "a part for each of Flower's threads may be on its way"
    assert set(large) <= set(deleted), "the SuperLink does not keep it until the run ends"
