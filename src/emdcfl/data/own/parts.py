"""From a client's samples with text labels to a ``Site``: splits, classes, and notes. Shared by folders, tables and arrays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from emdcfl.core import keys
from emdcfl.core.errors import DataError
from emdcfl.core.units import NAMED_IN_FULL, names
from emdcfl.data.split import stratified_indices
from emdcfl.data.types import Site, Split

FRACTIONS = (0.6, 0.2, 0.2)
MIN_SAMPLES = 10
MIN_VALIDATION = 64
"""Validation samples below which distances to other sites are noisy."""
FEW = 20
"""Validation samples up to which a calibrated tolerance may not be able to separate a site from any other."""
MIXED = "all"
MOST_WORDS = 5
"""Labels or files named in a note."""
SPLITS = ("train", "val", "test")

Text = NDArray[np.str_]
Divided = dict[str, dict[str, "Part"]]
"""Client → split → samples."""


@dataclass(frozen=True)
class Part:
    """Samples (an array or an Arrow table: anything with ``take``) and their labels as text."""

    x: Any
    labels: Text

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: NDArray[np.int64]) -> Part:
        return Part(self.x[rows] if isinstance(self.x, np.ndarray) else self.x.take(rows), self.labels[rows])


@dataclass(frozen=True)
class Raw:
    """A client's samples by split name, or all of them under ``"all"``. ``origin`` names its file or folder in messages."""

    name: str
    origin: str
    parts: Mapping[str, Part]


@dataclass(frozen=True)
class Note:
    """Something the user should know about one client, or, without one, about a file.

    ``{n}`` in the text stands for ``count``, ``{words}`` for ``words``.
    """

    client: str
    origin: str
    text: str
    count: int = 0
    words: tuple[str, ...] = ()


def write_notes(notes: Iterable[Note]) -> list[str]:
    """Write every text once, with all clients it applies to.

    Examples
    --------
    >>> write_notes([Note("a", "a.csv", "rows left out: {n}", 1), Note("b", "b.csv", "rows left out: {n}", 3), Note("b", "b.csv", "small")])
    ['clients a, b: rows left out: 1 to 3', "client 'b' (b.csv): small"]
    """
    grouped: dict[str, list[Note]] = {}
    for note in notes:
        grouped.setdefault(note.text, []).append(note)
    written = []
    for text, same in grouped.items():
        clients = list(dict.fromkeys(note.client for note in same))
        who = names(clients) if len(clients) > 1 else f"client {clients[0]!r} ({same[0].origin})" if clients[0] else same[0].origin
        counts = [note.count for note in same]
        words = list(dict.fromkeys(word for note in same for word in note.words))
        shown = ", ".join(words[:MOST_WORDS]) + (f" and {len(words) - MOST_WORDS} more" if len(words) > MOST_WORDS else "")
        count = str(counts[0]) if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
        listed = "clients " if 1 < len(clients) <= NAMED_IN_FULL else ""
        written.append(f"{listed}{who}: {text.replace('{n}', count).replace('{words}', shown)}")
    return written


def prepare(where: str, raws: Sequence[Raw], seed: int, fractions: Sequence[float]) -> tuple[Divided, tuple[str, ...], list[Note]]:
    """Split every client's samples and name the classes; return splits by client, classes and notes."""
    if len(raws) < 2:
        found = f"1 client ({raws[0].name!r})" if raws else "no clients"
        raise DataError(f"{where}: expected at least two clients with samples, got {found}; add another")
    divided = {raw.name: divide(raw, seed, fractions) for raw in raws}
    classes = class_names(divided)
    notes: list[Note] = []
    for raw in raws:
        parts = divided[raw.name]
        for split in ("val", "test"):
            parts[split], more = known_only(raw.name, raw.origin, split, parts[split], classes)
            notes += more
        notes += warnings(raw.name, raw.origin, parts)
    return divided, classes, notes


