"""``metrics.jsonl``: a row per client and tested round, with a copy in ``state/`` from which damage is mended.

A committed round notes how many bytes of the file were there and their checksum (``mark``). On resume the file is cut back to them; where
they do not fit, the copy is taken instead.

Imports errors and files.
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

METRICS = "metrics.jsonl"

log = logging.getLogger("emdcfl")

Mark = dict[str, Any]
Lines = list[tuple[bytes, dict[str, Any]]]


class Metrics:
    """The metrics of a run directory."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / METRICS
        self.copy = folder / "state" / METRICS
        self._hash = hashlib.sha256()
        self._size: int | None = None  # unknown until the file was trimmed or read

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows, to the copy first. Every row has a ``round``."""
        rows = list(rows)
        for row in rows:
            if not isinstance(row.get("round"), int):
                raise StoreError(f"{self.path}: every row of metrics needs an integer 'round', got {dict(row)!r}")
        text = "".join(files.json_text(dict(row), f"{self.path}: round {row['round']}") + "\n" for row in rows).encode()
        self._measure()
        for path in (self.copy, self.path):
            files.append_file(path, text)
        self._note(text)

    def mark(self) -> Mark:
        """What a committed round says of the file."""
        self._measure()
        return {"bytes": self._size, "sha256": self._hash.hexdigest()}

    def _measure(self) -> None:
        if self._size is None:
            self._size = 0
            self._note(_content(self.path) or b"")

    def _note(self, content: bytes) -> None:
        self._hash.update(content)
        self._size = (self._size or 0) + len(content)

    def rows(self) -> list[dict[str, Any]]:
        """All rows; a last line that a kill cut off is left out."""
        content, copy = _content(self.path), _content(self.copy)
        if content is None and copy is not None:
            log.warning("%s: missing; read from its copy", self.path)
            content = copy
        if content is not None and copy is not None:
            both = min(len(content), len(copy))
            if content[:both] != copy[:both]:
                raise StoreError(f"{self.path}: differs from its copy in {self.copy.parent.name}/, so one is damaged; {_RESUME}")
        return [row for _, row in self._lines(content or b"")]

    def _lines(self, content: bytes) -> Lines:
        found: Lines = []
        for number, line in enumerate(content.split(b"\n")[:-1], start=1):  # what follows the last line break was cut off
            try:
                row = json.loads(line)
                int(row["round"])
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
                raise StoreError(f"{self.path}: line {number} is damaged; {_RESUME}") from error
            found.append((line + b"\n", row))
        return found

    def trim(self, round: int, mark: Mark | None) -> None:
        """Forget rows of rounds after ``round``: they were written, but their round was never committed. ``mark`` is that round's."""
        content, copy = _content(self.path), _content(self.copy)
        if content is None and copy is None:
            if mark is not None and mark.get("bytes"):
                log.warning("%s: missing; the run goes on without the rows up to round %d", self.path, round)
            return
        kept = self._kept(round, mark, content, copy)
        for path, now in ((self.path, content), (self.copy, copy)):
            if now != kept:
                files.write_file(path, [kept])
        self._hash, self._size = hashlib.sha256(), 0
        self._note(kept)

    def _kept(self, round: int, mark: Mark | None, content: bytes | None, copy: bytes | None) -> bytes:
        if round == 0:
            return b""
        if mark is None:  # a round that was saved without one
            there = content if content is not None else copy or b""
            return b"".join(line for line, row in self._lines(there) if row["round"] <= round)
        for name, text in ((self.path, content), (self.copy, copy)):
            whole = (text or b"")[: mark["bytes"]]
            if len(whole) == mark["bytes"] and hashlib.sha256(whole).hexdigest() == mark["sha256"]:
                if name is self.copy:
                    log.warning("%s: damaged or missing; written again from its copy in %s/", self.path, self.copy.parent.name)
                return whole
        raise StoreError(
            f"{self.path}: the rows up to round {round} are damaged, and so is their copy in {self.copy.parent.name}/; "
            "restore one of the files, or delete both to go on without these rows"
        )


_RESUME = "resume the run (--resume) to mend it"


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"{path}: cannot read: {error.strerror}") from error
