"""Read the one sheet of an Excel workbook as a table, with openpyxl (extra ``excel``). Formulas count as their stored values."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from datetime import date, datetime, time
from itertools import islice
from pathlib import Path
from typing import Any

from emdcfl.core.errors import ConfigError, DataError
from emdcfl.core.optional import pa, require

UNPACKED = 1 << 28
"""Bytes that a workbook may unpack to: its cells take far more in memory."""
MAX_ROWS, MAX_COLUMNS = 1 << 20, 1 << 14
"""Of a sheet, as Excel has them."""
MAX_CELLS = 1 << 28
"""Of a sheet, empty ones counted: two cells in opposite corners would otherwise take many minutes."""
MAX_TEXT = 1 << 29
"""Characters of a sheet: a file holds a word once, however many cells have it."""
HEAD = 20
"""Rows in which the names of columns are looked for."""


def read_workbook(path: Path) -> pa.Table:
    """Return the cells below the row of names: the first with more than one cell."""
    try:
        openpyxl = require("openpyxl", "excel", f"to read {path}")
    except ConfigError as error:
        raise DataError(f"{error}, or save the table as CSV") from error
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        if size > UNPACKED:
            raise DataError(f"{path}: unpacks to {size / 2**20:.0f} MB, at most {UNPACKED / 2**20:.0f} are read; save it as CSV or Parquet")
        book = openpyxl.load_workbook(path, read_only=True, data_only=True)
        try:
            sheet = _only_sheet(book, path)
            names, rows, first = _cells(sheet, path)
        finally:
            book.close()
        if any(cell is None for row in rows for cell in row):
            _refuse_formulas(openpyxl, path, sheet.title, len(names), rows, first)
    except (OSError, DataError):
        raise
    except Exception as error:  # openpyxl has its own ways to fail on a damaged file: KeyError, BadZipFile, ParseError, …
        raise DataError(f"cannot read the table {path}: it is damaged, or no workbook ({type(error).__name__}); save it as CSV") from error
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(names)
    kept = [i for i, name in enumerate(names) if name is not None or any(cell is not None for cell in columns[i])]
    return pa.table([_column(columns[i]) for i in kept], names=[_name(names[i], i) for i in kept])


def _only_sheet(book: Any, path: Path) -> Any:
    filled = _filled(book, 1) or _filled(book, HEAD)
    if len(filled) != 1:
        told = (
            f"{len(filled)} sheets with a first row ({', '.join(sheet.title for sheet in filled[:5])})" if filled else "no sheet with data"
        )
        raise DataError(f"{path}: expected one sheet with a table, got {told}; keep one, or save each as CSV")
    return filled[0]


def _filled(book: Any, rows: int) -> list[Any]:
    """Return the sheets with a cell in their first rows."""

    def found(sheet: Any) -> bool:
        return any(cell is not None for row in sheet.iter_rows(max_row=rows, max_col=MAX_COLUMNS, values_only=True) for cell in row)

    return [sheet for sheet in book.worksheets if found(sheet)]


def _cells(sheet: Any, path: Path) -> tuple[list[Any], list[tuple[Any, ...]], int]:
    """Return names, rows and the number of the first row; titles above the names, one cell each, are passed over."""
    head = [list(row) for row in sheet.iter_rows(max_row=HEAD, max_col=MAX_COLUMNS, values_only=True)]
    filled = [[i for i, cell in enumerate(row) if cell is not None] for row in head]
    top = next((i for i, cells in enumerate(filled) if len(cells) > 1), next(i for i, cells in enumerate(filled) if cells))
    width = max(cells[-1] for cells in filled[top:] if cells) + 1
    rows = sheet.iter_rows(min_row=top + 2, max_row=MAX_ROWS, max_col=width, values_only=True)
    found, text = [], sum(map(_length, head))
    for row in islice(rows, MAX_CELLS // width):
        if any(cell is not None for cell in row):
            found.append(row)
            text += _length(row)
            if text > MAX_TEXT:
                raise DataError(f"{path}: has more than {MAX_TEXT} characters of text, repeated words counted; leave out rows or columns")
    if next(rows, None) is not None:
        raise DataError(f"{path}: has more than {MAX_CELLS} cells, empty ones counted; delete what lies beside or below the table")
    return head[top][:width], found, top + 2


def _length(row: Sequence[Any]) -> int:
    return sum(len(cell) for cell in row if isinstance(cell, str))


def _refuse_formulas(openpyxl: Any, path: Path, title: str, width: int, rows: Sequence[tuple[Any, ...]], first: int) -> None:
    """Refuse formulas that no program has computed: they would be read as missing."""
    book = openpyxl.load_workbook(path, read_only=True)
    try:
        written = book[title].iter_rows(min_row=first, max_row=MAX_ROWS, max_col=width)
        filled = [row for row in written if any(cell.value is not None for cell in row)]
        for row, values in zip(filled, rows, strict=False):
            for cell, value in zip(row, values, strict=True):
                if value is None and cell.data_type == "f":
                    raise DataError(
                        f"{path}: the formula in cell {cell.coordinate} has no stored value; open and save it in Excel, or save it as CSV"
                    )
    finally:
        book.close()


def _name(name: Any, number: int) -> str:
    return f"Unnamed: {number}" if name is None or not str(name).strip() else str(name).strip()


def _column(cells: Sequence[Any]) -> pa.Array:
    """Numbers, dates or truth values where all cells are; else text."""
    present = [cell for cell in cells if cell is not None]
    if all(isinstance(cell, bool) for cell in present):
        return pa.array(cells, pa.bool_() if present else pa.null())
    if all(type(cell) is int and abs(cell) < 1 << 53 for cell in present):
        return pa.array(cells, pa.int64())
    if all(type(cell) in (int, float) for cell in present):
        return pa.array([None if cell is None else float(cell) for cell in cells], pa.float64())
    if all(isinstance(cell, date) for cell in present):  # a datetime is one
        moments = [None if cell is None else cell if isinstance(cell, datetime) else datetime.combine(cell, time()) for cell in cells]
        return pa.array(moments, pa.timestamp("ms"))
    return pa.array([None if cell is None else _text(cell) for cell in cells], pa.string())


def _text(cell: Any) -> str:
    if isinstance(cell, datetime) and cell.time() == time():
        return str(cell.date())
    return str(int(cell)) if isinstance(cell, float) and cell.is_integer() else str(cell)