def divide(raw: Raw, seed: int, fractions: Sequence[float] = FRACTIONS) -> dict[str, Part]:
    """Return train, val and test: those given; the others are cut out of the given ones, class by class, with a keyed seed."""
    rng = keys.generator(seed, raw.name, 0, "split")
    total = sum(len(part) for part in raw.parts.values())
    if total < MIN_SAMPLES:
        raise DataError(f"client {raw.name!r} ({raw.origin}) has {total} samples; at least {MIN_SAMPLES} are needed")
    given = {name: part for name, part in raw.parts.items() if len(part)}
    if MIXED in given:
        rows = stratified_indices(label_codes(given[MIXED].labels), fractions, rng)
        found = dict(zip(SPLITS, (given[MIXED].take(r) for r in rows), strict=True))
    else:
        if "train" not in given:
            raise DataError(f"client {raw.name!r} ({raw.origin}) has no training samples")
        found = dict(given)
        for name, fraction in (("test", fractions[2]), ("val", fractions[1] / (fractions[0] + fractions[1]))):
            if name not in found:
                keep, held = stratified_indices(label_codes(found["train"].labels), (1 - fraction, fraction), rng)
                found[name], found["train"] = found["train"].take(held), found["train"].take(keep)
    for name in SPLITS:
        if not len(found[name]):
            raise DataError(f"client {raw.name!r} ({raw.origin}) has no {name} samples left after splitting {total}; add samples")
    return {name: found[name] for name in SPLITS}


def class_names(divided: Mapping[str, Mapping[str, Part]]) -> tuple[str, ...]:
    """Union of the training labels of all clients; sorted as numbers where all are numbers."""
    words = {str(label) for parts in divided.values() for label in np.unique(parts["train"].labels)}
    if len(words) < 2:
        raise DataError(f"all training samples have the same label {next(iter(words), '')!r}: at least two classes are needed")
    return tuple(sort_words(words))


def sort_words(words: set[str]) -> list[str]:
    """Sort numerically where every word is a number, else alphabetically."""
    try:
        return sorted(words, key=float)
    except ValueError:
        return sorted(words)


def known_only(name: str, origin: str, split: str, part: Part, classes: Sequence[str]) -> tuple[Part, list[Note]]:
    """Drop samples whose label is not among the classes, with a note."""
    unseen = sorted(set(part.labels.tolist()) - set(classes))
    if not unseen:
        return part, []
    keep = np.flatnonzero(np.isin(part.labels, list(classes)))
    dropped = len(part) - len(keep)
    if not len(keep):
        raise DataError(f"client {name!r} ({origin}): none of the {split} labels ({', '.join(unseen[:5])}) occurs in training")
    text = f"{split} samples left out because training lacks their label ({{words}}): {{n}}"
    return part.take(keep), [Note(name, origin, text, dropped, tuple(unseen))]


def warnings(name: str, origin: str, parts: Mapping[str, Part]) -> list[Note]:
    """Return notes on one client: classes with one sample, one class only, a small validation split."""
    found = []
    counts = Counter(label for part in parts.values() for label in part.labels.tolist())
    lone = tuple(sorted(str(label) for label, count in counts.items() if count == 1))
    if lone:
        found.append(Note(name, origin, "only one sample of class {words}, so it is in one split only", words=lone))
    if len(counts) == 1:
        found.append(Note(name, origin, "all samples have the same label ({words})", words=tuple(counts)))
    m = len(parts["val"])
    if m < MIN_VALIDATION:
        text = f"{{n}} validation samples; with fewer than {MIN_VALIDATION}, distances are noisy"
        text += f"; with {FEW} or fewer, a client may not be compared"
        found.append(Note(name, origin, text, m))
    return found


def to_split(x: NDArray[Any], labels: Text, classes: Sequence[str]) -> Split:
    """Arrays to tensors, labels to class numbers."""
    number = {label: i for i, label in enumerate(classes)}
    y = np.array([number[label] for label in labels.tolist()], dtype=np.int64)
    return Split(torch.from_numpy(np.ascontiguousarray(x)), torch.from_numpy(y))


def to_site(name: str, arrays: Mapping[str, NDArray[Any]], parts: Mapping[str, Part], classes: Sequence[str]) -> Site:
    """Build the site from the encoded samples of each split."""
    splits = {split: to_split(arrays[split], parts[split].labels, classes) for split in SPLITS}
    return Site(name, splits["train"], splits["val"], {"test": splits["test"]})


def label_codes(labels: Text) -> NDArray[np.int64]:
    """Number the different labels in sorted order."""
    return np.unique(labels, return_inverse=True)[1].astype(np.int64)
