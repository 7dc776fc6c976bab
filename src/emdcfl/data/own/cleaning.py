"""Repairs that a user asks for before samples are split: labels that are spelled in different ways, columns that are no features.

What nobody asked to repair is only named: ``label_variants`` finds labels that may mean the same, ``columns.py`` identifiers, dates, row
numbers and columns that tell sites apart.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emdcfl.core.errors import ConfigError, DataError, nearest
from emdcfl.core.units import names, some
from emdcfl.data.own.checking.columns import ColumnProfile, SiteColumn, index_columns, spelled_differently
from emdcfl.data.own.checking.profiling import with_units
from emdcfl.data.own.formats.dates import read_dates
from emdcfl.data.own.formats.readers import NUMBER
from emdcfl.data.own.notes import Note
from emdcfl.data.own.parts import Part, Raw, is_numbers, sort_words
from emdcfl.data.own.tables import AS_WRITTEN, DROP_ROWS, CellRules, complete_rows, read_list

GAP_POLICIES = ("mean", DROP_ROWS)


@dataclass(frozen=True)
class Cleaning:
    """What is repaired in a user's files."""

    merge_labels: bool = False
    """Labels that differ only in capitals, spaces or in how a letter is stored become one, in small letters."""
    label_map: tuple[tuple[str, str], ...] = ()
    """Labels to rename."""
    drop: tuple[str, ...] = ()
    """Columns of tables that are no features."""
    only: tuple[str, ...] = ()
    """The only columns of tables that are."""
    cells: CellRules = AS_WRITTEN
    """Marks of missing values, and columns to read as dates."""
    gaps: str = "mean"
    """``mean``: a missing number becomes the pooled mean, with a column that says so. ``drop-rows``: rows with one are left out."""
    task: str | None = None
    """``classification`` or ``regression``: whether labels are classes or numbers to predict. Without it they are classes, and labels
    that look like measurements are refused."""

    @classmethod
    def of(cls, **options: Any) -> Cleaning:
        """Read those of ``CLEANING`` among a scenario's options: ``label_map`` as ``OLD=NEW,…``, lists as such or as text with commas."""
        merge_labels, label_map, drop, only, date, missing, gaps, task = (options.get(name) for name in CLEANING)
        if drop and only:
            raise ConfigError("expected --drop or --only, got both; --only already leaves out all other columns")
        if not isinstance(merge_labels, bool | None):
            raise ConfigError(f"expected merge_labels = true or false, got {merge_labels!r}")
        pairs = [pair.partition("=") for pair in (label_map or "").split(",") if pair.strip()]
        if any(not old.strip() or not sign or not new.strip() for old, sign, new in pairs):
            raise ConfigError(f"expected --label-map OLD=NEW,… as in 0=benign,1=malignant; got {label_map!r}")
        if gaps not in (None, *GAP_POLICIES):
            raise ConfigError(f"expected --gaps {' or '.join(GAP_POLICIES)}, got {gaps!r}")
        if read_task(task) == REGRESSION and (merge_labels or pairs):
            raise ConfigError("--merge-labels and --label-map are for classes, got --task regression; leave them out")
        renamed = tuple((old.strip(), new.strip()) for old, _, new in pairs)
        cells = CellRules(read_list(missing, "--missing MARK,…"), read_dates(date), task == REGRESSION)
        dropped, chosen = read_list(drop, "--drop COLUMN,…"), read_list(only, "--only COLUMN,…")
        return cls(bool(merge_labels), renamed, dropped, chosen, cells, gaps or "mean", task)

    def in_words(self) -> list[str]:
        """Say what is repaired; left out columns are listed elsewhere."""
        said = ["labels that differ only in capitals and spaces count as one"] if self.merge_labels else []
        if self.label_map:
            said.append(f"labels renamed: {', '.join(f'{old} → {new}' for old, new in self.label_map)}")
        if self.cells.missing:
            said.append(f"read as missing: {', '.join(self.cells.missing)}")
        if self.cells.dates:
            said.append(f"read as dates, in days since 1970: {', '.join(name for name, _ in self.cells.dates)}")
        return [*said, "rows with missing values are left out"] if self.gaps != "mean" else said

    def select(self, raws: Sequence[Raw], label: str | None, where: str) -> tuple[list[Raw], list[Note]]:
        """Return the clients with the columns that are wanted, and notes; the label stays.

        A column that is named may be missing at some clients, not at all. A column without a name that
        numbers the rows is left out unless ``only`` names it.
        """
        tables = [] if label is None else [part.x.column_names for raw in raws for part in raw.parts.values()]
        known = {name for table in tables for name in table}
        dividing = set(raws[0].rule.columns.values())
        keep = replace(self, drop=tuple(name for name in self.drop if name not in dividing)).columns(known, label)  # no features anyway
        undated = next((name for name, _ in self.cells.dates if name not in known | dividing), None)
        if undated is not None:
            raise DataError(f"--date {undated}: column {undated!r} is at no client: {nearest(undated, known - {str(label)})}")
        if label is None:
            return list(raws), []
        index = [name for name in index_columns(raws, label) if name in keep and name not in self.only]
        keep -= set(index)
        text = "column {words} has no name and numbers the rows, so it is left out; --only would keep it"
        notes = [Note("", where, text, words=tuple(map(repr, index)), left_out=True)] if index else []

        def cut(part: Part) -> Part:
            return replace(part, x=part.x.select([name for name in part.x.column_names if name in keep or name == label]))

        def cleaned(raw: Raw) -> Raw:
            units = {name: unit for name, unit in raw.units.items() if name in keep or name == label}
            return replace(raw, parts={split: cut(part) for split, part in raw.parts.items()}, units=units)

        return [self.full_rows(cleaned(raw), sorted(keep), notes) for raw in raws], notes

    def full_rows(self, raw: Raw, columns: Sequence[str], notes: list[Note]) -> Raw:
        """Return a client's rows without missing values in some columns, where such rows are left out; appends a note."""
        if self.gaps == "mean":
            return raw
        rows = {split: np.flatnonzero(complete_rows(part.x, columns)) for split, part in raw.parts.items()}
        lost = raw.total - sum(map(len, rows.values()))
        if lost and not any(map(len, rows.values())):
            raise DataError(
                f"client {raw.name!r} ({raw.origin}): every row has a missing value, so --gaps drop-rows leaves none; "
                "drop the column that is empty, or use --gaps mean"
            )
        if lost:
            notes.append(Note(raw.name, raw.origin, "rows with missing values left out (--gaps drop-rows): {n}", lost, left_out=True))
        return replace(raw, parts={split: part.take(rows[split]) for split, part in raw.parts.items()}) if lost else raw

    def columns(self, known: Collection[str], label: str | None) -> set[str]:
        """Return the columns that are features, of those that any client has; ``label`` is ``None`` for images."""
        wanted = self.drop or self.only
        flag = f"--{'drop' if self.drop else 'only'} {','.join(wanted)}"
        if wanted and label is None:
            raise DataError(f"{flag} is for columns of tables, but these are images; leave it out")
        if label is None and (self.cells.missing or self.cells.dates or self.gaps != "mean"):
            raise DataError("--date, --missing and --gaps are for tables, but these are images; leave them out")
        unknown = next((name for name in wanted if name not in known or name == label), None)
        if unknown is not None:
            reason = "is the label" if unknown == label else f"is at no client: {nearest(unknown, set(known) - {str(label)})}"
            raise DataError(f"{flag}: column {unknown!r} {reason}")
        return set(self.only) or set(known) - set(self.drop)

    def clean(self, raw: Raw) -> Raw:
        """Return a client's samples with repaired labels, as numbers where these are to be predicted."""
        if self.task == REGRESSION:
            return replace(raw, parts={split: _as_numbers(raw, part) for split, part in raw.parts.items()})
        cleaned = replace(raw, parts={split: self._clean(part) for split, part in raw.parts.items()})
        tables = [part.labels for part in raw.parts.values() if not isinstance(part.x, np.ndarray)]
        if tables:
            check_classes(np.concatenate(tables), f"client {raw.name!r} ({raw.origin}): label column {raw.label!r}", self.task)
        return cleaned

    def label(self, word: str) -> str:
        """Return the class that a label as it is spelled stands for."""
        spell = folded if self.merge_labels else str
        renamed = {spell(old): spell(new) for old, new in self.label_map}
        return renamed.get(spell(word), spell(word))

    def _clean(self, part: Part) -> Part:
        if not self.merge_labels and not self.label_map:
            return part
        known = {word: self.label(word) for word in set(part.labels.tolist())}
        return replace(part, labels=np.array([known[word] for word in part.labels.tolist()], dtype=str))


