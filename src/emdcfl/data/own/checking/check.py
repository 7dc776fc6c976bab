"""``check_folder`` reads a folder as a run does, and reports every problem and doubt: one page that a data steward can sign."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from emdcfl.core.checks import NODE_NAME, names_node
from emdcfl.core.errors import DataError
from emdcfl.core.units import names
from emdcfl.data.own.checking.columns import ColumnProfile, check_categories
from emdcfl.data.own.checking.leaks import Repeats, leaks, repeats, series_notes
from emdcfl.data.own.cleaning import REGRESSION
from emdcfl.data.own.folder import FolderOptions, FolderSamples, build_scenario, read_folder, read_site_alone
from emdcfl.data.own.formats.client_tables import read_client_tables
from emdcfl.data.own.formats.images import common_shape, list_images, read_client, read_headers
from emdcfl.data.own.formats.layout import ClientFiles, client_folder, discover, visible
from emdcfl.data.own.formats.quantities import common_units
from emdcfl.data.own.notes import write_notes
from emdcfl.data.own.parts import Raw, prepare
from emdcfl.data.own.splitting import RANDOM
from emdcfl.data.own.tables import column_kinds
from emdcfl.data.types import Scenario


@dataclass(frozen=True)
class ClientReport:
    """One client: sizes of its splits, samples of every class, labels as its files spell them, its fingerprint, and sizes of its images."""

    name: str
    sizes: dict[str, int]
    labels: dict[str, int]
    spelled: dict[str, int] = field(default_factory=dict)
    fingerprint: str = ""
    images: dict[str, int] = field(default_factory=dict)
    """``8×8 grey`` → how many images."""
    numbers: dict[str, float] = field(default_factory=dict)
    """``low``, ``mean`` and ``high`` of the numbers to predict, where there are any."""


@dataclass(frozen=True)
class FolderReport:
    """What a run would read. ``errors`` stop a run; ``notes`` do not."""

    path: str
    kind: str
    shape: tuple[int, ...] = ()
    classes: tuple[str, ...] = ()
    clients: tuple[ClientReport, ...] = ()
    errors: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    model: dict[str, Any] = field(default_factory=dict)
    label: str | None = None
    columns: tuple[ColumnProfile, ...] = ()
    left_out: tuple[str, ...] = ()
    """Columns that are no features."""
    repeats: Repeats | None = None
    renamed: dict[str, str] = field(default_factory=dict)
    """Label as it is spelled → class."""
    repairs: tuple[str, ...] = ()
    """What the user asked to repair, in words."""

    @property
    def ok(self) -> bool:
        return not self.errors

    def as_dict(self) -> dict[str, Any]:
        found = self.repeats
        return {
            "path": self.path,
            "kind": self.kind,
            "ok": self.ok,
            "shape": list(self.shape),
            "label": self.label,
            "classes": list(self.classes),
            "clients": [
                {"name": c.name, "sizes": c.sizes, "labels": c.labels, "spelled": c.spelled, "fingerprint": c.fingerprint}
                | ({"images": c.images} if c.images else {})
                | ({"numbers": c.numbers} if c.numbers else {})
                for c in self.clients
            ],
            "columns": [column.as_dict() | {"feature": column.name not in self.left_out} for column in self.columns],
            "repeats": []
            if found is None
            else [{"site": site, "of": site, "samples": n} for site, n in found.held.items() if n]
            + [{"site": a, "of": b, "samples": n} for (a, b), n in found.across.items()],
            "repairs": list(self.repairs),
            "errors": list(self.errors),
            "notes": list(self.notes),
            "model": self.model,
        }


def check_folder(path: str | Path, *, seed: int = 0, **options: Any) -> FolderReport:
    """Read a folder as ``load_folder`` does, and report all problems instead of stopping at the first, and what may leak."""
    return _check(Path(path), FolderOptions(**options), seed)


def check_options(path: str | Path, options: Mapping[str, Any]) -> FolderReport:
    """Check a folder with the options of a scenario of own files."""
    return _check(Path(path), FolderOptions.of(options), options.get("data_seed", 0))


def _check(path: Path, how: FolderOptions, seed: int) -> FolderReport:
    try:
        reading = read_folder(path, how)
    except DataError as first:
        others = [] if how.client is not None else _errors_by_client(path, how)
        errors = [*([] if any(error.startswith(str(first)) for error in others) else [str(first)]), *others]
        return FolderReport(str(path), "unknown", errors=tuple(errors))
    return _split_and_report(reading, seed)


def check_site(path: Path, name: str, *, seed: int = 0, **options: Any) -> FolderReport:
    """Check the files of one site, whose partners are elsewhere: a folder of class folders, or a table."""
    try:
        reading = read_site_alone(path, name, FolderOptions(**options))
    except DataError as error:
        return FolderReport(str(path), "unknown", errors=(str(error),))
    return _split_and_report(reading, seed, alone=True)


def _split_and_report(reading: FolderSamples, seed: int, *, alone: bool = False) -> FolderReport:
    report, path = describe(reading), reading.path
    try:
        scenario, divided = build_scenario(reading, seed=seed, alone=alone)
    except DataError as error:
        return replace(report, errors=tuple(dict.fromkeys([str(error), *_problems(reading, seed, alone=alone)])))
    found = repeats(scenario)
    series = series_notes(reading.raws, reading.label) if reading.label is not None and reading.how.rule == RANDOM else []
    unfit = [site.name for site in scenario.sites if not names_node(site.name)]
    federation = (
        [f"{names(unfit)}: cannot name a node of a federation; for that, rename the files or folders: {NODE_NAME}"] if unfit else []
    )
    notes = (*scenario.notes, *federation, *found.notes(str(path)), *leaks(scenario, divided, reading.how.rule), *series)
    return with_splits(replace(report, notes=notes, repeats=found), scenario)


def _problems(reading: FolderSamples, seed: int, *, alone: bool) -> list[str]:
    """Return all that stops a run, which itself stops at the first."""
    raws = reading.raws
    checks: list[Callable[[], object]] = [
        partial(common_units, {raw.name: raw.units for raw in raws}),
        partial(prepare, str(reading.path), raws, seed, alone=alone),
    ]
    if reading.label is not None:
        checks += [partial(check_categories, [column]) for column in reading.features]
        tables = [(f"client {raw.name!r} ({raw.origin})", part.x) for raw in raws for part in raw.parts.values()]
        everywhere = set[str].intersection(*(set(table.column_names) for _, table in tables))
        uneven = [column.name for column in reading.features if column.name not in everywhere]
        checks.append(partial(column_kinds, tables, [reading.label]))  # with all columns, so that it finds one of another name
        checks += [partial(column_kinds, tables, [reading.label, *(other for other in uneven if other != name)]) for name in uneven]
    found: dict[str, None] = {}
    for check in checks:
        try:
            check()
        except DataError as error:
            text = str(error)
            if not any(text.partition(";")[0] == known.partition(";")[0] for known in found):
                found[text] = None
    return list(found)


def describe(reading: FolderSamples) -> FolderReport:
    """Report what was read, before it is split."""
    kept = {column.name for column in reading.features}
    spell = {word: reading.how.cleaning.label(word) for words in reading.labels.values() for word in words}
    clients = []
    for raw in reading.raws:
        spelled = dict(sorted(reading.labels[raw.name].items()))
        headers = filter(None, reading.headers.get(raw.name, []))
        images = Counter(f"{size[0]}×{size[1]} {MODES.get(mode, mode)}" for mode, size in headers)
        sizes = {split: len(part) for split, part in raw.parts.items()}
        numbers = _numbers(raw) if reading.how.cleaning.task == REGRESSION else {}
        clients.append(ClientReport(raw.name, sizes, {}, spelled, reading.fingerprints[raw.name], dict(images.most_common()), numbers))
    return FolderReport(
        path=str(reading.path),
        kind="images" if reading.label is None else "table",
        classes=tuple(sorted(set(spell.values()))),
        clients=tuple(clients),
        notes=tuple(write_notes(reading.notes)),
        label=reading.label,
        columns=tuple(reading.columns.values()),
        left_out=tuple(name for name in reading.columns if name not in kept),
        renamed=spell,
        repairs=tuple(reading.how.cleaning.in_words()),
    )


def _numbers(raw: Raw) -> dict[str, float]:
    found = np.concatenate([part.labels for part in raw.parts.values()]).astype(np.float64)
    return {"low": float(found.min()), "mean": float(found.mean()), "high": float(found.max())}


MODES = {"1": "black and white", "L": "grey", "LA": "grey and transparent", "I": "grey, 32 bits", "F": "grey, floats", "P": "palette"}
MODES |= dict.fromkeys(("I;16", "I;16B"), "grey, 16 bits")
"""Pillow's modes of images in words; others (RGB, RGBA, CMYK) are words already."""


