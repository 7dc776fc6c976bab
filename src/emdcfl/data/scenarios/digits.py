"""scikit-learn's digits; needs no files. ``rotated-digits`` for the demo and for tests, ``digit-sites`` for many small sites."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import torch

from emdcfl.core import keys
from emdcfl.core.errors import ConfigError
from emdcfl.data.own.defaults import BY_BENEFIT, FINE_TUNING, TRAINING
from emdcfl.data.own.parts import FRACTIONS
from emdcfl.data.scenarios.registry import scenario
from emdcfl.data.sources import digits
from emdcfl.data.split import split_indices, stratified_indices
from emdcfl.data.transforms import rotate
from emdcfl.data.types import Preprocess, Scenario, Site, Split
from emdcfl.models.recipe import ModelRecipe

ANGLES = (0, 90, 180, 270)
PREPROCESS = Preprocess(mean=(0.3053,), std=(0.3761,), scale=1 / 255)


@scenario("rotated-digits", "scikit-learn's 8×8 digits, four rotations, two sites each; no download")
def rotated_digits(*, groups: int = 4, clients_per_group: int = 2, data_seed: int = 0) -> Scenario:
    """Build the scenario: every rotation group is an independent shuffle of all 1,797 digits, dealt to its clients.

    The rotations are the first ``groups`` of 0°, 90°, 180°, 270°. Each site splits its share 60/20/20 into train, validation and test.
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
        preprocess=PREPROCESS,
        model=ModelRecipe("small_cnn", {"channels": 1, "classes": 10, "size": 8}),
        groups=truth,
        k=groups,
        defaults=TRAINING,
    )


@scenario("digit-sites", "scikit-learn's 8×8 digits divided among small sites, turned or relabelled by group; no download")
def digit_sites(
    *,
    angles: Sequence[float] = ANGLES,
    label_shifts: Sequence[int] = (0,),
    clients_per_group: int | Sequence[int] = 2,
    data_seed: int = 0,
) -> Scenario:
    """Build the scenario: all sites divide the 1,797 digits among them; a group is an angle (degrees, canvas kept) and a label shift.

    Every angle comes once with the labels ``(y + shift) mod 10`` of each shift: concept shift. ``clients_per_group`` is one number for all
    groups, or one for each in turn; groups of one site each have no truth to score.
    """
    settings = list(product(angles, label_shifts))
    counts = [clients_per_group] * len(settings) if isinstance(clients_per_group, int) else list(clients_per_group)
    if len({(angle % 360, shift % 10) for angle, shift in settings}) < len(settings) or not settings:
        raise ConfigError(f"digit-sites: expected different angles and label_shifts, got {list(angles)} and {list(label_shifts)}")
    if len(counts) != len(settings):
        raise ConfigError(f"digit-sites: expected clients_per_group for {len(settings)} groups, got {len(counts)} numbers")
    if min(counts) < 1 or not 2 <= sum(counts) <= 60:
        raise ConfigError(f"digit-sites: expected 2 to 60 sites, at least one in a group, got clients_per_group = {counts}")
    source = digits()
    shares = iter(np.array_split(keys.generator(data_seed, "digit-sites", 0, "deal").permutation(len(source)), sum(counts)))
    sites: list[Site] = []
    truth: dict[str, str] = {}
    for (angle, shift), count in zip(settings, counts, strict=True):
        group = f"rot{angle % 360:g}" + (f"+{shift}" if len(label_shifts) > 1 else "")
        images = torch.from_numpy(rotate(source.images, angle))
        labels = torch.from_numpy((source.labels + shift) % 10)
        for number in range(1, count + 1):
            name, members = f"{group}-{number}", next(shares)
            parts = stratified_indices(labels[members].numpy(), FRACTIONS, keys.generator(data_seed, name, 0, "split"))
            train, val, test = (Split(images[members[part]], labels[members[part]]) for part in parts)
            sites.append(Site(name, train, val, {"test": test}))
            truth[name] = group
    return Scenario(
        name="digit-sites",
        sites=tuple(sites),
        classes=source.classes,
        preprocess=PREPROCESS,
        model=ModelRecipe("mlp", {"features": 64, "classes": 10}),
        groups=truth if max(counts) > 1 else None,
        k=max(2, len(settings)) if max(counts) > 1 else 2,
        defaults={"rounds": 10, "local_epochs": 5, "batch_size": 32, "lr": 0.05} | FINE_TUNING,
        method_defaults=BY_BENEFIT,
    )
