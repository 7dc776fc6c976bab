"""What the columns of tables hold: kind, range or words at every site, and notes on those that are doubtful as features."""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, timedelta
from enum import StrEnum
from functools import cached_property
from typing import Any

import numpy as np

from emdcfl.core.errors import DataError
from emdcfl.core.optional import pa
from emdcfl.core.units import names, some
from emdcfl.data.own.formats.readers import GAPS, NUMBER
from emdcfl.data.own.notes import Note
from emdcfl.data.own.parts import Raw
from emdcfl.data.own.tables import MAX_WORDS, is_numeric, most_frequent

ID_NAME = re.compile(
    r"(^|[_\W])(id([_\W]|$)|(ids?|patient|subject|person|participant|user|animal|machine|device|serial|document|specimen|lot|batch)"
    r"(s?[_\W]*(id|ids|no|nr|num|number|code|key|name|hash|pseudonym|\d+))?[_\W]*$)",
    re.I,
)
"""Names of columns that tell who or what was measured; ``lot_area`` tells something about it, and ``n_patients`` counts."""
REPEATS = 1.05
"""Rows per value from which an identifier names somebody measured repeatedly; a few may be typing errors."""
UNNAMED = re.compile(r"Unnamed: \d+(\.\d+)?|__index_level_\d+__")
"""How pandas calls a column without a name, usually an index that was written with the table."""
SHARE_OF_TEXT = 0.2
"""Share of text among numbers up to which it looks like a mistake; more may be codes of diagnoses."""
FEW = 20
"""Different values up to which a column may name kinds (of machines, say) instead of single ones."""
SHOWN_WORDS = 5
MAX_MORE_DIGITS = 6
"""Digits added to three where a column's numbers differ in late ones only."""


class Doubt(StrEnum):
    """Why a column may be no feature, or needs a repair; the gravest first."""

    LABEL_COPY = "copies the label"
    CASES = "one class per value"
    IDS = "identifiers"
    ROWS = "row numbers"
    PER_SITE = "one value per site"
    RANGES = "one range per site"
    FREE_TEXT = "identifiers or free text"
    PAIRS = "two numbers in a cell"
    POINTS = "numbers as text, or with another decimal mark"
    DATES = "dates"
    ONE_VALUE = "one value"
    CODE = "code for missing?"
    UNITS = "other units?"
    TEXT_AMONG_NUMBERS = "text among numbers"
    SOME_SITES = "only at some sites"


REPAIRABLE = frozenset({Doubt.CODE, Doubt.UNITS, Doubt.TEXT_AMONG_NUMBERS, Doubt.SOME_SITES})
"""Doubts about columns that are features once they are repaired."""


@dataclass(frozen=True)
class SiteColumn:
    """A column at one site: gaps, range of numbers (dates: days since 1970), and how often each word of text occurs."""

    rows: int
    missing: int
    low: float | None = None
    high: float | None = None
    words: Mapping[str, int] = field(default_factory=dict)
    different: int = 0
    """Different values, of text and of identifiers."""


