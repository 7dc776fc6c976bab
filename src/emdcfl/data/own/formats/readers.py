"""Read table files into Arrow tables: text as it is spelled and encoded, numbers with marks of thousands, units or gaps."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from emdcfl.core.errors import DataError
from emdcfl.core.optional import arrow, pa, pc
from emdcfl.data.own.formats.dates import WRITTEN, as_dates
from emdcfl.data.own.formats.layout import EXCEL_SUFFIXES
from emdcfl.data.own.formats.parquet import CATEGORIES, read_parquet
from emdcfl.data.own.formats.quantities import find_unit, is_money, split_unit, without_unit
from emdcfl.data.own.formats.spreadsheet import read_workbook
from emdcfl.data.own.tables import AS_WRITTEN, CellRules, text_values

if TYPE_CHECKING:
    import pyarrow.csv as pcsv
else:
    pcsv = arrow("csv")

MAX_NUMBER = 1e30
"""Largest number of a table, either sign."""

GAPS = frozenset({"", "-", "--", "–", "—", ".", "?", "na", "n/a", "n.a.", "nan", "null", "none", "nil", "missing", "unknown", "#n/a"})
"""What people write into a cell of numbers that has none, in small letters."""

NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")

FRACTION = re.compile(r"[-+]?(?:\d+|\d{1,3}(?:[.,]\d{3})+)([.,])\d+")
THOUSANDS = re.compile(r"[-+]?[1-9]\d{0,2}(,\d{3})+(\.\d+)?")
SWAPPED = str.maketrans(".,", ",.")

MAX_BLOCK = 1 << 26
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

WINDOWS = "Windows-1252"
NO_TEXT = f"it is neither UTF-8 nor {WINDOWS} text; save it as UTF-8 (Excel: CSV UTF-8)"
OTHER_TEXT = re.compile(rb"[A-Za-z]([\x82\x84\x87-\x89\x8b\x93\x94\xa3\xb9\xbc\xbe\xbf]|(?<!m)\xb3)[A-Za-z]")
"""Bytes that are letters in DOS or Windows-1250, and in Windows-1252 marks that do not stand inside a word; m³a is a unit."""
DECIMAL, ENCODING, CODES = "decimal", "encoding", "codes"
"""How a file is written, kept with its table: its decimal point, its encoding if not UTF-8, and columns of numbers with a 0 ahead."""
CODE = re.compile(r"[-+]?0\d+")

HEAD = 1000
"""Rows in which a column's name is looked for."""


def read_file(path: Path, cells: CellRules = AS_WRITTEN) -> pa.Table:
    """Read a CSV, TSV, Parquet or Excel file."""
    try:
        if path.suffix.lower() in EXCEL_SUFFIXES:
            table = read_workbook(path)
            how = {DECIMAL: _decimal_of(table)}
            table = _with_gaps(table, cells, how[DECIMAL])
        elif path.suffix.lower() == ".parquet":
            table = read_parquet(path)
            how = {DECIMAL: _decimal_of(table), CATEGORIES: json.dumps(_categories_of(table))}
            table = without_marks(table, cells.missing)
        else:
            table, how = _read_csv(path, cells)
        names = table.column_names  # a name that is not UTF-8 shows itself only here
    except UnicodeDecodeError as error:
        raise DataError(f"cannot read the table {path}: {NO_TEXT}") from error
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DataError(f"cannot read the table {path}: {_reason(path, error)}") from error
    if 2 * like_data(table) >= len(names) > 0:
        raise DataError(f"{path}: its first line looks like data, not like column names; add a line with names above it")
    twice = next((name for name, times in Counter(names).items() if times > 1), None)
    if twice is not None:
        raise DataError(f"{path} has two columns {'of the same name' if like_data(table) else f'named {twice!r}'}: rename one")
    _check_range(table, path)
    return with_dates(table, cells, str(path)).replace_schema_metadata(how)


