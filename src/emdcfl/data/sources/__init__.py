"""Where samples come from: scikit-learn's 1,797 handwritten digits, and public data sets. Every source is a table of uint8 images."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from emdcfl.core.errors import ConfigError, nearest
from emdcfl.data.sources.files import parquet_files
from emdcfl.data.sources.parquet import ImageTable, LabelledImages, read_table

log = logging.getLogger("emdcfl")


@dataclass(frozen=True)
class Published:
    """A public data set: its place on the hub, the shape of its images, its further text columns.

    ``resized`` allows an edition in another square size, because the network's input is resized anyway.
    """

    repo: str
    shape: tuple[int, int, int]
    splits: tuple[str, ...] = ("train", "test")
    text: tuple[str, ...] = ()
    resized: bool = False


PUBLISHED = {
    "mnist": Published("ylecun/mnist", (1, 28, 28)),
    "cifar10": Published("uoft-cs/cifar10", (3, 32, 32)),
    "pacs": Published("flwrlabs/pacs", (3, 227, 227), splits=("train",), text=("domain",), resized=True),
}
NAMES = ("digits", *PUBLISHED)


def table(name: str, split: str, data_root: str | Path | None = None) -> ImageTable:
    """Return one split of a published data set, pixels not yet decoded."""
    if name not in PUBLISHED:
        raise ConfigError(f"unknown data set {name!r}: {nearest(name, PUBLISHED)}")
    known = PUBLISHED[name]
    if split not in known.splits:
        raise ConfigError(f"{name} has no split {split!r} (valid: {', '.join(known.splits)})")
    found = read_table(f"{name}-{split}", parquet_files(name, known.repo, split, data_root), known.shape, text=known.text)
    if not known.resized or (side := found.side()) in (None, known.shape[1]):
        return found
    log.info("%s: images of %d×%d pixels instead of the published %d×%d", found.name, side, side, *known.shape[1:])
    return replace(found, shape=(known.shape[0], side, side))


def load(name: str, split: str = "train", data_root: str | Path | None = None) -> LabelledImages:
    """Return one split of a source by name, ``digits`` included (which has one split)."""
    if name not in NAMES:
        raise ConfigError(f"unknown source {name!r}: {nearest(name, NAMES)}")
    return digits() if name == "digits" else table(name, split, data_root).load()


def digits() -> LabelledImages:
    """Return the digits as uint8 images of shape ``(1, 8, 8)``; the 17 grey levels 0…16 become ``round(255·v/16)``."""
    table = _table()
    images = np.floor(table[:, :-1].reshape(-1, 1, 8, 8) * (255 / 16) + 0.5).astype(np.uint8)
    return LabelledImages(images, table[:, -1].astype(np.int64), tuple(str(k) for k in range(10)))


def _table() -> np.ndarray[Any, Any]:
    """Return pixels and label of every digit, read from the package's own file: importing the package takes seconds."""
    spec = find_spec("sklearn")
    path = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz" if spec is not None and spec.origin else None
    if path is not None and path.is_file():
        return np.loadtxt(path, delimiter=",")
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return np.column_stack([bunch.data, bunch.target])


__all__ = ["NAMES", "PUBLISHED", "ImageTable", "Published", "LabelledImages", "digits", "load", "table"]
