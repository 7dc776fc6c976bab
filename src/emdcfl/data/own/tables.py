r"""Tables with numbers, categories and gaps, encoded with federated statistics.

Each client reports, per numeric column, count :math:`n_c`, mean :math:`\mu_c` and squared deviation :math:`M_c`; pooled,

.. math:: \mu = \frac{\sum_c n_c \mu_c}{\sum_c n_c}, \qquad
          \sigma^2 = \frac{\sum_c \left(M_c + n_c(\mu_c-\mu)^2\right)}{\sum_c n_c}.

Everyone standardises with the same :math:`\mu, \sigma`, so shifts between sites survive. Categories are one-hot over the union of the
clients' words; a missing number becomes the pooled mean plus an indicator column.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emdcfl.core.errors import FEW, ConfigError, DataError, similar
from emdcfl.core.optional import pa, pc

OTHER_SIZE, MIN_VALUES = 8.0, 10
"""How many times larger or smaller new numbers are that look like those of another unit, and how many different ones say so."""

DROP_ROWS = "drop-rows"
"""Policy of missing values by which rows with one are left out."""

CLOSE = 0.7
"""How alike (0 to 1) the names of columns are that may mean the same."""

MAX_WORDS = 200
MAX_WORD_LENGTH = 64
FEW_WORDS = 10
"""So many different words may each occur once: small tables have rare classes."""


@dataclass(frozen=True)
class CellRules:
    """How cells are read."""

    missing: tuple[str, ...] = ()
    """Marks of missing values, in any column, besides the usual ones."""
    dates: tuple[tuple[str, str], ...] = ()
    """Columns to read as dates, each with a format of ``strptime``, ``auto``, or ``auto:FORMAT``."""
    numbers: bool = False
    """Whether labels are numbers to predict, which may have a unit."""
    words: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Columns of text, and words that they hold in other files. A file with a few of them may look as if it held truth values (true),
    numbers (007) or no values (none)."""
    names: tuple[str, ...] = ()
    """Columns of names, where 1.1 and 1.10, 7 and 007 differ."""


AS_WRITTEN = CellRules()


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of the values that are present; ``missing`` counts the gaps."""

    count: int
    mean: float
    deviation: float
    missing: int


@dataclass(frozen=True)
class Summary:
    """What one client reports about its training table: moments of numeric columns, words of the others. No row leaves it."""

    numeric: Mapping[str, Moments]
    words: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Numeric:
    """A standardised column; ``gaps`` adds an indicator column for missing values."""

    name: str
    mean: float
    std: float
    gaps: bool
    date: str = ""
    """Where the column is read as dates: their format, ``auto``, or ``auto:FORMAT`` with the one that all sites used."""
    unit: str = ""
    """Where cells are numbers with a unit: the unit."""

    @property
    def width(self) -> int:
        return 1 + self.gaps


@dataclass(frozen=True)
class Categorical:
    """A one-hot column; words outside the vocabulary (and gaps) become all zeros."""

    name: str
    words: tuple[str, ...]

    @property
    def width(self) -> int:
        return len(self.words)

    def read(self, table: pa.Table) -> list[str]:
        """Return the column's cells as text; a gap is empty."""
        values = table.column(self.name)
        if pa.types.is_boolean(values.type) and {"True", "False"}.isdisjoint(self.words):
            values = pc.cast(values, pa.string())  # true and false, as in files
        return text_values(values)


