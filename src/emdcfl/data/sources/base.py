"""What a source hands out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Source:
    """Images with labels, before anybody divided them among sites.

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
