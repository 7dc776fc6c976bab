"""Read a column of text or numbers as dates. The format is told from all of its cells, or given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from emdcfl.core.errors import DataError
from emdcfl.core.optional import pa
from emdcfl.data.own.tables import CellRules, read_list

AUTO = "auto"
"""Format of dates that is told from their cells."""
WRITTEN = "written"
"""Metadata of a column of dates: the format that its text had."""
DAYS = (
    *("%Y-%m-%d", "%Y/%m/%d", "%Y.%m.%d", "%Y%m%d"),
    *("%d.%m.%Y", "%d.%m.%y", "%d/%m/%Y", "%d/%m/%y", "%d-%m-%Y", "%d %b %Y", "%d-%b-%Y", "%d %B %Y"),
    *("%m/%d/%Y", "%m/%d/%y", "%m-%d-%Y"),
)
TIMES = ("", " %H:%M", " %H:%M:%S", " %H:%M:%S.%f", "T%H:%M:%S", "T%H:%M:%S.%f")
MAX_SPAN = 50
"""Years that dates with years of two digits may span: beyond, some are likely to be read into another century than their neighbours."""
FORMATS = tuple(day + time for time in TIMES for day in DAYS)


def as_dates(column: pa.ChunkedArray, form: str, where: str) -> tuple[pa.ChunkedArray, str]:
    """Return a column as timestamps, and the format of its text. Errors quote no cell.

    ``form`` is a format of ``strptime``, ``auto``, or ``auto:FORMAT``, where the format decides between several that fit.
    """
    if pa.types.is_temporal(column.type) or pa.types.is_null(column.type):
        return column, ""
    usual = form.partition(f"{AUTO}:")[2]
    form = AUTO if usual else form
    if pa.types.is_floating(column.type):
        cells = [None if cell is None else f"{cell:.0f}" for cell in column.to_pylist()]
    else:
        cells = [None if cell is None else str(cell).strip() or None for cell in column.to_pylist()]
    fitting = readings({cell for cell in cells if cell is not None}, FORMATS if form == AUTO else (form,))
    if not fitting:
        row, form = _first_odd(cells, FORMATS if form == AUTO else (form,))
        raise DataError(
            f"{where}: expected dates{f' written as {form}' if form else ''}, got something else in row {row}; "
            "correct it, or say how dates are written (--date COLUMN:%d.%m.%Y)"
        )
    if len(fitting) > 1 and usual:
        fitting = readings({cell for cell in cells if cell is not None}, (usual,)) or fitting
    if len(fitting) > 1:
        ways = " or ".join(fitting)
        remedy = f"say which, as in --date COLUMN:{next(iter(fitting))}, or write YYYY-MM-DD"  # predict and place have no --date
        raise DataError(f"{where}: its dates may be written as {ways}; {remedy}")
    written, times = next(iter(fitting.items()))
    if "%y" in written:
        _check_century(times.values(), written, where, asked=form != AUTO)
    return pa.chunked_array([pa.array([None if cell is None else times[cell] for cell in cells], pa.timestamp("ms"))]), written


def _check_century(times: Iterable[datetime], form: str, where: str, *, asked: bool) -> None:
    """Refuse years of two digits that may be read into the wrong century: 69 to 99 are 1969 to 1999, 00 to 68 are 2000 to 2068."""
    years = [time.year for time in times]
    first, last = min(years, default=0), max(years, default=0)
    far = last - first > MAX_SPAN
    if far or (not asked and last > datetime.now(UTC).year):
        remedy = "" if far else f", or --date COLUMN:{form} if they lie ahead"
        raise DataError(f"{where}: its years have two digits, which would be read as {first} to {last}; write four digits{remedy}")


def readings(words: Iterable[str], forms: Iterable[str] = FORMATS) -> dict[str, dict[str, datetime]]:
    """Return the formats that fit all words, with what they read; formats that read the same count once.

    Examples
    --------
    >>> list(readings(["1/2/2024", "3/4/2024"])), list(readings(["1/2/2024", "31/1/2024"]))
    (['%d/%m/%Y', '%m/%d/%Y'], ['%d/%m/%Y'])
    """
    listed = set(words)
    fitting: dict[str, dict[str, datetime]] = {}
    for one in forms:
        try:
            times = {word: datetime.strptime(word, one) for word in listed}
        except ValueError:
            continue
        if times not in fitting.values():
            fitting[one] = times
    return fitting


def looks_like_dates(words: Iterable[str]) -> bool:
    """Whether one format fits all of some words.

    Examples
    --------
    >>> looks_like_dates(["1.3.2024", "17.11.2025"]), looks_like_dates(["1.3", "17.11"])
    (True, False)
    """
    listed = set(words)
    return bool(listed and readings(listed))


def read_dates(options: str | Iterable[str] | None) -> tuple[tuple[str, str], ...]:
    """Read ``COLUMN,…`` or ``COLUMN:FORMAT,…``, as text or as a list.

    Examples
    --------
    >>> read_dates("visit,born:%d/%m/%Y")
    (('visit', 'auto'), ('born', '%d/%m/%Y'))
    """
    pairs = [one.partition(":%") for one in read_list(options, "--date COLUMN,… or COLUMN:FORMAT,…")]
    return tuple((name.strip(), f"%{form}" if sign else AUTO) for name, sign, form in pairs)


def usual_dates(cells: CellRules, tables: Sequence[pa.Table]) -> CellRules:
    """Return the rules for new files: where all files wrote dates alike, a new one with few rows is read so, too."""
    dates = []
    for name, form in cells.dates:
        fields = [table.schema.field(name).metadata or {} for table in tables if name in table.column_names]
        written = {field.get(WRITTEN.encode(), b"").decode() for field in fields} - {""}
        usual = written.pop() if form == AUTO and len(written) == 1 else ""
        dates.append((name, f"{AUTO}:{usual}" if usual else form))
    return replace(cells, dates=tuple(dates))


def _first_odd(cells: list[str | None], forms: Iterable[str]) -> tuple[int, str]:
    """Return the first row, counted from 1, that does not fit the format which fits most rows, and that format where it fits any."""
    fits = {form: [cell is None or bool(readings([cell], [form])) for cell in cells] for form in forms}
    best = max(fits, key=lambda form: sum(fits[form]))
    any_fit = any(fit and cell is not None for fit, cell in zip(fits[best], cells, strict=True))
    return fits[best].index(False) + 1, best if any_fit else ""
