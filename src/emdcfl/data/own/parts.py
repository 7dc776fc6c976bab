"""From a client's samples and labels to a ``Site``: splits and classes. Shared by folders, tables and arrays.

Labels are text, which names classes, or float64 where numbers are to be predicted.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from emdcfl.core import keys
from emdcfl.core.errors import DataError
from emdcfl.core.units import some
from emdcfl.data.own import defaults
from emdcfl.data.own.notes import Note
from emdcfl.data.own.splitting import GROUP, RANDOM, SPLIT, TIME, Keys, SplitRule
from emdcfl.data.split import Indices, grouped_indices, ordered_indices, stratified_indices
from emdcfl.data.types import Preprocess, Scenario, Site, Split, Target

FRACTIONS = (0.6, 0.2, 0.2)
MIN_SAMPLES = 10
MIN_VALIDATION = 64
"""Validation samples below which distances to other sites are noisy."""
FEW = 20
"""Validation samples up to which a calibrated tolerance may not be able to separate a site from any other."""
MIXED = "all"
MAX_CLIENTS = 40
"""Clients that an error lists."""
APART = "leave it out (--leave-out), or place it in a finished run without its labels (emdcfl place RUN FILE --unlabelled)"
"""What can be done with a site that cannot train."""
SPLITS = ("train", "val", "test")

Text = NDArray[np.str_]
Labels = NDArray[Any]
"""Text, or float64."""
Divided = dict[str, dict[str, "Part"]]
"""Client → split → samples."""


@dataclass(frozen=True)
class Part:
    """Samples (an array or an Arrow table: anything with ``take``), their labels, and what they are split by."""

    x: Any
    labels: Labels
    by: Keys = field(default_factory=dict)
    kind: str = "text"
    """What the labels were before they became text, one of ``LABEL_KINDS``."""

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: NDArray[np.int64]) -> Part:
        x = self.x[rows] if isinstance(self.x, np.ndarray) else self.x.take(rows)
        return replace(self, x=x, labels=self.labels[rows], by={meaning: values[rows] for meaning, values in self.by.items()})


@dataclass(frozen=True)
class Raw:
    """A client's samples by split name, or all of them under ``"all"``; messages name its file or folder, and the label column."""

    name: str
    origin: str
    parts: Mapping[str, Part]
    rule: SplitRule = RANDOM
    label: str = ""
    units: Mapping[str, str] = field(default_factory=dict)
    """Column of numbers with a unit → the unit, as its cells have it."""
    codes: frozenset[str] = frozenset()
    """Columns of numbers that begin with 0 in the file."""

    @property
    def total(self) -> int:
        return sum(map(len, self.parts.values()))


def prepare(where: str, raws: Sequence[Raw], seed: int, *, alone: bool = False) -> tuple[Divided, tuple[str, ...], list[Note]]:
    """Split every client's samples and name the classes; return splits by client, classes and notes.

    ``alone``: this is one client of several that are elsewhere.
    """
    if len(raws) < 2 and not alone:
        found = f"1 client ({raws[0].name!r})" if raws else "no clients"
        raise DataError(
            f"{where}: expected at least two clients with samples, got {found}; add another, or give the folder that holds the clients"
        )
    small = {raw.name: f"{raw.name} ({raw.total})" for raw in raws if raw.total < MIN_SAMPLES}
    if len(small) > 1:
        many = len(small) > MAX_CLIENTS  # so many may be the values of a wrong column
        listed, flag = some([*small.values()]) if many else ", ".join(small.values()), "SITE,…" if many else shlex.quote(",".join(small))
        raise DataError(
            f"{where}: {len(small)} clients have fewer than {MIN_SAMPLES} samples: {listed}; add some, or leave them out "
            f"(--leave-out {flag}) and place them later without their labels (emdcfl place RUN FILE --unlabelled)"
        )
    divided = {raw.name: divide(raw, seed) for raw in raws}
    classes = () if holds_numbers(divided) else class_names(divided, least=1 if alone else 2)
    notes: list[Note] = []
    for raw in raws:
        divided[raw.name] = known_only(raw, divided[raw.name], classes, notes)
        notes += warnings(raw, divided[raw.name])
    return divided, classes, notes


def rows_of(names: Text) -> dict[str, Indices]:
    """Name, in alphabetical order → the rows that have it.

    Examples
    --------
    >>> {name: rows.tolist() for name, rows in rows_of(np.array(["b", "a", "b"])).items()}
    {'a': [1], 'b': [0, 2]}
    """
    found, number = np.unique(names, return_inverse=True)
    rows = np.split(np.argsort(number, kind="stable"), np.cumsum(np.bincount(number))[:-1])
    return dict(zip(found.tolist(), rows, strict=False))  # without rows there is one part


