"""Repairs that a user asks for before samples are split: labels that are spelled in different ways, columns that are no features.

What nobody asked to repair is only named: ``label_variants`` finds labels that may mean the same, ``doubtful_columns`` identifiers, dates,
row numbers and columns that tell sites apart.
"""

from __future__ import annotations

import re
import shlex
import unicodedata
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from emdcfl.core.errors import ConfigError, DataError, nearest
from emdcfl.core.optional import arrow
from emdcfl.core.units import names
from emdcfl.data.own.parts import Note, Part, Raw, sort_words
from emdcfl.data.own.readers import GAPS

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.compute as pc
else:
    pa, pc = arrow(), arrow("compute")

NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
DATE = re.compile(r"\s*(\d{1,2}[./-]\d{1,2}[./-]\d{2,4}|\d{4}[./-]\d{1,2}[./-]\d{1,2})(\D.*)?")
ID_NAME = re.compile(
    r"(^|[_\W])(id|patient|subject|person|participant|user|animal|machine|device|serial|document|specimen|lot|batch)s?([_\W]|id|no|nr|$)",
    re.I,
)
NUMBER_NAME = re.compile(r"(^|[_\W])(mrn|ssn|uuid|guid|key|record|case|index|row|unnamed|number|name)([_\W]|id|no|nr|$)", re.I)
SHARE_OF_TEXT = 0.2
"""Share of text among numbers up to which it looks like a mistake; more may be codes of diagnoses."""
FEW = 20
"""Different values up to which a column may name kinds (of machines, say) instead of single ones."""


@dataclass(frozen=True)
class Cleaning:
    """What is repaired in a user's files.

    Attributes
    ----------
    merge_labels : bool
        Labels that differ only in capitals, spaces or in how a letter is stored become one, in small letters.
    label_map : pairs of str
        Labels to rename.
    drop, only : str
        Columns of tables that are no features, or the only ones that are.
    """

    merge_labels: bool = False
    label_map: tuple[tuple[str, str], ...] = ()
    drop: tuple[str, ...] = ()
    only: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        merge_labels: bool | None = None,
        label_map: str | None = None,
        drop: str | Sequence[str] | None = None,
        only: str | Sequence[str] | None = None,
    ) -> Cleaning:
        """Read the options: ``label_map`` as ``OLD=NEW,…``, columns as a list or ``COLUMN,…``."""
        if drop and only:
            raise ConfigError("expected --drop or --only, got both; --only already leaves out all other columns")
        if not isinstance(merge_labels, bool | None):
            raise ConfigError(f"expected merge_labels = true or false, got {merge_labels!r}")
        pairs = [pair.partition("=") for pair in (label_map or "").split(",") if pair.strip()]
        if any(not old.strip() or not sign or not new.strip() for old, sign, new in pairs):
            raise ConfigError(f"expected --label-map OLD=NEW,… as in 0=benign,1=malignant; got {label_map!r}")
        renamed = tuple((old.strip(), new.strip()) for old, _, new in pairs)
        return cls(bool(merge_labels), renamed, _listed(drop, "drop"), _listed(only, "only"))

    @classmethod
    def of_options(cls, options: Mapping[str, Any]) -> Cleaning:
        """Read the repairs from the options of a scenario of own files."""
        return cls.of(options.get("merge_labels"), options.get("label_map"), options.get("drop"), options.get("only"))

    def select(self, raws: Sequence[Raw], label: str | None) -> list[Raw]:
        """Return the clients with the columns that are wanted; the label stays. A column may be missing at some clients, not at all."""
        tables = [] if label is None else [part.x.column_names for raw in raws for part in raw.parts.values()]
        keep = self.columns({name for table in tables for name in table}, label)

        def cut(part: Part) -> Part:
            return replace(part, x=part.x.select([name for name in part.x.column_names if name in keep or name == label]))

        return [replace(raw, parts={split: cut(part) for split, part in raw.parts.items()}) for raw in raws] if tables else list(raws)

    def columns(self, known: Collection[str], label: str | None) -> set[str]:
        """Return the columns that are features, of those that any client has; ``label`` is ``None`` for images."""
        wanted = self.drop or self.only
        flag = f"--{'drop' if self.drop else 'only'} {','.join(wanted)}"
        if wanted and label is None:
            raise DataError(f"{flag} is for columns of tables, but these are images; leave it out")
        unknown = next((name for name in wanted if name not in known or name == label), None)
        if unknown is not None:
            reason = "is the label" if unknown == label else f"is at no client: {nearest(unknown, set(known) - {str(label)})}"
            raise DataError(f"{flag}: column {unknown!r} {reason}")
        return set(self.only) or set(known) - set(self.drop)

    def clean(self, raw: Raw) -> Raw:
        """Return a client's samples with repaired labels."""
        return replace(raw, parts={split: self._clean(part) for split, part in raw.parts.items()})

    def _clean(self, part: Part) -> Part:
        if not self.merge_labels and not self.label_map:
            return part
        spell = folded if self.merge_labels else str
        renamed = {spell(old): spell(new) for old, new in self.label_map}
        known = {word: renamed.get(spell(word), spell(word)) for word in set(part.labels.tolist())}
        return replace(part, labels=np.array([known[word] for word in part.labels.tolist()], dtype=str))


