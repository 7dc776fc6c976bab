"""Parquet files and data frames as tables of numbers and text, without taking more memory than a file admits to."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

from emdcfl.core.errors import DataError
from emdcfl.core.optional import pa, pc, pq

UNPACKED = 1 << 31
"""Bytes that a Parquet file may unpack to."""

CATEGORIES = "categories"
"""Key of a table's metadata: the columns that pandas or Arrow calls categories."""


def read_parquet(path: Path) -> pa.Table:
    """Read a Parquet file whose footer names no more than ``UNPACKED``; text is read by its dictionary, so that a word counts once."""
    footer = pq.read_metadata(path)
    columns = range(footer.num_columns)
    chunks = [footer.row_group(g).column(i) for g in range(footer.num_row_groups) for i in columns]
    widths = [max(8, footer.schema.column(i).length) for i in columns] * footer.num_row_groups
    size = sum(chunk.num_values * width for chunk, width in zip(chunks, widths, strict=True))
    _check_size(path, max(size, footer.num_rows * 8, sum(chunk.total_uncompressed_size for chunk in chunks)))
    schema = pq.read_schema(path)
    words = [field.name for field in schema if _is_text_or_bytes(field.type)]
    leaves = [footer.schema.column(i) for i in columns]
    texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY" and leaf.logical_type.type != "DECIMAL"]
    bare = "arrow_extensions_enabled"  # JSON would have no dictionary; versions without this read it as text
    known = {bare: False} if bare in inspect.signature(pq.ParquetFile).parameters else {}
    with pq.ParquetFile(path, read_dictionary=texts, **known) as file:
        table = file.read()
    plain = pa.schema([schema.field(i) if field.name in words else field for i, field in enumerate(table.schema)])
    _check_size(path, sum(_text_size(chunk) for column in table.columns for chunk in column.chunks))
    table = table.cast(plain)
    cells = [pc.if_else(pc.is_nan(c), pa.scalar(None, c.type), c) if pa.types.is_floating(c.type) else c for c in table.columns]
    return as_plain(pa.table(cells, schema=plain.remove_metadata()), path)


def _is_text_or_bytes(kind: pa.DataType) -> bool:
    return kind in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())


def _text_size(column: pa.Array) -> int:
    """Count the bytes of a column of words, or of lists or records of words, once each row holds its own; 0 for other columns."""
    if isinstance(column, pa.MapArray):
        return _text_size(column.keys) + _text_size(column.items)
    if pa.types.is_nested(column.type):
        inside = column.flatten()
        return sum(map(_text_size, inside)) if isinstance(column, pa.StructArray) else _text_size(inside)
    if not isinstance(column, pa.DictionaryArray) or not _is_text_or_bytes(column.dictionary.type):
        return 0
    lengths = pc.cast(pc.fill_null(pc.binary_length(column.dictionary), 0), pa.int64())
    return pc.sum(pc.take(lengths, column.indices)).as_py() or 0


def _check_size(path: Path, size: int) -> None:
    if size > UNPACKED:
        raise DataError(f"{path}: unpacks to {size / 2**30:.1f} GB, at most {UNPACKED / 2**30:g} are read; leave out rows or columns")


def as_plain(table: pa.Table, path: Path | str) -> pa.Table:
    """Write columns of bytes, which Parquet files of some writers have, of lists or records, and of pandas' categories of text as text."""
    t = pa.types
    columns, categories = [], []
    for name, column in zip(table.column_names, table.columns, strict=True):
        if t.is_dictionary(column.type) and _is_text_or_bytes(column.type.value_type):
            column = column.cast(column.type.value_type)
            categories.append(name)
        if t.is_string_view(column.type) or t.is_binary_view(column.type):  # few of Arrow's functions know them
            column = column.cast(pa.large_string() if t.is_string_view(column.type) else pa.large_binary())
        if t.is_nested(column.type) or isinstance(column.type, pa.BaseExtensionType):
            column = pa.chunked_array([pa.array([None if cell is None else str(cell) for cell in column.to_pylist()], pa.string())])
        if t.is_binary(column.type) or t.is_large_binary(column.type) or t.is_fixed_size_binary(column.type):
            try:
                column = pc.cast(pc.cast(column, pa.binary()), pa.string())
            except pa.ArrowException as error:
                raise DataError(f"{path}: column {name!r} holds bytes that are not UTF-8 text; save the file as UTF-8") from error
        columns.append(column)
    return pa.table(columns, names=table.column_names).replace_schema_metadata({CATEGORIES: json.dumps(categories)}) if columns else table