def divide(raw: Raw, seed: int) -> dict[str, Part]:
    """Return train, val and test: those given; the others are cut out of the given ones by the client's rule, with a keyed seed."""
    rng = keys.generator(seed, raw.name, 0, "split")
    total = raw.total
    if total < MIN_SAMPLES:
        raise DataError(f"client {raw.name!r} ({raw.origin}) has {total} samples; at least {MIN_SAMPLES} are needed; add some, {APART}")
    given = {name: part for name, part in raw.parts.items() if len(part)}
    if MIXED in given and SPLIT in given[MIXED].by:
        words = given[MIXED].by[SPLIT]
        given = {name: given[MIXED].take(np.flatnonzero(words == name)) for name in SPLITS if (words == name).any()}
    if MIXED in given:
        rows = _cut(raw, given[MIXED], FRACTIONS, rng)
        found = dict(zip(SPLITS, (given[MIXED].take(r) for r in rows), strict=True))
    else:
        if "train" not in given:
            only = f", only {' and '.join(f'{len(given[name])} of {name}' for name in SPLITS if name in given)}"
            raise DataError(f"client {raw.name!r} ({raw.origin}) has no training samples{only}; give it some, {APART}")
        found = dict(given)
        for name, fraction in (("test", FRACTIONS[2]), ("val", FRACTIONS[1] / (FRACTIONS[0] + FRACTIONS[1]))):
            if name not in found:
                keep, held = _cut(raw, found["train"], (1 - fraction, fraction), rng)
                found[name], found["train"] = found["train"].take(held), found["train"].take(keep)
    for name in SPLITS:
        if not len(found[name]):
            labels = {label for part in found.values() for label in np.asarray(part.labels).tolist()}
            said = (
                f"has no {name} samples left after splitting {total}, with {len(labels)} different labels; check the label, or add samples"
            )
            raise DataError(f"client {raw.name!r} ({raw.origin}) {said}")
    return {name: found[name] for name in SPLITS}


def _cut(raw: Raw, part: Part, fractions: Sequence[float], rng: np.random.Generator) -> tuple[Indices, ...]:
    """Cut by time, by group, by both (a group is as old as its newest sample), or at random; the last two class by class."""
    codes = None if GROUP not in part.by else np.unique(part.by[GROUP], return_inverse=True)[1].astype(np.int64)
    if codes is not None and codes.max(initial=0) + 1 < len(fractions):
        raise DataError(
            f"client {raw.name!r} ({raw.origin}): {raw.rule.group!r} has {codes.max(initial=0) + 1} different values; "
            f"at least {len(fractions)} are needed, one for each split"
        )
    if TIME in part.by:
        times = np.asarray(part.by[TIME], dtype=np.float64)
        if codes is not None:
            newest = np.full(codes.max() + 1, -np.inf)
            np.maximum.at(newest, codes, times)
            times = newest[codes]
        return ordered_indices(times, fractions)
    if codes is not None:
        return grouped_indices(label_codes(part.labels), codes, fractions, rng)
    return stratified_indices(label_codes(part.labels), fractions, rng)


def class_names(divided: Mapping[str, Mapping[str, Part]], *, least: int = 2) -> tuple[str, ...]:
    """Union of the training labels of all clients; sorted as numbers where all are numbers."""
    words = {str(label) for parts in divided.values() for label in np.unique(parts["train"].labels)}
    if len(words) < least:
        raise DataError(f"all training samples have the same label {next(iter(words), '')!r}: at least two classes are needed")
    return tuple(sort_words(words))


def label_kind(kinds: Iterable[str], classes: Sequence[str]) -> str:
    """Return what the labels of all clients were; whole numbers are integers where they were at any client.

    Examples
    --------
    >>> label_kind(["int", "float"], ["0", "1"]), label_kind(["int", "float"], ["0", "0.5"]), label_kind(["int", "text"], ["0", "1"])
    ('int', 'float', 'text')
    """
    found = set(kinds)
    if found == {"bool"} and set(classes) <= {"True", "False"}:
        return "bool"
    if not found <= {"int", "float"} or not found or not all(_reads(float, word) for word in classes):  # renamed classes are words
        return "text"
    return "int" if "int" in found and all(_reads(int, word) for word in classes) else "float"


def _reads(kind: Callable[[str], Any], word: str) -> bool:
    try:
        kind(word)
    except ValueError:
        return False
    return True


def sort_words(words: set[str]) -> list[str]:
    """Sort numerically where every word is a number, else alphabetically."""
    listed = sorted(words)  # 1 and 01 are equal, nan equals nothing, and the order of a set differs between processes
    try:
        return sorted(listed, key=lambda word: (math.isnan(float(word)), float(word)))
    except ValueError:
        return listed


