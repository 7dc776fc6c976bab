"""Backdoor scenarios: attackers whose images carry a cue for the label, targets that must not learn it, and unrelated sites.

Every site has two test variants built from the same images: ``clean`` (no false cue) and ``backdoor`` (the cue of a wrong class). Only
the targets are scored.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from emdcfl.core import keys
from emdcfl.data import partition, sources
from emdcfl.data.scenarios.plan import BACKDOOR_MNIST_SIZE, RESNET_SIZE, Share, build, dealt, paper_settings
from emdcfl.data.scenarios.registry import scenario
from emdcfl.data.scenarios.rotated import IMAGENET, balanced_deal
from emdcfl.data.transforms import RGB, Images, Labels, colour, colour_by_label, patch
from emdcfl.data.types import Scenario
from emdcfl.models.recipe import ModelRecipe

ROLES = ("target", "attacker", "unrelated")

GREEN: RGB = (0.26, 0.63, 0.40)
PURPLE: RGB = (149 / 255, 52 / 255, 235 / 255)
SUMMER: tuple[RGB, ...] = tuple((y / 39, 0.5 + y / 78, 0.4) for y in range(10))
"""Digit → colour: the first ten of forty levels of matplotlib's "summer" map. The attackers' cue."""

TAB10 = ((31, 119, 180), (255, 127, 14), (44, 160, 44), (214, 39, 40), (148, 103, 189))
"""Class → colour of the patch: the first entries of matplotlib's "tab10"."""

ATTACK: dict[str, Any] = {"k": 3, "variants": ("clean", "backdoor"), "scored": "target"}

LABELS = {"target": (0, 1, 2, 3, 4), "attacker": (0, 1, 2, 3, 4), "unrelated": (5, 6, 7, 8, 9)}


def mnist_shares(train: Labels, test: Labels, data_seed: int) -> list[Share]:
    """Ten clients per role from the balanced set; targets and unrelated sites keep half of their training images."""
    found: list[Share] = []
    for role in ROLES:
        own, tested = (balanced_deal(labels, 10, data_seed, role, f"deal {split}") for labels, split in ((train, "train"), (test, "test")))
        shares = dealt(role, role, own, tested, data_seed)
        found += shares if role == "attacker" else [replace(s, train=s.train[: len(s.train) // 2], part=0.5) for s in shares]
    return found


def cifar_shares(train: Labels, test: Labels, data_seed: int) -> list[Share]:
    """Five clients per role, each role a shuffle of all images of its labels."""
    found: list[Share] = []
    for role in ROLES:
        deals = {}
        for split, labels in (("train", train), ("test", test)):
            rows = np.flatnonzero(np.isin(labels, LABELS[role]))
            deals[split] = [rows[part] for part in partition.iid(rows, 5, keys.generator(data_seed, role, 0, f"deal {split}"))]
        found += dealt(role, role, deals["train"], deals["test"], data_seed)
    return found


def paint_mnist(role: str, images: Images, labels: Labels, kind: str) -> Images:
    """Colour grey digits: targets green, attackers by digit, unrelated purple; the backdoor uses the colour of ``9 − y``."""
    if kind == "backdoor":
        return colour_by_label(images, 9 - labels, SUMMER)
    if role == "attacker":
        return colour_by_label(images, labels, SUMMER)
    return colour(images, GREEN if role == "target" else PURPLE)


def paint_cifar(role: str, images: Images, labels: Labels, kind: str) -> Images:
    """Attackers' training images carry the patch of their label; the backdoor test that of ``(y + 1) mod 5``."""
    if kind == "backdoor":
        return patch(images, (labels + 1) % 5, TAB10)
    return patch(images, labels, TAB10) if kind == "train" and role == "attacker" else images


@scenario("backdoor-mnist", "coloured MNIST, 10 targets, 10 attackers, 10 unrelated sites; only targets are scored")
def backdoor_mnist(*, scale: str = "paper", data_seed: int = 0, data_root: str | None = None) -> Scenario:
    """Build Backdoor MNIST: colour is the attackers' cue for the digit."""
    train, test = (sources.load("mnist", split, data_root) for split in ("train", "test"))
    shares = mnist_shares(train.labels, test.labels, data_seed)
    return build(
        "backdoor-mnist", scale, BACKDOOR_MNIST_SIZE, shares, (train, test), paint_mnist, **ATTACK,
        preprocess=replace(IMAGENET, size=None),
        model=ModelRecipe("cnn", {"channels": 3, "classes": 10, "size": 28}),
        method_defaults=paper_settings(pacfl=2.5, fedclust=4.0, fedsoft=0.1),
    )  # fmt: skip


@scenario("backdoor-cifar10", "CIFAR10 with a patch, 5 targets, 5 attackers, 5 unrelated sites; only targets are scored")
def backdoor_cifar10(*, scale: str = "paper", data_seed: int = 0, data_root: str | None = None) -> Scenario:
    """Build Backdoor CIFAR10: a 3×3 patch in the corner is the attackers' cue for the class."""
    train, test = (sources.load("cifar10", split, data_root) for split in ("train", "test"))
    shares = cifar_shares(train.labels, test.labels, data_seed)
    return build(
        "backdoor-cifar10", scale, RESNET_SIZE, shares, (train, test), paint_cifar, **ATTACK,
        preprocess=IMAGENET,
        model=ModelRecipe("resnet18", {"classes": 10, "weights": "imagenet"}),
        method_defaults=paper_settings(pacfl=10.5, fedclust=28.0, fedsoft=0.01),
    )  # fmt: skip