@dataclass(frozen=True)
class ColumnProfile:
    """A column of all sites; ``doubt`` says why it may be no feature, ``odd`` the cells that are to blame."""

    name: str
    kind: str
    sites: Mapping[str, SiteColumn]
    doubt: Doubt | None = None
    odd: tuple[str, ...] = ()
    different: int = 0
    """Different identifiers at all sites together."""

    def as_dict(self) -> dict[str, Any]:
        """JSON values. Words of identifiers and free text are counted, not listed."""
        told = self.doubt not in (Doubt.IDS, Doubt.FREE_TEXT, Doubt.ROWS)
        return {
            "name": self.name,
            "kind": self.kind,
            "doubt": self.doubt,
            "sites": {
                site: {"rows": one.rows, "missing": one.missing}
                | ({"low": one.low, "high": one.high} if one.low is not None else {})
                | ({"different": one.different} if one.different else {})
                | ({"words": list(most_frequent(one.words, SHOWN_WORDS))} if one.words and told else {})
                for site, one in self.sites.items()
            },
        }

    def range_at(self, site: str) -> str:
        """The range or the words at a site, for people."""
        one = self.sites.get(site)
        if one is None:
            return "not there"
        if one.missing == one.rows:
            return "empty"
        if one.different and (self.doubt in (Doubt.IDS, Doubt.FREE_TEXT) or one.different > FEW):
            return f"{one.different} different"
        if one.words:
            words = most_frequent(one.words, SHOWN_WORDS)
            return ", ".join(words) + (f", {len(one.words) - len(words)} more" if len(one.words) > len(words) else "")
        assert one.low is not None
        assert one.high is not None
        low, high = (_day(end) if self.kind == "date" else _short(end, self.digits) for end in (one.low, one.high))
        return low if low == high else f"{low} to {high}"

    def range_over(self) -> str:
        """The range or the words over all sites."""
        ends = [end for both in self.ranges.values() for end in both]
        whole = SiteColumn(sum(one.rows for one in self.sites.values()), self.missing, min(ends, default=None), max(ends, default=None))
        text = replace(whole, words=self.words, different=self.different or len(self.words))
        parts = [whole] * bool(ends and self.words and not self.different) + [text]  # dates or numbers at some sites, text at others
        return "; ".join(replace(self, sites={"": part}).range_at("") for part in parts)

    def odd_one_out(self) -> str | None:
        """The site whose range lies farthest from the others', in units of the whole range; none where they overlap by half."""
        if len(self.ranges) < 2:
            return None
        lows, highs = np.array(list(self.ranges.values()), dtype=np.float64).T
        spread = float(highs.max() - lows.min()) or 1.0
        away = (np.abs(lows - np.median(lows)) + np.abs(highs - np.median(highs))) / spread
        return list(self.ranges)[int(away.argmax())] if away.max() > 0.5 else None

    def ranges_apart(self) -> str:
        """The ranges of all sites, those to blame first, for people."""
        return some([f"{site} {self.range_at(site)}" for site in sorted(self.sites, key=lambda site: site not in self.odd)], "; ")

    @cached_property
    def digits(self) -> int:
        """Digits that tell numbers of the column apart, which may be large beside their spread."""
        ends = [end for both in self.ranges.values() for end in both]
        spread, largest = max(ends, default=0.0) - min(ends, default=0.0), max(map(abs, ends), default=0.0)
        return 3 + min(max(0, math.floor(math.log10(largest / spread))), MAX_MORE_DIGITS) if largest > spread > 0 else 3

    @property
    def missing(self) -> int:
        return sum(one.missing for one in self.sites.values())

    @cached_property
    def words(self) -> Counter[str]:
        """How often each word of text occurs, over all sites."""
        return add_up(one.words for one in self.sites.values())

    @cached_property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """Site → range of its numbers, where it has any."""
        return {site: (one.low, one.high) for site, one in self.sites.items() if one.low is not None and one.high is not None}


def index_columns(raws: Sequence[Raw], label: str) -> list[str]:
    """Columns without a name that number the rows: an index that was written with the table."""
    tables = [part.x for raw in raws for part in raw.parts.values() if len(part)]
    names = {name for table in tables for name in table.column_names if UNNAMED.fullmatch(name) and name != label}

    def numbers_rows(column: pa.ChunkedArray) -> bool:
        return bool(pa.types.is_integer(column.type)) and not column.null_count and len(column.unique()) == len(column)

    return sorted(name for name in names if all(numbers_rows(table.column(name)) for table in tables if name in table.column_names))


def check_categories(columns: Collection[ColumnProfile]) -> list[str]:
    """Refuse identifiers as categories; return a note on columns with more words than are encoded."""
    notes = []
    for column in columns:
        n = len(column.words)
        if n <= MAX_WORDS or column.kind not in ("category", "mixed", "date"):
            continue
        if column.doubt in (Doubt.IDS, Doubt.FREE_TEXT, Doubt.PAIRS, Doubt.POINTS, Doubt.DATES):
            other = {
                Doubt.DATES: f", or read it with --date {shlex.quote(column.name)}",
                Doubt.PAIRS: ", or write them into two columns",
                Doubt.POINTS: ", or write them as the file's other numbers",
            }.get(column.doubt, ", or use --group if its rows belong together")
            raise DataError(
                f"column {column.name!r} has {n} different texts: it looks like {column.doubt}; at most {MAX_WORDS} categories "
                f"are encoded; leave it out (--drop {shlex.quote(column.name)}){other}"
            )
        notes.append(
            f"column {column.name!r} has {n} different texts: {MAX_WORDS} that are at most sites and in most rows are encoded, "
            "the others as none of them; group them, or use --drop"
        )
    return notes


