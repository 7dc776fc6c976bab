r"""Tell from the cells of tables what a column holds, and what makes it doubtful as a feature.

A column copies the label if at every site each of its values goes with one class, or its classes lie in ranges that do not overlap, so that
chance would do it with a probability below :math:`10^{-3}` for all columns together. For classes of :math:`n_k` rows, numbers lie in
separate ranges by chance with :math:`K!\prod_k n_k!/n!`. A column of more values than classes, each with one class, numbers cases.
A column copies numbers to predict if its correlation with them is 1 or −1.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf, lgamma, log

import numpy as np
from numpy.typing import NDArray

from emdcfl.core.optional import pa
from emdcfl.data.own.checking.columns import FEW, ID_NAME, SHARE_OF_TEXT, ColumnProfile, Doubt, SiteColumn, add_up, odd_words
from emdcfl.data.own.formats.dates import looks_like_dates
from emdcfl.data.own.formats.readers import GAPS
from emdcfl.data.own.parts import Labels, Part, Raw, is_numbers
from emdcfl.data.own.tables import is_numeric, number_matrix, number_values, text_values

NUMBER_NAME = re.compile(
    r"(^|[_\W])(mrn|ssn|uuid|guid|key|record|case|index|row|unnamed|number(?![_\W]*of)|name|\w*nummer|zip|plz)([_\W]|id|no|nr|$)", re.I
)
PAIR = re.compile(r"\d+(\.\d+)?\s*/\s*\d+(\.\d+)?")
"""Two numbers in a cell, as of blood pressure."""
MARKED = re.compile(r"[-+]?\d+[.,]\d+|[-+]?\d{1,3}")
"""A fraction, or a short number among fractions: of a CSV, these are text where its other numbers have the other decimal mark."""
MISSING_CODES = (-9, -99, -999, -9999, 99, 999, 9999, 99999)
"""Numbers that stand for a missing value in many studies."""
CHANCE = 1e-3
COPY = 0.9999
"""Correlation from which a column counts as a copy of the numbers to predict, perhaps in other units."""
ROWS_OF_A_CASE = 3
"""Rows per value, on average, from which values may number cases."""


@dataclass
class _Facts:
    """A column in one table of a site."""

    site: str
    kind: pa.DataType
    rows: int
    missing: int
    values: pa.ChunkedArray
    low: float = np.nan
    high: float = np.nan
    counts: bool = False
    rises: bool = False
    """Whether whole numbers rise from row to row, as numbers do that are given in order."""
    coded: bool = False
    """Whether numbers begin with 0, as codes do."""
    separated: bool = False
    words: Counter[str] = field(default_factory=Counter)


def profile_columns(raws: Sequence[Raw], label: str) -> dict[str, ColumnProfile]:
    """Describe all columns but the label, in the order of the tables."""
    parts = [(raw.name, part) for raw in raws for part in raw.parts.values() if len(part)]
    codes = {raw.name: raw.codes for raw in raws}
    facts: dict[str, list[_Facts]] = {}
    for site, part in parts:
        for name, piece in _facts(site, part, label, codes[site]).items():
            facts.setdefault(name, []).append(piece)
    labels = [_alike(part.labels) for _, part in parts]
    chance = sum(_log_chance(one) for one in labels)
    enough = log(CHANCE / max(len(facts), 1))
    sites = {site for site, _ in parts}
    found: dict[str, ColumnProfile] = {}
    for name, pieces in facts.items():
        doubt, odd = _doubt(name, pieces)
        if doubt == Doubt.ONE_VALUE and len(sites) == 1:
            doubt = None  # other sites, which are elsewhere, may have other values
        if {piece.site for piece in pieces} != sites:
            doubt = doubt or Doubt.SOME_SITES
        elif len(pieces) == len(parts) and _copies_label(pieces, labels, chance, enough):
            doubt = Doubt.LABEL_COPY
        elif doubt is None and len(pieces) == len(parts) and _tells_cases(pieces, labels, enough):
            doubt = Doubt.CASES
        found[name] = with_units(ColumnProfile(name, _kind(pieces, doubt), _by_site(pieces, doubt), doubt, odd, _different(pieces, doubt)))
    return found


def with_units(column: ColumnProfile) -> ColumnProfile:
    """Suspect other units at a site whose numbers all lie outside the range of the other sites; or a column by which sites were divided."""
    if column.doubt is not None or column.kind != "number":
        return column
    ranges = column.ranges
    ordered = sorted(ranges.values())
    if len(ordered) > 2 and all(one[1] < other[0] for one, other in pairwise(ordered)):
        return replace(column, doubt=Doubt.RANGES)
    lows, highs = sorted(low for low, _ in ordered)[:2], sorted((high for _, high in ordered), reverse=True)[:2]

    def lies_apart(low: float, high: float) -> bool:  # from the others: a site at the end of all ranges is compared with the second
        return high < lows[low == lows[0]] or low > highs[high == highs[0]]

    if 2 * sum(low == high for low, high in ordered) >= len(ordered) > 2:
        return column  # facts about sites, of which one is always the largest
    apart = [site for site, (low, high) in ranges.items() if len(ranges) > 1 and lies_apart(low, high)]
    return replace(column, doubt=Doubt.UNITS, odd=tuple(apart)) if apart else column


def _facts(site: str, part: Part, label: str, codes: Collection[str]) -> dict[str, _Facts]:
    table: pa.Table = part.x
    kinds = {name: kind for name, kind in zip(table.column_names, table.schema.types, strict=True) if name != label}
    found: dict[str, _Facts] = {}
    numeric = [name for name, kind in kinds.items() if is_numeric(kind)]
    numbers = number_matrix(table, numeric)
    missing = np.isnan(numbers).sum(axis=0)
    low, high = np.fmin.reduce(numbers, axis=0), np.fmax.reduce(numbers, axis=0)
    steps = np.diff(numbers, axis=0)
    counts = (steps == 1).all(axis=0) & (len(numbers) > 1)
    rises = np.asarray((steps > 0).all(axis=0) | (steps < 0).all(axis=0)) & (len(numbers) > FEW)
    separated = _separated(numbers, _alike(part.labels))
    at = {name: i for i, name in enumerate(numeric)}
    for name, kind in kinds.items():
        values = table.column(name)
        if name in at:
            i, whole = at[name], pa.types.is_integer(kind)
            told = {"counts": counts[i] and whole, "rises": rises[i] and whole, "coded": name in codes and whole, "separated": separated[i]}
            found[name] = _Facts(site, kind, len(part), int(missing[i]), values, float(low[i]), float(high[i]), **told)
        else:
            words = text_values(values)
            found[name] = _Facts(site, kind, len(part), words.count(""), values, words=Counter(filter(None, words)))
    return found


def _alike(labels: Labels) -> Labels:
    """Labels without capitals and spaces around them, so that spellings do not hide a copy; numbers as they are."""
    if is_numbers(labels):
        return labels
    return np.char.lower(np.char.strip(labels))


def _separated(numbers: NDArray[np.float64], labels: Labels) -> NDArray[np.bool_]:
    """Whether the classes lie in ranges of a column that do not overlap; no class at all in a table of one class.

    Of numbers to predict: whether a column is a multiple of them.
    """
    if is_numbers(labels):
        return np.array([_is_multiple(column, labels) for column in numbers.T], dtype=bool)
    classes = np.unique(labels)
    if not 1 < len(classes) <= FEW or not numbers.shape[1]:
        return np.full(numbers.shape[1], len(classes) == 1)
    rows = [numbers[labels == one] for one in classes]
    low, high = (np.stack([reduce.reduce(one, axis=0) for one in rows]) for reduce in (np.fmin, np.fmax))
    order = np.argsort(low, axis=0)
    low, high = np.take_along_axis(low, order, axis=0), np.take_along_axis(high, order, axis=0)
    return np.asarray((high[:-1] < low[1:]).all(axis=0), dtype=bool)


def _is_multiple(column: NDArray[np.float64], target: Labels) -> bool:
    known = ~np.isnan(column)
    if known.sum() <= 2:
        return False
    a, b = column[known] - column[known].mean(), (target[known] - target[known].mean()).astype(np.float64)
    length = float(np.linalg.norm(a) * np.linalg.norm(b))
    return length > 0 and abs(float(a @ b)) > COPY * length


def _log_chance(labels: Labels) -> float:
    """Logarithm of the probability that numbers without a relation to the labels lie in separate ranges."""
    if is_numbers(labels):
        return -inf
    counts = np.unique(labels, return_counts=True)[1].tolist()
    return lgamma(len(counts) + 1) + sum(lgamma(n + 1) for n in counts) - lgamma(len(labels) + 1)


def _copies_label(pieces: Sequence[_Facts], labels: Sequence[Labels], chance: float, enough: float) -> bool:
    """Whether a column tells the label at every site."""
    if sum(piece.missing for piece in pieces) * 2 > sum(piece.rows for piece in pieces):
        return False
    if all(piece.separated and not piece.words for piece in pieces):
        return chance < enough
    if any(is_numbers(own) for own in labels) or not all(_few_values(piece) for piece in pieces):
        return False
    pairs = Counter(
        (word, str(one))
        for piece, own in zip(pieces, labels, strict=True)
        for word, one in zip(text_values(piece.values), own.tolist(), strict=True)
        if word
    )
    values = Counter(word for word, _ in pairs)
    if len(values) < 2 or max(values.values()) > 1:
        return False
    classes = Counter[str]()
    for (_, one), n in pairs.items():
        classes[one] += n
    total = sum(pairs.values())
    return len(classes) > 1 and (total - len(values)) * log(max(classes.values()) / total) < enough


def _tells_cases(pieces: Sequence[_Facts], labels: Sequence[NDArray[np.str_]], enough: float) -> bool:
    """Whether each value goes with one class at every site, in several rows: numbers of cases, series or visits, not a feature."""
    told = 0.0
    for piece, own in zip(pieces, labels, strict=True):
        if piece.missing or not (piece.words or pa.types.is_integer(piece.kind)):
            return False
        values = len(piece.values.unique())
        classes, codes, counts = np.unique(own, return_inverse=True, return_counts=True)
        if not max(2, len(classes)) < values <= len(own) / ROWS_OF_A_CASE:
            return False
        numbers = np.unique(np.asarray(piece.values), return_inverse=True)[1]
        if len(np.unique(numbers * len(classes) + codes)) > values:
            return False
        told += (len(own) - values) * log(counts.max() / len(own))
    return told < enough


def _few_values(piece: _Facts) -> bool:
    return len(piece.words) <= FEW if piece.words else bool(pa.types.is_integer(piece.kind)) and piece.high - piece.low < FEW


def _doubt(name: str, pieces: Sequence[_Facts]) -> tuple[Doubt | None, tuple[str, ...]]:
    """Say what a column, given by site and split, is instead of a feature."""
    full = [piece for piece in pieces if piece.missing < piece.rows]
    words = add_up(piece.words for piece in full)
    odd = [odd_words(piece.words) for piece in full if piece.words]
    mixed = any(0 < one.total() < SHARE_OF_TEXT * piece.words.total() for one, piece in zip(odd, [p for p in full if p.words], strict=True))
    if mixed:
        return Doubt.TEXT_AMONG_NUMBERS, tuple(dict.fromkeys(word for one in odd for word in one))
    temporal = [bool(pa.types.is_temporal(piece.kind)) for piece in full]
    dated = all(known or looks_like_dates(list(piece.words)[:FEW]) for known, piece in zip(temporal, full, strict=True))
    if dated and any(temporal):
        return Doubt.DATES, ()
    if not full or any(bool(piece.words) != bool(full[0].words) for piece in full):
        return None, ()
    kind = full[0].kind
    if all(len(piece.words) == 1 if piece.words else piece.low == piece.high for piece in full):
        same = len(words) == 1 if words else len({piece.low for piece in full}) == 1
        return (Doubt.ONE_VALUE if same else Doubt.PER_SITE), ()
    if dated:
        return Doubt.DATES, ()
    if all(piece.counts for piece in full):
        return Doubt.ROWS, ()
    if not words and (code := _missing_code(full)) is not None:
        return Doubt.CODE, (f"{code:g}",)
    if not words and not pa.types.is_integer(kind):
        return None, ()
    named = ID_NAME.search(name) or NUMBER_NAME.search(name) or all(p.rises for p in full) or any(p.coded for p in full)
    if not words and not named:
        return None, ()
    distinct = [len(piece.words) if words else len(piece.values.unique()) for piece in full]
    if max(distinct) <= FEW:
        return None, ()
    marked = [word for word in words if word.lower() not in GAPS]
    if any("." in word or "," in word for word in marked) and all(MARKED.fullmatch(word) for word in marked):
        return Doubt.POINTS, ()
    if named:
        return Doubt.IDS, ()
    if words and all(PAIR.fullmatch(word) for word in words):
        return Doubt.PAIRS, ()
    return (Doubt.FREE_TEXT if all(2 * n > piece.rows - piece.missing for n, piece in zip(distinct, full, strict=True)) else None), ()


def _missing_code(pieces: Sequence[_Facts]) -> float | None:
    """Return a usual code for missing values that occurs more than once: below 0 where no other value is, or far from all of them."""
    ends = [end for end in (min(p.low for p in pieces), max(p.high for p in pieces)) if end in MISSING_CODES]
    for end in ends:
        values = np.concatenate([number_values(piece.values) for piece in pieces])
        others = values[(values != end) & ~np.isnan(values)]
        if (values == end).sum() < 2 or not len(others):
            continue
        if (end < 0 <= others.min()) or np.abs(others - end).min() > max(np.ptp(others), 1.0):
            return float(end)
    return None


def _kind(pieces: Sequence[_Facts], doubt: Doubt | None) -> str:
    present = [piece for piece in pieces if piece.missing < piece.rows]
    if not present:
        return "empty"
    textual, dated = [bool(piece.words) for piece in present], [bool(pa.types.is_temporal(piece.kind)) for piece in present]
    if doubt == Doubt.DATES or (any(dated) and all(date or text for date, text in zip(dated, textual, strict=True))):
        return "date"
    return "category" if all(textual) else "number" if not any(textual) else "mixed"


def _by_site(pieces: Sequence[_Facts], doubt: Doubt | None) -> dict[str, SiteColumn]:
    sites: dict[str, list[_Facts]] = {}
    for piece in pieces:
        sites.setdefault(piece.site, []).append(piece)
    return {site: _site_column(own, doubt) for site, own in sites.items()}


def _site_column(pieces: Sequence[_Facts], doubt: Doubt | None) -> SiteColumn:
    ends = [end for piece in pieces for end in (piece.low, piece.high) if end == end]
    words = add_up(piece.words for piece in pieces)
    rows, missing = (sum(counts) for counts in zip(*((piece.rows, piece.missing) for piece in pieces), strict=True))
    return SiteColumn(rows, missing, min(ends, default=None), max(ends, default=None), words, len(words) or _different(pieces, doubt))


def _different(pieces: Sequence[_Facts], doubt: Doubt | None) -> int:
    """Count the different identifiers in tables that may share some."""
    if doubt != Doubt.IDS:
        return 0
    return len({value for piece in pieces for value in piece.values.unique().to_pylist()} - {None})
