"""What every source returns, and the source that needs no files: scikit-learn's 1,797 handwritten digits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Source:
    """Images with labels, before they are divided among sites.

    Attributes
    ----------
    images : array
        uint8 ``(N, C, H, W)``; may be memory-mapped.
    labels : array
        int64 ``(N,)``.
    classes : tuple of str
        Names of the labels.
    columns : mapping
        Further columns of the table, for example ``domain``.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    classes: tuple[str, ...]
    columns: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    vocabularies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.labels)


def digits() -> Source:
    """Return the digits as uint8 images of shape ``(1, 8, 8)``; the 17 grey levels 0…16 become ``round(255·v/16)``."""
    table = _table()
    images = np.floor(table[:, :-1].reshape(-1, 1, 8, 8) * (255 / 16) + 0.5).astype(np.uint8)
    return Source(images, table[:, -1].astype(np.int64), tuple(str(k) for k in range(10)))


def _table() -> np.ndarray[Any, Any]:
    """Return pixels and label of every digit, read from the package's own file: importing the package takes seconds."""
    spec = find_spec("sklearn")
    path = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz" if spec is not None and spec.origin else None
    if path is not None and path.is_file():
        return np.loadtxt(path, delimiter=",")
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return np.column_stack([bunch.data, bunch.target])