def column_notes(where: str, raws: Sequence[Raw], columns: Collection[ColumnProfile]) -> list[Note]:
    """Name columns that may be no features, hold a code for missing values, or a few cells of text among numbers, with the remedy."""
    notes = []
    doubtful = [column for column in columns if column.doubt and column.doubt not in REPAIRABLE]
    if doubtful:
        shown = some([f"{column.name!r} ({column.doubt})" for column in doubtful])
        listed = shlex.quote(",".join(column.name for column in doubtful)) if len(doubtful) <= FEW else "COLUMN,…"
        dates = ",".join(column.name for column in doubtful if column.doubt == Doubt.DATES and column.words)
        as_dates = f", or read dates with --date {shlex.quote(dates)}" if dates else ""
        cases = next((column.name for column in doubtful if column.doubt == Doubt.CASES), None)
        together = f"; if rows with one value belong together, use --group {shlex.quote(cases)}" if cases else ""
        together += "; write two numbers into two columns" if any(column.doubt == Doubt.PAIRS for column in doubtful) else ""
        text = f"columns that may be no features: {{words}}; leave them out with --drop {listed}{as_dates}{together}"
        notes.append(Note("", where, text, words=(shown,), doubt=True))
    empty = {column.name: [site for site, one in column.sites.items() if one.missing == one.rows] for column in columns}
    empty = {name: sites for name, sites in empty.items() if 0 < len(sites) < len(raws)}
    if empty:
        shown = some([f"{name!r} at {names(sites)}" for name, sites in empty.items()], "; ")
        listed = shlex.quote(",".join(empty)) if len(empty) <= FEW else "COLUMN,…"
        text = f"columns without any value at a site tell which site it is: {{words}}; leave them out with --drop {listed}"
        notes.append(Note("", where, text, words=(shown,), doubt=True))
    for column in columns:
        if column.doubt == Doubt.CODE:
            text = f"column {column.name!r} holds {{words}} several times, unlike its other values; if it marks missing values, add "
            notes.append(Note("", where, f"{text}--missing {','.join(column.odd)}", words=column.odd, doubt=True))
        if column.doubt == Doubt.UNITS:
            text = f"column {column.name!r} at {{words}} lies apart from the other sites ({column.ranges_apart()}): if the units differ, "
            text += f"convert it, or use --drop {shlex.quote(column.name)}"
            notes.append(Note("", where, text, words=column.odd, doubt=True))
    for column in columns:
        words = column.words if column.kind == "category" and not column.doubt else ()
        if several := spelled_differently(words, lambda word: " ".join(word.casefold().split())):
            text = f"column {column.name!r} has words in several spellings, which count as different: {{words}}; write them alike"
            notes.append(Note("", where, text, words=tuple(", ".join(map(repr, same)) for same in several)))
    origins = {raw.name: raw.origin for raw in raws}
    for column in columns:
        if column.doubt == Doubt.TEXT_AMONG_NUMBERS:
            for site, one in column.sites.items():
                odd = odd_words(one.words)
                if 0 < sum(odd.values()) < SHARE_OF_TEXT * sum(one.words.values()):
                    text = f"column {column.name!r} holds numbers and {{n}} cells of text ({{words}}), so its numbers count as categories; "
                    text += f"write numbers, leave the cells empty, use --missing WORD,… or --drop {shlex.quote(column.name)}"
                    notes.append(Note(site, origins[site], text, sum(odd.values()), tuple(map(repr, odd)), doubt=True))
    return notes


def unit_notes(where: str, raws: Sequence[Raw]) -> list[Note]:
    """Say which columns are read as numbers with a unit, and at which sites they have none."""
    found: dict[str, dict[str, str]] = {}
    for raw in raws:
        for name, unit in raw.units.items():
            if all(is_numeric(part.x.schema.field(name).type) for part in raw.parts.values()):  # else text among numbers
                found.setdefault(name, {})[raw.name] = unit
    notes = []
    if found:
        units = [f"{name!r} ({', '.join(dict.fromkeys(own.values()))})" for name, own in found.items()]
        notes.append(Note("", where, "numbers with a unit, read as numbers: {words}", words=tuple(units)))
    for name, own in found.items():
        if without := [raw.name for raw in raws if raw.name not in own]:
            text = f"column {name!r} has a unit at {names(list(own))} ({', '.join(dict.fromkeys(own.values()))}) and none at {{words}}: "
            text += f"if that is another, convert it, or use --drop {shlex.quote(name)}"
            notes.append(Note("", where, text, words=(names(without),), doubt=True))
    return notes


def spelled_differently(words: Iterable[str], fold: Callable[[str], str]) -> list[list[str]]:
    """Group the words that are the same once they are folded, where there are several of them."""
    alike: dict[str, list[str]] = {}
    for word in sorted(words):
        alike.setdefault(fold(word), []).append(word)
    return [same for same in alike.values() if len(same) > 1]


def add_up(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    """Add up counts in one counter: ``sum`` would copy it for each of them."""
    total = Counter[str]()
    for one in counts:
        total.update(one)
    return total


def odd_words(words: Mapping[str, int]) -> Counter[str]:
    """Words that are neither numbers nor marks of missing values, in the order they appear."""
    return Counter({word: n for word, n in words.items() if not NUMBER.fullmatch(word.replace(",", ".")) and word.lower() not in GAPS})


def _short(number: float, digits: int) -> str:
    return f"{number:.0f}" if float(number).is_integer() and abs(number) < 1e6 else f"{number:.{digits}g}"


def _day(days: float) -> str:
    try:
        return str(date(1970, 1, 1) + timedelta(days=days))
    except OverflowError:
        return f"day {days:.0f}"
