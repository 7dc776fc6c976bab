"""Repairs that a user asks for before samples are split: labels that are spelled in different ways, columns that are no features.

What nobody asked to repair is only named: ``label_variants`` finds labels that may mean the same.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from emdcfl.core.errors import ConfigError
from emdcfl.core.units import names
from emdcfl.data.own.parts import Note, Part, Raw, sort_words

NUMBER = re.compile(r"[-+]?\d+(\.\d*)?")


@dataclass(frozen=True)
class Cleaning:
    """What is repaired in a user's files.

    Attributes
    ----------
    merge_labels : bool
        Labels that differ only in capitals, spaces or in how a letter is stored become one, in small letters.
    label_map : pairs of str
        Labels to rename.
    """

    merge_labels: bool = False
    label_map: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, merge_labels: bool | None = None, label_map: str | None = None) -> Cleaning:
        """Read the options ``merge_labels`` and ``label_map`` (``OLD=NEW,…``)."""
        if not isinstance(merge_labels, bool | None):
            raise ConfigError(f"expected merge_labels = true or false, got {merge_labels!r}")
        pairs = [pair.partition("=") for pair in (label_map or "").split(",") if pair.strip()]
        if any(not old.strip() or not sign or not new.strip() for old, sign, new in pairs):
            raise ConfigError(f"expected --label-map OLD=NEW,… as in 0=benign,1=malignant; got {label_map!r}")
        return cls(bool(merge_labels), tuple((old.strip(), new.strip()) for old, _, new in pairs))

    @classmethod
    def of_options(cls, options: Mapping[str, Any]) -> Cleaning:
        """Read the repairs from the options of a scenario of own files."""
        return cls.of(options.get("merge_labels"), options.get("label_map"))

    def clean(self, raw: Raw) -> Raw:
        """Return a client's samples, repaired."""
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
