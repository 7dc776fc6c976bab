"""``load_folder`` builds a scenario from a folder of images or tables; ``check_folder`` reports every problem in one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emdcfl.core import keys
from emdcfl.core.errors import DataError
from emdcfl.core.units import names
from emdcfl.data.own import defaults
from emdcfl.data.own.cleaning import AS_THEY_ARE, Cleaning, doubtful_columns, mixed_columns, variant_notes
from emdcfl.data.own.images import common_shape, list_images, read_client
from emdcfl.data.own.layout import ClientFiles, Layout, client_folder, discover, visible
from emdcfl.data.own.leaks import leaks
from emdcfl.data.own.parts import FRACTIONS, SPLITS, Divided, Note, Raw, prepare, to_site, write_notes
from emdcfl.data.own.readers import read_client_tables, read_shared_table
from emdcfl.data.own.splitting import RANDOM, SplitRule
from emdcfl.data.own.tables import TableEncoding, column_bytes, column_kinds, pool, summarise
from emdcfl.data.types import Preprocess, Scenario

Arrays = Mapping[str, Mapping[str, NDArray[Any]]]


def load_folder(
    path: str | Path,
    *,
    label: str | None = None,
    client: str | None = None,
    seed: int = 0,
    model: defaults.Model = None,
    size: int | None = None,
    fractions: Sequence[float] = FRACTIONS,
    rule: SplitRule = RANDOM,
    cleaning: Cleaning = AS_THEY_ARE,
) -> Scenario:
    """Read the user's own data.

    Parameters
    ----------
    path : path
        One sub-folder per client with class sub-folders of images (optionally below train/val/test), one CSV/TSV/Parquet file per
        client, or one such file with a client column.
    label, client : str, optional
        Columns of tables: the label (default: the first of label, target, class, y) and the client.
    seed : int
        Seed of the splits, made per client and class.
    model : str or ModelRecipe, optional
        Default: an MLP for tables, a CNN for images.
    size : int, optional
        Height and width of images. Default: the most frequent size if it is square and at most 64, else 64 (224 for pretrained networks).
    fractions : three floats
        Shares of train, validation and test where the folder has no such splits.
    rule : SplitRule
        Split by time, by a column, or with repeated measurements kept together; default: at random, class by class.
    cleaning : Cleaning
        Repairs of labels, and columns to leave out; default: none.

    Returns
    -------
    Scenario
        ``notes`` lists what was left out or looks doubtful; ``encoding`` says how files are read.
    """
    wanted: dict[str, Any] = {"label": label, "client": client, "rule": rule, "cleaning": cleaning}
    scenario, divided = _load(Path(path), seed=seed, model=model, size=size, fractions=fractions, **wanted)
    if rule != RANDOM or scenario.encoding["kind"] != "table":
        return scenario
    return replace(scenario, notes=(*scenario.notes, *leaks(scenario, divided, rule, hints=False)))


def _load(
    path: Path,
    *,
    label: str | None,
    client: str | None,
    seed: int,
    model: defaults.Model = None,
    size: int | None = None,
    fractions: Sequence[float] = FRACTIONS,
    rule: SplitRule = RANDOM,
    cleaning: Cleaning = AS_THEY_ARE,
) -> tuple[Scenario, Divided]:
    """Return the scenario, and the samples before they were encoded."""
    layout = discover(path, client_column=client)
    raws, details, notes = _read(layout, label=label, client=client, model=model, size=size, rule=rule)
    if layout.ignored:
        notes.append(Note("", str(path), "files that are not read: {words}", words=tuple(file.name for file in layout.ignored)))
    raws = cleaning.select([cleaning.clean(raw) for raw in raws], details.get("label"))
    divided, classes, more = prepare(str(path), raws, seed, fractions)
    notes += variant_notes(str(path), raws)
    if details["kind"] == "table":
        notes += [*doubtful_columns(str(path), raws, details["label"]), *mixed_columns(raws, details["label"])]
    arrays, encoding, preprocess, mixed = _encode(divided, {raw.name: raw.origin for raw in raws}, details, model)
    shape = arrays[raws[0].name]["train"].shape[1:]
    scenario = Scenario(
        name=path.stem if path.is_file() else path.resolve().name,
        sites=tuple(to_site(name, arrays[name], parts, classes) for name, parts in divided.items()),
        classes=classes,
        preprocess=preprocess,
        model=defaults.recipe(model, shape=shape, classes=len(classes)),
        defaults=defaults.training(model) | defaults.FINE_TUNING,
        method_defaults=defaults.BY_BENEFIT,
        notes=(*write_notes([*notes, *more]), *mixed),
        encoding=encoding,
        fingerprints={raw.name: _fingerprint(raw) for raw in raws},
    )
    return scenario, divided


def _fingerprint(raw: Raw) -> str:
    """Return a short hash of a client's samples and labels."""
    found: list[Any] = []
    for split, part in raw.parts.items():
        contents = [part.x.tobytes()] if isinstance(part.x, np.ndarray) else column_bytes(part.x)
        found += [split, len(part), *contents, *part.labels.tolist(), *(values.tobytes() for values in part.by.values())]
    return keys.digest(*found).hex()[:16]


