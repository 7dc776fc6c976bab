"""``results.jsonl``: one line per finished run, keyed by the hash of its complete config, with a checksum. Append-only, so files of several
machines merge.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from emdcfl.core.errors import StoreError
from emdcfl.runs.store import files
from emdcfl.runs.store.lock import Lock

RESULTS = "results.jsonl"
REQUIRED = ("config", "scenario", "method", "seed", "accuracy", "settings")

ResultRow = dict[str, Any]
"""One line of ``results.jsonl``."""


def read_results(path: Path) -> list[ResultRow]:
    """Read the rows of a file (or of ``results.jsonl`` in a folder), each config once; a last line that was cut off is left out."""
    path = path / RESULTS if path.is_dir() else path
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise StoreError(f"{path}: missing; give a results.jsonl that 'emdcfl compare' wrote, or its folder") from error
    except OSError as error:
        raise StoreError(f"{path}: cannot read: {error.strerror}") from error
    found: dict[str, ResultRow] = {}
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        if not line.strip():
            continue
        try:
            row = files.unsealed(json.loads(line), f"{path}: line {number}")
            missing = [key for key in REQUIRED if key not in row]
            hash(row.get("config"))
        except (ValueError, TypeError, AttributeError, RecursionError, StoreError) as error:
            raise StoreError(f"{path}: line {number} is damaged; delete the line, and what it held is run again") from error
        if missing:
            raise StoreError(f"{path}: line {number} has no {missing[0]!r}; expected a row that 'emdcfl compare' wrote")
        found.setdefault(row["config"], row)
    return list(found.values())


class Results:
    """The results of a folder, locked for one process."""

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = Lock(folder / ".lock")
        except OSError as error:
            raise StoreError(f"{folder}: cannot make the folder: {error.strerror}; choose another --out") from error
        self.path = folder / RESULTS
        try:
            self._drop_half_line()
            self.rows = read_results(self.path) if self.path.exists() else []
        except BaseException:
            self._lock.release()
            raise

    def _drop_half_line(self) -> None:
        """Cut off the half line that a kill may have left, so that the next row begins on a line of its own."""
        if not self.path.exists():
            return
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            files.write_file(self.path, [content[:whole]])

    def known(self) -> set[str]:
        """Hashes of the configs that are done."""
        return {row["config"] for row in self.rows}

    def add(self, rows: Iterable[ResultRow]) -> int:
        """Append rows whose config is not known yet, flushed to the disk before this returns; say how many there were."""
        known = self.known()
        new: list[ResultRow] = []
        for row in rows:
            if row["config"] not in known:
                known.add(row["config"])
                new.append(row)
        if not new:
            return 0
        named = [(row, f"{self.path}: {row['method']}") for row in new]
        text = "".join(files.json_text(files.sealed(row, where), where) + "\n" for row, where in named)
        try:
            files.append_file(self.path, text.encode())
        except StoreError as error:
            reason = error.__cause__.strerror if isinstance(error.__cause__, OSError) else str(error)
            raise StoreError(f"{self.path}: cannot write: {reason}; free the cause and start again, finished runs stay") from error
        self.rows += new
        return len(new)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._lock.release()


def as_result(summary: Mapping[str, Any], settings: Mapping[str, Any], history: list[dict[str, Any]]) -> ResultRow:
    """Return the row of a finished run: what came out, from what, on what."""
    kept = ("config", "scenario", "method", "seed", "rounds", "k", "ari", "accuracy", "seconds", "notes", "versions")
    row = {key: summary[key] for key in kept}
    device = str(settings["engine"]["device"])
    return {
        **row,
        "bytes": summary.get("bytes", {}),
        "failures": len(summary["failures"]),
        "history": history,
        "commit": commit(),
        "hardware": hardware(device),
        "settings": settings,
    }


@functools.cache
def commit() -> str | None:
    """Return the commit of the source, with ``+`` if it was changed since; ``EMDCFL_COMMIT`` where the source was copied without git."""
    given = os.environ.get("EMDCFL_COMMIT")
    if given:
        return given
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(here), *arguments], capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        if not git("ls-files", Path(__file__).name):  # installed into somebody else's repository
            return None
        return git("rev-parse", "HEAD")[:12] + ("+" if git("status", "--porcelain", "--untracked-files=no", "--", str(here.parent)) else "")
    except (OSError, subprocess.SubprocessError):
        return None


def hardware(device: str) -> str:
    """Name what a run computed on."""
    processor = f"{_processor()}, {len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} cores"
    if device.startswith("cuda") and torch.cuda.is_available():
        return f"{torch.cuda.get_device_name(torch.device(device))} ({processor})"
    return processor


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
