"""The run directory: whatever one of its files holds, every reader reads it or says in one line what is wrong; a resume does too.

A round's JSON, the summary and the reading are also forged with a checksum that fits, so that what lies behind it is tried as well.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from emdcfl.core.errors import EmdcflError, StoreError
from emdcfl.methods.emdcfl import EMDCFL
from emdcfl.report import render
from emdcfl.runs import runner
from emdcfl.runs.config import Config, from_dict
from emdcfl.runs.outputs import load_served, read_reading, read_summary
from emdcfl.runs.plan import plan
from emdcfl.runs.store import RunStore
from emdcfl.runs.store.files import sealed, unsealed
from emdcfl.studies import results
from fuzz.feed import Feed, one_line

TABLES: dict[str, dict[str, Any]] = {
    "run": {"rounds": 2},
    "scenario": {"name": "rotated-digits", "groups": 2, "clients_per_group": 1},
    "method": {"name": "emdcfl", "tolerance": 0.1},
    "model": {"name": "mlp", "features": 64, "hidden": [8]},
    "training": {"local_epochs": 1},
    "engine": {"name": "sequential", "device": "cpu"},
}
FORGED = "forged round"
SEALED = {"forged summary": "summary.json", "forged reading": "reading.json"}


class Template:
    """A finished run, small enough to be put back after every attempt."""

    def __init__(self) -> None:
        logging.getLogger("emdcfl").setLevel(logging.CRITICAL)
        torch.set_num_threads(1)
        place = Path("/dev/shm")
        self.path = Path(tempfile.mkdtemp(prefix="fuzz-", dir=place if os.access(place, os.W_OK) else None)) / "run"
        self.config: Config = plan(from_dict(TABLES)).config
        runner.run(self.config, self.path)
        with results.Results(self.path) as found:
            summary = read_summary(self.path)
            found.add([results.as_result(summary, TABLES, [])])
        (self.path / ".lock").unlink()
        self.client = str(summary["clients"][0])
        self.files = {p.relative_to(self.path).as_posix(): p.read_bytes() for p in self.path.rglob("*") if p.is_file()}
        self.names = sorted(name for name in self.files if not name.endswith(".png"))
        self.newest = max(name for name in self.names if name.startswith("state/round-"))

    def restore(self) -> None:
        """Put back what was changed or deleted, and take away what is new."""
        for path in self.path.rglob("*"):
            if path.is_file() and path.relative_to(self.path).as_posix() not in self.files:
                path.unlink()
        for name, content in self.files.items():
            path = self.path / name
            if not path.is_file() or path.read_bytes() != content:
                path.write_bytes(content)

    def close(self) -> None:
        """Remove it."""
        shutil.rmtree(self.path.parent, ignore_errors=True)


@cache
def template() -> Template:
    """Return the run, played once."""
    return Template()


def seeds() -> list[bytes]:
    """Every file: whole, and with a byte overwritten; and forged rounds."""
    there = template()
    found = [bytes([i, 0]) + there.files[name] for i, name in enumerate(there.names) if len(there.files[name]) < 20000]
    found += [bytes([i, 2, 0, 100, 0, 0, 65]) for i in range(len(there.names))]
    body = json.loads(there.files[there.newest])["body"]
    bodies = [body, *(unsealed(json.loads(there.files[name]), name) for name in SEALED.values())]
    return [*found, *(bytes([len(there.names) + i]) + json.dumps(content).encode() for i, content in enumerate(bodies))]


def one(data: bytes) -> None:
    """Damage one file, look at everything, resume."""
    there, feed = template(), Feed(data)
    name = feed.choice([*there.names, FORGED, *SEALED])
    if name in SEALED:
        name, content = SEALED[name], _resealed(feed.rest())
    elif name == FORGED:
        name, content = there.newest, _forged(feed.rest())
    else:
        content = feed.changed(there.files[name])
    try:
        (there.path / name).write_bytes(content)
        for look in (_state, _metrics, _outputs, _results, _report, _resume):
            _told(look, there)
    finally:
        there.restore()


def _forged(body: bytes) -> bytes:
    try:
        text = json.dumps(json.loads(body), separators=(",", ":"), allow_nan=False)
    except (ValueError, RecursionError):
        return body
    return f'{{"sha256":"{hashlib.sha256(text.encode()).hexdigest()}","body":{text}}}\n'.encode()


def _resealed(body: bytes) -> bytes:
    try:
        value = json.loads(body)
        return json.dumps(sealed(value, "forged") if isinstance(value, dict) else value).encode()
    except (ValueError, RecursionError, StoreError):
        return body


def _told(look: Callable[[Template], object], there: Template) -> None:
    try:
        look(there)
    except EmdcflError as error:
        one_line(error)


def _state(there: Template) -> None:
    store = RunStore.read(there.path)
    store.config()
    store.load_state(EMDCFL.State)


def _metrics(there: Template) -> None:
    RunStore.read(there.path).read_metrics()


def _outputs(there: Template) -> None:
    _told(lambda t: read_summary(t.path), there)
    _told(lambda t: read_reading(t.path), there)
    load_served(there.path, there.client)


def _results(there: Template) -> None:
    results.read_results(there.path)


def _report(there: Template) -> None:
    render(there.path)


def _resume(there: Template) -> None:
    with RunStore.open(there.path, there.config, resume=True) as store:
        loaded = store.load_state(EMDCFL.State)
        store.trim_metrics(0 if loaded is None else loaded[0])
        assert loaded is None or loaded[0] in (1, 2)
