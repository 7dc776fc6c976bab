"""Which data a run on own files belongs to: where they were, and a fingerprint of every site's samples, in ``state/data.json``.

The place is kept twice, absolute and relative to the run directory: one holds from every folder, the other when a tree is moved as a whole.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from emdcfl.core.errors import DataError, StoreError
from emdcfl.core.units import names
from emdcfl.runs.store import files

DATA = "state/data.json"

log = logging.getLogger("emdcfl")


def bind(folder: Path, options: Mapping[str, Any], sites: Mapping[str, str]) -> None:
    """Note the own files (``options["path"]``) a run begins with; for a run that goes on, raise unless they are the same."""
    path = options.get("path")
    if not path or not sites or check(folder, sites):
        return
    place = Path(path).resolve()
    record = {"given": path, "path": str(place), "relative": os.path.relpath(place, folder.resolve()), "sites": dict(sites)}
    files.write_json(folder / DATA, record)


def check(folder: Path | None, sites: Mapping[str, str]) -> bool:
    """Raise if the samples of a site are others than those the run began with; return whether the run noted any."""
    record = _read(folder)
    if record is None:
        return False
    then = record["sites"]
    changes = {
        "changed": [site for site in then if site in sites and sites[site] != then[site]],
        "are gone": [site for site in then if site not in sites],
        "are new": [site for site in sites if site not in then],
    }
    told = "; ".join(f"{what}: {names(found)}" for what, found in changes.items() if found)
    if told:
        raise StoreError(f"{folder}: the data are not those the run began with (sites that {told}); restore them, or choose another --out")
    return True


def locate(folder: Path | None, given: str) -> str:
    """Return where the run's data are now; the path as it was given where that leads there."""
    record = _read(folder)
    if folder is None or record is None:
        return given
    places = [Path(os.path.normpath(folder.resolve() / record["relative"])), Path(record["path"])]
    found = next((place for place in places if place.exists()), None)
    if found is None:
        raise DataError(f"{folder}: the run's data are not at {' or '.join(dict.fromkeys(map(str, places)))}; put them back")
    return given if same(given, found) else str(found)


def as_given(folder: Path | None, path: str) -> str:
    """Return the path that the run in a folder was given, where ``path`` leads to the same place; else ``path``."""
    record = _read(folder)
    if record is None or not Path(path).exists():
        return path
    return str(record["given"]) if same(path, Path(locate(folder, record["given"]))) else path


def same(path: str, place: Path) -> bool:
    """Whether a path leads to a place that exists."""
    return Path(path).exists() and Path(path).samefile(place)


def _read(folder: Path | None) -> dict[str, Any] | None:
    if folder is None or not (folder / DATA).is_file():
        return None
    try:
        record = files.read_sealed(folder / DATA)
        words = [record["given"], record["path"], record["relative"], *record["sites"].values()]
    except (StoreError, KeyError, TypeError, AttributeError):
        words = [None]
    if not all(isinstance(word, str) for word in words):
        log.warning("%s: damaged; whether the data changed cannot be told", folder / DATA)
        return None
    return record
