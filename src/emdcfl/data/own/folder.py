"""``load_folder`` builds a scenario from a folder of images or tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from emdcfl.core import keys
from emdcfl.core.errors import DataError, nearest
from emdcfl.core.optional import pa
from emdcfl.core.units import names
from emdcfl.data.own import defaults
from emdcfl.data.own.checking.columns import ColumnProfile, Doubt, check_categories, column_notes, unit_notes
from emdcfl.data.own.checking.leaks import leaks, repeats
from emdcfl.data.own.checking.profiling import profile_columns
from emdcfl.data.own.cleaning import AS_THEY_ARE, REGRESSION, Cleaning, variant_notes
from emdcfl.data.own.formats.client_tables import read_client_tables, read_shared_table
from emdcfl.data.own.formats.dates import usual_dates
from emdcfl.data.own.formats.images import Header, common_shape, list_images, read_client, read_headers
from emdcfl.data.own.formats.layout import ClientFiles, FolderLayout, discover, site_files
from emdcfl.data.own.formats.quantities import common_units
from emdcfl.data.own.notes import Note, write_notes
from emdcfl.data.own.parts import SPLITS, Divided, Raw, assemble, prepare
from emdcfl.data.own.splitting import RANDOM, SplitRule
from emdcfl.data.own.tables import (
    AS_WRITTEN,
    CellRules,
    TableEncoding,
    column_bytes,
    column_kinds,
    is_numeric,
    pool,
    read_list,
    summarise,
    text_values,
)
from emdcfl.data.types import Preprocess, Scenario

Arrays = Mapping[str, Mapping[str, NDArray[Any]]]
Headers = dict[str, list[Header | None]]
Named = TypeVar("Named", ClientFiles, Raw)


@dataclass(frozen=True)
class FolderOptions:
    """How a folder of own files is read."""

    label: str | None = None
    """Label column of tables; by default the first of label, target, class, y."""
    client: str | None = None
    """Client column, of one table for all."""
    model: defaults.Model = None
    """The network: by default an MLP for tables, a CNN for images."""
    size: int | None = None
    """Width of images; by default their most frequent size if it is square and at most 64, else 64 (224 for pretrained networks)."""
    rule: SplitRule = RANDOM
    cleaning: Cleaning = AS_THEY_ARE
    leave_out: tuple[str, ...] = ()
    """Clients that take no part."""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> FolderOptions:
        """Read those among the options of a scenario of own files."""
        about = {name: options.get(name) for name in ("label", "client", "model", "size")}
        out = read_list(options.get("leave_out"), "--leave-out SITE,…")
        return cls(**about, rule=SplitRule.of(**options), cleaning=Cleaning.of(**options), leave_out=out)

    def chosen(self, path: Path, sites: list[Named]) -> list[Named]:
        """Return the sites that take part, as files or as what was read of them."""
        known, out = {site.name for site in sites}, set(self.leave_out)
        if unknown := sorted(out - known):
            raise DataError(f"--leave-out {unknown[0]}: {path} has no such site: {nearest(unknown[0], known)}")
        if sites and out == known:
            raise DataError(f"{path}: --leave-out leaves no site; name fewer")
        return [site for site in sites if site.name not in out]


def load_folder(path: str | Path, *, seed: int = 0, **options: Any) -> Scenario:
    """Read the user's own data; ``options`` are the fields of ``FolderOptions``, ``seed`` is that of the splits.

    ``path`` has one sub-folder per client with class sub-folders of images (optionally below train/val/test), or one CSV/TSV/Parquet file
    per client; or it is one such file with a client column. Splits are made per client and class unless ``rule`` says otherwise. In the
    scenario, ``notes`` lists what was left out or looks doubtful; ``encoding`` says how files are read.
    """
    return checked_scenario(read_folder(Path(path), FolderOptions(**options)), seed=seed)


def checked_scenario(reading: FolderSamples, *, seed: int) -> Scenario:
    """Split and encode what was read, with notes on samples that occur twice or almost."""
    scenario, divided = build_scenario(reading, seed=seed)
    more = repeats(scenario).notes(str(reading.path))
    if reading.how.rule == RANDOM and reading.label is not None:
        more += leaks(scenario, divided, RANDOM, hints=False)
    return replace(scenario, notes=(*scenario.notes, *more), doubts=(*scenario.doubts, *more))


@dataclass(frozen=True)
class FolderSamples:
    """A folder's samples before they are split."""

    path: Path
    how: FolderOptions
    raws: list[Raw]
    """Samples as ``Cleaning`` left them."""
    labels: dict[str, Counter[str]]
    """Client → label as the files spell it → samples."""
    notes: list[Note]
    columns: dict[str, ColumnProfile]
    """Of tables: what every column holds, also those that are left out."""
    fingerprints: dict[str, str]
    """Client → short hash of its samples and labels."""
    headers: Headers
    """Of images: client → mode and size of each as it is stored."""

    @property
    def label(self) -> str | None:
        """The label column of tables; ``None`` for images."""
        return self.raws[0].label or None

    @property
    def features(self) -> list[ColumnProfile]:
        """Columns that are not left out."""
        kept = {name for raw in self.raws for part in raw.parts.values() for name in part.x.column_names} if self.columns else set()
        return [column for name, column in self.columns.items() if name in kept]


