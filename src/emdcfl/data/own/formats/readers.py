"""Read table files into Arrow tables, and split off the labels as text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from emdcfl.core.errors import DataError, nearest
from emdcfl.core.optional import arrow
from emdcfl.data.own.formats.dates import as_dates
from emdcfl.data.own.formats.layout import EXCEL_SUFFIXES, ClientFiles
from emdcfl.data.own.formats.spreadsheet import read_workbook
from emdcfl.data.own.parts import MIXED, Note, Part, Raw, Text
from emdcfl.data.own.splitting import RANDOM, SplitRule, table_keys
from emdcfl.data.own.tables import AS_WRITTEN, CellRules

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.csv as pcsv
    import pyarrow.parquet as pq
else:
    pa, pc, pcsv, pq = arrow(), arrow("compute"), arrow("csv"), arrow("parquet")

LABEL_NAMES = ("label", "target", "class", "y")

LARGEST = 1e30
"""Largest number of a table, either sign."""

UNPACKED = 1 << 31
"""Bytes that a Parquet file may unpack to."""

GAPS = frozenset({"", "-", "--", "–", "—", ".", "?", "na", "n/a", "n.a.", "nan", "null", "none", "nil", "missing", "unknown", "#n/a"})
"""What people write into a cell of numbers that has none, in small letters."""

NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")

FRACTION = re.compile(r"[-+]?(?:\d+|\d{1,3}(?:[.,]\d{3})+)([.,])\d+")
THOUSANDS = re.compile(r"[-+]?[1-9]\d{0,2}(,\d{3})+(\.\d+)?")
SWAPPED = str.maketrans(".,", ",.")

LARGEST_BLOCK = 1 << 26
"""Bytes of a CSV that are parsed together."""

PEEK = 1 << 18
"""Bytes of a CSV from which its delimiter and decimal point are read."""

NO_CSV = {
    b"PK\3\4": "a spreadsheet or an archive; call it .xlsx, save it as CSV, or unpack it",
    b"\xd0\xcf\x11\xe0": "a spreadsheet; save it as CSV",
    b"\x1f\x8b": "packed; unpack it",
    b"\xff\xfe": "text in UTF-16; save it as UTF-8",
    b"\xfe\xff": "text in UTF-16; save it as UTF-8",
    b"PAR1": "a Parquet file; call it .parquet",
    b"\x89PNG": "an image; images belong into SITE/CLASS folders",
    b"\xff\xd8\xff": "an image; images belong into SITE/CLASS folders",
    b"%PDF": "a PDF; save its table as CSV",
}
"""What a file with the suffix of a CSV may be instead, by its first bytes, and the remedy."""

HEAD = 1000
"""Rows in which a column's name is looked for."""


def read_file(path: Path, cells: CellRules = AS_WRITTEN) -> pa.Table:
    """Read a CSV, TSV, Parquet or Excel file."""
    try:
        if path.suffix.lower() in EXCEL_SUFFIXES:
            table = _with_gaps(read_workbook(path), cells.missing, ".")
        elif path.suffix.lower() == ".parquet":
            table = _read_parquet(path)
            if cells.missing:
                table = pa.table([_without(column, cells.missing, ".") for column in table.columns], table.column_names)
        else:
            table = _read_csv(path, cells.missing)
        names = table.column_names  # a name that is not UTF-8 shows itself only here
    except UnicodeDecodeError as error:
        raise DataError(
            f"cannot read the table {path}: a column name is not UTF-8 text; save the file as UTF-8 (Excel: CSV UTF-8)"
        ) from error
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DataError(f"cannot read the table {path}: {_reason(path, error)}") from error
    table = _as_utf8(table, path)
    if 2 * _like_data(table) >= len(names) > 0:
        raise DataError(f"{path}: its first line looks like data, not like column names; add a line with names above it")
    twice = next((name for name, times in Counter(names).items() if times > 1), None)
    if twice is not None:
        raise DataError(f"{path} has two columns {'of the same name' if _like_data(table) else f'named {twice!r}'}: rename one")
    _check_range(table, path)
    for name, form in cells.dates:
        if name in names:
            table = table.set_column(names.index(name), name, as_dates(table.column(name), form, f"{path}: column {name!r}"))
    return table


