"""Tables made to cost time, to overflow, or to carry their cells into an error that a server reads."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from emdcfl.core.errors import DataError
from emdcfl.data.own import check_folder
from emdcfl.data.own.formats import parquet
from emdcfl.data.own.formats.client_tables import label_column
from emdcfl.data.own.formats.readers import read_file
from emdcfl.data.own.tables import Numeric, TableEncoding, column_kinds, pool, summarise


def cost(work: Callable[[], object]) -> float:
    """Processor time of some work; the best of three."""
    found = []
    for _ in range(3):
        started = time.process_time()
        work()
        found.append(time.process_time() - started)
    return min(found)


def encoded(path: Path, columns: int) -> float:
    """Cost of reading and encoding a table of two rows."""
    path.write_text(",".join(f"c{i}" for i in range(columns)) + "\n" + 2 * (",".join("1" for _ in range(columns)) + "\n"))

    def work() -> None:
        table = read_file(path)
        numeric, categorical, _ = column_kinds([("a", table), ("b", table)], [])
        pool([summarise(table, numeric, categorical)], "y").encode(table, "a")

    return cost(work)


@pytest.mark.slow
def test_time_grows_with_the_columns_and_not_with_their_square(tmp_path: Path) -> None:
    assert encoded(tmp_path / "wide.csv", 8000) / encoded(tmp_path / "narrow.csv", 2000) < 8


@pytest.mark.slow
def test_columns_of_bytes_are_converted_together(tmp_path: Path) -> None:
    tables = {n: pa.table({f"c{i}": pa.array([b"x"]) for i in range(n)}) for n in (1000, 4000)}
    assert parquet.as_plain(tables[1000], tmp_path).schema.field("c999").type == pa.string()
    taken = {n: cost(lambda table=table: parquet.as_plain(table, tmp_path)) for n, table in tables.items()}  # type: ignore[misc]
    assert taken[4000] / taken[1000] < 8


@pytest.mark.parametrize("cell", ["1e300", "-1e300", "1e31"])
def test_a_number_that_would_overflow_is_named_by_file_and_column(cell: str, tmp_path: Path) -> None:
    path = tmp_path / "site.csv"
    path.write_text(f"age,y\n1.5,0\n{cell},1\n")
    with pytest.raises(DataError, match=r"site.csv: column 'age' holds a number beyond"):
        read_file(path)


def test_gaps_and_infinities_are_still_gaps(tmp_path: Path) -> None:
    (tmp_path / "site.csv").write_text("age,y\n1.5,0\ninf,1\n,1\nnan,0\n")
    table = read_file(tmp_path / "site.csv")
    assert summarise(table, ["age"], []).numeric["age"].missing == 3


def test_a_number_that_overflows_only_when_standardised_is_refused() -> None:
    encoding = TableEncoding("y", (Numeric("age", 0.0, 1e-12, False),))
    with pytest.raises(DataError, match="'age' of new.csv"):
        encoding.encode(pa.table({"age": [1e30]}), "new.csv")


def test_a_ragged_row_is_named_by_its_line_and_not_quoted(tmp_path: Path) -> None:
    path = tmp_path / "site.csv"
    path.write_text("age,ward,y\n1,2,0\n4,5,Smith,HIV\n")
    with pytest.raises(DataError, match=r"site.csv: expected 3 columns, got 4 in line 3") as caught:
        read_file(path)
    assert "Smith" not in str(caught.value)


@pytest.mark.parametrize("content", [b'age,y\n"Smith,1\nHIV', b"\x00Smith", b"PAR1Smith"])
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_no_error_of_a_damaged_table_quotes_it(content: bytes, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"site.{suffix}"
    path.write_bytes(content + b"\n,,,,\n")
    with pytest.raises(DataError, match=f"site.{suffix}") as caught:
        read_file(path)
    assert "Smith" not in str(caught.value)
    assert "HIV" not in str(caught.value)


def test_a_column_of_names_is_refused_without_quoting_one(tmp_path: Path) -> None:
    for site in "ab":
        rows = "".join(f"{i},Smith{site}{i},{i % 2}\n" for i in range(300))
        (tmp_path / f"{site}.csv").write_text("age,surname,y\n" + rows)
    errors = " ".join(check_folder(tmp_path).errors)
    assert "'surname'" in errors
    assert "Smith" not in errors


def nulls(rows: int) -> pa.Table:
    return pa.table({"a": pa.nulls(rows, pa.float64()), "y": pa.nulls(rows, pa.int8())})


def words(rows: int, size: int) -> pa.Table:
    """One long word in all rows: the file holds it once."""
    coded = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array(["x" * size]))
    return pa.table({"a": coded, "y": pa.nulls(rows, pa.int8())})


def nested(rows: int, size: int, kind: pa.DataType, cell: Callable[[str], Any]) -> pa.Table:
    return pa.table({"a": pa.array([cell("x" * size)] * rows, kind), "y": [0] * rows})


def listed(length: int) -> pa.Table:
    return pa.table({"a": pa.ListArray.from_arrays(pa.array([0, length], pa.int32()), pa.nulls(length, pa.int8())), "y": [1]})


BOMBS = {
    "rows without a value": (nulls(1_000_000), False),
    "a long word in all rows, as text": (words(2000, 20_000), False),
    "a long word in all rows, as a category": (words(2000, 20_000), True),
    "a long word in lists": (nested(2000, 20_000, pa.list_(pa.large_string()), lambda word: [word]), False),
    "a long word in records": (nested(2000, 20_000, pa.struct([("s", pa.list_(pa.string()))]), lambda word: {"s": [word]}), False),
    "a long word as a value": (nested(2000, 20_000, pa.map_(pa.string(), pa.binary()), lambda word: [("key", word)]), False),
    "a long word as JSON": (nested(2000, 20_000, pa.json_(), lambda word: f'"{word}"'), True),
    "a long word as a view": (nested(2000, 20_000, pa.string_view(), str), True),
    "a list as a cell": (listed(1_000_000), False),
    "wide cells of bytes": (pa.table({"a": pa.array([b"x" * 20_000] * 300, pa.binary(20_000)), "y": [0] * 300}), False),
}


COUNTED: list[pa.MemoryPool] = []
"""Pools live as long as the process: memory taken from one may be given back later, by a thread of Arrow's."""