def read_folder(path: Path, how: FolderOptions) -> FolderSamples:
    """Read the files of all clients, clean them and describe them."""
    layout = discover(path, client_column=how.client)
    if layout.kind != "table":
        layout = replace(layout, clients=how.chosen(path, layout.clients))  # before they are read, which may fail
    raws, notes, headers = _read(layout, how)
    if layout.ignored:
        notes.append(
            Note("", str(path), "files that are not read: {words}", words=tuple(file.name for file in layout.ignored), left_out=True)
        )
    return clean_reading(path, how, raws, notes, headers)


def read_site_alone(path: Path, name: str, how: FolderOptions) -> FolderSamples:
    """Read the files of one site whose partners are elsewhere."""
    kind, files = site_files(path, name)
    return clean_reading(path, how, *_read(FolderLayout(kind, [files]), how))


def clean_reading(path: Path, how: FolderOptions, raws: Sequence[Raw], notes: list[Note], headers: Headers | None = None) -> FolderSamples:
    """Clean what was read, and describe it with notes on what looks doubtful."""
    cleaning = how.cleaning
    if how.leave_out:
        text = "sites that take no part (--leave-out): {words}"
        notes = [n for n in notes if n.client not in how.leave_out]
        notes.append(Note("", str(path), text, words=(names(sorted(set(how.leave_out))),), left_out=True))
    label, numbers = raws[0].label or None, cleaning.task == REGRESSION
    labels = {
        raw.name: Counter(w for part in raw.parts.values() for w in part.labels.tolist()) if not numbers else Counter() for raw in raws
    }
    cleaned = [cleaning.clean(raw) for raw in raws]
    columns = {} if label is None else profile_columns(cleaned, label)
    for name, _ in cleaning.cells.dates:
        if name in columns and columns[name].doubt == Doubt.DATES:
            columns[name] = replace(columns[name], doubt=None)  # the user said so
    kept, more = cleaning.select(cleaned, label, str(path))
    found = [*notes, *more, *variant_notes(str(path), kept)]
    fingerprints = {raw.name: _fingerprint(raw) for raw in kept}
    reading = FolderSamples(path, how, kept, labels, found, columns, fingerprints, headers or {})
    reading.notes.extend([*unit_notes(str(path), kept), *column_notes(str(path), kept, reading.features)])
    return reading


def build_scenario(reading: FolderSamples, *, seed: int = 0, alone: bool = False) -> tuple[Scenario, Divided]:
    """Split and encode what was read; return the scenario, and the samples before they were encoded.

    ``alone``: this is one client of several that are elsewhere.
    """
    path, raws, model = reading.path, reading.raws, reading.how.model
    units = common_units({raw.name: raw.units for raw in raws})
    divided, classes, more = prepare(str(path), raws, seed, alone=alone)
    many = check_categories(reading.features)
    arrays, encoding, preprocess, mixed = _encode(divided, {raw.name: raw.origin for raw in raws}, reading, units)
    scenario = assemble(
        path.stem if path.is_file() else path.resolve().name,
        *(arrays, divided, classes, preprocess, model),
        notes=(*write_notes([*reading.notes, *more]), *mixed, *many),
        doubts=(*write_notes(note for note in reading.notes if note.doubt), *mixed, *many),
        encoding=encoding,
        fingerprints=reading.fingerprints,
    )
    return scenario, divided


