r"""Do rows of the validation or test split lie suspiciously close to training rows?

Independent rows have near neighbours too. With :math:`k` neighbours in :math:`m` dimensions, :math:`(d_1/d_k)^m` is the smallest of
:math:`k - 1` uniform numbers, so :math:`P(d_1 < r\,d_k) = 1 - (1 - r^m)^{k-1}`. A held-out row is a near-duplicate where that is below
:math:`\alpha`; :math:`m` is estimated from the farther neighbours, which repeats of one patient do not reach. Rows of other sites, at the
same distance, say how often discrete tables coincide by chance; for a site alone, rows made of parts of two of its training rows do.

References
----------
Levina, Bickel (2004). Maximum Likelihood Estimation of Intrinsic Dimension. NeurIPS.
"""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median_low
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emdcfl.core import keys
from emdcfl.core.optional import pa
from emdcfl.core.units import some
from emdcfl.data.own.checking.columns import ID_NAME, REPEATS
from emdcfl.data.own.notes import Note, write_notes
from emdcfl.data.own.parts import SPLITS, Divided, Raw
from emdcfl.data.own.splitting import RANDOM, SplitRule
from emdcfl.data.own.tables import is_numeric, number_values
from emdcfl.data.types import Scenario, Site

ALPHA = 0.01
NEIGHBOURS = 20
MAX_HELD, MAX_TRAINED = 300, 1500
"""Rows looked at per site: a distance matrix of this size takes milliseconds."""
MAX_OTHERS, MAX_ALONE = 50, 16
"""Other sites that a site is compared with, drawn anew for each: all together, and one by one."""
SHARE = 0.05
"""Share of near-duplicates among the held-out rows from which they are named."""

MANY_COPIES, SHARE_OF_COPIES = 3, 0.02
"""Equal samples of a site, and their share, from which they are named."""
FEW_VALUES = 10
"""Different values at a site below which a column is a category, unless its name says that it tells who was measured."""
MOSTLY_DIFFERENT = 0.5
ORDERS = 8
"""Orders of the columns of a site's training samples, to see how often samples coincide."""
TIME_NAME = re.compile(
    r"(^|[_\W\d])(date|datum|year|jahr|time|timestamp|zeit|quarter|month|monat|week|day|tag|period|epoch)s?([_\W\d]|$)", re.I
)
"""Names of columns of numbers that may say when a row was measured."""
MIN_TIMES = 10
"""Different values at every site from which rows in their order look like a series."""
NEWER = "if newer rows are to be predicted from older ones, use --split"

CHANCE = 3.0
"""Standard errors up to which equal pairs inside a site count as chance."""
BEYOND_CHANCE = 3.0
"""Times as many equal samples at two sites as chance would give, from which they are named."""

Rows = NDArray[np.float64]


@dataclass(frozen=True)
class Near:
    """Near-duplicates of one site: share of the held-out rows, all pairs of (split, row, training row), and the training rows looked at."""

    site: str
    share: float
    pairs: list[tuple[str, int, int]]
    trained: NDArray[np.int64]


def leaks(scenario: Scenario, divided: Divided, rule: SplitRule, *, hints: bool = True) -> list[str]:
    """Return notes on rows that are almost the same in training and in test, with the remedy; ``hints``: and on columns that look so."""
    found = [near for site in scenario.sites if (near := near_duplicates(site, [one for one in scenario.sites if one is not site]))]
    kind = scenario.encoding.get("kind")
    tables = kind == "table"
    other = "--group EXPRESSION (by file name)" if kind else "a third array beside X and y: who or what was measured"
    label = scenario.encoding.get("label")
    remedy = _remedy(found, divided, label) if tables and found else other
    text = "{n} % of the validation and test rows almost repeat a training row; repeated measurements or neighbours in time leak: " + (
        f"keep them in one split with {remedy}" if rule == RANDOM else "the split does not keep them apart; check the column"
    )
    notes = write_notes(Note(near.site, near.site, text, round(100 * near.share)) for near in found)
    if hints and tables and rule == RANDOM:
        notes += _hints(divided, label, mentioned=" ".join(notes))
    return notes


