"""Sites that nobody constructed: wrists of ten people (``watch``), thirty people (``hapt``), 58 school authorities (``chem97``).

``natural/NAME.parquet`` below the data folder holds one row per window of a sensor series, or per pupil. Neighbouring windows overlap, so
series are split by time, and windows that cross a cut are left out. The option ``train_rows`` keeps so many training rows of a site, drawn
class by class with ``data_seed``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from emdcfl.core import keys
from emdcfl.core.errors import ConfigError
from emdcfl.core.optional import pa
from emdcfl.data.own.defaults import BY_BENEFIT, FINE_TUNING
from emdcfl.data.own.folder import table_encoding
from emdcfl.data.own.parts import FRACTIONS, SPLITS, Divided, Part, Text, class_names, label_codes, to_site
from emdcfl.data.scenarios.registry import scenario
from emdcfl.data.sources.files import natural_table
from emdcfl.data.split import Indices, stratified_indices
from emdcfl.data.types import Preprocess, Scenario
from emdcfl.models.recipe import ModelRecipe

TRAINING = {"rounds": 10, "local_epochs": 5, "batch_size": 64, "lr": 0.05}
K = 2
"""Clusters for the methods that must be told a number: as in the paper's scenarios without groups, the smallest that is not FedAvg."""

Masks = dict[str, NDArray[np.bool_]]


def by_time(start: NDArray[np.int64], length: NDArray[np.int64], width: int, cuts: Sequence[float]) -> list[NDArray[np.bool_]]:
    """Which windows lie wholly before the first cut, between the cuts, and after the last; cuts are shares of a series' length.

    Examples
    --------
    >>> start = np.arange(0, 301, 25)
    >>> [start[part].tolist() for part in by_time(start, np.full(13, 400), 100, (0.5, 0.75))]
    [[0, 25, 50, 75, 100], [200], [300]]
    """
    edges = [0.0, *cuts, 1.0]
    return [(start >= low * length) & (start + width <= high * length) for low, high in pairwise(edges)]


@scenario("watch", "seven exercises from smart watches, person × wrist, 20 sites (EMDCFL_DATA/natural)")
def watch(*, train_rows: int | None = None, data_seed: int = 0, data_root: str | None = None) -> Scenario:
    """Build ``watch``: of every series the first half trains, the third quarter validates, the rest tests. The wrist is a true group."""
    table = natural_table("watch", data_root)
    who = np.array([f"{p}-{w}" for p, w in zip(*(table.column(c).to_pylist() for c in ("person", "wrist")), strict=True)])
    masks = dict(zip(SPLITS, by_time(*_times(table), 100, (0.5, 0.75)), strict=True))
    table = table.drop_columns(["person", "wrist", "series", "start", "length"])
    groups = {name: name.split("-")[1] for name in np.unique(who).tolist()}
    return _build("watch", table, "exercise", who, masks, train_rows, data_seed, groups)


@scenario("hapt-later", "six activities from smartphones, 30 persons, a later recording as test (EMDCFL_DATA/natural)", later=True)
@scenario("hapt", "six activities from smartphones, 30 persons, split by time (EMDCFL_DATA/natural)", later=False)
def hapt(*, later: bool, train_rows: int | None = None, data_seed: int = 0, data_root: str | None = None) -> Scenario:
    """Build ``hapt``: segments are cut as in ``watch``; ``hapt-later`` cuts recording 1 at two thirds and tests on later recordings."""
    table = natural_table("hapt", data_root)
    who = np.array(table.column("person").to_pylist())
    if later:
        first = table.column("recording").to_numpy() == 1
        train, val = by_time(*_times(table), 128, (2 / 3,))
        masks = {"train": first & train, "val": first & val, "test": ~first}
    else:
        masks = dict(zip(SPLITS, by_time(*_times(table), 128, (0.5, 0.75)), strict=True))
    table = table.drop_columns(["person", "recording", "segment", "start", "length"])
    return _build("hapt-later" if later else "hapt", table, "activity", who, masks, train_rows, data_seed)


@scenario("chem97", "chemistry grades of 23,693 pupils, 58 school authorities (EMDCFL_DATA/natural)")
def chem97(*, train_rows: int | None = None, data_seed: int = 0, data_root: str | None = None) -> Scenario:
    """Build ``chem97``: pupils do not repeat, so each authority's are split 60/20/20 at random, class by class."""
    table = natural_table("chem97", data_root)
    who = np.array(table.column("authority").to_pylist())
    labels = np.array(table.column("grade").to_pylist())
    masks: Masks = {split: np.zeros(len(who), dtype=bool) for split in SPLITS}
    for name in np.unique(who).tolist():
        rows = np.flatnonzero(who == name)
        parts = stratified_indices(label_codes(labels[rows]), FRACTIONS, keys.generator(data_seed, name, 0, "split"))
        for split, part in zip(SPLITS, parts, strict=True):
            masks[split][rows[part]] = True
    return _build("chem97", table.drop_columns(["authority"]), "grade", who, masks, train_rows, data_seed)


def _times(table: pa.Table) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    start, length = (table.column(name).to_numpy().astype(np.int64) for name in ("start", "length"))
    return start, length


def _build(
    name: str,
    table: pa.Table,
    label: str,
    who: Text,
    masks: Masks,
    train_rows: int | None,
    data_seed: int,
    groups: dict[str, str] | None = None,
) -> Scenario:
    labels = np.array(table.column(label).to_pylist())
    divided: Divided = {}
    names = np.unique(who).tolist()
    most = min(int(masks["train"][who == site].sum()) for site in names)
    if train_rows is not None and not 1 <= train_rows <= most:
        raise ConfigError(f"train_rows must be between 1 and the {most} training rows of the smallest site, got {train_rows}")
    for site in names:
        rows = {split: np.flatnonzero((who == site) & mask) for split, mask in masks.items()}
        if train_rows is not None:
            rows["train"] = _few(rows["train"], labels, train_rows, keys.generator(data_seed, site, 0, "few"))
        divided[site] = {split: Part(table.take(chosen), labels[chosen]) for split, chosen in rows.items()}
    classes = class_names(divided)
    encoding, _ = table_encoding(divided, dict.fromkeys(divided, name), label)
    arrays = {site: {split: encoding.encode(part.x, name) for split, part in parts.items()} for site, parts in divided.items()}
    return Scenario(
        name=name,
        sites=tuple(to_site(site, arrays[site], parts, classes) for site, parts in divided.items()),
        classes=classes,
        preprocess=Preprocess(),
        model=ModelRecipe("mlp", {"features": encoding.width, "classes": len(classes)}),
        groups=groups,
        k=K,
        defaults=TRAINING | FINE_TUNING,
        method_defaults=BY_BENEFIT,
        encoding=encoding.as_dict(),
    )


def _few(rows: Indices, labels: Text, count: int, rng: np.random.Generator) -> Indices:
    """Draw ``count`` rows, one of every class in turn, so that small draws hold every class."""
    shuffled = rng.permutation(rows)
    codes = label_codes(labels[shuffled])
    turn = np.zeros(len(rows), dtype=np.int64)
    for code in np.unique(codes):
        members = np.flatnonzero(codes == code)
        turn[members] = np.arange(len(members))
    return np.sort(shuffled[np.argsort(turn, kind="stable")[:count]])