def _fingerprint(raw: Raw) -> str:
    """Return a short hash of a client's samples and labels."""
    found: list[Any] = []
    for split, part in raw.parts.items():
        contents = [part.x.tobytes()] if isinstance(part.x, np.ndarray) else column_bytes(part.x)
        found += [split, len(part), *contents, *part.labels.tolist(), *(values.tobytes() for values in part.by.values())]
    return keys.digest(*found).hex()[:16]


def _read(layout: FolderLayout, how: FolderOptions) -> tuple[list[Raw], list[Note], Headers]:
    """Read all clients; return them, notes, and the images' headers."""
    rule, cells = how.rule, how.cleaning.cells
    if layout.kind == "images":
        listed = [list_images(files) for files in layout.clients]
        pretrained = defaults.is_pretrained(how.model)
        headers = {files.name: read_headers(files) for files in listed}
        shape = common_shape(headers, size=224 if pretrained and how.size is None else how.size, colour=True if pretrained else None)
        read = [read_client(files, shape, rule) for files in listed]
        return [raw for raw, _ in read], [note for _, more in read for note in more], headers
    if layout.kind == "table":
        assert layout.table is not None
        assert how.client is not None
        raws, notes = read_shared_table(layout.table, how.label, how.client, rule, cells)
        return how.chosen(layout.table, raws), notes, {}
    read = [read_client_tables(files, how.label, rule, cells) for files in layout.clients]
    words = _words([raw for raw, _ in read])
    for i, (raw, _) in enumerate(read):
        if own := tuple((name, words[name]) for name in sorted(_ambiguous(raw) & words.keys())):
            read[i] = read_client_tables(layout.clients[i], how.label, rule, replace(cells, words=own))
    return [raw for raw, _ in read], [note for _, more in read for note in more], {}


def _words(raws: Sequence[Raw]) -> dict[str, tuple[str, ...]]:
    """Return column → words at the clients where it is text, of columns that may be text although a client's are not."""
    wanted = set().union(*map(_ambiguous, raws))
    found: dict[str, set[str]] = {}
    for table in (part.x for raw in raws for part in raw.parts.values()):
        for name in wanted & set(table.column_names):
            if not is_numeric(table.schema.field(name).type):
                found.setdefault(name, set()).update(text_values(table.column(name).unique()))
    return {name: tuple(sorted(words - {""})) for name, words in found.items()}


def _ambiguous(raw: Raw) -> set[str]:
    """Return a client's columns of truth values, of codes that begin with 0, and without values: these may be text at others."""
    fields = [field for part in raw.parts.values() for field in part.x.schema]
    t = pa.types
    return {f.name for f in fields if t.is_boolean(f.type) or t.is_null(f.type) or (f.name in raw.codes and is_numeric(f.type))}


def _encode(
    divided: Divided, origins: Mapping[str, str], reading: FolderSamples, units: Mapping[str, str]
) -> tuple[Arrays, dict[str, Any], Preprocess, list[str]]:
    if reading.label is None:
        arrays: Arrays = {name: {split: parts[split].x for split in SPLITS} for name, parts in divided.items()}
        train = [splits["train"] for splits in arrays.values()]
        return arrays, {"kind": "images", "shape": list(train[0].shape[1:])}, defaults.image_preprocess(train, reading.how.model), []
    encoding, notes = table_encoding(divided, origins, reading.label, reading.how.cleaning.cells, units)
    encoding = replace(encoding, gaps=reading.how.cleaning.gaps)
    encoded: Arrays = {name: {split: encoding.encode(parts[split].x, origins[name]) for split in SPLITS} for name, parts in divided.items()}
    # The encoding has standardised already, in double precision, so nothing is left for the device.
    return encoded, encoding.as_dict(), Preprocess(), notes


def table_encoding(
    divided: Divided, origins: Mapping[str, str], label: str, cells: CellRules = AS_WRITTEN, units: Mapping[str, str] | None = None
) -> tuple[TableEncoding, list[str]]:
    """Pool what the clients report about their training rows; returns the encoding and notes."""
    every = [(f"client {name!r} ({origins[name]})", part.x) for name, parts in divided.items() for part in parts.values()]
    numeric, categorical, notes = column_kinds(every, leave_out=[label])
    summaries = [summarise(parts["train"].x, numeric, categorical) for parts in divided.values()]
    return pool(summaries, label, usual_dates(cells, [table for _, table in every]), units), notes