@dataclass(frozen=True)
class Repeats:
    """Samples that are equal in every feature."""

    held: dict[str, int]
    """Site → validation and test samples that are also among its training samples."""
    across: dict[tuple[str, str], int]
    """Two sites → samples of the second that are also at the first; one at more than ``MAX_OTHERS`` sites counts with the first alone."""
    disagree: int
    """Samples with an equal one of another class."""
    samples: dict[str, int]
    """Site → samples."""
    by_chance: bool
    """Whether most samples repeat inside their site, as rows of a few categories do."""
    held_by_chance: Mapping[str, float]
    """Site → validation and test samples that would also equal one of as many samples of other sites, at most (two standard errors)."""
    equal_pairs: float
    """Share of equal pairs of samples inside sites, at most (two standard errors): as many coincide by chance between sites."""

    def sentences(self) -> list[str]:
        """What was found, in words, the most first."""
        held, across = Counter(self.held).most_common(), Counter(self.across).most_common()
        found = [f"validation and test samples of site {site} that equal one of its training samples: {n}" for site, n in held if n]
        found += [f"samples of site {b} that are also at site {a}: {n}" for (a, b), n in across if n]
        if self.disagree:
            found.append(f"samples with the features of one with another label: {self.disagree}")
        return found

    def notes(self, where: str) -> list[str]:
        """Return a note where repeats are so many that they may be copies."""
        if self.by_chance:
            return []
        held = [f"{n} at site {site}" for site, n in self.held.items() if n >= self._many_held(site)]
        across = [f"{n} of site {b} at site {a}" for (a, b), n in self.across.items() if self._many(a, b, n)]
        notes = []
        if held:
            notes.append(
                f"{where}: validation and test samples that equal a training sample: {some(held)}; remove the copies, or use --group"
            )
        if across:
            notes.append(f"{where}: samples at two sites: {some(across)}; remove the copies, or say why they are there")
        return notes

    def _many_held(self, site: str) -> float:
        return max(MANY_COPIES, SHARE_OF_COPIES * self.samples[site], BEYOND_CHANCE * self.held_by_chance.get(site, 0.0))

    def _many(self, a: str, b: str, n: int) -> bool:
        """Whether two sites share more equal samples than chance gives any two of all sites."""
        by_chance = self.equal_pairs * self.samples[a] * self.samples[b]
        if n < max(MANY_COPIES, SHARE_OF_COPIES * self.samples[b], BEYOND_CHANCE * by_chance):
            return False
        from scipy.special import gammainc

        return bool(gammainc(n, by_chance) * math.comb(len(self.samples), 2) <= ALPHA)  # the tail of Poisson's distribution


def repeats(scenario: Scenario) -> Repeats:
    """Compare all samples of all sites, as a network would see them."""
    held: dict[str, int] = {}
    seen: dict[str, Counter[bytes]] = {}
    labels: dict[bytes, set[float]] = {}
    sites_with: dict[bytes, list[str]] = {}
    for site in scenario.sites:
        marks = {name: [keys.digest(row.tobytes())[:16] for row in split.x.numpy()] for name, split in site.splits.items()}
        trained = set(marks["train"])
        held[site.name] = sum(mark in trained for name, found in marks.items() if name != "train" for mark in found)
        seen[site.name] = Counter(mark for found in marks.values() for mark in found)
        for name, split in site.splits.items():
            for mark, label in zip(marks[name], split.y.tolist(), strict=True):
                labels.setdefault(mark, set()).add(label)
        for mark in seen[site.name]:
            sites_with.setdefault(mark, []).append(site.name)
    across = Counter[tuple[str, str]]()
    for mark, names in sites_with.items():
        pairs = combinations(names, 2) if len(names) <= MAX_OTHERS else ((names[0], name) for name in names[1:])
        for a, b in pairs:  # all pairs of hundreds of sites would take minutes
            across[a, b] += seen[b][mark]
    number = {name: i for i, name in enumerate(seen)}
    return Repeats(
        held,
        across={pair: across[pair] for pair in sorted(across, key=lambda pair: [number[name] for name in pair])},
        disagree=sum(n for found in seen.values() for mark, n in found.items() if len(labels[mark]) > 1),
        samples={name: found.total() for name, found in seen.items()},
        by_chance=max(len(found) / max(found.total(), 1) for found in seen.values()) < MOSTLY_DIFFERENT,
        held_by_chance={
            site.name: _held_by_chance(site, [one for one in scenario.sites if one is not site])
            for site in scenario.sites
            if held[site.name] >= MANY_COPIES
        },
        equal_pairs=_share_of_equal_pairs([*seen.values()]),
    )