CLASSIFICATION, REGRESSION = "classification", "regression"
MAX_CLASSES = 1000
MEASURED, SHARE_OF_ROWS = 20, 0.2
"""Different numbers, and their share of the rows, beyond which labels look like measurements instead of classes."""


def read_task(task: Any) -> str | None:
    """Return what labels are, if anybody said so."""
    if task not in (None, CLASSIFICATION, REGRESSION):
        raise ConfigError(f"expected task = {CLASSIFICATION} or {REGRESSION}, got {task!r}")
    return None if task is None else str(task)


def check_classes(labels: NDArray[Any], who: str, task: str | None) -> None:
    """Refuse labels that cannot be classes, or that look like measurements while nobody said what they are; ``who`` names them."""
    words = np.unique(labels)
    if len(words) > MAX_CLASSES:
        raise DataError(f"{who} has {len(words)} different values; at most {MAX_CLASSES} classes are expected; {_ASK}")
    if task is None and len(words) > max(MEASURED, SHARE_OF_ROWS * len(labels)) and all(map(_is_number, words.tolist())):
        raise DataError(f"{who} has {len(words)} different numbers in {len(labels)} rows: classes or measurements? {_ASK}")


_ASK = "say --task regression to predict numbers, --task classification for classes (in Python task=), or name another --label"


