"""Nested values survive being taken apart; what is not such a value is refused, whoever made it."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from emdcfl.core.codec import MESSAGE, Packed, Rules, from_raw, pack, raw, unpack
from emdcfl.core.errors import ClientError, StoreError
from emdcfl.core.replies import brief

STATE = Rules(tuples=True, error=StoreError)


def test_tuples_come_back_where_the_rules_say_so() -> None:
    value = {"p": (1, [2.5, float("inf")]), "t": ((), b"x"), "$": None}
    assert unpack(pack(value, STATE), STATE) == value
    assert unpack(pack((1, (2,)))) == [1, [2]]
    with pytest.raises(StoreError, match="object at value.p"):
        pack({"p": object()}, STATE)


def test_one_tensor_with_many_names_is_refused_and_so_is_one_without() -> None:
    packed = pack({"a": torch.ones(3), "b": torch.ones(3)})
    assert len(packed.tensors) == 2
    for node in ({"l": [{"t": 0}] * 1000}, {"l": [{"t": 1}, {"t": 0}]}, {"t": 0}, None):
        with pytest.raises(ClientError, match="expected"):
            unpack(replace(packed, skeleton=node))


def test_raw_bytes_of_views_are_those_of_their_values() -> None:
    matrix = torch.arange(12.0).view(3, 4)
    for tensor in (matrix.T, matrix[:, 1:3], matrix[1], torch.nn.Parameter(matrix), torch.tensor(True), torch.zeros(0, 3)):
        back = from_raw(bytes(raw(tensor)), str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        assert torch.equal(back, tensor)


@pytest.mark.parametrize("value", [object(), {1: 2}, {"a": {b"x": 1}}, torch.zeros(2, dtype=torch.complex64), {1, 2}, 1 << 63, MESSAGE])
def test_what_json_and_tensors_cannot_hold_is_refused(value: object) -> None:
    with pytest.raises(ClientError, match="expected"):
        pack(value)


def test_nesting_without_end_is_refused_on_both_sides() -> None:
    value: object = 0
    node: object = 0
    for _ in range(50):
        value, node = [value], {"l": [node]}
    with pytest.raises(ClientError, match="levels"):
        pack(value)
    with pytest.raises(ClientError, match="levels"):
        unpack(Packed(node))


@pytest.mark.parametrize(
    ("data", "dtype", "shape"),
    [
        (b"1234", "float32", [2]),
        (b"12345678", "object", [1]),
        (b"12345678", "x" * 10_000, [1]),
        (b"", "float32", [-1]),
        (b"", "float32", [0, 1 << 64]),
        (b"", "float32", [0, 1 << 62, 1 << 62]),
        (b"1234", "float32", [1] * 1000),
        (b"\x02", "bool", [1]),
        (b"1234", "float32", [1.0]),
    ],
)
def test_bytes_that_contradict_their_description_are_refused(data: bytes, dtype: str, shape: list[int]) -> None:
    with pytest.raises(ClientError, match="expected") as refused:
        from_raw(data, dtype, shape)
    assert str(refused.value).isprintable() and len(str(refused.value)) < 400


@given(st.text(), st.integers(1, 50))
def test_a_quotation_is_short_and_printable(text: str, most: int) -> None:
    said = brief(text, most)
    assert said.isprintable() and len(said) <= most
    line = " ".join(text.split())
    assert said == line if line.isprintable() and len(text) <= most else said[:-1] in brief(text, len(text))