@dataclass(frozen=True)
class TableEncoding:
    """How a table becomes a float32 matrix; the same at every client, and stored with a run."""

    label: str
    columns: tuple[Numeric | Categorical, ...]
    missing: tuple[str, ...] = ()
    """Marks of missing values besides the usual ones."""
    gaps: str = "mean"
    """What a row with a missing value is: encoded, or left out (``DROP_ROWS``)."""

    def usable(self, table: pa.Table) -> NDArray[np.bool_]:
        """Which rows are encoded, and not left out for a missing value."""
        names = [column.name for column in self.columns]
        return complete_rows(table, names) if self.gaps == DROP_ROWS else np.ones(table.num_rows, dtype=bool)

    @property
    def cells(self) -> CellRules:
        """How new files are read."""
        dates = tuple((c.name, c.date) for c in self.columns if isinstance(c, Numeric) and c.date)
        return CellRules(self.missing, dates, words=tuple((c.name, c.words) for c in self.columns if isinstance(c, Categorical)))

    @property
    def units(self) -> dict[str, str]:
        """Column → unit, where its cells have one."""
        return {c.name: c.unit for c in self.columns if isinstance(c, Numeric) and c.unit}

    @property
    def width(self) -> int:
        return sum(column.width for column in self.columns)

    def encode(self, table: pa.Table, origin: str) -> NDArray[np.float32]:
        """Encode the rows of a table that has all columns (others, the label among them, are ignored)."""
        there = set(table.column_names)
        missing = [column.name for column in self.columns if column.name not in there]
        if missing:
            found = [close for name in missing[:FEW] if (close := similar(name, there - {c.name for c in self.columns}, CLOSE))]
            remedy = f"rename {', '.join(dict.fromkeys(found))}" if found else "add it, with empty cells where nothing is known"
            raise DataError(f"{origin} lacks the column{'s' if len(missing) > 1 else ''} {', '.join(missing)}; {remedy}")
        out = np.zeros((table.num_rows, self.width), np.float32)
        starts = np.cumsum([0, *(column.width for column in self.columns)]).tolist()
        placed = list(zip(starts, self.columns, strict=False))
        self._encode_numbers(table, [(start, column) for start, column in placed if isinstance(column, Numeric)], out, origin)
        for start, column in placed:
            if isinstance(column, Categorical):
                number = {word: start + i for i, word in enumerate(column.words)}
                for row, word in enumerate(column.read(table)):
                    if word in number:
                        out[row, number[word]] = 1
        return out

    def other_sizes(self, *tables: pa.Table) -> list[str]:
        """Return the columns whose mean and spread are both ``OTHER_SIZE`` times those of training or more, or as many times less."""
        columns = [c for c in self.columns if isinstance(c, Numeric) and not c.date]
        numbers, found = np.concatenate([number_matrix(table, [c.name for c in columns]) for table in tables]), []
        for column, own in zip(columns, numbers.T, strict=True):
            known = own[~np.isnan(own)]
            if len(known) < MIN_VALUES or column.mean == 0:
                continue
            sizes = abs(known.mean() / column.mean), known.std() / column.std
            if (min(sizes) >= OTHER_SIZE or max(sizes) <= 1 / OTHER_SIZE) and len(np.unique(known)) >= MIN_VALUES:
                found.append(f"{column.name!r} (mean {known.mean():.3g}, in training {column.mean:.3g})")
        return found

    def doubts(self, *tables: pa.Table) -> Iterator[tuple[str, list[str]]]:
        """Yield what looks wrong in new tables, each with the words for its ``{words}``."""
        texts = [column for column in self.columns if isinstance(column, Categorical)]
        unknown = [f"{c.name} {word!r}" for table in tables for c in texts for word in sorted({*c.read(table)} - {"", *c.words})]
        if unknown:
            yield "words that the model does not know are read as missing: {words}", list(dict.fromkeys(unknown))
        if columns := self.other_sizes(*tables):
            yield "numbers much larger or smaller than in training: {words}; if the units differ, convert them", columns

    def _encode_numbers(self, table: pa.Table, columns: Sequence[tuple[int, Numeric]], out: NDArray[np.float32], origin: str) -> None:
        """Standardise all numeric columns at once: a table may have thousands."""
        if not columns:
            return
        kinds = dict(zip(table.column_names, table.schema.types, strict=True))
        for _, column in columns:
            if not is_numeric(kinds[column.name]):
                expected = "must hold numbers or dates, as in training"
                raise DataError(f"column {column.name!r} of {origin} {expected}, got {kinds[column.name]}; convert it")
        numbers = number_matrix(table, [column.name for _, column in columns])
        gaps = np.isnan(numbers)
        with np.errstate(over="ignore"):
            z = np.where(gaps, 0.0, (numbers - [c.mean for _, c in columns]) / [c.std for _, c in columns]).astype(np.float32)
        far = np.flatnonzero(~np.isfinite(z).all(axis=0))
        if len(far):
            raise DataError(f"column {columns[far[0]][1].name!r} of {origin} holds a number too far from those in training; correct it")
        out[:, [start for start, _ in columns]] = z
        told = [i for i, (_, column) in enumerate(columns) if column.gaps]
        out[:, [columns[i][0] + 1 for i in told]] = gaps[:, told]

    def as_dict(self) -> dict[str, Any]:
        columns: list[dict[str, Any]] = []
        for column in self.columns:
            if isinstance(column, Numeric):
                more = {key: value for key, value in (("date", column.date), ("unit", column.unit)) if value}
                columns.append({"name": column.name, "mean": column.mean, "std": column.std, "gaps": column.gaps, **more})
            else:
                columns.append({"name": column.name, "words": list(column.words)})
        rules: dict[str, Any] = {"missing": list(self.missing)} if self.missing else {}
        rules |= {"gaps": self.gaps} if self.gaps == DROP_ROWS else {}
        return {"kind": "table", "label": self.label, "columns": columns, **rules}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TableEncoding:
        columns = tuple(
            Categorical(c["name"], tuple(c["words"]))
            if "words" in c
            else Numeric(c["name"], c["mean"], c["std"], bool(c["gaps"]), str(c.get("date", "")), str(c.get("unit", "")))
            for c in values["columns"]
        )
        return cls(values["label"], columns, tuple(map(str, values.get("missing", ()))), str(values.get("gaps", "mean")))


