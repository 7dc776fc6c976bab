"""Validation of result rows from elsewhere, before ``compare --merge`` appends them: known keys, types, ranges, finite numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from emdcfl.core.errors import StoreError
from emdcfl.runs.config import TABLES

LONGEST_TEXT = 1000
MOST_ENTRIES = 100_000

Test = Callable[[Any], bool]


def _text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= LONGEST_TEXT and value.isprintable()


def _number(low: float, high: float = math.inf, *, whole: bool = False) -> Test:
    kinds = int if whole else (int, float)
    return lambda value: isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value) and low <= value <= high


def _or_none(test: Test) -> Test:
    return lambda value: value is None or test(value)


def _each(test: Test) -> Test:
    return lambda value: isinstance(value, Mapping) and len(value) <= MOST_ENTRIES and all(_text(k) and test(v) for k, v in value.items())


def _listed(test: Test) -> Test:
    return lambda value: isinstance(value, list) and len(value) <= MOST_ENTRIES and all(test(item) for item in value)


def _record(required: Mapping[str, Test], optional: Mapping[str, Test] | None = None) -> Test:
    known = {**required, **(optional or {})}
    return lambda value: (
        isinstance(value, Mapping)
        and value.keys() >= required.keys()
        and value.keys() <= known.keys()
        and all(known[key](item) for key, item in value.items())
    )


def _plain(value: Any, depth: int = 4) -> bool:
    """Whether a setting is made of finite numbers, printable text, and short lists and tables of them."""
    if isinstance(value, Mapping):
        return depth > 0 and len(value) <= MOST_ENTRIES and all(_text(k) and _plain(v, depth - 1) for k, v in value.items())
    if isinstance(value, list):
        return depth > 0 and len(value) <= MOST_ENTRIES and all(_plain(item, depth - 1) for item in value)
    return value is None or isinstance(value, bool) or _text(value) or _number(-math.inf)(value)


def _settings(value: Any) -> bool:
    """Whether these are the tables of a config; their keys may be those of another version."""
    if not isinstance(value, Mapping) or not {"run", "scenario", "method", "training"} <= value.keys() <= set(TABLES):
        return False
    if not _plain(value) or not all(isinstance(table, Mapping) for table in value.values()):
        return False
    named = all(_text(value[table].get("name")) for table in ("scenario", "method"))
    return named and _number(1, 1e9, whole=True)(value["run"].get("rounds"))


_COUNT, _SECONDS = _number(0, 1e15, whole=True), _number(0, 1e12)
_SHARE, _ARI = _or_none(_number(0, 1)), _or_none(_number(-1, 1))
_SCORE = {"mean": _SHARE, "worst": _SHARE}

REQUIRED: Mapping[str, Test] = {
    "config": lambda value: isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None,
    "scenario": _text,
    "method": _text,
    "seed": _number(0, 2**63 - 1, whole=True),
    "rounds": _COUNT,
    "k": _COUNT,
    "ari": _ARI,
    "accuracy": _record({**_SCORE, "variants": _each(_record(_SCORE))}, {"samples": _COUNT}),
    "seconds": lambda value: _each(_SECONDS)(value) and "total" in value,
    "settings": _settings,
}
OPTIONAL: Mapping[str, Test] = {
    "notes": _listed(_text),
    "versions": _each(_text),
    "bytes": _each(_each(_number(0))),
    "failures": _COUNT,
    "history": _listed(_record({"round": _COUNT, "k": _COUNT, "ari": _ARI, "mean": _SHARE})),
    "commit": _or_none(_text),
    "hardware": _text,
}


def checked(rows: Iterable[Mapping[str, Any]], origin: object) -> Iterator[dict[str, Any]]:
    """Yield rows that are what ``emdcfl compare`` writes; the first that is not stops with its key."""
    known = {**REQUIRED, **OPTIONAL}
    for number, row in enumerate(rows, start=1):
        wrong = [key for key in REQUIRED if key not in row]
        wrong += [key for key, value in row.items() if key not in known or not known[key](value)]
        if wrong:
            raise StoreError(f"{origin}: row {number}: {wrong[0]!r} is not what 'emdcfl compare' writes; nothing is taken in")
        yield dict(row)