def _is_number(word: Any) -> bool:
    try:
        return math.isfinite(float(word))
    except ValueError:
        return False


def _as_numbers(raw: Raw, part: Part) -> Part:
    if isinstance(part.x, np.ndarray):
        raise DataError(f"client {raw.name!r} ({raw.origin}): images in folders have classes, got --task regression; leave it out")
    wrong = next((word for word in part.labels.tolist() if not _is_number(word)), None)
    if wrong is not None:
        raise DataError(
            f"client {raw.name!r} ({raw.origin}): expected numbers in {raw.label!r} to predict, got {wrong!r}; correct it, or empty it"
        )
    return replace(part, labels=part.labels.astype(np.float64))


AS_THEY_ARE = Cleaning()
CLEANING = ("merge_labels", "label_map", "drop", "only", "date", "missing", "gaps", "task")
"""Options of a scenario of own files that are about cleaning."""


def folded(label: str) -> str:
    r"""Return a label in small letters, with single spaces, and numbers without a fraction of zero.

    Examples
    --------
    >>> folded(" Benign\u00a0 TUMOUR"), folded("1.0"), folded("1.5")
    ('benign tumour', '1', '1.5')
    """
    text = " ".join(unicodedata.normalize("NFKC", label).casefold().split())
    return re.sub(r"\.0*$", "", text) if NUMBER.fullmatch(text) else text