AS_THEY_ARE = Cleaning()


def folded(label: str) -> str:
    r"""Return a label in small letters, with single spaces, and numbers without a fraction of zero.

    Examples
    --------
    >>> folded(" Benign\u00a0 TUMOUR"), folded("1.0"), folded("1.5")
    ('benign tumour', '1', '1.5')
    """
    text = " ".join(unicodedata.normalize("NFKC", label).casefold().split())
    return re.sub(r"\.0*$", "", text) if NUMBER.fullmatch(text) else text


def label_variants(labels: Mapping[str, Collection[str]]) -> Iterator[str]:
    """Yield one sentence for labels that differ only in spelling, and one where some sites write numbers and others words.

    Examples
    --------
    >>> list(label_variants({"a": ["benign"], "b": ["Benign"], "c": ["benign"]}))
    ["labels are spelled in different ways: 'Benign' at b, 'benign' at a, c"]
    >>> list(label_variants({"a": ["0", "1"], "b": ["no", "yes"]}))
    ['labels are numbers at a (0, 1) and words at b (no, yes)']
    """
    at: dict[str, list[str]] = {}
    for site, words in labels.items():
        for word in set(words):
            at.setdefault(word, []).append(site)
    spellings: dict[str, list[str]] = {}
    for word in sorted(at):
        spellings.setdefault(folded(word), []).append(word)
    variants = [", ".join(f"{w!r} at {names(at[w])}" for w in words) for words in spellings.values() if len(words) > 1]
    if variants:
        yield f"labels are spelled in different ways: {_some(variants, '; ')}"
    coded = [site for site, words in labels.items() if words and all(NUMBER.fullmatch(word.strip()) for word in words)]
    worded = [site for site, words in labels.items() if not any(NUMBER.fullmatch(word.strip()) for word in words)]
    if coded and worded:
        numbers, words = ({word for site in sites for word in labels[site]} for sites in (coded, worded))
        yield f"labels are numbers at {names(coded)} ({_some(sort_words(numbers))}) and words at {names(worded)} ({_some(sorted(words))})"


def variant_notes(where: str, raws: Sequence[Raw], *, files: bool = True) -> list[Note]:
    """Return notes on labels that may mean the same, with the remedy."""
    labels = {raw.name: {word for part in raw.parts.values() for word in part.labels.tolist()} for raw in raws}
    notes = []
    for sentence in label_variants(labels):
        flag = "--label-map NUMBER=WORD,…" if sentence.startswith("labels are numbers") else "--merge-labels"
        remedy = f"if they mean the same, add {flag}" if files else "if they mean the same, write them alike"
        notes.append(Note("", where, "{words}; " + remedy, words=(sentence,)))
    return notes


