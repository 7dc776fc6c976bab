"""Rotated MNIST in the paper's four versions.

Classes are balanced first; every rotation block is an independent shuffle of the whole balanced set, dealt class by class to ten clients.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from emdcfl.core import keys
from emdcfl.data import partition, sources
from emdcfl.data.scenarios.plan import CNN_SCALES, PAPER_TRAINING, Share, hold_out, shrink
from emdcfl.data.scenarios.registry import scenario
from emdcfl.data.split import Indices
from emdcfl.data.transforms import rotate
from emdcfl.data.types import Preprocess, Scenario, Site, Split
from emdcfl.models.recipe import ModelRecipe

CLIENTS = 10
NORMALISE = Preprocess(mean=(0.1307,), std=(0.3081,), scale=1 / 255)

VERSIONS: dict[str, tuple[tuple[int, ...], tuple[str, ...], int]] = {
    "max": ((0, 90, 180, 270), ("rot0", "rot90", "rot180", "rot270"), 4),
    "two": ((-3, 3, 177, 183), ("upright", "upright", "upside-down", "upside-down"), 2),
    "min": ((-3, -1, 1, 3), ("all",) * 4, 2),
    "base": ((0, 0, 0, 0), ("all",) * 4, 2),
}
"""Version → angles of the four blocks, true group of each, and K for the methods that must be told."""


def block_names(version: str) -> list[str]:
    """One distinct name per block; angles are taken modulo 360, so that a name holds no sign."""
    angles = VERSIONS[version][0]
    return [f"part{i}" for i in range(1, 5)] if version == "base" else [f"rot{angle % 360}" for angle in angles]


def balance(labels: NDArray[np.int64]) -> Indices:
    """Indices of the first ``min class count`` samples of every class."""
    keep = min(np.bincount(labels))
    return np.sort(np.concatenate([np.flatnonzero(labels == label)[:keep] for label in np.unique(labels)]))


def balanced_deal(labels: NDArray[np.int64], parts: int, data_seed: int, block: str, purpose: str) -> list[Indices]:
    """Deal the balanced set to ``parts`` clients, class by class, from an independent shuffle of this block."""
    kept = balance(labels)
    return [kept[share] for share in partition.balanced(labels[kept], parts, keys.generator(data_seed, block, 0, purpose))]


def shares(train: NDArray[np.int64], test: NDArray[np.int64], version: str, data_seed: int) -> list[Share]:
    """Build the index plan. The test set is cut into as many slices as there are clients in all, of which each block uses the first ten."""
    found = []
    for block, group in zip(block_names(version), VERSIONS[version][1], strict=True):
        train_deal = balanced_deal(train, CLIENTS, data_seed, block, "deal train")
        test_deal = balanced_deal(test, 4 * CLIENTS, data_seed, block, "deal test")
        for number in range(CLIENTS):
            name = f"{block}-{number + 1}"
            kept, held = hold_out(train_deal[number], 10, keys.generator(data_seed, name, 0, "split"))
            found.append(Share(name, block, group, kept, held, test_deal[number]))
    return found


@scenario("rotated-mnist", "MNIST, rotations 0/90/180/270, 40 sites, 4 groups", version="max")
@scenario("rotated-mnist-two", "MNIST, rotations −3/3/177/183, 40 sites, 2 groups", version="two")
@scenario("rotated-mnist-min", "MNIST, rotations −3/−1/1/3, 40 sites, 1 group", version="min")
@scenario("mnist-base", "MNIST without rotation, 40 sites, 1 group", version="base")
def rotated_mnist(*, version: str, scale: str = "paper", data_seed: int = 0, data_root: str | None = None) -> Scenario:
    """Build one version of Rotated MNIST (PIL rotation, nearest neighbour, canvas kept)."""
    train, test = (sources.load("mnist", split, data_root) for split in ("train", "test"))
    plan, training, notes = shrink(shares(train.labels, test.labels, version, data_seed), scale, CNN_SCALES, PAPER_TRAINING)
    angles = dict(zip(block_names(version), VERSIONS[version][0], strict=True))

    def split(source: sources.Source, rows: Indices, block: str) -> Split:
        return Split(torch.from_numpy(rotate(source.images[rows], angles[block])), torch.from_numpy(source.labels[rows]))

    sites = tuple(
        Site(s.name, split(train, s.train, s.block), split(train, s.val, s.block), {"test": split(test, s.test, s.block)}) for s in plan
    )
    return Scenario(
        name="mnist-base" if version == "base" else "rotated-mnist" + ("" if version == "max" else f"-{version}"),
        sites=sites,
        classes=train.classes,
        preprocess=NORMALISE,
        model=ModelRecipe("cnn", {"channels": 1, "classes": 10, "size": 28}),
        groups={s.name: s.group for s in plan},
        k=VERSIONS[version][2],
        defaults={**training, "lr": 0.01},
        method_defaults={"pacfl": {"threshold": 12.0}, "fedclust": {"threshold": 5.0}, "fedsoft": {"lam": 0.1}},
        notes=notes,
    )