def read_list(values: Any, expected: str) -> tuple[str, ...]:
    """Read an option that is a list of texts, or one text with commas.

    Examples
    --------
    >>> read_list("age, dose", "--drop COLUMN,…"), read_list(["a,b"], "--drop COLUMN,…"), read_list(None, "--drop COLUMN,…")
    (('age', 'dose'), ('a,b',), ())
    """
    listed = values.split(",") if isinstance(values, str) else list(values or ())
    if not all(isinstance(value, str) and value.strip() for value in listed):
        raise ConfigError(f"expected {expected} (in a config: a list of these), got {values!r}")
    return tuple(value.strip() for value in listed)


def withheld(words: Mapping[str, int]) -> str | None:
    """Say why a node does not list words: they look like names, numbers of persons or free text; ``None`` where it does."""
    rare = sum(count == 1 for count in words.values())
    if len(words) > MAX_WORDS:
        return f"{len(words)} different words, at most {MAX_WORDS} are sent"
    if any(len(word) > MAX_WORD_LENGTH for word in words):
        return f"words of more than {MAX_WORD_LENGTH} characters"
    return f"{len(words)} different words, {rare} of them once" if len(words) > FEW_WORDS and 2 * rare > len(words) else None


def summarise(table: pa.Table, numeric: Sequence[str], categorical: Sequence[str]) -> Summary:
    """Return what a client reports about its training rows."""
    return Summary(
        {name: _moments(number_values(table.column(name))) for name in numeric},
        {name: most_frequent(Counter(filter(None, text_values(table.column(name))))) for name in categorical},
    )


def most_frequent(counts: Mapping[str, int], most: int = MAX_WORDS) -> tuple[str, ...]:
    """Return the most frequent words in alphabetical order."""
    return tuple(sorted(sorted(counts, key=lambda word: (-counts[word], word))[:most]))


def pool(summaries: Sequence[Summary], label: str, cells: CellRules = AS_WRITTEN, units: Mapping[str, str] | None = None) -> TableEncoding:
    """Pool the clients' summaries into one encoding.

    A column without any value is left out; a constant one becomes zero. Of more than 200 words, those that most clients have are encoded.
    """
    dates, known = dict(cells.dates), units or {}
    columns: list[Numeric | Categorical] = []
    for name in summaries[0].numeric:
        moments = [summary.numeric[name] for summary in summaries]
        count = sum(m.count for m in moments)
        if count == 0:
            continue
        mean = math.fsum(m.count * m.mean for m in moments) / count
        variance = math.fsum(m.deviation + m.count * (m.mean - mean) ** 2 for m in moments) / count
        std = math.sqrt(variance)
        constant = std <= 1e-12 * max(1.0, abs(mean))
        columns.append(
            Numeric(name, mean, 1.0 if constant else std, any(m.missing for m in moments), dates.get(name, ""), known.get(name, ""))
        )
    for name in summaries[0].words:
        if words := most_frequent(Counter(word for summary in summaries for word in summary.words[name])):
            columns.append(Categorical(name, words))
    if not columns:
        raise DataError("the tables have no usable column besides the label")
    return TableEncoding(label, tuple(columns), cells.missing)