def label_variants(labels: Mapping[str, Collection[str]]) -> Iterator[tuple[str, str]]:
    """Yield what may be wrong with the sites' labels, each with the option that repairs it.

    That is: labels that differ only in spelling, numbers at some sites and words at others, and sites that share no label with another.

    Examples
    --------
    >>> list(label_variants({"a": ["benign"], "b": ["Benign"], "c": ["benign"]}))
    [('merge_labels', "labels are spelled in different ways: 'Benign' at b, 'benign' at a, c")]
    >>> list(label_variants({"a": ["0", "1"], "b": ["no", "yes"]}))
    [('label_map', 'labels are numbers at a (0, 1) and words at b (no, yes)')]
    >>> list(label_variants({"a": ["no", "yes"], "b": ["nein", "ja"], "c": ["yes"]}))
    [('label_map', 'sites share no label with another: b (ja, nein)')]
    """
    at: dict[str, list[str]] = {}
    for site, words in labels.items():
        for word in set(words):
            at.setdefault(word, []).append(site)
    variants = [", ".join(f"{w!r} at {names(at[w])}" for w in words) for words in spelled_differently(at, folded)]
    if variants:
        yield "merge_labels", f"labels are spelled in different ways: {some(variants, '; ')}"
    coded = [site for site, words in labels.items() if words and all(NUMBER.fullmatch(word.strip()) for word in words)]
    worded = [site for site, words in labels.items() if not any(NUMBER.fullmatch(word.strip()) for word in words)]
    if coded and worded:
        numbers, words = ({word for site in sites for word in labels[site]} for sites in (coded, worded))
        told = f"labels are numbers at {names(coded)} ({some(sort_words(numbers))}) and words at {names(worded)} ({some(sorted(words))})"
        yield "label_map", told
        return
    sites_with = Counter(word for words in labels.values() for word in {folded(word) for word in words})
    apart = {site: words for site, words in labels.items() if words and all(sites_with[folded(word)] == 1 for word in words)}
    if apart and len(labels) > 1:
        told = some([f"{names([site])} ({some(sort_words(set(words)))})" for site, words in apart.items()])
        yield "label_map", f"sites share no label with another: {told}"


def variant_notes(where: str, raws: Sequence[Raw], *, files: bool = True) -> list[Note]:
    """Return notes on names of sites and on labels that may mean the same, or other units where numbers are predicted, with the remedy."""
    notes: list[Note] = []
    if several := spelled_differently([raw.name for raw in raws], folded):
        text = "names of sites in several spellings, which count as different sites: {words}; write them alike"
        notes.append(Note("", where, text, words=tuple(", ".join(map(repr, same)) for same in several), doubt=True))
    if any(is_numbers(part.labels) for raw in raws for part in raw.parts.values()):
        return [*notes, *_target_notes(where, raws)]
    labels = {raw.name: {str(word) for part in raw.parts.values() for word in part.labels.tolist()} for raw in raws}
    for repair, sentence in label_variants(labels):
        flag = "--label-map OLD=NEW,…" if repair == "label_map" else "--merge-labels"
        remedy = f"if they mean the same, add {flag}" if files else "if they mean the same, write them alike"
        notes.append(Note("", where, "{words}; " + remedy, words=(sentence,), doubt=True))
    return notes


def _target_notes(where: str, raws: Sequence[Raw]) -> list[Note]:
    """Name sites whose numbers to predict all lie outside the range of the others': those of other units."""
    numbers = {raw.name: np.concatenate([part.labels for part in raw.parts.values()]) for raw in raws}
    ranges = {site: SiteColumn(len(own), 0, float(own.min()), float(own.max())) for site, own in numbers.items() if len(own)}
    column = with_units(ColumnProfile(raws[0].label, "number", ranges))
    if column.doubt is None:
        return []
    odd = column.odd or tuple(ranges)
    what = f"the numbers to predict{f' ({raws[0].label!r})' if raws[0].label else ''}"
    text = f"{what} at {{words}} lie apart from those of the other sites ({column.ranges_apart()}): if the units differ, convert them"
    return [Note("", where, text, words=(names(list(odd)),), doubt=True)]
