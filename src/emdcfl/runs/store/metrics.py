"""``metrics.jsonl``: a row per client and tested round, with a copy in ``state/`` from which damage is repaired.

A committed round notes how many bytes of the file were there and their checksum (``mark``). On resume the file is cut back to them; where
they do not fit, the copy is taken instead.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from emdcfl.core.errors import StoreError
from emdcfl.runs.store import files
from emdcfl.runs.store.rounds import Mark

METRICS = "metrics.jsonl"
RESUME = "resume the run (--resume) to repair it"

log = logging.getLogger("emdcfl")


class Metrics:
    """The metrics of a run directory."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / METRICS
        self.copy = folder / "state" / METRICS

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows, to the copy first. Every row has a ``round``."""
        text = ""
        for row in rows:
            if not isinstance(row.get("round"), int):
                raise StoreError(f"{self.path}: every row of metrics needs an integer 'round', got {dict(row)!r}")
            text += files.json_text(dict(row), f"{self.path}: round {row['round']}") + "\n"
        for path in (self.copy, self.path):
            files.append_file(path, text.encode())

    def mark(self) -> Mark:
        """Return what a round that is committed now notes about the file."""
        return _mark(_content(self.path) or b"")

    def rows(self) -> list[dict[str, Any]]:
        """Return all rows; a last line that a kill cut off is left out."""
        content, copy = _content(self.path), _content(self.copy)
        if content is None and copy is not None:
            log.warning("%s: missing; read from its copy", self.path)
            content = copy
        elif content is not None and copy is not None and not (content.startswith(copy) or copy.startswith(content)):
            raise StoreError(f"{self.path}: differs from its copy in {self.copy.parent.name}/, so one is damaged; {RESUME}")
        return [self._row(line, number) for number, line in enumerate((content or b"").split(b"\n")[:-1], start=1)]

    def _row(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            row: dict[str, Any] = json.loads(line)
            int(row["round"])
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise StoreError(f"{self.path}: line {number} is damaged; {RESUME}") from error
        return row

    def trim(self, mark: Mark | None) -> None:
        """Cut the file back to what the mark of a round covers, or to nothing: later rows were never committed."""
        mark = _mark(b"") if mark is None else mark
        found = {path: _content(path) for path in (self.path, self.copy)}
        whole = [content[: mark["bytes"]] for content in found.values() if content is not None]
        kept = next((content for content in whole if _mark(content) == mark), None)
        if not whole:
            if mark["bytes"]:
                log.warning("%s: missing; the run goes on without the rows so far", self.path)
            return
        if kept is None:
            raise StoreError(
                f"{self.path}: damaged, and so is its copy in {self.copy.parent.name}/; "
                "restore one of the files, or delete both to go on without these rows"
            )
        for path, content in found.items():
            if kept and (content is None or not content.startswith(kept)):
                log.warning("%s: damaged or missing; written again from its copy", path)
            if content != kept:
                files.write_file(path, [kept])


def _mark(content: bytes) -> Mark:
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"{path}: cannot read: {error.strerror}") from error