def _held_by_chance(site: Site, others: Sequence[Site]) -> float:
    """Return how many validation and test samples would equal one of as many strangers as there are training samples, at most.

    Strangers are the training samples of one of some other sites, the median one: copies may lie at some. Or they are the site's own, with
    each column in another order: where hardly a column varies, as at a school for girls of one district, samples coincide there alone.
    """
    rng = keys.generator(0, site.name, 0, "equal samples")
    train, held = _rows(site.train.x.numpy()), np.concatenate([_rows(split.x.numpy()) for split in (site.val, *site.tests.values())])
    vary = _varying(train, held)
    marks = [row.tobytes() for row in np.ascontiguousarray(held[:, vary])]
    chosen = [[others[i]] for i in rng.permutation(len(others))[:MAX_ALONE]] or [[]]

    def equal(strangers: Rows) -> float:
        there = Counter(row.tobytes() for row in np.ascontiguousarray(strangers))
        shares = np.array([there[mark] for mark in marks]) / max(len(strangers), 1)
        return float((1 - (1 - shares) ** len(train)).sum())

    elsewhere = median_low(equal(_strangers(train, one, rng, MAX_TRAINED)[:, vary]) for one in chosen)
    reordered = np.concatenate([rng.permuted(train[:, vary], axis=0) for _ in range(ORDERS)])
    usual = max(elsewhere, equal(reordered))
    return usual + 2 * math.sqrt(usual)  # two standard errors above what was found


def _varying(*parts: Rows) -> NDArray[np.bool_]:
    """Features with more than one value at a site: what all its samples share sets those of other sites apart, however alike they are."""
    return np.asarray(np.ptp(np.concatenate(parts), axis=0) > 0)


