"""One client's samples on their way to a ``Site``: labels still text, splits not yet made. Shared by folders, tables and arrays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from emdcfl.core import keys
from emdcfl.core.errors import DataError
from emdcfl.data.split import stratified_indices
from emdcfl.data.types import Site, Split

FRACTIONS = (0.6, 0.2, 0.2)
MIN_SAMPLES = 10
MIN_VALIDATION = 64
FEW = 20
"""Validation samples up to which calibrated tolerances may refuse nobody, by the number of sites (``transport.fewest``)."""
MIXED = "all"
SPLITS = ("train", "val", "test")

Text = NDArray[np.str_]


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
    """What a client brought: parts by split name, or one part under ``"all"``. ``origin`` names its file or folder in messages."""

    name: str
    origin: str
    parts: Mapping[str, Part]


def divide(raw: Raw, seed: int, fractions: Sequence[float] = FRACTIONS) -> dict[str, Part]:
    """Return train, val and test: those given, the others cut out of what there is, class by class, with a keyed seed."""
    rng = keys.generator(seed, raw.name, 0, "split")
    total = sum(len(part) for part in raw.parts.values())
    if total < MIN_SAMPLES:
        raise DataError(f"client {raw.name!r} ({raw.origin}) has {total} samples; at least {MIN_SAMPLES} are needed")
    given = {name: part for name, part in raw.parts.items() if len(part)}
    if MIXED in given:
        rows = stratified_indices(_codes(given[MIXED].labels), fractions, rng)
        found = dict(zip(SPLITS, (given[MIXED].take(r) for r in rows), strict=True))
    else:
        if "train" not in given:
            raise DataError(f"client {raw.name!r} ({raw.origin}) has no training samples")
        found = dict(given)
        for name, fraction in (("test", fractions[2]), ("val", fractions[1] / (fractions[0] + fractions[1]))):
            if name not in found:
                keep, held = stratified_indices(_codes(found["train"].labels), (1 - fraction, fraction), rng)
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


def known_only(name: str, origin: str, split: str, part: Part, classes: Sequence[str]) -> tuple[Part, list[str]]:
    """Drop samples whose label is not among the classes, and say so."""
    unseen = sorted(set(part.labels.tolist()) - set(classes))
    if not unseen:
        return part, []
    keep = np.flatnonzero(np.isin(part.labels, list(classes)))
    dropped = len(part) - len(keep)
    if not len(keep):
        raise DataError(f"client {name!r} ({origin}): none of the {split} labels ({', '.join(unseen[:5])}) occurs in training")
    return part.take(keep), [
        f"client {name!r} ({origin}): {dropped} {split} samples with labels unseen in training ({', '.join(unseen[:5])}) were left out"
    ]


def warnings(name: str, origin: str, parts: Mapping[str, Part]) -> list[str]:
    """What the user should know about one client: lone samples, one class only, a validation split too small for a clear test."""
    found = []
    counts = Counter(label for part in parts.values() for label in part.labels.tolist())
    lone = sorted(str(label) for label, count in counts.items() if count == 1)
    if lone:
        found.append(f"client {name!r} ({origin}): only one sample of class {', '.join(lone[:5])}, so it is in one split only")
    if len(counts) == 1:
        found.append(f"client {name!r} ({origin}): all samples have the label {next(iter(counts))!r}")
    m = len(parts["val"])
    if m < MIN_VALIDATION:
        alone = "; with so few it may be compared with nobody and served alone" if m <= FEW else ""
        found.append(
            f"client {name!r} ({origin}): {m} validation samples; below {MIN_VALIDATION} distances to other sites are noisy{alone}"
        )
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


def _codes(labels: Text) -> NDArray[np.int64]:
    return np.unique(labels, return_inverse=True)[1].astype(np.int64)
