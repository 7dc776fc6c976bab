"""PACS: four styles of picture (art painting, cartoon, photo, sketch), 18 sites."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from emdcfl.core import keys
from emdcfl.data import sources
from emdcfl.data.scenarios.plan import PAPER_TRAINING, RESNET_SCALES, Share, dealt, paper_settings, shrink
from emdcfl.data.scenarios.registry import scenario
from emdcfl.data.scenarios.rotated import IMAGENET
from emdcfl.data.types import Scenario, Site, Split
from emdcfl.models.recipe import ModelRecipe

DOMAINS = ("art_painting", "cartoon", "photo", "sketch")
IMAGES_PER_CLIENT = 500


def shares(domains: NDArray[np.int64], vocabulary: tuple[str, ...], labels: NDArray[np.int64], data_seed: int) -> list[Share]:
    """Build the index plan: per domain, the last ``⌊0.2 N⌋`` of a shuffle are test images; both parts are dealt round-robin.

    A domain of N images has ``⌊N/500⌋`` clients; each holds out a fifth (rounded up) of its non-test images for validation. Rows are
    ordered by label before the shuffle, so that the order of the file matters only within a class.
    """
    found: list[Share] = []
    for domain in DOMAINS:
        rows = np.flatnonzero(domains == vocabulary.index(domain))
        rows = rows[np.argsort(labels[rows], kind="stable")]
        order = keys.generator(data_seed, domain, 0, "deal").permutation(rows)
        test_size = len(order) // 5
        clients = len(order) // IMAGES_PER_CLIENT
        rest, test = order[: len(order) - test_size], order[len(order) - test_size :]
        own, tested = ([part[number::clients] for number in range(clients)] for part in (rest, test))
        found += dealt(domain, domain, own, tested, data_seed, parts=5)
    return found


@scenario("pacs", "PACS, four styles of picture, 18 sites, 4 groups")
def pacs(*, scale: str = "paper", data_seed: int = 0, data_root: str | None = None) -> Scenario:
    """Build PACS. Images stay in a memory-mapped file in the order of the sites, so a site is a piece of it and costs no memory."""
    table = sources.table("pacs", "train", data_root)
    all_shares = shares(table.columns["domain"], table.vocabularies["domain"], table.labels, data_seed)
    plan, training, notes = shrink(all_shares, scale, RESNET_SCALES, PAPER_TRAINING)
    published = sources.PUBLISHED["pacs"].shape
    if table.shape != published:
        notes = (*notes, f"images of {table.shape[1]}×{table.shape[2]} pixels, not the published {published[1]}×{published[2]}")
    loaded = table.load(np.concatenate([part for s in plan for part in (s.train, s.val, s.test)]))
    images, labels = torch.from_numpy(loaded.images), torch.from_numpy(loaded.labels)
    sites = []
    first = 0
    for s in plan:
        parts = []
        for length in (len(s.train), len(s.val), len(s.test)):
            parts.append(Split(images[first : first + length], labels[first : first + length]))
            first += length
        sites.append(Site(s.name, parts[0], parts[1], {"test": parts[2]}))
    return Scenario(
        name="pacs",
        sites=tuple(sites),
        classes=table.classes,
        preprocess=IMAGENET,
        model=ModelRecipe("resnet18", {"classes": 7, "weights": "imagenet"}),
        groups={s.name: s.group for s in plan},
        k=4,
        defaults={**training, "lr": 0.001},
        method_defaults=paper_settings(pacfl=11.0, fedclust=8.0, fedsoft=0.01),
        notes=notes,
    )
