"""Rows of a benchmark that goes on where it was stopped: a file with a line of JSON for each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def read(path: Path) -> list[Row]:
    """Read the rows of a file, none where it is missing; a line that a kill cut off is left out, so that its run is done again."""
    rows = []
    for line in path.read_text(encoding="utf-8").split("\n") if path.exists() else []:
        with suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def append(path: Path, row: Row) -> None:
    """Add a row on a line of its own; several processes may share the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+", buffering=0) as file:  # one write a row
        file.seek(max(0, file.seek(0, 2) - 1))
        after_a_kill = file.read(1) not in (b"", b"\n")
        file.write(b"\n" * after_a_kill + json.dumps(row, separators=(",", ":")).encode() + b"\n")


def key(row: Row, names: Sequence[str]) -> str:
    """Return what says whether a row is there already: its values of these names."""
    return json.dumps([row.get(name) for name in names], sort_keys=True)