def _some(words: Sequence[str], between: str = ", ") -> str:
    return between.join(words[:5]) + (f" and {len(words) - 5} more" if len(words) > 5 else "")


def doubtful_columns(where: str, raws: Sequence[Raw], label: str) -> list[Note]:
    """Name columns that look like identifiers, row numbers or dates, or have one value (at each site), with the remedy."""
    tables = [part.x for raw in raws for part in raw.parts.values()]
    shared = set.intersection(*(set(table.column_names) for table in tables)) - {label}
    columns = {name: [table.column(name) for table in tables] for name in tables[0].column_names if name in shared}
    found = {name: kind for name, values in columns.items() if (kind := _doubt(name, values))}
    if not found:
        return []
    shown = _some([f"{name!r} ({kind})" for name, kind in found.items()])
    listed = shlex.quote(",".join(found)) if len(found) <= FEW else "COLUMN,…"
    return [Note("", where, f"columns that may be no features: {{words}}; leave them out with --drop {listed}", words=(shown,))]


def mixed_columns(raws: Sequence[Raw], label: str) -> list[Note]:
    """Name columns of numbers with a few cells of text, which turn all their numbers into categories."""
    notes = []
    for raw in raws:
        for part in raw.parts.values():
            for name, column in zip(part.x.column_names, part.x.columns, strict=True):
                if name == label or not pa.types.is_string(column.type):
                    continue
                words = [word.strip() for word in column.drop_null().to_pylist()]
                odd = [word for word in words if not NUMBER.fullmatch(word) and word.lower() not in GAPS]
                if 0 < len(odd) < SHARE_OF_TEXT * len(words):
                    text = f"column {name!r} holds numbers and {{n}} cells of text ({{words}}), so its numbers count as categories; "
                    text += f"write numbers, leave the cells empty, or use --drop {shlex.quote(name)}"
                    notes.append(Note(raw.name, raw.origin, text, len(odd), tuple(dict.fromkeys(map(repr, odd)))))
    return notes


def _doubt(name: str, columns: Sequence[pa.ChunkedArray]) -> str | None:
    """Say what a column, given by site and split, is instead of a feature."""
    columns = [column.drop_null() for column in columns if len(column) > column.null_count]
    if not columns or any(column.type != columns[0].type for column in columns):
        return None
    kind = columns[0].type
    if pa.types.is_temporal(kind):
        return "dates"
    text, whole = pa.types.is_string(kind) or pa.types.is_large_string(kind), pa.types.is_integer(kind)
    if text or whole or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        ranges = [tuple(pc.min_max(column).as_py().values()) for column in columns]
        if all(low == high for low, high in ranges):
            return "one value" if len(set(ranges)) == 1 else "one value per site"
    if text and all(DATE.fullmatch(word) for column in columns for word in column.slice(0, FEW).to_pylist()):
        return "dates"
    if not text and not whole:
        return None
    numbered = whole and all(len(column) > 1 and bool((np.diff(column.to_numpy()) == 1).all()) for column in columns)
    if numbered:
        return "row numbers"
    distinct = min(pc.count_distinct(column).as_py() for column in columns)
    many = distinct > FEW and 2 * distinct > max(map(len, columns))
    if ID_NAME.search(name) or NUMBER_NAME.search(name):
        return "identifiers" if distinct > FEW else None
    return "identifiers or free text" if text and many else None


def _listed(columns: str | Sequence[str] | None, flag: str) -> tuple[str, ...]:
    """Read names of columns, as a list or as text with commas."""
    listed = columns.split(",") if isinstance(columns, str) else list(columns or ())
    if not all(isinstance(name, str) and name.strip() for name in listed):
        raise ConfigError(f"expected --{flag} COLUMN,… (in a config: a list of names), got {columns!r}")
    return tuple(name.strip() for name in listed)
