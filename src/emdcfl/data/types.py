"""Types of data: ``Split``, ``Site``, ``Preprocess``, ``Scenario``.

Images stay uint8 in memory and become network inputs in batches, on the device that trains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from emdcfl.core.errors import DataError
from emdcfl.models.recipe import ModelRecipe

LABEL_KINDS: Mapping[str, Callable[[str], Any]] = {"text": str, "int": int, "float": float, "bool": lambda word: word == "True"}
"""What labels were in the user's data → how the name of a class becomes one again."""


@dataclass(frozen=True)
class Split:
    """Samples and labels of equal length."""

    x: Tensor
    """uint8 ``(N, C, H, W)`` for images, float32 ``(N, F)`` for tables."""
    y: Tensor
    """``(N,)``: int64 class indices, or float32 numbers to predict, standardised with ``Scenario.target``."""

    def __post_init__(self) -> None:
        if self.x.shape[0] != self.y.shape[0]:
            raise DataError(f"a split needs one label per sample, got {self.x.shape[0]} samples and {self.y.shape[0]} labels")
        if self.y.dtype not in (torch.int64, torch.float32):
            raise DataError(f"labels must be int64 class indices, or float32 numbers to predict, got {self.y.dtype}")

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"Split({len(self)} samples of {tuple(self.x.shape[1:])})"

    @cached_property
    def _length(self) -> int:
        return int(self.y.shape[0])  # called often, and torch builds a new shape object at every call


@dataclass(frozen=True)
class Site:
    """The data of one client. ``tests`` maps a variant's name to its split; the first one is the main result."""

    name: str
    train: Split
    val: Split
    tests: dict[str, Split]

    @property
    def splits(self) -> dict[str, Split]:
        """All splits by name: ``"train"``, ``"val"`` and, for each variant, ``"test:NAME"``."""
        return {"train": self.train, "val": self.val, **{f"test:{name}": split for name, split in self.tests.items()}}

    @classmethod
    def from_splits(cls, name: str, splits: Mapping[str, Split]) -> Site:
        """Return the site that has these ``splits``."""
        tests = {key.removeprefix("test:"): split for key, split in splits.items() if key.startswith("test:")}
        return cls(name, splits["train"], splits["val"], tests)


MAX_SIDE = 1 << 13
"""Pixels on a side to which images are resized."""


@dataclass(frozen=True)
class Preprocess:
    """From stored ``x`` to the network's input: ``(resize(x · scale) − mean) / std``, in float32."""

    mean: tuple[float, ...] = (0.0,)
    """Like ``std``: one value per channel (images) or column (tables), or a single value for all."""
    std: tuple[float, ...] = (1.0,)
    scale: float = 1.0
    """1/255 for uint8 images, 1 for tables."""
    size: int | None = None
    """If set, the shorter side is resized to this (bilinear, antialiased) and the centre square is cut out."""

    def __call__(self, x: Tensor) -> Tensor:
        z = self.resized(x)
        shape = (1, -1) + (1,) * (z.dim() - 2)
        return (z - _constant(tuple(self.mean), z.device).view(shape)) / _constant(tuple(self.std), z.device).view(shape)

    def resized(self, x: Tensor) -> Tensor:
        """Return the scaled, resized and cut sample in float32, before mean and std."""
        z = x.to(torch.float32)
        if self.scale != 1.0:
            z = z * self.scale
        if self.size is not None and z.shape[-2:] != (self.size, self.size):
            z = _resize_and_crop(z, self.size)
        return z

    def suits(self, shape: Sequence[int]) -> bool:
        """Whether samples of this shape can be brought to the network's input."""
        each = {len(self.mean), len(self.std)} <= {1, shape[0]} and all(spread > 0 for spread in self.std)
        return each and (self.size is None or (len(shape) == 3 and 0 < self.size <= MAX_SIDE))

    def as_dict(self) -> dict[str, Any]:
        return {"mean": list(self.mean), "std": list(self.std), "scale": self.scale, "size": self.size}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Preprocess:
        return cls(tuple(values["mean"]), tuple(values["std"]), float(values["scale"]), values["size"])


@lru_cache(maxsize=32)  # a copy to a GPU waits for all work before it
def _constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


def _resize_and_crop(z: Tensor, size: int) -> Tensor:
    height, width = z.shape[-2:]
    ratio = size / min(height, width)
    new = (max(size, round(height * ratio)), max(size, round(width * ratio)))
    z = F.interpolate(z, size=new, mode="bilinear", antialias=ratio < 1, align_corners=False)  # nothing to smooth where pixels are spread
    top, left = (new[0] - size) // 2, (new[1] - size) // 2
    return z[..., top : top + size, left : left + size]


@dataclass(frozen=True)
class Target:
    """Numbers to predict: their mean and standard deviation over the training samples of all sites, with which they are standardised."""

    mean: float
    std: float


@dataclass(frozen=True)
class Scenario:
    """Sites, what they share, and what is known about them."""

    name: str
    sites: tuple[Site, ...]
    classes: tuple[str, ...]
    preprocess: Preprocess
    model: ModelRecipe
    groups: dict[str, str] | None = None
    """True group of every site, where known (simulated scenarios)."""
    k: int | None = None
    """Number of clusters given to the methods that need it."""
    scored: tuple[str, ...] | None = None
    """Sites whose accuracy counts in the summary (backdoor targets); ``None`` means all."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Training defaults of this scenario: ``lr``, ``rounds``, ``local_epochs``, ``batch_size``, and the mode of fine-tuning at home,
    ``personalize``."""
    method_defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Method name → field → value, for hyper-parameters tuned per scenario."""
    notes: tuple[str, ...] = ()
    """Changes made by a scale, and warnings for the user."""
    doubts: tuple[str, ...] = ()
    """Those of the notes that say what to repair before training."""
    encoding: Mapping[str, Any] = field(default_factory=dict)
    """How a file becomes a row of ``x`` (JSON values), so that a stored run can read new files: kind and shape of images, or a table's
    columns. Empty where there are no files, as for arrays; images are then read at the shape of the first site."""
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    """Site → hash of its samples as they were read from the user's own files, before anything pooled over sites went into them."""
    target: Target | None = None
    """Of regression; ``classes`` is then empty."""
    label_kind: str = "text"
    """What labels were in the user's data, one of ``LABEL_KINDS``; ``classes`` are their names."""
    source: tuple[str, Mapping[str, Any]] | None = field(default=None, init=False, compare=False)
    """Name and options that build it again, set by the registry; a scenario changed with ``dataclasses.replace`` has none."""
