"""Answers to the survey: any value is taken or refused with a ``ClientError`` of one line; what is taken gives finite statistics."""

from __future__ import annotations

import math
from typing import Any

import torch

from emdcfl.core.errors import ClientError, DataError
from emdcfl.data.own.tables import Moments, Summary, pool
from emdcfl.engines.flower.survey_replies import check_answer
from fuzz.feed import Feed, any_value, changed_value, one_line

MOMENTS = {"count": 9, "mean": 40.0, "deviation": 3.5, "missing": 1}
TABLE = {
    "kind": "table",
    "labels": ["0", "1"],
    "label": "y",
    "label_kind": "int",
    "columns": {"age": True, "ward": False},
    "units": {"age": "y"},
}
ASKED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"question": "describe"}, {"kind": "images", "labels": ["cat", "dog"], "colour": False, "sizes": [[12, 12, 40], [8, 9, 2]]}),
    ({"question": "describe"}, TABLE),
    (
        {"question": "measure", "shape": [3, 8, 8]},
        {"count": 64, "sums": torch.full((3,), 640.0).double(), "squares": torch.full((3,), 6400.0).double()},
    ),
    (
        {"question": "measure", "numeric": ["age", "weight"], "categorical": ["ward"]},
        {"numeric": {"age": MOMENTS, "weight": MOMENTS}, "words": {"ward": ["north", "south"]}},
    ),
]


def seeds() -> list[bytes]:
    """Each question, with answers changed in some place."""
    return [
        bytes([question, *([1] if more else [0]), 1, place, value])
        for question in range(4)
        for more in (0, 1)
        for place in (0, 1)
        for value in (0, 7)
    ]


def one(data: bytes) -> None:
    """Check an answer; where it is taken, pool it with an honest one."""
    feed = Feed(data)
    question, honest = feed.choice(ASKED)
    reply = honest
    for _ in range(1 + feed.number(4)):
        reply = changed_value(feed, reply) if feed.number(16) else any_value(feed)
    if not isinstance(reply, dict):
        return  # refused before it comes here
    try:
        check_answer(question, reply)
    except ClientError as error:
        one_line(error)
        return
    if "numeric" in reply:
        try:
            encoding = pool([_summary(honest), _summary(reply)], "y").as_dict()
        except DataError as error:
            one_line(error)
            return
        for column in encoding["columns"]:
            assert "words" in column or (math.isfinite(column["mean"]) and 0 < column["std"] < math.inf), column
    elif "sums" in reply:
        variance = reply["squares"] / reply["count"] - (reply["sums"] / reply["count"]) ** 2
        assert bool((variance > -1e-3 * 255**2).all()), reply
    else:
        assert 1 <= len(reply["labels"]) <= 200, reply


def _summary(reply: dict[str, Any]) -> Summary:
    return Summary({name: Moments(**m) for name, m in reply["numeric"].items()}, {name: tuple(w) for name, w in reply["words"].items()})