def with_dates(table: pa.Table, cells: CellRules, origin: str) -> pa.Table:
    """Read the columns that are said to hold dates; the field of each keeps how they were written."""
    for name, form in cells.dates:
        if name in table.column_names:
            column, written = as_dates(table.column(name), form, f"{origin}: column {name!r}")
            field = pa.field(name, column.type, metadata={WRITTEN: written})
            table = table.set_column(table.column_names.index(name), field, column)
    return table


def _is_text(column: pa.ChunkedArray) -> bool:
    return bool(pa.types.is_string(column.type) or pa.types.is_large_string(column.type))


def read_numbers(table: pa.Table, origin: str, leave: Collection[str] = ()) -> pa.Table:
    """Read columns of text that hold numbers and marks of missing values only as numbers, as those of a CSV are.

    Categories, codes that begin with 0, and the columns to leave stay text.
    """
    decimal, kept = _decimal(table), {*leave, *_categories_of(table)}
    for i, (name, column) in enumerate(zip(table.column_names, table.columns, strict=True)):
        if name in kept or not _is_text(column):
            continue
        if not any(CODE.fullmatch(word.strip()) for word in pc.unique(column).to_pylist() if word is not None):
            numbers = _numbers(column.cast(pa.string()), decimal)
            if not pa.types.is_string(numbers.type):
                table = table.set_column(i, name, numbers)
                _check_range(table.select([name]), origin)
    return table


def _categories_of(table: pa.Table) -> list[str]:
    return list(json.loads((table.schema.metadata or {}).get(CATEGORIES.encode(), b"[]")))


def read_units(table: pa.Table, leave: Collection[str] = ()) -> tuple[pa.Table, dict[str, str]]:
    """Read columns of numbers with one unit as numbers, but for those to leave; returns the table, and the unit of each such column.

    Cells that hold something else stay text, and so does their column.
    """
    decimal = _decimal(table)
    units: dict[str, str] = {}
    for i, (name, column) in enumerate(zip(table.column_names, table.columns, strict=True)):
        if name in leave or not _is_text(column):
            continue
        words: Counter[str] = Counter()
        for found in pc.value_counts(column.drop_null()).to_pylist():
            if (word := found["values"].strip()).lower() not in GAPS:
                words[word] += found["counts"]
        unit = find_unit(words, [word for word in words if NUMBER.fullmatch(_in_points(word, decimal))])
        if unit is not None:
            units[name] = unit
            table = table.set_column(i, name, _numbers(without_unit(column, unit), decimal))
    return table, units


def _decimal(table: pa.Table) -> str:
    return (table.schema.metadata or {}).get(DECIMAL.encode(), b"").decode() or _decimal_of(table)


def _decimal_of(table: pa.Table) -> str:
    """Return the decimal point of the text in a table that is no text file: a comma where a cell tells."""
    texts = filter(_is_text, table.columns)
    return _decimal_point([str(word).strip() for column in texts for word in pc.unique(column.slice(0, HEAD)).to_pylist() if word], ",")


def like_data(table: pa.Table) -> int:
    """Count the column names that look like cells: numbers that do not count the columns, and words found below them.

    Names are quoted in errors, which may reach a server; the first row of a file without names must not be.
    """
    names = table.column_names
    numbers = [name for name in names if NUMBER.fullmatch(name.strip())]
    whole = sorted({int(name) for name in numbers if re.fullmatch(r"\d{1,9}", name)})
    if len(whole) == len(numbers) > 1 and whole[-1] - whole[0] + 1 == len(whole):  # 0, 1, 2, … or years
        numbers = []
    found = len(numbers)
    for name, column in zip(names, table.columns, strict=True):
        if name and pa.types.is_string(column.type):
            found += bool(pc.any(pc.equal(column.slice(0, HEAD), name)).as_py())
    return found