def _read_parquet(path: Path) -> pa.Table:
    """Read a Parquet file whose footer names no more than ``UNPACKED``; text is read by its dictionary, so that a word counts once."""
    footer = pq.read_metadata(path)
    columns = range(footer.num_columns)
    chunks = [footer.row_group(g).column(i) for g in range(footer.num_row_groups) for i in columns]
    widths = [max(8, footer.schema.column(i).length) for i in columns] * footer.num_row_groups
    cells = sum(chunk.num_values * width for chunk, width in zip(chunks, widths, strict=True))
    _check_size(path, max(cells, footer.num_rows * 8, sum(chunk.total_uncompressed_size for chunk in chunks)))
    schema = pq.read_schema(path)
    words = [field.name for field in schema if _is_text(field.type)]
    with pq.ParquetFile(path, read_dictionary=words) as file:
        table = file.read()
    plain = pa.schema([schema.field(i) if field.name in words else field for i, field in enumerate(table.schema)])
    _check_size(path, sum(_text_size(chunk) for column in table.columns for chunk in column.chunks))
    return table.cast(plain)


def _is_text(kind: pa.DataType) -> bool:
    return kind in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())


def _text_size(column: pa.Array) -> int:
    """Bytes of a column of words once each row holds its own; 0 for other columns."""
    if not isinstance(column, pa.DictionaryArray) or not _is_text(column.dictionary.type):
        return 0
    lengths = pc.cast(pc.fill_null(pc.binary_length(column.dictionary), 0), pa.int64())
    return pc.sum(pc.take(lengths, column.indices)).as_py() or 0


def _check_size(path: Path, size: int) -> None:
    if size > UNPACKED:
        raise DataError(f"{path}: unpacks to {size / 2**30:.1f} GB, at most {UNPACKED / 2**30:g} are read; leave out rows or columns")


def _like_data(table: pa.Table) -> int:
    """Count the column names that look like cells: numbers that do not count the columns, and words found below them.

    Names are quoted in errors, which may reach a server; the first row of a file without names must not be.
    """
    names = table.column_names
    numbers = [name for name in names if re.fullmatch(r"\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*", name)]
    whole = sorted({int(name) for name in numbers if re.fullmatch(r"\d{1,9}", name)})
    if len(whole) == len(numbers) > 1 and whole[-1] - whole[0] + 1 == len(whole):  # 0, 1, 2, … or years
        numbers = []
    found = len(numbers)
    for name, column in zip(names, table.columns, strict=True):
        if name and pa.types.is_string(column.type):
            found += bool(pc.any(pc.equal(column.slice(0, HEAD), name)).as_py())
    return found


def _names_of(table: pa.Table) -> list[str]:
    """Column names for an error message; none where they may be cells."""
    return [] if _like_data(table) else list(table.column_names)


def _read_csv(path: Path, missing: Sequence[str] = (), *, threads: bool = True) -> pa.Table:
    delimiter, decimal = _dialect(path)
    parse = pcsv.ParseOptions(delimiter=delimiter)
    # Empty text counts as missing too, as an empty number does.
    convert = pcsv.ConvertOptions(strings_can_be_null=True, decimal_point=decimal)
    # one block and one thread, if the file is not large: both cost time for every column, and there may be thousands
    size = path.stat().st_size
    read = pcsv.ReadOptions(use_threads=threads and size > LARGEST_BLOCK, block_size=min(max(size, 1 << 20), LARGEST_BLOCK))
    table = pcsv.read_csv(path, read, parse, convert)
    if not table.num_columns:
        return table
    # a column without a name is called as pandas calls it, and can be left out by that name
    names = [name.strip() or f"Unnamed: {i}" for i, name in enumerate(table.column_names)]
    return _with_gaps(table.rename_columns(names), missing, decimal)


def _with_gaps(table: pa.Table, missing: Sequence[str], decimal: str) -> pa.Table:
    """Read marks of missing values as gaps, and text of numbers and such marks as numbers."""
    columns = [_without(column, missing, decimal) for column in table.columns] if missing else table.columns
    return pa.table([_numbers(column, decimal) for column in columns], names=table.column_names)


def _dialect(path: Path) -> tuple[str, str]:
    """Return what separates the cells (what all of the first lines have equally often, and most often) and the decimal point."""
    usual = "\t" if path.suffix.lower() == ".tsv" else ","
    with path.open("rb") as file:
        start = file.read(PEEK)
    kind = next((kind for mark, kind in NO_CSV.items() if start.startswith(mark)), None)
    if kind is not None:
        raise DataError(f"cannot read the table {path}: it is not a CSV but {kind}")
    text = start.decode("latin-1")
    quoted = r'"[^"]*"' if text.count('"') % 2 == 0 else r'"[^"\r\n]*"'  # a cell in quotes may hold lines, an odd quote may be inches
    lines = [line for line in re.split(r"[\r\n]+", re.sub(quoted, "", text)) if line.strip()]  # splitlines would also split at Å
    lines = lines[:-1] if len(text) == PEEK else lines
    counts = {mark: {line.count(mark) for line in lines[:20]} for mark in (usual, ";", "\t", "|", ",")}
    even = {mark: max(found) for mark, found in counts.items() if len(found) == 1 and 0 not in found}
    delimiter = max(even, key=lambda mark: even[mark], default=usual)
    cells = [*re.findall(r'"([^"]*)"', text), *(cell for line in lines[1:] for cell in line.split(delimiter))]
    return delimiter, _decimal_point([cell.strip() for cell in cells], delimiter)


