"""Which config a run directory belongs to: ``config.toml`` for people, and a sealed copy in ``state/run.json``.

Either file can be damaged or lost: the other one says what it held. A ``config.toml`` that reads well but says something else may have been
changed on purpose, and is not written over: that is an error, which names the keys.

Imports errors, config and files.
"""

from __future__ import annotations

import functools
import logging
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from emdcfl.core.errors import ConfigError, StoreError
from emdcfl.runs.config import Config, config_hash, loads
from emdcfl.runs.store import files

FORMAT = 1
CONFIG = "config.toml"
RUN = "state/run.json"

log = logging.getLogger("emdcfl")

Tables = dict[str, Any]


def is_run(folder: Path) -> bool:
    """Whether a run began here; one that lost its ``run.json`` is known by its rounds."""
    return (folder / RUN).is_file() or ((folder / CONFIG).is_file() and any((folder / "state").glob("round-*.json")))


def read_config(folder: Path) -> Config:
    """The config of the run, as it began."""
    text = _agreed(folder)
    try:
        return loads(text, str(folder / CONFIG))
    except ConfigError as error:
        raise StoreError(f"{error}; the run was made by another version of emdcfl") from error


def check_same(folder: Path, config_toml: str, digest: str) -> None:
    """Raise unless the run in the folder has this config, given as text and hash."""
    record = _record(folder)
    if record is not None and record["config_hash"] == digest:
        return
    old = _flat(_tables(_agreed(folder)) or {})
    new = _flat(tomllib.loads(config_toml))
    keys = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    if not keys and record is None:
        return
    raise StoreError(f"{folder}: belongs to a run of another config, differing in {_named(keys, old, new)}; choose another --out")


def repair_config(folder: Path, config_toml: str, digest: str) -> None:
    """Write both files where they are not as they should be. The folder is locked, and known to belong to this config or to nobody."""
    text = _text(folder)
    if text != config_toml:
        if text is not None:
            log.warning("%s: changed or damaged; written again", folder / CONFIG)
        files.write_file(folder / CONFIG, [config_toml.encode()])
    body = files.sealed({"format": FORMAT, "config_hash": digest, "config": config_toml}, RUN)
    whole = files.json_text(body, RUN, indent=2).encode() + b"\n"
    if not (folder / RUN).is_file() or (folder / RUN).read_bytes() != whole:
        if (folder / RUN).exists():
            log.warning("%s: damaged, or of an earlier version; written again", folder / RUN)
        files.write_file(folder / RUN, [whole])


def _agreed(folder: Path) -> str:
    """The text of the config, from whichever file is whole."""
    record, text = _record(folder), _text(folder)
    tables = _tables(text)
    if record is None:
        if text is None or tables is None:
            raise StoreError(f"{folder}: {CONFIG} and {RUN} are both damaged or missing; restore one of them, or choose another --out")
        return text
    copy = record.get("config")
    if not isinstance(copy, str):  # written before there were copies
        if text is None or tables is None or config_hash(loads(text, str(folder / CONFIG))) != record["config_hash"]:
            raise StoreError(f"{folder / CONFIG}: changed, damaged or missing since the run began; restore it, or choose another --out")
        return text
    if text is None or tables is None or copy.startswith(text):  # cut off between two lines, it still reads well
        if text != copy:
            log.warning("%s: damaged or missing; going by the copy in %s", folder / CONFIG, RUN)
        return copy
    if tables == _tables(copy):
        return text
    old, new = _flat(_tables(copy) or {}), _flat(tables)
    keys = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    raise StoreError(
        f"{folder / CONFIG}: changed or damaged since the run began, in {_named(keys, old, new)}; "
        "delete it to go on with what the run began with, or choose another --out"
    )


def _record(folder: Path) -> Tables | None:
    """What ``run.json`` holds; ``None`` where it is missing or damaged."""
    try:
        stored = files.read_json(folder / RUN)
    except StoreError:
        return None
    if not isinstance(stored, dict) or not isinstance(stored.get("config_hash"), str):
        return None
    number = stored.get("format")
    if isinstance(number, int) and number > FORMAT:
        raise StoreError(
            f"{folder / RUN}: expected format {FORMAT}, got {number}: written by a newer emdcfl, or damaged; use that version, "
            f"or delete the file to go by {CONFIG}"
        )
    if number != FORMAT:
        return None
    if "config" in stored and (files.SEAL not in stored or not isinstance(stored["config"], str) or _tables(stored["config"]) is None):
        return None
    try:
        return files.unsealed(stored, RUN)
    except StoreError:
        return None


def _text(folder: Path) -> str | None:
    try:
        return (folder / CONFIG).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


@functools.lru_cache(maxsize=8)
def _tables(text: str | None) -> Tables | None:
    """What the text says, ``None`` where it is not TOML. Only to look at: the result is shared."""
    try:
        return None if text is None else tomllib.loads(text)
    except (ValueError, RecursionError):
        return None


def _named(keys: list[str], old: Tables, new: Tables) -> str:
    shown = [f"{key} ({old.get(key, 'unset')!r} there, {new.get(key, 'unset')!r} here)" for key in keys[:5]]
    more = [f"and {len(keys) - 5} more"] if len(keys) > 5 else []
    return ", ".join(shown + more) or CONFIG


def _flat(values: Mapping[str, Any], prefix: str = "") -> Tables:
    flat: Tables = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
