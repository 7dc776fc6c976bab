"""Rotated MNIST and Rotated CIFAR10 in the paper's four versions.

Every block of clients has its own rotation and its own shuffle of the whole data set. MNIST is class-balanced first and dealt class by
class, and its images keep their size; CIFAR10 is cut into equal parts, and rotation enlarges the canvas.
"""

from __future__ import annotations

import numpy as np

from emdcfl.core import keys
from emdcfl.data import partition, sources
from emdcfl.data.scenarios.plan import CNN_SIZE, RESNET_SIZE, Share, build, dealt, paper_settings
from emdcfl.data.scenarios.registry import scenario
from emdcfl.data.split import Indices
from emdcfl.data.transforms import Images, Labels, border, rotate
from emdcfl.data.types import Preprocess, Scenario
from emdcfl.models.recipe import ModelRecipe
from emdcfl.models.vision import IMAGENET_MEAN, IMAGENET_STD

CLIENTS = 10
BORDER = 2
MNIST = Preprocess(mean=(0.1307,), std=(0.3081,), scale=1 / 255)
IMAGENET = Preprocess(mean=IMAGENET_MEAN, std=IMAGENET_STD, scale=1 / 255, size=224)

VERSIONS: dict[str, tuple[tuple[int, ...], tuple[str, ...], int]] = {
    "max": ((0, 90, 180, 270), ("rot0", "rot90", "rot180", "rot270"), 4),
    "two": ((-3, 3, 177, 183), ("upright", "upright", "upside-down", "upside-down"), 2),
    "min": ((-3, -1, 1, 3), ("all",) * 4, 2),
    "base": ((0, 0, 0, 0), ("all",) * 4, 2),
}
"""Version → angles of the four blocks, true group of each, and K for the methods that need it."""


def block_angles(version: str) -> dict[str, int]:
    """One distinct name per block → its angle; names take angles modulo 360, so that none holds a sign."""
    angles = VERSIONS[version][0]
    return {f"part{i}" if version == "base" else f"rot{angle % 360}": angle for i, angle in enumerate(angles, start=1)}


def _name(source: str, version: str) -> str:
    return f"{source}-base" if version == "base" else f"rotated-{source}" + ("" if version == "max" else f"-{version}")


def balance(labels: Labels) -> Indices:
    """Indices of the first ``min class count`` samples of every class."""
    keep = min(np.bincount(labels))
    return np.sort(np.concatenate([np.flatnonzero(labels == label)[:keep] for label in np.unique(labels)]))


def balanced_deal(labels: Labels, parts: int, data_seed: int, block: str, purpose: str) -> list[Indices]:
    """Deal the balanced set to ``parts`` clients, class by class, from an independent shuffle of this block."""
    kept = balance(labels)
    return [kept[share] for share in partition.balanced(labels[kept], parts, keys.generator(data_seed, block, 0, purpose))]


def mnist_shares(train: Labels, test: Labels, version: str, data_seed: int) -> list[Share]:
    """Build the index plan. The test set is cut into as many slices as there are clients in all; each block uses the first ten."""
    found: list[Share] = []
    for block, group in zip(block_angles(version), VERSIONS[version][1], strict=True):
        own = balanced_deal(train, CLIENTS, data_seed, block, "deal train")
        found += dealt(block, group, own, balanced_deal(test, 4 * CLIENTS, data_seed, block, "deal test"), data_seed)
    return found


def cifar10_shares(train: Labels, test: Labels, version: str, data_seed: int) -> list[Share]:
    """Build the index plan: every block is an independent shuffle of everything, cut into ten equal parts."""
    found: list[Share] = []
    for block, group in zip(block_angles(version), VERSIONS[version][1], strict=True):
        own = partition.iid(train, CLIENTS, keys.generator(data_seed, block, 0, "deal train"))
        found += dealt(block, group, own, partition.iid(test, CLIENTS, keys.generator(data_seed, block, 0, "deal test")), data_seed)
    return found


def rotate_cifar10(images: Images, angle: int, version: str) -> Images:
    """Rotate with canvas expansion; the black border of ``min`` makes the frames of ±1° and ±3° equally wide (38×38)."""
    return rotate(border(images, BORDER) if version == "min" else images, angle, expand=True)


@scenario("mnist-base", "MNIST without rotation, 40 sites, 1 group", version="base")
@scenario("rotated-mnist-min", "MNIST, rotations −3/−1/1/3, 40 sites, 1 group", version="min")
@scenario("rotated-mnist-two", "MNIST, rotations −3/3/177/183, 40 sites, 2 groups", version="two")
@scenario("rotated-mnist", "MNIST, rotations 0/90/180/270, 40 sites, 4 groups", version="max")
def rotated_mnist(*, version: str, scale: str = "paper", data_seed: int = 0, data_root: str | None = None) -> Scenario:
    """Build one version of Rotated MNIST (PIL rotation, nearest neighbour, canvas kept)."""
    train, test = (sources.load("mnist", split, data_root) for split in ("train", "test"))
    plan = mnist_shares(train.labels, test.labels, version, data_seed)
    angles = block_angles(version)
    return build(
        _name("mnist", version), scale, CNN_SIZE, plan, (train, test), lambda block, images, *_: rotate(images, angles[block]),
        k=VERSIONS[version][2],
        preprocess=MNIST,
        model=ModelRecipe("cnn", {"channels": 1, "classes": 10, "size": 28}),
        method_defaults=paper_settings(pacfl=12.0, fedclust=5.0, fedsoft=0.1),
    )  # fmt: skip


@scenario("cifar10-base", "CIFAR10 without rotation, 40 sites, 1 group", version="base")
@scenario("rotated-cifar10-min", "CIFAR10, rotations −3/−1/1/3, 40 sites, 1 group", version="min")
@scenario("rotated-cifar10-two", "CIFAR10, rotations −3/3/177/183, 40 sites, 2 groups", version="two")
@scenario("rotated-cifar10", "CIFAR10, rotations 0/90/180/270, 40 sites, 4 groups", version="max")
def rotated_cifar10(*, version: str, scale: str = "paper", data_seed: int = 0, data_root: str | None = None) -> Scenario:
    """Build one version of Rotated CIFAR10."""
    train, test = (sources.load("cifar10", split, data_root) for split in ("train", "test"))
    plan = cifar10_shares(train.labels, test.labels, version, data_seed)
    angles = block_angles(version)
    return build(
        _name("cifar10", version), scale, RESNET_SIZE, plan, (train, test),
        lambda block, images, *_: rotate_cifar10(images, angles[block], version),
        k=VERSIONS[version][2],
        preprocess=IMAGENET,
        model=ModelRecipe("resnet18", {"classes": 10, "weights": "imagenet"}),
        method_defaults=paper_settings(pacfl=12.0, fedclust=45.0, fedsoft=0.01),
    )  # fmt: skip
