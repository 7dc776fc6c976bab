"""What a node may answer to the survey: every field with its type and range. A reply that breaks a rule leaves its node out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, float64

from emdcfl.core.errors import ClientError
from emdcfl.core.replies import brief
from emdcfl.core.schema import Field, check
from emdcfl.data.own.formats.quantities import MAX_UNIT_LENGTH
from emdcfl.data.own.formats.readers import MAX_NUMBER
from emdcfl.data.own.tables import MAX_WORD_LENGTH, MAX_WORDS
from emdcfl.data.types import LABEL_KINDS
from emdcfl.engines.flower.node.survey import DESCRIBE, Answer

MAX_COLUMNS = 100_000
MAX_SIDE = 1 << 16
MAX_ROWS = 100_000_000
MAX_PIXELS = 1 << 44
BRIGHTEST = 255.0

IMAGES = {"kind", "labels", "colour", "sizes"}
TABLE = {"kind", "labels", "label", "label_kind", "columns", "units"}
MOMENTS = {
    "count": Field(int, low=0, high=MAX_ROWS),
    "mean": Field(float, low=-MAX_NUMBER, high=MAX_NUMBER),
    "deviation": Field(float, low=0, high=MAX_ROWS * 4 * MAX_NUMBER**2),
    "missing": Field(int, low=0, high=MAX_ROWS),
}


def check_answer(question: Mapping[str, Any], reply: Answer) -> None:
    """Raise ``ClientError`` unless the reply is an answer to the question."""
    if question["question"] == DESCRIBE:
        _described(reply)
    elif "shape" in question:
        _measured_images(reply, question["shape"][0])
    else:
        _measured_table(reply, question["numeric"], question["categorical"])


def _described(reply: Answer) -> None:
    fields = {"images": IMAGES, "table": TABLE}.get(str(reply.get("kind")))
    if fields is None:
        raise ClientError(f"expected kind 'images' or 'table', got {brief(repr(reply.get('kind')), 40)}")
    _names(reply, fields, "the reply")
    _words("labels", reply["labels"], least=1)
    if fields is TABLE:
        _word("label", reply["label"], longest=1024)
        if reply["label_kind"] not in (*LABEL_KINDS,):
            raise ClientError(f"expected label_kind {', '.join(LABEL_KINDS)}, got {brief(repr(reply['label_kind']), 40)}")
        columns = reply["columns"]
        if not isinstance(columns, dict) or len(columns) > MAX_COLUMNS:
            raise ClientError(f"expected columns as a dict of at most {MAX_COLUMNS} names, got {_shown(columns)}")
        for name, numeric in columns.items():
            _word("a column", name, longest=1024)
            if not isinstance(numeric, bool):
                raise ClientError(f"expected columns to map names to true or false, got {type(numeric).__name__}")
        units = reply["units"]
        if not isinstance(units, dict) or not set(units) <= {name for name, numeric in columns.items() if numeric}:
            raise ClientError(f"expected units as a dict of columns of numbers, got {_shown(units)}")
        for unit in units.values():
            _word("a unit", unit, longest=MAX_UNIT_LENGTH)
        return
    if not isinstance(reply["colour"], bool):
        raise ClientError(f"expected colour as true or false, got {type(reply['colour']).__name__}")
    if not isinstance(reply["sizes"], list):
        raise ClientError(f"expected sizes as a list, got {_shown(reply['sizes'])}")
    for size in reply["sizes"]:
        if not isinstance(size, list) or len(size) != 3 or not all(type(n) is int and n >= 1 for n in size):
            raise ClientError(f"expected sizes as width, height and count from 1, got {brief(repr(size), 40)}")
        if max(size[:2]) > MAX_SIDE or size[2] > MAX_ROWS:
            raise ClientError(f"expected sides of at most {MAX_SIDE} pixels, got {brief(repr(size), 40)}")


def _measured_images(reply: Answer, channels: int) -> None:
    sums = Field(float64, (channels,), low=0)
    check(reply, {"count": Field(int, low=1, high=MAX_PIXELS), "sums": sums, "squares": sums}, {})
    n = reply["count"]
    for total, square in zip(reply["sums"].tolist(), reply["squares"].tolist(), strict=True):
        # pixels lie between 0 and 255, and (Σx)² <= n Σx²
        if total > BRIGHTEST * n * (1 + 1e-9) or not total**2 / n <= square * (1 + 1e-9) <= BRIGHTEST * total * (1 + 1e-6):
            raise ClientError(f"expected sums of {n} pixels from 0 to 255 and of their squares, got {total:g} and {square:g}")


def _measured_table(reply: Answer, numeric: Sequence[str], categorical: Sequence[str]) -> None:
    _names(reply, {"numeric", "words"}, "the reply")
    for field, wanted in (("numeric", numeric), ("words", categorical)):
        if not isinstance(reply[field], dict):
            raise ClientError(f"expected {field} as a dict, got {_shown(reply[field])}")
        _names(reply[field], set(wanted), field)
    for moments in reply["numeric"].values():
        check(moments, MOMENTS, {})
        if moments["deviation"] > moments["count"] * (2 * MAX_NUMBER) ** 2 or (not moments["count"] and moments["mean"]):
            raise ClientError("expected mean and deviation of as many numbers as are counted, got more")
    for words in reply["words"].values():
        _words("words", words)


def _names(found: Mapping[Any, Any], wanted: Collection[str], where: str) -> None:
    if set(found) != set(wanted):
        extra = brief(repr(sorted(map(str, set(found) - set(wanted)))[:3]), 100)
        missing = brief(repr(sorted(set(wanted) - set(found))[:3]), 100)
        raise ClientError(f"expected the names asked for in {where}, got {extra} more and {missing} less")


def _words(what: str, words: Any, *, least: int = 0) -> None:
    if not isinstance(words, list) or not least <= len(words) <= MAX_WORDS:
        raise ClientError(f"expected {what} as a list of {least} to {MAX_WORDS} words, got {_shown(words)}")
    for word in words:
        _word(what, word, longest=MAX_WORD_LENGTH)
    if len(set(words)) < len(words):
        raise ClientError(f"expected {what} to differ, got the same twice")


def _word(what: str, word: Any, *, longest: int) -> None:
    if not isinstance(word, str) or len(word) > longest:
        raise ClientError(f"expected {what} of at most {longest} characters, got {_shown(word)}")
    try:
        word.encode()
    except UnicodeEncodeError as error:
        raise ClientError(f"expected {what} as UTF-8 text, got half a character") from error


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return type(value).__name__ + (f" of {len(value)}" if isinstance(value, (list, dict, str)) else "")
