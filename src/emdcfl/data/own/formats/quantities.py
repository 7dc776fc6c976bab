"""Numbers with a unit in cells of text: ``12 mg``, ``37,2 °C``, ``85%``, ``€ 1,200``. A column of one unit is read as numbers.

A unit stands behind the number, money also before it. Behind a space it may be any short word; without one it must be known, because
``12a`` may be a code. Numbers that begin with a zero (``007 B``) are codes, too.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Mapping
from shlex import quote

from emdcfl.core.errors import DataError
from emdcfl.core.optional import pa
from emdcfl.core.units import names

MAX_TEXT_SHARE = 0.2
"""Share of cells without the column's unit up to which it is read as numbers; what they hold is then text among numbers."""
MAX_UNIT_LENGTH = 16
_NUMBER = r"[-+]?(?:(?:0|[1-9]\d*)(?:[.,]\d+)*|[.,]\d+)(?:[eE][-+]?\d+)?"
_MONEY = r"€|\$|£|¥|EUR|USD|GBP|CHF|Fr\.?"
_BASE = r"g|l|m|s|h|d|y|mol|osm|eq|IU|IE|U|Pa|bar|Hz|V|A|W|Wh|J|cal|N|K|B|bit|ohm|Ω"
_FACTOR = rf"(?:[munpkMGdcµμ]?(?:{_BASE})[23²³]?|mmHg|cmH2O|bpm|min|hrs?|yrs?|lbs?|oz|in|ft|mph|ppm|ppb|pH|%|‰|°[CF]?|{_MONEY})"
_KNOWN = re.compile(rf"/?{_FACTOR}(?:[/·*]{_FACTOR})*", re.I)
_LETTER_ALONE = re.compile(r"[ghlms]", re.I)
_WORD = r"(?:[^\W\d_]|[%‰°€$£¥]|/(?=[^\W\d_]))[^\s;,<>()]*"
_AFTER = re.compile(rf"({_NUMBER})(\s*)({_WORD}(?:\s{_WORD})?)")
_BEFORE = re.compile(rf"({_MONEY})\s*({_NUMBER})")
_MICRO = {"mcg": "μg", "ug": "μg", "ul": "μl", "um": "μm", "umol": "μmol"}


def split_unit(cell: str) -> tuple[str, str] | None:
    """Return the number of a cell, as it is written, and its unit; None for any other cell.

    Examples
    --------
    >>> [split_unit(cell) for cell in ("12 mg", "37,2 °C", "85%", "€ 1,200", "12a", "007 B", "120/80 mmHg")]
    [('12', 'mg'), ('37,2', '°C'), ('85', '%'), ('1,200', '€'), None, None, None]
    """
    if len(cell) > 2 * MAX_UNIT_LENGTH:
        return None
    if money := _BEFORE.fullmatch(cell):
        return money[2], money[1]
    found = _AFTER.fullmatch(cell)
    if found is None or len(found[3]) > MAX_UNIT_LENGTH:
        return None
    unit = found[3]
    if not found[2] and (not _KNOWN.fullmatch(unit) or (len(unit) == 1 and unit.isalpha() and not _LETTER_ALONE.fullmatch(unit))):
        return None
    return found[1], unit


def is_money(unit: str) -> bool:
    return re.fullmatch(_MONEY, unit) is not None


def same_unit(unit: str) -> str:
    """Return one spelling for all of a unit's.

    Examples
    --------
    >>> same_unit("mm Hg") == same_unit("mmHg"), same_unit("µg") == same_unit("mcg"), same_unit("mg") == same_unit("g")
    (True, True, False)
    """
    text = "".join(unicodedata.normalize("NFKC", unit).split()).casefold()
    return _MICRO.get(text, text)


def find_unit(words: Mapping[str, int], numbers: Collection[str]) -> str | None:
    """Return the unit of a column, given how often each word occurs and which are plain numbers; None where it has none, or several."""
    spelled: Counter[str] = Counter()
    for word, n in words.items():
        if found := split_unit(word):
            spelled[found[1]] += n
    if not spelled:
        return None
    units: Counter[str] = Counter()
    for unit, n in spelled.items():
        units[same_unit(unit)] += n
    best, cells = units.most_common(1)[0]
    total, plain = sum(words.values()), sum(words[word] for word in numbers)
    if 2 * cells < total or total - cells - plain > MAX_TEXT_SHARE * total:
        return None
    return max((unit for unit in spelled if same_unit(unit) == best), key=lambda unit: spelled[unit])


def common_units(found: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return column → unit, given those of every client; a column in several units is an error, with the remedy."""
    units: dict[str, str] = {}
    for name in dict.fromkeys(name for own in found.values() for name in own):
        at: dict[str, list[str]] = {}
        for client, own in found.items():
            if name in own:
                at.setdefault(same_unit(own[name]), []).append(client)
        if len(at) > 1:
            where = "; ".join(f"{found[clients[0]][name]} at {names(clients)}" for clients in at.values())
            raise DataError(f"column {name!r} has different units ({where}): convert it to one, or leave it out with --drop {quote(name)}")
        units[name] = next(own[name] for own in found.values() if name in own)
    return units


def check_units(found: Mapping[str, str], expected: Mapping[str, str], origin: str) -> None:
    """Refuse a table with another unit than in training."""
    other = next((n for n, unit in found.items() if n in expected and same_unit(unit) != same_unit(expected[n])), None)
    if other is not None:
        raise DataError(f"column {other!r} of {origin} is in {found[other]}, in training in {expected[other]}; convert it")


def without_unit(column: pa.ChunkedArray, unit: str) -> pa.ChunkedArray:
    """Return a column of text with the numbers alone where a cell has this unit."""

    def bare(cell: str | None) -> str | None:
        found = None if cell is None else split_unit(cell.strip())
        return found[0] if found and same_unit(found[1]) == same_unit(unit) else cell

    return pa.chunked_array([pa.array([bare(cell) for cell in column.to_pylist()], pa.string())])
