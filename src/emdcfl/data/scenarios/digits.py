"""``rotated-digits``: scikit-learn's digits in four orientations, for the demo and for tests; needs no files."""

from __future__ import annotations

import numpy as np
import torch

from emdcfl.core import keys
from emdcfl.core.errors import ConfigError
from emdcfl.data.scenarios.registry import scenario
from emdcfl.data.sources import digits
from emdcfl.data.split import split_indices
from emdcfl.data.types import Preprocess, Scenario, Site, Split
from emdcfl.models.recipe import ModelRecipe

ANGLES = (0, 90, 180, 270)
FRACTIONS = (0.6, 0.2, 0.2)


@scenario("rotated-digits", "scikit-learn's 8×8 digits, four rotations, two sites each; no download")
def rotated_digits(*, groups: int = 4, clients_per_group: int = 2, data_seed: int = 0) -> Scenario:
    """Build the scenario: every rotation group is an independent shuffle of all 1,797 digits, dealt to its clients.

    Parameters
    ----------
    groups : int
        How many of the rotations 0°, 90°, 180°, 270° to use.
    clients_per_group : int
        Sites per rotation; each splits its share 60/20/20 into train, validation and test.
    data_seed : int
        Seed of the shuffles.
    """
    if not 1 <= groups <= len(ANGLES):
        raise ConfigError(f"rotated-digits: groups must be between 1 and {len(ANGLES)}, got {groups}")
    if not 1 <= clients_per_group <= 30:
        raise ConfigError(f"rotated-digits: clients_per_group must be between 1 and 30, got {clients_per_group}")
    source = digits()
    sites: list[Site] = []
    truth: dict[str, str] = {}
    for turns, angle in enumerate(ANGLES[:groups]):
        group = f"rot{angle}"
        order = keys.generator(data_seed, group, 0, "deal").permutation(len(source))
        images = torch.rot90(torch.from_numpy(source.images), turns, dims=(-2, -1)).contiguous()
        labels = torch.from_numpy(source.labels)
        for number, members in enumerate(np.array_split(order, clients_per_group), start=1):
            name = f"{group}-{number}"
            parts = split_indices(len(members), FRACTIONS, keys.generator(data_seed, name, 0, "split"))
            train, val, test = (Split(images[members[part]], labels[members[part]]) for part in parts)
            sites.append(Site(name, train, val, {"test": test}))
            truth[name] = group
    return Scenario(
        name="rotated-digits",
        sites=tuple(sites),
        classes=source.classes,
        preprocess=Preprocess(mean=(0.3053,), std=(0.3761,), scale=1 / 255),
        model=ModelRecipe("small_cnn", {"channels": 1, "classes": 10, "size": 8}),
        groups=truth,
        k=groups,
        defaults={"rounds": 5, "local_epochs": 10, "batch_size": 32, "lr": 0.02},
    )
