"""A client's tables: which column is the label, samples and labels apart, one table for all divided by its client column."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from emdcfl.core.errors import DataError, nearest
from emdcfl.core.optional import pa, pc
from emdcfl.data.own.formats.layout import ClientFiles
from emdcfl.data.own.formats.quantities import common_units
from emdcfl.data.own.formats.readers import CODES, ENCODING, WINDOWS, like_data, read_file, read_numbers, read_units
from emdcfl.data.own.notes import Note
from emdcfl.data.own.parts import MIXED, Part, Raw, Text, rows_of
from emdcfl.data.own.splitting import RANDOM, TIME, SplitRule, table_keys
from emdcfl.data.own.tables import AS_WRITTEN, CellRules, text_values

LABEL_NAMES = ("label", "target", "class", "y")

MAX_CLASSES_WITH_UNIT = 20
"""Different labels up to which numbers with a unit are the names of classes."""


def _names_of(table: pa.Table) -> list[str]:
    """Column names for an error message; none where they may be cells."""
    return [] if like_data(table) else list(table.column_names)


def label_column(table: pa.Table, label: str | None, origin: str) -> str:
    """Return the name of the label column: the one asked for, or the first of label, target, class, y."""
    if label is not None:
        if label not in table.column_names:
            if not (names := _names_of(table)):
                raise DataError(f"{origin} has no label column {label!r}, and its first line looks like data: add a line with column names")
            known = nearest(label, names)
            remedy = "" if "did you mean" in known else "; a site without labels can join a run later: emdcfl place RUN FILE --unlabelled"
            raise DataError(f"{origin} has no label column {label!r}: {known}{remedy}")
        return label
    for name in LABEL_NAMES:
        if name in table.column_names:
            return name
    shown = ", ".join(_names_of(table)) or "no line with column names"
    raise DataError(f"{origin}: name the label column (--label COLUMN, in Python label=); it has {shown}")


def labelled(table: pa.Table, label: str, name: str, origin: str, rule: SplitRule = RANDOM) -> tuple[Part, list[Note]]:
    """Split off the labels as text, and what the rows are split by; rows without one are left out, with a note."""
    keep = np.flatnonzero(np.array(text_values(table.column(label)), dtype=str) != "")
    notes = []
    if not len(keep) and table.num_rows:
        raise DataError(f"client {name!r} ({origin}): all {table.num_rows} rows are without a label in {label!r}; fill them in")
    if len(keep) < table.num_rows:
        notes.append(Note(name, origin, "rows without a label left out: {n}", table.num_rows - len(keep), left_out=True))
        table = table.take(keep)
    labels, kind = _as_text(table.column(label)), _label_kind(table.column(label).type)
    table, by, present = table_keys(table, rule, label, f"client {name!r} ({origin})")
    part = Part(table, labels, by, kind)
    if present.all():
        return part, notes
    words = tuple(rule.columns.values())
    notes.append(
        Note(name, origin, "rows without {words}, by which they are split, left out: {n}", int((~present).sum()), words, left_out=True)
    )
    return part.take(np.flatnonzero(present)), notes


def read_client_tables(
    client: ClientFiles, label: str | None, rule: SplitRule = RANDOM, cells: CellRules = AS_WRITTEN
) -> tuple[Raw, list[Note]]:
    """Read the table or tables of one client; return samples and notes."""
    tables = {split: (read_file(path, cells), str(path)) for split, path in client.parts.items()}
    notes = [note for table, origin in tables.values() for note in encoding_notes(table, client.name, origin)]
    raw, more = client_samples(client.name, tables, label, rule, cells)
    return raw, [*notes, *more]


def client_samples(
    name: str, tables: Mapping[str, tuple[pa.Table, str]], label: str | None, rule: SplitRule, cells: CellRules
) -> tuple[Raw, list[Note]]:
    """Return the samples of one client, and notes, from its table or one for each split, with where each comes from."""
    if rule.column and MIXED not in tables:
        raise DataError(f"client {name!r} has train, val or test tables already, so --split-column has nothing to do; leave it out")
    parts: dict[str, Part] = {}
    notes: list[Note] = []
    units: dict[str, str] = {}
    codes: frozenset[str] = frozenset()
    for split, (table, origin) in tables.items():
        label = label_column(table, label, f"client {name!r}: {origin}")
        codes |= codes_of(table)
        table = read_numbers(table, origin, [*words_to_leave(label, rule, cells), *dict(cells.words)])
        table, own = read_units(table, [*label_to_leave(table, label, cells), *dict(cells.words)])
        units = common_units({"the other splits": units, f"client {name!r} ({origin})": own})
        parts[split], more = labelled(table, label, name, origin, rule)
        notes += more
    return Raw(name, next(iter(tables.values()))[1], parts, rule, label or "", units, codes), notes


def encoding_notes(table: pa.Table, name: str, origin: str) -> list[Note]:
    """Say that a file is no UTF-8."""
    other = (table.schema.metadata or {}).get(ENCODING.encode())
    text = f"read as {WINDOWS} (Western Europe), because it is not UTF-8; if letters look wrong, save it as UTF-8"
    return [Note(name, origin, text)] if other else []


def codes_of(table: pa.Table) -> frozenset[str]:
    """Return the columns of numbers that begin with 0 in the file."""
    return frozenset(json.loads((table.schema.metadata or {}).get(CODES.encode(), b"[]")))


def label_to_leave(table: pa.Table, label: str, cells: CellRules) -> list[str]:
    """Return the label where its words are classes, also such as '5 mg' and '10 mg'; none where it holds numbers with a unit."""
    return [] if cells.numbers or len(pc.unique(table.column(label))) > MAX_CLASSES_WITH_UNIT else [label]


def words_to_leave(label: str, rule: SplitRule, cells: CellRules) -> list[str]:
    """Return the columns whose text counts as it is written: labels that are classes, and what rows are split by, but for time."""
    return [*([] if cells.numbers else [label]), *(name for meaning, name in rule.columns.items() if meaning != TIME)]


def read_shared_table(
    path: Path, label: str | None, client: str, rule: SplitRule = RANDOM, cells: CellRules = AS_WRITTEN
) -> tuple[list[Raw], list[Note]]:
    """Read one table and divide it by its client column; that column is dropped."""
    table = read_file(path, replace(cells, names=(client,)))
    raws, notes = shared_table(table, str(path), label, client, rule, cells)
    return raws, [*encoding_notes(table, "", str(path)), *notes]


def shared_table(
    table: pa.Table, origin: str, label: str | None, client: str, rule: SplitRule, cells: CellRules = AS_WRITTEN
) -> tuple[list[Raw], list[Note]]:
    """Divide a table by its client column."""
    if client not in table.column_names:
        raise DataError(f"{origin} has no client column {client!r}: {nearest(client, table.column_names)}")
    column = label_column(table, label, origin)
    if column == client:
        raise DataError(f"{origin}: the label and the client column are both {client!r}; name another with --label or --client")
    who = _as_text(pc.fill_null(pc.cast(table.column(client), pa.string()), ""))
    if all(re.fullmatch(r"(\d+[.,]0)?", name) for name in set(who.tolist())):  # integers that a gap elsewhere turned into floats
        who = np.array([name[:-2] for name in who.tolist()], dtype=str)
    if (who == "").all():
        raise DataError(f"{origin}: no row has a value in the client column {client!r}; fill it in, or name another with --client")
    notes = [Note("", origin, "rows without a client left out: {n}", int((who == "").sum()), left_out=True)] if (who == "").any() else []
    table = read_numbers(table, origin, [client, *words_to_leave(column, rule, cells)])
    table, leave, codes = table.drop_columns([client]), label_to_leave(table, column, cells), codes_of(table)
    raws = []
    for name, rows in rows_of(who).items():
        if name == "":
            continue
        own, units = read_units(table.take(rows), leave)
        part, more = labelled(own, column, name, origin, rule)
        raws.append(Raw(name, f"{origin}, {client} = {name}", {MIXED: part}, rule, column, units, codes))
        notes += more
    return raws, notes


def _label_kind(kind: pa.DataType) -> str:
    """Return what labels of a column are, one of ``LABEL_KINDS``."""
    t = pa.types
    kind = kind.value_type if t.is_dictionary(kind) else kind
    return next((name for name, test in (("int", t.is_integer), ("float", t.is_floating), ("bool", t.is_boolean)) if test(kind)), "text")


def _as_text(column: pa.ChunkedArray) -> Text:
    values = column.to_pylist()
    if pa.types.is_floating(column.type) and all(float(value).is_integer() for value in values):
        values = [int(value) for value in values]  # a gap elsewhere turns a CSV's integers into floats
    return np.array([str(value).strip() for value in values], dtype=str)
