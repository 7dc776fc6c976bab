"""``results.jsonl``: one line per finished run, keyed by the hash of its complete config, with a checksum. Append-only, so files of several
machines merge; rows from elsewhere are validated first (``checked``): known keys, types, ranges, finite numbers.
"""

from __future__ import annotations

import functools
import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import torch

from emdcfl.core.errors import StoreError
from emdcfl.core.metric import metric_of
from emdcfl.core.units import escaped
from emdcfl.runs.config import TABLES
from emdcfl.runs.new_sites.unseen import UNSEEN
from emdcfl.runs.store import files
from emdcfl.runs.store.files import Lock

RESULTS = "results.jsonl"
NEEDED = ("config", "scenario", "method", "seed", "settings")
"""What tables are made of; a row from elsewhere is held to ``REQUIRED``."""

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
            missing = [key for key in (*NEEDED, metric_of(row).value) if key not in row]
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
            raise StoreError(f"{self.path}: cannot write: {reason}; fix the problem and retry, finished runs stay") from error
        self.rows += new
        return len(new)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def as_result(summary: Mapping[str, Any], settings: Mapping[str, Any], history: list[dict[str, Any]]) -> ResultRow:
    """Return the row of a finished run: its scores, its settings, and the hardware and commit it ran on."""
    kept = ("config", "scenario", "method", "seed", "rounds", "k", "ari", metric_of(summary).value, "seconds", "notes", "versions")
    row = {key: summary[key] for key in kept}
    device = str(settings["engine"]["device"])
    return {
        **row,
        **({"unseen": summary["unseen"]["sites"]} if "unseen" in summary else {}),
        "bytes": summary.get("bytes", {}),
        "failures": len(summary["failures"]),
        "history": history,
        "commit": commit(),
        "hardware": hardware(device),
        "settings": settings,
    }


def plain_row(row: ResultRow) -> list[ResultRow]:
    """Return, as a list of one, the row of the run without fine-tuning that a row with fine-tuning holds; nothing for other rows.

    Its bytes are left out: they also count the test of the fine-tuned models.
    """
    if "plain" not in row:
        return []
    apart = ("plain", "config", metric_of(row).value, "seconds", "bytes", "settings")
    seconds, tuning = dict(row["seconds"]), float(row["seconds"].get("personalize", 0.0))
    seconds["total"] -= tuning
    return [
        {
            **{key: value for key, value in row.items() if key not in apart},
            **row["plain"],
            "seconds": {phase: value for phase, value in seconds.items() if phase != "personalize"},
            "settings": {table: keys for table, keys in row["settings"].items() if table != "personalize"},
        }
    ]


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


MAX_TEXT_LENGTH = 1000
MAX_ENTRIES = 100_000

Test = Callable[[Any], bool]


def _text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_TEXT_LENGTH and escaped(value) == value  # wide spaces are no hidden characters


def _number(low: float, high: float = math.inf, *, whole: bool = False) -> Test:
    kinds = int if whole else (int, float)
    return lambda value: isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value) and low <= value <= high


def _or_none(test: Test) -> Test:
    return lambda value: value is None or test(value)


def _each(test: Test) -> Test:
    return lambda value: isinstance(value, Mapping) and len(value) <= MAX_ENTRIES and all(_text(k) and test(v) for k, v in value.items())


def _listed(test: Test) -> Test:
    return lambda value: isinstance(value, list) and len(value) <= MAX_ENTRIES and all(test(item) for item in value)


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
        return depth > 0 and len(value) <= MAX_ENTRIES and all(_text(k) and _plain(v, depth - 1) for k, v in value.items())
    if isinstance(value, list):
        return depth > 0 and len(value) <= MAX_ENTRIES and all(_plain(item, depth - 1) for item in value)
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
_REAL, _SIZE = _or_none(_number(-1e15, 1e15)), _or_none(_number(0, 1e15))


def _scores(value: Test, needed: Mapping[str, Test], optional: Mapping[str, Test], sites: Mapping[str, Test]) -> Test:
    """Return the test of scores, overall and of each test variant: ``value`` is that of a score, the others are of what comes with it."""
    score = {"mean": value, "worst": value, **needed}
    more = {"low": value, "high": value, "new_sites": _or_none(_record({"low": value, "high": value})), **optional}
    variant = _record(score, {**more, "sites": _listed(value), "tested": _listed(_COUNT), **sites})
    return _record({**score, "variants": _each(variant)}, {**more, "samples": _COUNT, "interval": _text})


_RARE = _or_none(_record({"mean": _SHARE, "low": _SHARE, "high": _SHARE, "sites": _COUNT}))
_RMSE = _record({"mean": _SIZE, "worst": _SIZE, "sites": _listed(_SIZE)})


def _hash(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None


REQUIRED: Mapping[str, Test] = {
    "config": _hash,
    "scenario": _text,
    "method": _text,
    "seed": _number(0, 2**63 - 1, whole=True),
    "rounds": _COUNT,
    "k": _COUNT,
    "ari": _ARI,
    "seconds": lambda value: _each(_SECONDS)(value) and "total" in value,
    "settings": _settings,
}
METRICS: Mapping[str, Test] = {
    "accuracy": _scores(_SHARE, {}, {"balanced": _RARE, "auc": _RARE}, {}),
    "r2": _scores(_REAL, {"rmse": _RMSE}, {}, {"errors": _listed(_SIZE)}),
}
"""A row has one of them."""
OPTIONAL: Mapping[str, Test] = {
    **METRICS,
    "plain": _record({"config": _hash}, METRICS),
    "unseen": _listed(
        _record(
            {
                "site": _text,
                "group": _or_none(_text),
                "cluster": _or_none(_COUNT),
                "alike": _SHARE,
                "misfits": _each(_number(-1e15, 1e15)),
                "samples": _COUNT,
            },
            {"accuracy": _record(dict.fromkeys(UNSEEN, _SHARE)), "r2": _record(dict.fromkeys(UNSEEN, _REAL))},
        )
    ),
    "data": _hash,
    "notes": _listed(_text),
    "versions": _each(_text),
    "bytes": _each(_each(_number(0))),
    "failures": _COUNT,
    "history": _listed(_record({"round": _COUNT, "k": _COUNT, "ari": _ARI, "mean": _REAL}, {"variants": _each(_REAL)})),
    "commit": _or_none(_text),
    "hardware": _text,
    "directory": _text,
}


def checked(rows: Iterable[Mapping[str, Any]], origin: object) -> Iterator[dict[str, Any]]:
    """Yield rows that are what ``emdcfl compare`` writes; the first that is not stops with its key."""
    known = {**REQUIRED, **OPTIONAL}
    for number, row in enumerate(rows, start=1):
        wrong = [key for key in (*REQUIRED, metric_of(row).value) if key not in row]
        wrong += ["accuracy"] if "r2" in row and "accuracy" in row else []
        wrong += [key for key, value in row.items() if key not in known or not known[key](value)]
        if wrong:
            raise StoreError(f"{origin}: row {number}: {wrong[0]!r} is not what 'emdcfl compare' writes; nothing is taken in")
        yield dict(row)
