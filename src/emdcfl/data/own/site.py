"""New files for a finished run, read as the run's own data were: a site to place, or samples to predict."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from emdcfl.core.errors import DataError
from emdcfl.core.optional import pa
from emdcfl.core.units import some
from emdcfl.data.own.cleaning import AS_THEY_ARE, CLASSIFICATION, Cleaning
from emdcfl.data.own.formats import dicom
from emdcfl.data.own.formats.client_tables import encoding_notes, read_client_tables
from emdcfl.data.own.formats.images import files_below, list_images, read_client, read_image
from emdcfl.data.own.formats.layout import IMAGE_SUFFIXES, TABLE_SUFFIXES, site_files
from emdcfl.data.own.formats.quantities import check_units
from emdcfl.data.own.formats.readers import read_file, read_numbers, read_units
from emdcfl.data.own.notes import Note, write_notes
from emdcfl.data.own.parts import SPLITS, Raw, divide, known_only, to_site, warnings
from emdcfl.data.own.splitting import RANDOM, SplitRule
from emdcfl.data.own.tables import TableEncoding
from emdcfl.data.types import Scenario, Site, Target

log = logging.getLogger("emdcfl")


def encoding_of(scenario: Scenario) -> dict[str, Any]:
    """How files are read for this scenario; images of bytes at the shape they are stored in."""
    if scenario.encoding:
        return dict(scenario.encoding)
    x = scenario.sites[0].train.x
    shape = list(x.shape[1:])
    as_files = len(shape) == 3 and x.dtype == torch.uint8  # nobody knows the range of pixels that are floats
    return {"kind": "images", "shape": shape} if as_files else {"kind": "arrays", "features": math.prod(shape)}


def load_site(
    path: str | Path,
    *,
    encoding: Mapping[str, Any],
    classes: Sequence[str],
    target: Target | None = None,
    name: str | None = None,
    label: str | None = None,
    seed: int = 0,
    rule: SplitRule = RANDOM,
    cleaning: Cleaning = AS_THEY_ARE,
) -> tuple[Site, tuple[str, ...]]:
    """Read one new site the way a run's sites were read; returns it and notes for the user.

    ``path`` is a client folder of images (class sub-folders), or a table. ``encoding``, ``classes`` and ``target`` are stored with the
    run's models; ``rule`` and ``cleaning`` say how its samples were split and its files repaired.
    """
    path = Path(path)
    _readable(path, encoding)
    kind, files = site_files(path, name)
    if (kind == "images") != (encoding["kind"] == "images"):
        raise DataError(f"{path} holds {kind}, but the run was trained on {'images' if encoding['kind'] == 'images' else 'tables'}")
    if kind == "images":
        channels, height, width = encoding["shape"]
        raw, notes = read_client(list_images(files), (channels, height, width), rule)
    else:
        column = label or encoding["label"]
        labels = ((column, tuple(classes)),) if classes else ()
        known = TableEncoding.from_dict(encoding).cells
        cells = replace(cleaning.cells, words=known.words + labels, dates=tuple((dict(cleaning.cells.dates) | dict(known.dates)).items()))
        raw, notes = read_client_tables(files, column, rule, cells)
    return new_site(raw, encoding, classes, notes, target=target, seed=seed, cleaning=cleaning)


def new_site(
    raw: Raw,
    encoding: Mapping[str, Any],
    classes: Sequence[str],
    notes: Sequence[Note],
    *,
    target: Target | None = None,
    seed: int = 0,
    cleaning: Cleaning = AS_THEY_ARE,
) -> tuple[Site, tuple[str, ...]]:
    """Build one more site from what was read; returns it and notes for the user."""
    if target is None:  # nobody asks again whether labels are classes
        cleaning = replace(cleaning, task=CLASSIFICATION)
    raw, notes = cleaning.clean(raw), list(notes)
    if encoding["kind"] == "table":
        raw = cleaning.full_rows(raw, [column["name"] for column in encoding["columns"]], notes)
    divided = known_only(raw, divide(raw, seed), classes, notes)  # in this order, the classes have no say in the split
    notes += warnings(raw, divided)
    if encoding["kind"] != "table":
        arrays = {split: divided[split].x for split in SPLITS}
    else:
        reader = TableEncoding.from_dict(encoding)
        check_units(raw.units, reader.units, raw.origin)
        arrays = {split: reader.encode(divided[split].x, raw.origin) for split in SPLITS}
        doubts = reader.doubts(*(divided[split].x for split in SPLITS))
        notes += [Note(raw.name, raw.origin, text, words=tuple(words)) for text, words in doubts]
    return to_site(raw.name, arrays, divided, classes, target), tuple(write_notes(notes))


def read_inputs(files: Sequence[str | Path], *, encoding: Mapping[str, Any]) -> tuple[Tensor, list[str]]:
    """Read unlabelled files for prediction; returns ``x`` and one name per row (``FILE`` for images, ``FILE:ROW`` for tables).

    Rows that training would have left out for a missing value are left out here, too, with a warning.
    """
    if not files:
        raise DataError("no files to predict")
    blocks: list[NDArray[Any]] = []
    names: list[str] = []
    for file in map(Path, files):
        _readable(file, encoding)
        if file.is_dir():
            raise DataError(f"{file} is a folder; name the files in it: {file / '*'}")
        if encoding["kind"] == "images":
            if file.suffix.lower() not in IMAGE_SUFFIXES:
                raise DataError(f"{file} is not an image; the run was trained on images")
            dicom.check_installed([file])
            channels, height, width = encoding["shape"]
            blocks.append(read_image(file, (channels, height, width))[None])
            names.append(str(file))
        else:
            if file.suffix.lower() not in TABLE_SUFFIXES:
                raise DataError(f"{file} is not a table ({', '.join(sorted(TABLE_SUFFIXES))}); the run was trained on tables")
            table = read_file(file, TableEncoding.from_dict(encoding).cells)
            for note in encoding_notes(table, "", str(file)):
                log.warning("%s: %s", note.origin, note.text)
            encoded, rows = encode_rows(table, encoding, str(file))
            if lost := table.num_rows - len(rows):
                log.warning("%s: rows with missing values left out, as in training (--gaps drop-rows): %d", file, lost)
            blocks.append(encoded)
            names += [f"{file}:{row + 1}" for row in rows.tolist()]
    return torch.from_numpy(np.concatenate(blocks)), names


def encode_rows(table: pa.Table, encoding: Mapping[str, Any], origin: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the rows of a table that training would not have left out, as a run stores them, and their numbers.

    One line of the log says which words the models do not know, and one which columns may have other units.
    """
    reader = TableEncoding.from_dict(encoding)
    leave = [encoding["label"], *dict(reader.cells.words)]
    table, units = read_units(read_numbers(table, origin, leave), leave)
    check_units(units, reader.units, origin)
    rows = np.flatnonzero(reader.usable(table))
    kept = table.take(rows)
    encoded = reader.encode(kept, origin)
    for text, words in reader.doubts(kept):
        log.warning("%s: %s", origin, text.format(words=some(words)))
    return encoded, rows


def read_unlabelled(path: Path, *, encoding: Mapping[str, Any]) -> Tensor:
    """Read all images below a folder, whatever their folders are called, or a table without a label column."""
    _readable(path, encoding)
    suffixes = IMAGE_SUFFIXES if encoding["kind"] == "images" else TABLE_SUFFIXES
    files = [path] if path.is_file() else [file for file in files_below(path) if file.suffix.lower() in suffixes]
    if not files:
        raise DataError(f"{path} holds no {'images' if encoding['kind'] == 'images' else 'tables'}, which the run was trained on")
    return read_inputs(files, encoding=encoding)[0]


def _readable(path: Path, encoding: Mapping[str, Any]) -> None:
    if encoding["kind"] == "arrays":
        raise DataError("the run was trained on arrays given in Python, so it cannot read files: use Result.predict in Python")
    if not path.exists():
        raise DataError(f"no such file or folder: {path}")
