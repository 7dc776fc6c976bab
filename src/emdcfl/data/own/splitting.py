"""How a site's samples become train, validation and test: at random, by time, by a column that says so, and with repeats kept together.

A random split puts neighbouring rows of a series, or repeated measurements of one patient, into training and test. The test then rewards
a model for recognising the patient.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from emdcfl.core.errors import ConfigError, DataError, nearest
from emdcfl.core.optional import pa
from emdcfl.data.own.tables import is_numeric, number_values

Part = TypeVar("Part")
TIME, GROUP, SPLIT = "time", "group", "split"
SPLIT_NAMES = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}

Keys = Mapping[str, NDArray[Any]]
"""``time``, ``group`` or ``split`` → one value per sample."""


@dataclass(frozen=True)
class SplitRule:
    """How samples are split."""

    time: str | None = None
    """Column of tables: the oldest rows of a site train, the next validate, the newest test."""
    group: str | None = None
    """Column whose equal values stay in one split. For images a regular expression searched for in the file's name; what its first group
    (or the whole) matches is the value."""
    column: str | None = None
    """Column of tables that says train, val or test."""

    @classmethod
    def of(cls, split: str | None = None, split_column: str | None = None, group: str | None = None, **others: Any) -> SplitRule:
        """Read ``split`` (``random`` or ``time:COLUMN``), ``split_column`` and ``group`` among a scenario's options."""
        kind, _, time = (split or "random").partition(":")
        if kind not in ("random", TIME) or bool(time) != (kind == TIME):
            raise ConfigError(f"expected --split random or --split time:COLUMN, got {split!r}")
        if split_column and (time or group):
            raise ConfigError("--split-column names the split of every row, so --split and --group have nothing to do; leave them out")
        return cls(time or None, group or None, split_column or None)

    @property
    def columns(self) -> dict[str, str]:
        """Meaning → column of tables. These columns are no features."""
        named = {TIME: self.time, GROUP: self.group, SPLIT: self.column}
        return {meaning: column for meaning, column in named.items() if column is not None}


RANDOM = SplitRule()


def by_split(parts: Mapping[str, Part], who: str) -> dict[str, Part]:
    """Return what is called ``training`` or ``valid`` under ``train`` and ``val``; two parts of one split are an error."""
    found = {SPLIT_NAMES.get(str(name).lower(), name): part for name, part in parts.items()}
    if len(found) < len(parts):
        raise DataError(f"{who}: expected one part for each of {', '.join(found)}, got {', '.join(parts)}; put those of one split together")
    return found


def table_keys(table: pa.Table, rule: SplitRule, label: str, origin: str) -> tuple[pa.Table, dict[str, NDArray[Any]], NDArray[np.bool_]]:
    """Take the rule's columns out of a table; return the rest, one value per row for each, and which rows have all of them."""
    keys: dict[str, NDArray[Any]] = {}
    present = np.ones(table.num_rows, dtype=bool)
    for meaning, name in rule.columns.items():
        if name not in table.column_names or name == label:
            others = [column for column in table.column_names if column != label]
            raise DataError(f"{origin} has no column {name!r} to split by: {nearest(name, others)}")
        column = table.column(name)
        present &= ~column.is_null().to_numpy(zero_copy_only=False)
        keys[meaning] = (
            _times(column, name, origin) if meaning == TIME else np.array([str(v).strip() for v in column.to_pylist()], dtype=str)
        )
    for meaning, values in keys.items():
        present &= ~np.isnan(values) if meaning == TIME else values != ""
    if SPLIT in keys:
        keys[SPLIT] = _split_names(keys[SPLIT], present, str(rule.column), origin)
    return table.drop_columns(list(set(rule.columns.values()))), keys, present


def file_keys(files: list[Path], rule: SplitRule, origin: str) -> dict[str, NDArray[Any]]:
    """Return the group of every image file, from its name."""
    if rule.time or rule.column:
        raise DataError(
            f"{origin} holds images: --split time and --split-column are for tables; put images into train, val and test folders"
        )
    if rule.group is None:
        return {}
    try:
        pattern = re.compile(rule.group)
    except re.error as error:
        raise ConfigError(f"--group {rule.group!r}: for images expected a regular expression of file names ({error})") from error
    found = [pattern.search(file.name) for file in files]
    lacking = next((file for file, match in zip(files, found, strict=True) if match is None), None)
    if lacking is not None:
        raise DataError(f"{lacking}: its name has no part that matches --group {rule.group!r}; rename it, or change the expression")
    values = [match.group(1 if pattern.groups else 0) or "" for match in found if match is not None]
    return {GROUP: np.array(values, dtype=str)}


def _times(column: pa.ChunkedArray, name: str, origin: str) -> NDArray[np.float64]:
    if not is_numeric(column.type):
        remedy = f"if these are dates, read them with --date {shlex.quote(name)}"
        raise DataError(f"{origin}: column {name!r} must hold numbers or dates to split by time, got text; {remedy}")
    return number_values(column)


def _split_names(values: NDArray[Any], present: NDArray[np.bool_], name: str, origin: str) -> NDArray[Any]:
    words = np.array([SPLIT_NAMES.get(str(value).lower(), "") for value in values], dtype=str)
    strange = np.flatnonzero((words == "") & present)
    if len(strange):
        raise DataError(f"{origin}: column {name!r} must say train, val or test, got {str(values[strange[0]])!r}")
    return words