def _read_csv(path: Path, cells: CellRules = AS_WRITTEN, *, threads: bool = True) -> tuple[pa.Table, dict[str, str]]:
    """Return the table, and how the file writes it."""
    delimiter, decimal, coded = _dialect(path)
    parse = pcsv.ParseOptions(delimiter=delimiter)
    # Empty text counts as missing too, as an empty number does.
    convert = pcsv.ConvertOptions(strings_can_be_null=True, decimal_point=decimal)
    # one block and one thread, if the file is not large: both cost time for every column, and there may be thousands
    size = path.stat().st_size
    read = pcsv.ReadOptions(use_threads=threads and size > MAX_BLOCK, block_size=min(max(size, 1 << 20), MAX_BLOCK))
    table, how = pcsv.read_csv(path, read, parse, convert), {DECIMAL: decimal}
    if not _is_utf8(table):
        with path.open("rb") as file:
            if OTHER_TEXT.search(file.read(MAX_BLOCK)):
                raise DataError(f"cannot read the table {path}: {NO_TEXT}")
        read.encoding = "cp1252"
        table, how[ENCODING] = pcsv.read_csv(path, read, parse, convert), WINDOWS
    if not table.num_columns:
        return table, how
    # a column without a name is called as pandas calls it, and can be left out by that name
    names = [name.strip() or f"Unnamed: {i}" for i, name in enumerate(table.column_names)]
    how[CODES] = json.dumps([name for i, name in enumerate(names) if i in coded])
    words = dict(cells.words)
    typed = [i for i, name in enumerate(names) if name in words and not pa.types.is_string(table.schema.types[i])]
    odd = [i for i in typed if set(text_values(table.column(i).unique())) - {"", *words[names[i]]}]
    odd += [i for i, kind in enumerate(table.schema.types) if names[i] in cells.names and (i in coded or pa.types.is_floating(kind))]
    if odd:
        convert.column_types = {table.column_names[i]: pa.string() for i in odd}
        table = pcsv.read_csv(path, read, parse, convert)
    return _with_gaps(table.rename_columns(names), cells, decimal), how


def _is_utf8(table: pa.Table) -> bool:
    """Whether a CSV was UTF-8: other text comes as bytes, and a name of it cannot be asked for."""
    try:
        _ = table.column_names
    except UnicodeDecodeError:
        return False
    return not any(map(pa.types.is_binary, table.schema.types))


def _with_gaps(table: pa.Table, cells: CellRules, decimal: str) -> pa.Table:
    """Read marks of missing values as gaps, and text of numbers and such marks as numbers, unless it holds words of its column."""
    columns, words = without_marks(table, cells.missing, decimal).columns, dict(cells.words)

    def read(name: str, column: pa.ChunkedArray) -> pa.ChunkedArray:
        known = name in words and not set(words[name]).isdisjoint(text_values(column.unique()))
        numbers = column if known else _numbers(column, decimal)
        return pc.if_else(numbers.is_null(), None, column) if name in cells.names else numbers

    return pa.table([read(name, column) for name, column in zip(table.column_names, columns, strict=True)], names=table.column_names)


def _dialect(path: Path) -> tuple[str, str, set[int]]:
    """Return what separates the cells, the decimal point, and which columns hold numbers that begin with 0.

    All of the first lines have the mark that separates cells equally often, and most often.
    """
    usual = "\t" if path.suffix.lower() == ".tsv" else ","
    with path.open("rb") as file:
        start = file.read(PEEK)
    kind = next((kind for mark, kind in NO_CSV.items() if start.startswith(mark)), None)
    if kind is not None:
        raise DataError(f"cannot read the table {path}: it is not a CSV but {kind}")
    text = _peeked(start)
    quoted = r'"[^"]*"' if text.count('"') % 2 == 0 else r'"[^"\r\n]*"'  # a cell in quotes may hold lines, an odd quote may be inches
    lines = [line for line in re.split(r"[\r\n]+", re.sub(quoted, "", text)) if line.strip()]  # splitlines would also split at Å
    lines = lines[:-1] if len(start) == PEEK else lines
    counts = {mark: {line.count(mark) for line in lines[:20]} for mark in (usual, ";", "\t", "|", ",")}
    even = {mark: max(found) for mark, found in counts.items() if len(found) == 1 and 0 not in found}
    delimiter = max(even, key=lambda mark: even[mark], default=usual)
    cells = [*re.findall(r'"([^"]*)"', text), *(cell for line in lines[1:] for cell in line.split(delimiter))]
    coded = {i for line in lines[1:] for i, cell in enumerate(line.split(delimiter)) if re.fullmatch(r"0\d+", cell.strip())}
    return delimiter, _decimal_point([cell.strip() for cell in cells], delimiter), coded


