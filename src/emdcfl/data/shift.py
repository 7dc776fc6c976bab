"""Shifts that make groups, each a small dictionary that fits into TOML: ``{kind = "rotation", angles = [0, 90]}``.

A shift splits every group into as many as it has settings; shifts compose, so two rotations and two noise levels make four groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from emdcfl.core import keys
from emdcfl.core.errors import ConfigError, nearest
from emdcfl.data import transforms
from emdcfl.data.transforms import Images, Labels


@dataclass(frozen=True)
class SamplePool:
    """Samples that form one true group."""

    name: str
    images: Images
    labels: Labels
    columns: Mapping[str, Labels]

    def take(self, rows: NDArray[np.int64]) -> SamplePool:
        return replace(self, images=self.images[rows], labels=self.labels[rows], columns={k: v[rows] for k, v in self.columns.items()})

    def where(self, mask: NDArray[np.bool_]) -> SamplePool:
        return self.take(np.flatnonzero(mask))


@dataclass(frozen=True)
class ShiftSetting:
    """One new group: its suffix, the change to the samples, and whether the change selects samples."""

    suffix: str
    change: Callable[[SamplePool], SamplePool]
    chooses: bool = False


def rotation(*, angles: Sequence[float], expand: bool = False) -> list[ShiftSetting]:
    """Feature shift: turn by each angle (degrees, counter-clockwise)."""
    return [ShiftSetting(f"rot{angle % 360:g}", _on_images(partial(transforms.rotate, angle=angle, expand=expand))) for angle in angles]


def colour(*, colours: Sequence[Sequence[float]]) -> list[ShiftSetting]:
    """Feature shift: colour grey images, each entry red, green, blue between 0 and 1."""
    for rgb in colours:
        if len(rgb) != 3 or not all(0 <= value <= 1 for value in rgb):
            raise ConfigError(f"colour: expected three numbers between 0 and 1, got {list(rgb)}")
    tints = [(float(red), float(green), float(blue)) for red, green, blue in colours]
    return [ShiftSetting(f"colour{i}", _on_images(partial(transforms.colour, rgb=rgb))) for i, rgb in enumerate(tints, start=1)]


def blur(*, radii: Sequence[float]) -> list[ShiftSetting]:
    """Feature shift: Gaussian blur of each radius in pixels; 0 leaves the images as they are."""
    _not_negative("blur: radii", radii)
    return [ShiftSetting(f"blur{radius:g}", _on_images(partial(transforms.blur, radius=radius))) for radius in radii]


def noise(*, sigmas: Sequence[float], data_seed: int) -> list[ShiftSetting]:
    """Feature shift: Gaussian noise of each strength, as a share of full brightness."""

    def change(pool: SamplePool, sigma: float) -> SamplePool:
        rng = keys.generator(data_seed, f"{pool.name} {sigma:g}", 0, "noise")
        return replace(pool, images=transforms.noise(pool.images, sigma, rng))

    _not_negative("noise: sigmas", sigmas)
    return [ShiftSetting(f"noise{sigma:g}", partial(change, sigma=sigma)) for sigma in sigmas]


def domain(*, column: str = "domain", values: Sequence[str], vocabulary: Sequence[str]) -> list[ShiftSetting]:
    """Feature shift: the values of a column of the source, such as PACS' domain."""
    for value in values:
        if value not in vocabulary:
            raise ConfigError(f"domain: column {column!r} has no value {value!r}: {nearest(value, vocabulary)}")

    def change(pool: SamplePool, code: int) -> SamplePool:
        return pool.where(pool.columns[column] == code)

    return [ShiftSetting(value, partial(change, code=list(vocabulary).index(value)), chooses=True) for value in values]


def classes(*, groups: Sequence[Sequence[int]], number_of_classes: int) -> list[ShiftSetting]:
    """Label shift: each group sees only these classes."""
    for label in (label for labels in groups for label in labels):
        if not 0 <= label < number_of_classes:
            raise ConfigError(f"classes: expected labels from 0 to {number_of_classes - 1}, got {label}")

    def change(pool: SamplePool, labels: tuple[int, ...]) -> SamplePool:
        return pool.where(np.isin(pool.labels, labels))

    return [ShiftSetting("classes" + "".join(map(str, labels)), partial(change, labels=tuple(labels)), chooses=True) for labels in groups]


def permutation(*, count: int, number_of_classes: int, data_seed: int) -> list[ShiftSetting]:
    """Concept shift: ``count`` groups with different labels for the same classes; the first keeps the labels, the others permute them."""
    if count < 1:
        raise ConfigError(f"permutation: count (of groups) must be at least 1, got {count}")
    orders = [np.arange(number_of_classes)]
    rng = keys.generator(data_seed, "labels", 0, "permutation")
    orders += [rng.permutation(number_of_classes) for _ in range(count - 1)]

    def change(pool: SamplePool, order: Labels) -> SamplePool:
        return replace(pool, labels=order[pool.labels])

    return [ShiftSetting(f"labels{i}", partial(change, order=order)) for i, order in enumerate(orders, start=1)]


SHIFTS: dict[str, Callable[..., list[ShiftSetting]]] = {
    "rotation": rotation,
    "colour": colour,
    "blur": blur,
    "noise": noise,
    "domain": domain,
    "classes": classes,
    "permutation": permutation,
}


def _not_negative(what: str, values: Sequence[float]) -> None:
    if not all(value >= 0 for value in values):
        raise ConfigError(f"{what} must not be negative, got {list(values)}")


def _on_images(transform: Callable[[Images], Images]) -> Callable[[SamplePool], SamplePool]:
    return lambda pool: replace(pool, images=transform(pool.images))