@pytest.mark.parametrize("what", BOMBS)
def test_a_parquet_file_that_unpacks_to_much_more_is_refused_before_it_does(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, typed = BOMBS[what]
    pq.write_table(table, tmp_path / "site.parquet", store_schema=typed)
    assert (tmp_path / "site.parquet").stat().st_size < 1 << 19
    monkeypatch.setattr(parquet, "UNPACKED", 1 << 22)  # a small limit, so that a small file exceeds it
    usual = pa.default_memory_pool()
    counted = pa.proxy_memory_pool(usual)
    COUNTED.append(counted)
    pa.set_memory_pool(counted)
    try:
        with pytest.raises(DataError, match=r"site.parquet: unpacks to"):
            read_file(tmp_path / "site.parquet")
    finally:
        pa.set_memory_pool(usual)
    assert counted.max_memory() < 1 << 21


def test_a_run_from_elsewhere_has_one_column_of_gaps_at_most() -> None:
    """A number in its models' metadata would be as many columns, each of all rows that are predicted."""
    column = {"name": "a", "mean": 0.0, "std": 1.0, "gaps": 10**12}
    assert TableEncoding.from_dict({"label": "y", "columns": [column]}).encode(pa.table({"a": [1.0, None]}), "new").tolist() == [
        [1, 0],
        [0, 1],
    ]


def test_parquet_columns_keep_their_types_and_categories_are_text(tmp_path: Path) -> None:
    cells = {pa.int32(): 1, pa.float32(): 1.5, pa.string(): "a", pa.large_string(): "b", pa.dictionary(pa.int8(), pa.string()): "c"}
    table = pa.table({f"c{i}": pa.array([cell, None], kind) for i, (kind, cell) in enumerate(cells.items())})
    pq.write_table(table, tmp_path / "site.parquet")
    found = read_file(tmp_path / "site.parquet")
    assert found.to_pydict() == table.to_pydict()
    assert found.schema.types == [*table.schema.types[:-1], pa.string()]


HEADLESS = {
    "numbers": "63,Smith,HIV,1\n41,Jones,flu,0\n",
    "words": "north,Smith,HIV,ill\nnorth,Jones,HIV,ill\nsouth,Brown,flu,well\n",
    "twice the same": "Smith,Smith,3\nJones,Jones,4\n",
    "decimals": "-1.5,2e-3,Smith\n1,2,Jones\n",
    "one number among words": "Smith,Anna,63\nJones,Berta,41\n",
}


@pytest.mark.parametrize("what", HEADLESS)
@pytest.mark.parametrize("label", [None, "y"])
def test_a_table_without_names_puts_no_row_into_an_error(what: str, label: str | None, tmp_path: Path) -> None:
    (tmp_path / "site.csv").write_text(HEADLESS[what])
    with pytest.raises(DataError, match="site.csv") as caught:
        label_column(read_file(tmp_path / "site.csv"), label, "site.csv")
    said = str(caught.value).replace(str(tmp_path), "")  # a temporary folder may have any number in its name
    assert not any(cell in said for cell in ("Smith", "HIV", "63", "Anna", "2e-3"))


@pytest.mark.parametrize(
    "names", ["0,1,2,label", "age,ward,bed,y", "2019,2020,2021,y", "1x1,1x2,1x3,label", "yes,age,ward,y", "1,age,ward,y"]
)
def test_tables_with_names_are_read(names: str, tmp_path: Path) -> None:
    (tmp_path / "site.csv").write_text(f"{names}\n" + "1,2,yes,0\n3,4,no,1\n" * 20)
    assert ",".join(read_file(tmp_path / "site.csv").column_names) == names