def _peeked(start: bytes) -> str:
    """Decode the beginning of a file, which may end within a letter."""
    try:
        return start.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        whole = error.start > len(start) - 4
        return start[: error.start].decode("utf-8-sig") if whole else start.decode("cp1252", errors="replace")


def _decimal_point(cells: Sequence[str], delimiter: str) -> str:
    """Return what most fractions are written with; 1.234 may be a thousand and counts only where no other cell tells.

    Numbers may have units. Money has no three decimals: € 1.234 is more than a thousand.

    Examples
    --------
    >>> _decimal_point(["0,5", "1.020", "12,75", "12.30"], ";"), _decimal_point(["1,020", "0.5"], ",")
    (',', '.')
    """
    marked = [cell for cell in cells if "," in cell or "." in cell]
    split = {cell: split_unit(cell) or (cell, "") for cell in set(marked)}
    if not any("," in cell or is_money(split[cell][1]) for cell in marked):
        return "."
    marks = {cell: found[1] for cell, (number, _) in split.items() if (found := FRACTION.fullmatch(number))}
    in_points = {cell: split[cell][0].translate(SWAPPED) if mark == "." else split[cell][0] for cell, mark in marks.items()}
    thousands = {cell for cell, number in in_points.items() if THOUSANDS.fullmatch(number)}
    money = {cell: "," if marks[cell] == "." else "." for cell in thousands if is_money(split[cell][1])}
    clear = [(marks | money)[cell] for cell in marked if cell in marks and (cell not in thousands or cell in money)]
    told = clear or [marks[cell] for cell in marked if cell in marks and delimiter != ","]
    return "," if 2 * told.count(",") > len(told) else "."


def without_marks(table: pa.Table, missing: Sequence[str], decimal: str = ".") -> pa.Table:
    """Replace the user's marks of missing values by gaps in all columns."""
    if not missing:
        return table
    columns = [_without(column, missing, decimal) for column in table.columns]
    return pa.table(columns, table.column_names).replace_schema_metadata(table.schema.metadata)


def _without(column: pa.ChunkedArray, missing: Sequence[str], decimal: str) -> pa.ChunkedArray:
    """Replace the user's marks of missing values by gaps: words in text, numbers (-999) in numbers."""
    if _is_text(column):
        marked = pc.is_in(pc.utf8_trim_whitespace(column), pa.array(missing, column.type))
    elif pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        codes = [float(mark.replace(decimal, ".")) for mark in missing if NUMBER.fullmatch(mark.replace(decimal, "."))]
        marked = pc.is_in(pc.cast(column, pa.float64(), safe=False), pa.array(codes, pa.float64()))
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
        title = "delete the lines above the column names" if ragged[1] == "1" else "correct the file"
        return f"expected {ragged[1]} columns, got {ragged[2]}{_line(path)}; {title}"
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


def _check_range(table: pa.Table, path: Path | str) -> None:
    """Refuse numbers whose squares, or whose float32, would overflow."""
    t = pa.types
    for name, column in zip(table.column_names, table.columns, strict=True):
        if t.is_floating(column.type) or t.is_decimal(column.type):
            numbers = pc.cast(column, pa.float64()).to_numpy(zero_copy_only=False)
            if (np.abs(numbers, where=np.isfinite(numbers), out=np.zeros(len(numbers))) > MAX_NUMBER).any():
                raise DataError(f"{path}: column {name!r} holds a number beyond ±{MAX_NUMBER:g}; correct it, or leave the cell empty")
