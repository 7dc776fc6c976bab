"""Rotated CIFAR10 in the paper's four versions: whole set per block, ten equal parts, rotation with an expanding canvas."""

from __future__ import annotations

import torch

from emdcfl.core import keys
from emdcfl.data import partition, sources
from emdcfl.data.scenarios.mnist import CLIENTS, VERSIONS, block_names
from emdcfl.data.scenarios.plan import PAPER_TRAINING, RESNET_SCALES, Share, hold_out, shrink
from emdcfl.data.scenarios.registry import scenario
from emdcfl.data.split import Indices
from emdcfl.data.transforms import Images, Labels, border, rotate
from emdcfl.data.types import Preprocess, Scenario, Site, Split
from emdcfl.models.recipe import ModelRecipe

IMAGENET = Preprocess(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), scale=1 / 255, size=224)
BORDER = 2


def shares(train: Labels, test: Labels, version: str, data_seed: int) -> list[Share]:
    """Build the index plan: every block is an independent shuffle of everything, cut into ten equal parts."""
    found = []
    for block, group in zip(block_names(version), VERSIONS[version][1], strict=True):
        train_deal = partition.iid(train, CLIENTS, keys.generator(data_seed, block, 0, "deal train"))
        test_deal = partition.iid(test, CLIENTS, keys.generator(data_seed, block, 0, "deal test"))
        for number in range(CLIENTS):
            name = f"{block}-{number + 1}"
            kept, held = hold_out(train_deal[number], 10, keys.generator(data_seed, name, 0, "split"))
            found.append(Share(name, block, group, kept, held, test_deal[number]))
    return found


def turned(images: Images, angle: int, version: str) -> Images:
    """Rotate with canvas expansion; the black border of ``min`` makes the frames of ±1° and ±3° equally wide (38×38)."""
    return rotate(border(images, BORDER) if version == "min" else images, angle, expand=True)


@scenario("rotated-cifar10", "CIFAR10, rotations 0/90/180/270, 40 sites, 4 groups", version="max")
@scenario("rotated-cifar10-two", "CIFAR10, rotations −3/3/177/183, 40 sites, 2 groups", version="two")
@scenario("rotated-cifar10-min", "CIFAR10, rotations −3/−1/1/3, 40 sites, 1 group", version="min")
@scenario("cifar10-base", "CIFAR10 without rotation, 40 sites, 1 group", version="base")
def rotated_cifar10(*, version: str, scale: str = "paper", data_seed: int = 0, data_root: str | None = None) -> Scenario:
    """Build one version of Rotated CIFAR10."""
    train, test = (sources.load("cifar10", split, data_root) for split in ("train", "test"))
    plan, training, notes = shrink(shares(train.labels, test.labels, version, data_seed), scale, RESNET_SCALES, PAPER_TRAINING)
    angles = dict(zip(block_names(version), VERSIONS[version][0], strict=True))

    def split(source: sources.Source, rows: Indices, block: str) -> Split:
        return Split(torch.from_numpy(turned(source.images[rows], angles[block], version)), torch.from_numpy(source.labels[rows]))

    sites = tuple(
        Site(s.name, split(train, s.train, s.block), split(train, s.val, s.block), {"test": split(test, s.test, s.block)}) for s in plan
    )
    return Scenario(
        name="cifar10-base" if version == "base" else "rotated-cifar10" + ("" if version == "max" else f"-{version}"),
        sites=sites,
        classes=train.classes,
        preprocess=IMAGENET,
        model=ModelRecipe("resnet18", {"classes": 10, "weights": "imagenet"}),
        groups={s.name: s.group for s in plan},
        k=VERSIONS[version][2],
        defaults={**training, "lr": 0.01},
        method_defaults={"pacfl": {"threshold": 12.0}, "fedclust": {"threshold": 45.0}, "fedsoft": {"lam": 0.01}},
        notes=notes,
    )