def known_only(raw: Raw, parts: Mapping[str, Part], classes: Sequence[str], notes: list[Note]) -> dict[str, Part]:
    """Return a client's parts without samples whose label is not among the classes; appends a note for each part that has such."""
    known = dict(parts)
    for split, part in parts.items():
        unseen = [] if is_numbers(part.labels) else sorted(set(part.labels.tolist()) - set(classes))
        if not unseen:
            continue
        keep = np.flatnonzero(np.isin(part.labels, list(classes)))
        which = "" if split == MIXED else f"{split} "
        if not len(keep):
            raise DataError(
                f"client {raw.name!r} ({raw.origin}): none of the {which}labels ({', '.join(unseen[:5])}) occurs in training, "
                f"which has {', '.join(classes[:5])}{', …' if len(classes) > 5 else ''}; write them alike"
            )
        known[split] = part.take(keep)
        text = f"{which}samples left out because training lacks their label ({{words}}): {{n}}"
        notes.append(Note(raw.name, raw.origin, text, len(part) - len(keep), tuple(unseen), left_out=True))
    return known


def warnings(raw: Raw, parts: Mapping[str, Part]) -> list[Note]:
    """Return notes on one client: classes with one sample, one class only, a small validation split."""
    found = []
    numbers = is_numbers(parts["train"].labels)
    counts = Counter(label for part in parts.values() for label in part.labels.tolist())
    lone = () if numbers else tuple(sorted(str(label) for label, count in counts.items() if count == 1))
    if lone:
        found.append(Note(raw.name, raw.origin, "only one sample of class {words}, so it is in one split only", words=lone))
    if len(counts) == 1:
        found.append(Note(raw.name, raw.origin, "all samples have the same label ({words})", words=tuple(map(str, counts))))
    m = len(parts["val"])
    if m < MIN_VALIDATION:
        text = f"{{n}} validation samples; with fewer than {MIN_VALIDATION}, distances are noisy"
        text += f"; with {FEW} or fewer, a client may not be compared"
        found.append(Note(raw.name, raw.origin, text, m))
    return found


def is_numbers(labels: Labels) -> bool:
    """Whether labels are numbers to predict instead of classes."""
    return labels.dtype.kind == "f"


def holds_numbers(divided: Mapping[str, Mapping[str, Part]]) -> bool:
    """Whether the clients' labels are numbers to predict."""
    return any(is_numbers(parts["train"].labels) for parts in divided.values())


def find_target(divided: Divided) -> Target | None:
    """Return mean and standard deviation of the numbers to predict, pooled over training samples; ``None`` for classes."""
    if not holds_numbers(divided):
        return None
    pooled = np.concatenate([parts["train"].labels for parts in divided.values()]).astype(np.float64)
    std = float(pooled.std())
    if std <= 1e-12 * max(1.0, abs(float(pooled.mean()))):
        raise DataError(f"all training samples have the same number to predict, {pooled[0]:g}: there is nothing to learn; check the label")
    return Target(float(pooled.mean()), std)


def to_split(x: NDArray[Any], labels: Labels, classes: Sequence[str], target: Target | None = None) -> Split:
    """Arrays to tensors, labels to class numbers or to standardised numbers."""
    if target is not None:
        z = ((labels.astype(np.float64) - target.mean) / target.std).astype(np.float32)
        return Split(torch.from_numpy(np.ascontiguousarray(x)), torch.from_numpy(z))
    number = {label: i for i, label in enumerate(classes)}
    y = np.array([number[label] for label in labels.tolist()], dtype=np.int64)
    return Split(torch.from_numpy(np.ascontiguousarray(x)), torch.from_numpy(y))


def to_site(
    name: str, arrays: Mapping[str, NDArray[Any]], parts: Mapping[str, Part], classes: Sequence[str], target: Target | None = None
) -> Site:
    """Build the site from the encoded samples of each split."""
    splits = {split: to_split(arrays[split], parts[split].labels, classes, target) for split in SPLITS}
    return Site(name, splits["train"], splits["val"], {"test": splits["test"]})


def assemble(
    name: str,
    arrays: Mapping[str, Mapping[str, NDArray[Any]]],
    divided: Divided,
    classes: tuple[str, ...],
    preprocess: Preprocess,
    model: defaults.Model,
    **facts: Any,
) -> Scenario:
    """Build a scenario from the encoded samples of every client's splits; ``facts`` are further fields of ``Scenario``."""
    target = find_target(divided)
    shape = next(iter(arrays.values()))["train"].shape[1:]
    return Scenario(
        name=name,
        sites=tuple(to_site(client, arrays[client], parts, classes, target) for client, parts in divided.items()),
        classes=classes,
        preprocess=preprocess,
        model=defaults.recipe(model, shape=shape, classes=len(classes) or 1),
        defaults=defaults.training(model) | defaults.FINE_TUNING,
        method_defaults=defaults.method_defaults(target),
        target=target,
        label_kind=label_kind([parts["train"].kind for parts in divided.values()], classes),
        **facts,
    )


def label_codes(labels: Labels) -> NDArray[np.int64]:
    """Number the different labels in sorted order; numbers to predict are all of one kind."""
    if is_numbers(labels):
        return np.zeros(len(labels), dtype=np.int64)
    return np.unique(labels, return_inverse=True)[1].astype(np.int64)
