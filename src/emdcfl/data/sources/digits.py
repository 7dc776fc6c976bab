"""The 1,797 handwritten digits that come with scikit-learn: no download, no files."""

from __future__ import annotations

import numpy as np

from emdcfl.data.sources.base import Source


def digits() -> Source:
    """Return the digits as uint8 images of shape ``(1, 8, 8)``; the 17 grey levels 0…16 become ``round(255·v/16)``."""
    from sklearn.datasets import load_digits  # here, because it takes seconds and most scenarios do without

    bunch = load_digits()
    images = np.floor(bunch.images * (255 / 16) + 0.5).astype(np.uint8)[:, None]
    return Source(images, bunch.target.astype(np.int64), tuple(str(name) for name in bunch.target_names))