def column_kinds(tables: Sequence[tuple[str, pa.Table]], leave_out: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Names of numeric and of categorical columns, and notes. A column is numeric if it is at every client (or empty there)."""
    first_origin, first = tables[0]
    names = [name for name in first.column_names if name not in leave_out]
    known = {*names, *leave_out}
    for origin, table in tables[1:]:
        there = set(table.column_names)
        lacking = [name for name in names if name not in there]
        if lacking:
            raise DataError(_lacks(origin, lacking[0], first_origin, [name for name in table.column_names if name not in known]))
        extra = [name for name in table.column_names if name not in known]
        if extra:
            raise DataError(_lacks(first_origin, extra[0], origin, []))
    numeric: list[str] = []
    categorical: list[str] = []
    notes: list[str] = []
    kinds = [(origin, dict(zip(table.column_names, table.schema.types, strict=True))) for origin, table in tables]
    for name in names:
        textual = next((origin for origin, kind in kinds if not is_numeric(kind[name])), None)
        (categorical if textual else numeric).append(name)
        numbers = [kind[name] for _, kind in kinds if is_numeric(kind[name]) and not pa.types.is_null(kind[name])]
        if textual and numbers:
            dates = all(map(pa.types.is_temporal, numbers))
            what, remedy = ("dates", f"read it with --date {shlex.quote(name)}") if dates else ("numbers", "write numbers")
            mixed = f"column {name!r} holds text in {textual} and {what} elsewhere: it is treated as categorical"
            notes.append(f"{mixed}; {remedy}, or use --drop")
    return numeric, categorical, notes


def _lacks(origin: str, name: str, there: str, others: Sequence[str]) -> str:
    """Say that a client lacks a column, with the one of ``others`` that may be the same under another name."""
    close = similar(name, others, CLOSE)
    remedy = f"rename its column {close!r}, or leave both out with" if close else "add it, or leave it out with"
    columns = ",".join([name, *([close] if close else [])])
    return f"{origin} lacks the column {name!r} that {there} has: all clients need the same columns; {remedy} --drop {shlex.quote(columns)}"


@lru_cache(maxsize=256)
def is_numeric(kind: pa.DataType) -> bool:
    """Whether a column of this type is read as numbers; others are read as categories."""
    t = pa.types
    tests = (t.is_integer, t.is_floating, t.is_boolean, t.is_decimal, t.is_temporal, t.is_null)
    return any(test(kind) for test in tests)


def number_values(values: pa.ChunkedArray) -> NDArray[np.float64]:
    """Values as float64; gaps and infinities become NaN. Dates count days, times count seconds."""
    if pa.types.is_timestamp(values.type):
        values = pc.divide(pc.cast(pc.cast(values, pa.timestamp("ms"), safe=False), pa.int64()), 86_400_000.0)
    elif pa.types.is_date(values.type):
        values = pc.cast(pc.cast(values, pa.date32()), pa.int32())
    elif pa.types.is_temporal(values.type):
        kind = pa.time64("us") if pa.types.is_time(values.type) else pa.duration("us")
        values = pc.divide(pc.cast(pc.cast(values, kind, safe=False), pa.int64()), 1e6)
    numbers = pc.cast(values, pa.float64(), safe=False).to_numpy(zero_copy_only=False)  # safe: an error for integers beyond 2⁵³
    return np.where(np.isfinite(numbers), numbers, np.nan)


def number_matrix(table: pa.Table, names: Sequence[str]) -> NDArray[np.float64]:
    """Numeric columns as ``number_values`` reads them, one per column of a matrix in column order."""
    matrix = np.empty((table.num_rows, len(names)), order="F")
    for i, name in enumerate(names):
        matrix[:, i] = number_values(table.column(name))
    return matrix


def complete_rows(table: pa.Table, columns: Sequence[str]) -> NDArray[np.bool_]:
    """Which rows have a value in each of some columns; those that the table lacks do not count."""
    chosen = table.select([name for name in columns if name in set(table.column_names)])
    numeric = [name for name, kind in zip(chosen.column_names, chosen.schema.types, strict=True) if is_numeric(kind)]
    full: NDArray[np.bool_] = np.asarray(~np.isnan(number_matrix(chosen, numeric)).any(axis=1))
    for name in set(chosen.column_names) - set(numeric):
        full &= np.array([word != "" for word in text_values(chosen.column(name))], dtype=bool)
    return full


def column_bytes(table: pa.Table) -> Iterator[bytes]:
    """Yield the name and the values of every column as bytes: the same for the same values, however they are stored."""
    for name, column in zip(table.column_names, table.columns, strict=True):
        yield name.encode()
        yield number_values(column).tobytes() if is_numeric(column.type) else "\0".join(text_values(column)).encode()


def text_values(values: pa.ChunkedArray | pa.Array) -> list[str]:
    """Cells as text without spaces around it; a gap is empty."""
    return ["" if word is None else str(word).strip() for word in values.to_pylist()]


def _moments(numbers: NDArray[np.float64]) -> Moments:
    present = numbers[~np.isnan(numbers)]
    if not len(present):
        return Moments(0, 0.0, 0.0, len(numbers))
    mean = float(present.mean())
    return Moments(len(present), mean, float(((present - mean) ** 2).sum()), len(numbers) - len(present))
