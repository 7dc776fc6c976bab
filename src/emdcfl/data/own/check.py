"""``check_folder``: what a run would see in a folder, with everything wrong in it at once instead of the first thing only."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from emdcfl.core.errors import DataError
from emdcfl.data.own.folder import load_folder
from emdcfl.data.own.images import common_shape, list_images, read_client
from emdcfl.data.own.layout import ClientFiles, client_folder, discover, visible
from emdcfl.data.own.readers import read_client_tables
from emdcfl.data.types import Scenario


@dataclass(frozen=True)
class ClientReport:
    """Sizes of a client's splits and the count of every class over all of them."""

    name: str
    sizes: dict[str, int]
    labels: dict[str, int]


@dataclass(frozen=True)
class FolderReport:
    """What was found. ``errors`` stop a run; ``notes`` do not."""

    path: str
    kind: str
    shape: tuple[int, ...] = ()
    classes: tuple[str, ...] = ()
    clients: tuple[ClientReport, ...] = ()
    errors: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    model: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.errors

    def as_dict(self) -> dict[str, Any]:
        """JSON values, for ``--json``."""
        return {
            "path": self.path,
            "kind": self.kind,
            "ok": self.ok,
            "shape": list(self.shape),
            "classes": list(self.classes),
            "clients": [{"name": c.name, "sizes": c.sizes, "labels": c.labels} for c in self.clients],
            "errors": list(self.errors),
            "notes": list(self.notes),
            "model": self.model,
        }


def check_folder(path: str | Path, *, label: str | None = None, client: str | None = None, seed: int = 0) -> FolderReport:
    """Look at a folder as ``load_folder`` would, and report instead of stopping at the first problem."""
    path = Path(path)
    errors: list[str] = []
    try:
        scenario = load_folder(path, label=label, client=client, seed=seed)
    except DataError as first:
        errors.append(str(first))
        errors += [error for error in _each_client(path, label, client) if error not in errors]
        return FolderReport(str(path), "unknown", errors=tuple(errors))
    return _report(path, scenario)


def _report(path: Path, scenario: Scenario) -> FolderReport:
    clients = []
    for site in scenario.sites:
        splits = {"train": site.train, "val": site.val, **site.tests}
        counts = Counter(int(label) for split in splits.values() for label in split.y.tolist())
        labels = {name: counts.get(i, 0) for i, name in enumerate(scenario.classes)}
        clients.append(ClientReport(site.name, {name: len(split) for name, split in splits.items()}, labels))
    return FolderReport(
        path=str(path),
        kind=str(scenario.encoding["kind"]),
        shape=tuple(scenario.sites[0].train.x.shape[1:]),
        classes=scenario.classes,
        clients=tuple(clients),
        notes=scenario.notes,
        model=scenario.model.as_dict(),
    )


def _each_client(path: Path, label: str | None, client: str | None) -> list[str]:
    """Try every client by itself, so that one report names all that is wrong."""
    if client is not None or not path.is_dir():
        return []
    try:
        found = discover(path).clients
    except DataError:
        found, errors = [], []
        for folder in (entry for entry in visible(path) if entry.is_dir()):
            try:
                found.append(client_folder(folder)[1])
            except DataError as error:
                errors.append(str(error))
        return errors + [error for files in found for error in _one_client(files, label)]
    return [error for files in found for error in _one_client(files, label)]


def _one_client(files: ClientFiles, label: str | None) -> list[str]:
    try:
        if any(part.is_dir() for part in files.parts.values()):
            listed = list_images(files)
            return read_client(listed, common_shape([listed]))[1]
        read_client_tables(files, label)
    except DataError as error:
        return [str(error)]
    return []
