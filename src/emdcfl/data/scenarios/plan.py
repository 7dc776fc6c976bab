"""Who gets which samples, decided on indices first; images are gathered afterwards, and only those that are kept.

Scales are applied here: ``smoke`` and ``small`` keep the first clients of every block and the first samples of every (shuffled) split of
the same construction, and shorten training; what changed is said in the scenario's notes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emdcfl.core.errors import ConfigError, nearest
from emdcfl.data.split import Indices


@dataclass(frozen=True)
class Share:
    """Index arrays of one future site. ``block`` is what it was built with (an angle, a role); ``group`` the truth to be found.

    ``part`` is how much of a scale's cap on train samples it gets, so that sites that have fewer than others still do when all are cut.
    """

    name: str
    block: str
    group: str
    train: Indices
    val: Indices
    test: Indices
    part: float = 1.0


@dataclass(frozen=True)
class Scale:
    """Caps per scale: clients of a block, samples of a split, and the training that goes with them (the paper's batches unless said)."""

    clients: int
    train: int
    val: int
    test: int
    rounds: int
    local_epochs: int
    batch_size: int | None = None


CNN_SCALES = {"smoke": Scale(2, 256, 64, 64, 2, 2), "small": Scale(3, 600, 128, 128, 3, 5)}
RESNET_SCALES = {"smoke": Scale(2, 32, 24, 16, 1, 1), "small": Scale(2, 128, 64, 64, 3, 2)}
"""A ResNet at 224×224 trains about twenty times slower than the CNN, so its scales are smaller."""

BACKDOOR_MNIST_SCALES = {"smoke": CNN_SCALES["smoke"], "small": Scale(3, 2400, 256, 512, 3, 3, batch_size=16)}
"""The attackers' networks must have learnt their cue before there is anything to be found or to be isolated from.

A digit can be told by its shape, and in batches of 64 the training loss is gone before the shade of green matters: after 350 steps on 2,000
images, two attackers lost 3 and 13 points on their own digits in wrong colours; after three epochs on 2,400 images in batches of 16, a
third of the computing, 20 and 22. With five epochs on 1,200 images their distances to the targets were a quarter (all: seed 0).
Targets and unrelated sites, which have half the attackers' train images at full size, have half of theirs here as well.
"""

PAPER_TRAINING = {"rounds": 10, "local_epochs": 10, "batch_size": 64}


def shrink(
    shares: Sequence[Share], scale: str, scales: Mapping[str, Scale], training: Mapping[str, Any]
) -> tuple[list[Share], dict[str, Any], tuple[str, ...]]:
    """Apply a scale; returns the shares that stay, the training defaults, and notes."""
    if scale == "paper":
        return list(shares), dict(training), ()
    if scale not in scales:
        raise ConfigError(f"unknown scale {scale!r}: {nearest(scale, [*scales, 'paper'])}")
    caps = scales[scale]
    kept: list[Share] = []
    seen: dict[str, int] = {}
    for share in shares:
        seen[share.block] = seen.get(share.block, 0) + 1
        if seen[share.block] <= caps.clients:
            train = share.train[: round(caps.train * share.part)]
            kept.append(replace(share, train=train, val=share.val[: caps.val], test=share.test[: caps.test]))
    shorter = {**training, "rounds": caps.rounds, "local_epochs": caps.local_epochs}
    if caps.batch_size is not None:
        shorter["batch_size"] = caps.batch_size
    return kept, shorter, (_note(scale, caps, shares, kept, training),)


def _note(scale: str, caps: Scale, shares: Sequence[Share], kept: Sequence[Share], training: Mapping[str, Any]) -> str:
    batches = "" if caps.batch_size is None else f" in batches of {caps.batch_size} (paper: {training['batch_size']})"
    return (
        f"scale {scale}: {len(kept)} of {len(shares)} clients, at most {caps.train}/{caps.val}/{caps.test} train/val/test samples each, "
        f"by default {caps.rounds} rounds (paper: {training['rounds']}) of {caps.local_epochs} epochs (paper: {training['local_epochs']})"
        f"{batches}; "
        f"the construction is the same"
    )


def hold_out(indices: Indices, parts: int, rng: np.random.Generator) -> tuple[Indices, Indices]:
    """Shuffle and hold out one part in ``parts``, rounded up, for validation; returns train and validation."""
    held = -(-len(indices) // parts)
    order: NDArray[np.int64] = rng.permutation(indices)
    return order[held:], order[:held]