def with_splits(report: FolderReport, scenario: Scenario) -> FolderReport:
    """Add what the splits hold."""
    clients = []
    for client, site in zip(report.clients, scenario.sites, strict=True):
        splits = {"train": site.train, "val": site.val, **site.tests}
        counts = Counter(label for split in splits.values() for label in split.y.tolist())
        labels = {name: counts.get(i, 0) for i, name in enumerate(scenario.classes)}
        clients.append(replace(client, sizes={name: len(split) for name, split in splits.items()}, labels=labels))
    return replace(
        report,
        shape=tuple(scenario.sites[0].train.x.shape[1:]),
        classes=scenario.classes,
        clients=tuple(clients),
        model=scenario.model.as_dict(),
    )


def _errors_by_client(path: Path, how: FolderOptions) -> list[str]:
    """Try every client by itself; return the problems of all of them."""
    if not path.is_dir():
        return []
    errors: list[str] = []
    try:
        found = discover(path).clients
    except DataError:
        found = []
        for folder in (entry for entry in visible(path) if entry.is_dir()):
            try:
                found.append(client_folder(folder)[1])
            except DataError as error:
                errors.append(str(error))
    taking_part = [files for files in found if files.name not in how.leave_out]
    return errors + _merge_equal([(files, error) for files in taking_part for error in _errors_of(files, how)])


def _merge_equal(errors: Sequence[tuple[ClientFiles, str]]) -> list[str]:
    """Write an error that several clients share once, with their names."""
    same: dict[str, list[tuple[str, str]]] = {}
    for files, error in errors:
        general = error
        for own in (repr(files.name), *map(str, files.parts.values())):
            general = general.replace(own, "")
        same.setdefault(general, []).append((files.name, error))
    return [first + (f"; the same at {names([name for name, _ in more])}" if more else "") for (_, first), *more in same.values()]


def _errors_of(files: ClientFiles, how: FolderOptions) -> list[str]:
    try:
        if any(part.is_dir() for part in files.parts.values()):
            listed = list_images(files)
            read_client(listed, common_shape({listed.name: read_headers(listed)}), how.rule)
        else:
            read_client_tables(files, how.label, how.rule, how.cleaning.cells)
    except DataError as error:
        return [str(error)]
    return []