def _decimal_point(cells: Sequence[str], delimiter: str) -> str:
    """Return what most fractions are written with; 1.234 may be a thousand and counts only where no other cell tells.

    Examples
    --------
    >>> _decimal_point(["0,5", "1.020", "12,75", "12.30"], ";"), _decimal_point(["1,020", "0.5"], ",")
    (',', '.')
    """
    if not any("," in cell for cell in cells):
        return "."
    marks = {cell: found[1] for cell in cells if (found := FRACTION.fullmatch(cell))}
    clear = [cell for cell in cells if cell in marks and not THOUSANDS.fullmatch(cell if marks[cell] == "," else cell.translate(SWAPPED))]
    told = clear or [cell for cell in cells if cell in marks and delimiter != ","]
    return "," if 2 * sum(marks[cell] == "," for cell in told) > len(told) else "."


def _without(column: pa.ChunkedArray, missing: Sequence[str], decimal: str) -> pa.ChunkedArray:
    """Replace the user's marks of missing values by gaps: words in text, numbers (-999) in numbers."""
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        marked = pc.is_in(pc.utf8_trim_whitespace(column), pa.array(missing, column.type))
    elif pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        codes = [float(mark.replace(decimal, ".")) for mark in missing if NUMBER.fullmatch(mark.replace(decimal, "."))]
        marked = pc.is_in(pc.cast(column, pa.float64()), pa.array(codes, pa.float64()))
    else:
        return column
    return pc.if_else(marked, pa.scalar(None, column.type), column)


def _numbers(column: pa.ChunkedArray, decimal: str) -> pa.ChunkedArray:
    """Read a text column whose words are numbers and marks of missing values as numbers; return any other column as it is."""
    if not pa.types.is_string(column.type):
        return column
    words = [word for word in pc.unique(column).to_pylist() if word is not None]
    present = {word: _in_points(word.strip(), decimal) for word in words if word.strip().lower() not in GAPS}
    try:
        numbers = pc.cast(pa.array(present.values(), pa.string()), pa.float64()).to_pylist()
    except pa.ArrowInvalid:
        return column
    value = dict(zip(present, numbers, strict=True))
    return pa.chunked_array([pa.array([value.get(word) for word in column.to_pylist()], pa.float64() if value else pa.null())])


def _in_points(text: str, decimal: str) -> str:
    """Write a number with a decimal point and without marks of thousands."""
    text = text.translate(SWAPPED) if decimal == "," else text
    return text.replace(",", "") if THOUSANDS.fullmatch(text) else text


