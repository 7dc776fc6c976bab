"""The fuzz targets hold for their seeds, for random bytes, and for every input that once was a finding. ``make fuzz`` goes on from here."""

from __future__ import annotations

import importlib

import hypothesis.strategies as st
import pytest
from fuzz.__main__ import FLOWER
from fuzz.feed import Feed, one_line
from hypothesis import HealthCheck, given, settings

FOUND = {
    "loaders": [
        b"\x00\x29" + b"\xff" * 89 + b"a,lab\x00\n",  # a table with a client column and no rows
        b"\x00\x04\xc1,label\n1,x\n",  # a column name that is not UTF-8
        b"\x00\x04a,b,word,label\n1,2,\xff\xfe,x\n",  # text that is not UTF-8
    ],
    "config": [
        b"\x00[run]\nseed = 0x" + b"f" * 6000,  # more digits than Python writes out
        b"\x00a = " + b"[" * 3000,  # deeper than the parser goes
        b"\x00[training]\nlr = 1" + b"0" * 400,  # an integer beyond any float
        b'\x00["a\\nb"]\nx = 1',  # a line break in a name
    ],
    "rundir": [],
    "codec": [],
    "survey": [bytes.fromhex("a9ff0003007f07a925ffffffffa9a9a9000000")],  # a tensor of int8
    "policy": [
        bytes.fromhex("0a03030007020203ffffffffffffff19"),  # a tensor of int8
        bytes.fromhex("04eb940bd5335f973daad8619b91ffc911f57cced458bbbf2ce03753c9bdfa0ff0169dc9575674066676cf"),  # a tensor as request
        bytes.fromhex("031afdc9b2c454142e8233882a4729e37bc3ddcb54a6e040f96c3d"),  # an infinite round
        bytes.fromhex("085544a2e5d555cac766fd8eb84d848f59"),  # a list of inputs
    ],
    "replies": [],
}
"""By target."""


def target(name: str) -> object:
    if name in FLOWER:
        pytest.importorskip("flwr", reason="needs the extra emdcfl[flower]")
    return importlib.import_module(f"fuzz.fuzz_{name}")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FOUND))
def test_seeds_and_findings(name: str) -> None:
    module = target(name)
    for data in [*module.seeds(), *FOUND[name]]:  # type: ignore[attr-defined]
        module.one(data)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "examples"), [("codec", 150), ("config", 150), ("loaders", 60), ("rundir", 15), ("survey", 150), ("policy", 60)]
)
def test_any_bytes(name: str, examples: int) -> None:
    module = target(name)

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(st.binary(max_size=120))
    def holds(data: bytes) -> None:
        module.one(data)  # type: ignore[attr-defined]

    holds()


def test_a_feed_never_runs_out() -> None:
    feed = Feed(b"\x05\x01")
    assert [feed.number(4), feed.number(300), feed.number(10), feed.piece(3)] == [1, 1, 0, b""]
    assert Feed(b"\x01\x02").changed(b"abcdef") == b"ab"


def test_a_message_of_two_lines_is_noticed() -> None:
    with pytest.raises(AssertionError, match="not one line"):
        one_line(ValueError("a\nb"))


def test_a_node_is_asked_for_everything_that_it_answers_by_default() -> None:
    module = target("policy")
    assert set(module.Policy().answered) <= set(module.TASKS)  # type: ignore[attr-defined]