def _read(
    layout: Layout, *, label: str | None, client: str | None, model: defaults.Model, size: int | None, rule: SplitRule
) -> tuple[list[Raw], dict[str, Any], list[Note]]:
    """Read all clients; return them, the images' shape or the label column, and notes."""
    notes: list[Note] = []
    if layout.kind == "images":
        listed = [list_images(files) for files in layout.clients]
        pretrained = defaults.is_pretrained(model)
        shape = common_shape(listed, size=size or (224 if pretrained else None), colour=True if pretrained else None)
        read = [read_client(files, shape, rule) for files in listed]
        return [raw for raw, _ in read], {"kind": "images", "shape": list(shape)}, [note for _, more in read for note in more]
    if layout.kind == "table":
        assert layout.table is not None
        assert client is not None
        raws, column, notes = read_shared_table(layout.table, label, client, rule)
        return raws, {"kind": "table", "label": column}, notes
    raws = []
    column = ""
    for files in layout.clients:
        raw, column, more = read_client_tables(files, label, rule)
        raws.append(raw)
        notes += more
    return raws, {"kind": "table", "label": column}, notes


def _encode(
    divided: Divided, origins: Mapping[str, str], details: Mapping[str, Any], model: defaults.Model
) -> tuple[Arrays, dict[str, Any], Preprocess, list[str]]:
    if details["kind"] == "images":
        arrays: Arrays = {name: {split: parts[split].x for split in SPLITS} for name, parts in divided.items()}
        return arrays, dict(details), defaults.image_preprocess([splits["train"] for splits in arrays.values()], model), []
    encoding, notes = table_encoding(divided, origins, details["label"])
    encoded: Arrays = {name: {split: encoding.encode(parts[split].x, origins[name]) for split in SPLITS} for name, parts in divided.items()}
    # The encoding has standardised already, in double precision, so nothing is left for the device.
    return encoded, encoding.as_dict(), Preprocess(), notes


def table_encoding(divided: Divided, origins: Mapping[str, str], label: str) -> tuple[TableEncoding, list[str]]:
    """Pool what the clients report about their training rows; returns the encoding and notes."""
    every = [(f"client {name!r} ({origins[name]})", part.x) for name, parts in divided.items() for part in parts.values()]
    numeric, categorical, notes = column_kinds(every, leave_out=[label])
    return pool([summarise(parts["train"].x, numeric, categorical) for parts in divided.values()], label), notes


@dataclass(frozen=True)
class ClientReport:
    """Sizes of a client's splits and the count of every class over all of them."""

    name: str
    sizes: dict[str, int]
    labels: dict[str, int]


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


def check_folder(
    path: str | Path,
    *,
    label: str | None = None,
    client: str | None = None,
    seed: int = 0,
    rule: SplitRule = RANDOM,
    cleaning: Cleaning = AS_THEY_ARE,
) -> FolderReport:
    """Read a folder as ``load_folder`` does, and report all problems instead of stopping at the first, and what may leak."""
    path = Path(path)
    errors: list[str] = []
    try:
        scenario, divided = _load(path, label=label, client=client, seed=seed, rule=rule, cleaning=cleaning)
    except DataError as first:
        others = _each_client(path, label, client)
        errors += [*([] if any(error.startswith(str(first)) for error in others) else [str(first)]), *others]
        return FolderReport(str(path), "unknown", errors=tuple(errors))
    return _report(path, replace(scenario, notes=(*scenario.notes, *leaks(scenario, divided, rule))))


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
    """Try every client by itself; return the problems of all of them."""
    if client is not None or not path.is_dir():
        return []
    try:
        found = discover(path).clients
    except DataError:
        found, errors = [], list[str]()
        for folder in (entry for entry in visible(path) if entry.is_dir()):
            try:
                found.append(client_folder(folder)[1])
            except DataError as error:
                errors.append(str(error))
        return errors + _once([(files, error) for files in found for error in _one_client(files, label)])
    return _once([(files, error) for files in found for error in _one_client(files, label)])


def _once(errors: Sequence[tuple[ClientFiles, str]]) -> list[str]:
    """Write an error that several clients share once, with their names."""
    same: dict[str, list[tuple[str, str]]] = {}
    for files, error in errors:
        general = error
        for own in (repr(files.name), *map(str, files.parts.values())):
            general = general.replace(own, "")
        same.setdefault(general, []).append((files.name, error))
    return [first + (f"; the same at {names([name for name, _ in more])}" if more else "") for (_, first), *more in same.values()]


def _one_client(files: ClientFiles, label: str | None) -> list[str]:
    try:
        if any(part.is_dir() for part in files.parts.values()):
            listed = list_images(files)
            return write_notes(read_client(listed, common_shape([listed]))[1])
        read_client_tables(files, label)
    except DataError as error:
        return [str(error)]
    return []