def _reason(path: Path, error: Exception) -> str:
    """Say what is wrong with a table without quoting its cells: the text may reach a server or a log."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    ragged = re.search(r"Expected (\d+) columns, got (\d+)", str(error))
    if ragged:
        return f"expected {ragged[1]} columns, got {ragged[2]}{_line(path)}; correct the file"
    if "Empty CSV" in str(error):
        return "it is empty; add rows, or move the file elsewhere"
    return f"it is damaged, or not a table ({type(error).__name__}); save it again as CSV or Parquet"


def _line(path: Path) -> str:
    """Find the line that cannot be parsed: only a reader with one thread counts them."""
    try:
        _read_csv(path, threads=False)
    except (OSError, ValueError, pa.ArrowException) as error:
        found = re.search(r"Row #(\d+)", str(error))
        return f" in line {found[1]}" if found else ""
    return ""


def _check_range(table: pa.Table, path: Path) -> None:
    """Refuse numbers whose squares, or whose float32, would overflow."""
    t = pa.types
    for name, column in zip(table.column_names, table.columns, strict=True):
        if t.is_floating(column.type) or t.is_decimal(column.type):
            numbers = pc.cast(column, pa.float64()).to_numpy(zero_copy_only=False)
            if (np.abs(numbers, where=np.isfinite(numbers), out=np.zeros(len(numbers))) > LARGEST).any():
                raise DataError(f"{path}: column {name!r} holds a number beyond ±{LARGEST:g}; correct it, or leave the cell empty")


def _as_utf8(table: pa.Table, path: Path) -> pa.Table:
    """Columns of bytes as text: a CSV in another encoding has them, and Parquet files of some writers."""
    t = pa.types
    columns = []
    for field, column in zip(table.schema, table.columns, strict=True):
        if t.is_binary(field.type) or t.is_large_binary(field.type) or t.is_fixed_size_binary(field.type):
            try:
                column = pc.cast(pc.cast(column, pa.binary()), pa.string())
            except pa.ArrowException as error:
                raise DataError(
                    f"{path}: column {field.name!r} holds bytes that are not UTF-8 text; save the file as UTF-8 (Excel: CSV UTF-8)"
                ) from error
        columns.append(column)
    return pa.table(columns, names=table.column_names) if columns else table


def label_column(table: pa.Table, label: str | None, origin: str) -> str:
    """Return the name of the label column: the one asked for, or the first of label, target, class, y."""
    if label is not None:
        if label not in table.column_names:
            if not (names := _names_of(table)):
                raise DataError(f"{origin} has no label column {label!r}, and its first line looks like data: add a line with column names")
            raise DataError(f"{origin} has no label column {label!r}: {nearest(label, names)}")
        return label
    for name in LABEL_NAMES:
        if name in table.column_names:
            return name
    shown = ", ".join(_names_of(table)) or "no line with column names"
    raise DataError(f"{origin}: name the label column (--label COLUMN); it has {shown}")


def labelled(table: pa.Table, label: str, name: str, origin: str, rule: SplitRule = RANDOM) -> tuple[Part, list[Note]]:
    """Split off the labels as text, and what the rows are split by; rows without one are left out, with a note."""
    column = table.column(label)
    keep = np.flatnonzero(~column.is_null().to_numpy(zero_copy_only=False))
    notes = []
    if not len(keep) and table.num_rows:
        raise DataError(f"client {name!r} ({origin}): all {table.num_rows} rows are without a label in {label!r}; fill them in")
    if len(keep) < table.num_rows:
        notes.append(Note(name, origin, "rows without a label left out: {n}", table.num_rows - len(keep), left_out=True))
        table = table.take(keep)
    labels = _as_text(table.column(label))
    table, by, present = table_keys(table, rule, label, f"client {name!r} ({origin})")
    part = Part(table, labels, by)
    if present.all():
        return part, notes
    words = tuple(rule.columns.values())
    notes.append(
        Note(name, origin, "rows without {words}, by which they are split, left out: {n}", int((~present).sum()), words, left_out=True)
    )
    return part.take(np.flatnonzero(present)), notes


def read_client_tables(
    client: ClientFiles, label: str | None, rule: SplitRule = RANDOM, cells: CellRules = AS_WRITTEN
) -> tuple[Raw, str, list[Note]]:
    """Read the table or tables of one client; return samples, the label column and notes."""
    parts: dict[str, Part] = {}
    notes: list[Note] = []
    column = origin = ""
    if rule.column and MIXED not in client.parts:
        raise DataError(f"client {client.name!r} has train, val or test tables already, so --split-column has nothing to do; leave it out")
    for split, path in client.parts.items():
        table = read_file(path, cells)
        origin = origin or str(path)
        column = label_column(table, label, f"client {client.name!r}: {path}")
        part, more = labelled(table, column, client.name, str(path), rule)
        parts[split] = part
        notes += more
    return Raw(client.name, origin, parts, rule, column), column, notes


def read_shared_table(
    path: Path, label: str | None, client: str, rule: SplitRule = RANDOM, cells: CellRules = AS_WRITTEN
) -> tuple[list[Raw], str, list[Note]]:
    """Read one table and divide it by its client column; that column is dropped."""
    return shared_table(read_file(path, cells), str(path), label, client, rule)


def shared_table(table: pa.Table, origin: str, label: str | None, client: str, rule: SplitRule) -> tuple[list[Raw], str, list[Note]]:
    """Divide a table by its client column."""
    if client not in table.column_names:
        raise DataError(f"{origin} has no client column {client!r}: {nearest(client, table.column_names)}")
    column = label_column(table, label, origin)
    if column == client:
        raise DataError(f"{origin}: the label and the client column are both {client!r}; name another with --label or --client")
    who = _as_text(pc.fill_null(pc.cast(table.column(client), pa.string()), ""))
    notes = [Note("", origin, "rows without a client left out: {n}", int((who == "").sum()), left_out=True)] if (who == "").any() else []
    table = table.drop_columns([client])
    raws = []
    for name in sorted(set(who.tolist()) - {""}):
        part, more = labelled(table.take(np.flatnonzero(who == name)), column, name, origin, rule)
        raws.append(Raw(name, f"{origin}, {client} = {name}", {MIXED: part}, rule, column))
        notes += more
    return raws, column, notes


def _as_text(column: pa.ChunkedArray) -> Text:
    values = column.to_pylist()
    if pa.types.is_floating(column.type) and all(float(value).is_integer() for value in values):
        values = [int(value) for value in values]  # a gap elsewhere turns a CSV's integers into floats
    return np.array([str(value).strip() for value in values], dtype=str)
