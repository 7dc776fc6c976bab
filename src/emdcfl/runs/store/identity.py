"""Which config a run directory belongs to: ``config.toml`` for people, and a copy with a checksum in ``state/run.json``.

Either file can be damaged or lost: the other one says what it held. A ``config.toml`` that reads well but says something else may have been
changed on purpose, and is not written over: that is an error, which names the keys. What is trained beside a run is no part of its config,
and stands in ``state/baselines.json``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from emdcfl.core.checks import read_toml
from emdcfl.core.errors import StoreError
from emdcfl.core.units import some
from emdcfl.runs.config import AT_NODES, OWN_FILES
from emdcfl.runs.store import files

FORMAT = 1
CONFIG = "config.toml"
RUN = "state/run.json"
FREE = "engine.workers"
"""Key that may differ when a run is resumed, as results are bit-identical; the directory keeps the value it began with."""
BASELINES = "state/baselines.json"

log = logging.getLogger("emdcfl")


def is_run(folder: Path) -> bool:
    """Whether a run began here; one that lost its ``run.json`` is known by its rounds."""
    return (folder / RUN).is_file() or ((folder / CONFIG).is_file() and any((folder / "state").glob("round-*.json")))


def read_config(folder: Path) -> str:
    """Return the config the run began with, as TOML, from whichever file is whole."""
    text, copy = _config(folder), _copy(folder)
    if copy is None:
        if text is None:
            raise StoreError(f"{folder}: {CONFIG} and {RUN} are both damaged or missing; restore one of them, or choose another --out")
        return text
    if text is None or (text != copy and copy.startswith(text)):  # cut off between two lines, it still reads well
        log.warning("%s: damaged or missing; using the copy in %s", folder / CONFIG, RUN)
    elif differing := _differences(copy, text):
        raise StoreError(
            f"{folder / CONFIG}: changed or damaged since the run began, in {differing}; "
            "delete it to go on with what the run began with, or choose another --out"
        )
    return copy


def check_same(folder: Path, config: str) -> str:
    """Return the config that the run in the folder began with; raise unless it is this one, but for ``FREE``."""
    began = read_config(folder)
    if differing := _differences(began, config, free=(FREE,)):
        raise StoreError(
            f"{folder}: belongs to a run of another config, differing in {differing}; "
            "to go on with it, give --resume and --out alone, else choose another --out"
        )
    return began


def write_config(folder: Path, config: str) -> None:
    """Write both files where they are missing, changed or damaged."""
    record = files.sealed({"format": FORMAT, "config": config}, RUN)
    for name, text in ((CONFIG, config), (RUN, files.json_text(record, RUN, indent=2) + "\n")):
        path, content = folder / name, text.encode()
        try:
            whole = path.read_bytes() == content
        except OSError:
            whole = False
        if not whole:
            if path.exists():
                log.warning("%s: changed or damaged; written again", path)
            files.write_file(path, [content])


class Baselines(StrEnum):
    """What is trained beside a run, to compare it with."""

    NONE = "none"
    SCORES = "scores"
    MODELS = "models"

    @classmethod
    def usual(cls, scenario: str) -> Baselines:
        """Return what is trained beside a run on these data where nobody says anything: scores, on own data."""
        return cls.SCORES if scenario in (OWN_FILES, AT_NODES) else cls.NONE


def note_baselines(folder: Path, chosen: Baselines, scenario: str) -> None:
    """Note what is trained beside the run, unless it is the usual, for who resumes it without saying so again."""
    if (noted_baselines(folder) or Baselines.usual(scenario)) is not chosen:
        files.write_json(folder / BASELINES, {"baselines": chosen.value})


def noted_baselines(folder: Path) -> Baselines | None:
    """Return what the run began with; ``None`` where it noted nothing."""
    if not (folder / BASELINES).is_file():
        return None
    try:
        return Baselines(files.read_sealed(folder / BASELINES)["baselines"])
    except (StoreError, KeyError, TypeError, ValueError):
        log.warning("%s: damaged; say --baselines, --no-baselines or --keep-baselines again if the run began with it", folder / BASELINES)
        return None


def _config(folder: Path) -> str | None:
    """Return the text of ``config.toml``; ``None`` where it is missing or not TOML."""
    try:
        text = (folder / CONFIG).read_text(encoding="utf-8")
        read_toml(text)
    except (OSError, ValueError):
        return None
    return text


def _copy(folder: Path) -> str | None:
    """Return the copy in ``run.json``; ``None`` where that is missing or damaged."""
    try:
        record = files.read_sealed(folder / RUN)
        number, text = record["format"], record["config"]
        read_toml(text)
    except (StoreError, KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return None
    if number != FORMAT:
        raise StoreError(f"{folder / RUN}: expected format {FORMAT}, got {number}; use the version of emdcfl that started the run")
    return str(text)


def _differences(old: str, new: str, free: Sequence[str] = ()) -> str:
    """Name the first keys in which two TOML texts differ, others than ``free``; empty where they agree."""
    there, here = flat(read_toml(old)), flat(read_toml(new))
    keys = sorted(key for key in there.keys() | here.keys() if there.get(key) != here.get(key) and key not in free)
    shown = [f"{key} ({there.get(key, 'unset')!r} there, {here.get(key, 'unset')!r} here)" for key in keys]
    return some(shown)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one, with dots in the keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found