def _strangers(train: Rows, others: Sequence[Site], rng: np.random.Generator, count: int) -> Rows:
    """Return about so many samples of other sites, as many of each: one odd site does not decide what is usual.

    Without others, half of the columns of a site's own training samples are exchanged among them. Columns of few values stay:
    those of a city and its state also coincide in independent samples.
    """
    if not others:
        changes = np.diff(np.sort(train[: 10 * FEW_VALUES], axis=0), axis=0) > 0
        exchanged = (changes.sum(axis=0) >= FEW_VALUES) & (rng.permutation(train.shape[1]) % 2 == 0)
        return np.asarray(np.where(exchanged, rng.permutation(train), train))
    chosen = [rng.permutation(len(one.train))[: -(-count // len(others))] for one in others]
    return np.concatenate([_rows(one.train.x.numpy()[rows]) for one, rows in zip(others, chosen, strict=True)])


def _share_of_equal_pairs(sites: Sequence[Counter[bytes]]) -> float:
    """Return the share of equal pairs of samples inside all sites, two standard errors above what was found.

    Sites with few samples say little each, so all are taken together. One with far more pairs than the median share gives holds copies of
    its own, and counts with that share.
    """
    equal = [sum(n * (n - 1) / 2 for n in found.values()) for found in sites]
    pairs = [max(found.total() * (found.total() - 1) / 2, 1) for found in sites]
    usual = median_low(n / m for n, m in zip(equal, pairs, strict=True))
    expected = [usual * m for m in pairs]
    together = sum(n if n <= e + CHANCE * math.sqrt(e) + CHANCE else e for n, e in zip(equal, expected, strict=True))
    return (together + 2 * math.sqrt(together)) / sum(pairs)


def near_duplicates(site: Site, others: Sequence[Site]) -> Near | None:
    """Find held-out rows of a site that almost repeat one of its training rows, far more often than those of other sites."""
    rng = keys.generator(0, site.name, 0, "near-duplicates")
    both = {"val": site.val.x.numpy(), "test": next(iter(site.tests.values())).x.numpy()}
    held = [(split, i) for split, x in both.items() for i in range(len(x))]
    held = [held[i] for i in np.sort(rng.permutation(len(held))[:MAX_HELD])]
    trained = np.sort(rng.permutation(len(site.train))[:MAX_TRAINED])
    if len(trained) < 2 * NEIGHBOURS or not held:
        return None
    train = _rows(site.train.x.numpy()[trained])
    x = np.concatenate([_rows(both[split][i][None]) for split, i in held])
    others = [others[i] for i in rng.permutation(len(others))[:MAX_OTHERS]] if len(others) > MAX_OTHERS else others
    vary = _varying(train, x)
    x = x[:, vary]
    distances = _distances(x, train[:, vary])
    order = np.argsort(distances, axis=1)[:, :NEIGHBOURS]
    nearest = np.take_along_axis(distances, order, axis=1)
    limit = nearest[:, -1] * _radius(nearest)
    usable = nearest[:, -1] > 0
    near = usable & (nearest[:, 0] <= limit)

    def by_chance() -> float:
        strangers = _strangers(train, others, rng, len(train))[:, vary]
        chance = usable & (_distances(x, strangers).min(axis=1) <= limit)
        return float(chance.mean()) * len(trained) / len(strangers)  # a site of other size is compared at its own density

    share, usual = float(near.mean()), by_chance()
    if share < SHARE or share < 5 * usual:
        return None
    usual = float(np.mean([usual, *(by_chance() for _ in range(ORDERS))]))  # few rows say little each time
    if share < 5 * usual:
        return None
    pairs = [(*held[i], int(trained[j])) for i, j in np.argwhere(near[:, None] & (distances <= limit[:, None]))]
    return Near(site.name, share, pairs, trained)


def _radius(nearest: Rows) -> float:
    r"""Return :math:`r` with :math:`1 - (1 - r^m)^{k-1} = \alpha`, for the dimension that neighbours k/2 to k show."""
    k = NEIGHBOURS
    half = nearest[(nearest[:, k // 2 - 1] > 0)][:, k // 2 - 1 :]
    if not len(half):
        return 0.0
    spread = float(np.log(half[:, -1:] / half[:, :-1]).mean())
    # E log(d_k/d_j) = (H_{k-1} − H_{j-1}) / m
    harmonic = np.concatenate([[0.0], np.cumsum(1 / np.arange(1, k))])
    expected = float(np.mean([harmonic[k - 1] - harmonic[j - 1] for j in range(k // 2, k)]))
    m = expected / max(spread, 1e-9)
    return float((1 - (1 - ALPHA) ** (1 / (k - 1))) ** (1 / m))


def _remedy(found: Sequence[Near], divided: Divided, label: str | None) -> str:
    """Name the column whose value the near-duplicates share although rows in general do not."""
    best, name = 0.0, None
    for column, sites in _identifiers(divided, label).items():
        named = bool(ID_NAME.search(column))
        if not named and min(len(np.unique(values)) for values in sites) < FEW_VALUES:
            continue  # a category such as a ward, which one patient's rows share, too
        same, chance, rows = [], [], 0
        for near in found:
            values = {split: np.array(part.x.column(column).to_pylist(), dtype=str) for split, part in divided[near.site].items()}
            same += [values[split][i] == values["train"][j] for split, i, j in near.pairs]
            chance += [values[split][i] == values["train"][(j + 7) % len(values["train"])] for split, i, j in near.pairs]
            looked_at = values["train"][near.trained]
            rows += sum(int((looked_at == values[split][i]).sum()) for split, i in {pair[:2] for pair in near.pairs})
        if not named and 2 * sum(same) < rows:
            continue  # a measurement: most rows with the same value are far from each other
        score = float(np.mean(same) - np.mean(chance)) if same else 0.0
        if score > max(best, 0.5):
            best, name = score, column
    if name is None:
        return "--group COLUMN (who or what was measured) or --split time:COLUMN"
    return f"--group {shlex.quote(name)}" + ("" if ID_NAME.search(name) else ", if that column says who or what was measured")


def _identifiers(divided: Divided, label: str | None) -> dict[str, list[NDArray[Any]]]:
    """Columns of whole numbers or text, and their values at every site; with fewer than three somewhere, not every split could have one."""
    schema = next(iter(divided.values()))["train"].x.schema
    t = pa.types
    wanted = (t.is_integer, t.is_string, t.is_large_string, t.is_null)
    words = [f.name for f in schema if f.name != label and any(kind(f.type) for kind in wanted)]
    found = {
        name: [np.concatenate([part.x.column(name).to_pylist() for part in parts.values()]).astype(str) for parts in divided.values()]
        for name in words
    }
    return {name: sites for name, sites in found.items() if all(len(np.unique(values)) >= len(SPLITS) for values in sites)}


def _hints(divided: Divided, label: str | None, mentioned: str) -> list[str]:
    """Point to columns that look as if they named who was measured, or when."""
    notes = []
    for column, sites in _identifiers(divided, label).items():
        by_group = f"--group {shlex.quote(column)}"
        if not ID_NAME.search(column) or by_group in mentioned:
            continue
        repeats = float(np.mean([len(values) / len(np.unique(values)) for values in sites]))
        if repeats >= REPEATS:
            notes.append(
                f"column {column!r} has {repeats:.1f} rows per value: if it names a patient, machine or document, use {by_group}, "
                "so that its rows stay in one split and it is no feature"
            )
    schema = next(iter(divided.values()))["train"].x.schema
    for column in schema:
        if pa.types.is_temporal(column.type) and column.name != label:
            notes.append(f"column {column.name!r} holds dates: {NEWER} {shlex.quote(f'time:{column.name}')}")
    return notes


def series_notes(raws: Sequence[Raw], label: str | None) -> list[str]:
    """Point to the column of numbers that rows of all files stand in the order of, if its name says that it is a time."""
    tables = [part.x for raw in raws for part in raw.parts.values() if len(part)]
    found: list[tuple[int, str]] = []
    for name in tables[0].column_names:
        if name == label or not TIME_NAME.search(name) or not all(name in table.column_names for table in tables):
            continue
        columns = [table.column(name) for table in tables]
        if all(is_numeric(one.type) and not pa.types.is_temporal(one.type) for one in columns):
            values = [number_values(one) for one in columns]
            different = min(len(np.unique(one)) for one in values)
            if different >= MIN_TIMES and all((np.diff(one) >= 0).all() or (np.diff(one) <= 0).all() for one in values):
                found.append((different, name))
    if not found:
        return []
    finest = max(found, key=lambda one: one[0])[1]
    return [f"rows of all sites stand in the order of column {finest!r}, as in a series: {NEWER} {shlex.quote(f'time:{finest}')}"]


def _rows(x: NDArray[np.generic]) -> Rows:
    return x.reshape(len(x), -1).astype(np.float64)


def _distances(a: Rows, b: Rows) -> Rows:
    squares = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1)[None] - 2 * a @ b.T
    # rounding of equal rows, far from zero, must not look like a distance
    scale = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1)[None]
    return np.sqrt(np.where(squares < 1e-12 * scale, 0.0, np.maximum(squares, 0.0)))
