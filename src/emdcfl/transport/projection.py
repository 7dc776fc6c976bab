r"""Seeded random projection of embeddings: what the server sees instead of an embedding.

:math:`R \in \mathbb{R}^{d \times p}` has i.i.d. standard normal entries, then each row is scaled to unit length;
:math:`p = \lfloor \text{ratio} \cdot d \rfloor`. Everyone who holds the seed draws a bit-identical matrix.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from emdcfl.core.errors import ConfigError
from emdcfl.transport.pool import Array


def projected_width(ratio: float, d: int) -> int:
    """Width after projection, ``max(1, floor(ratio * d))``, with `ratio` read as the decimal it was written as.

    Examples
    --------
    >>> projected_width(0.9, 128), projected_width(0.29, 100), projected_width(0.1, 5)
    (115, 29, 1)
    """
    if not 0 < ratio <= 1:
        raise ConfigError(f"expected a projection ratio in (0, 1], got {ratio}; 0.9 is the paper's")
    if d < 1:
        raise ConfigError(f"expected an embedding width of at least 1, got {d}")
    return max(1, math.floor(Fraction(repr(float(ratio))) * d))


def projection(seed: bytes | int, d: int, p: int) -> Array:
    """Draw the projection that belongs to a seed.

    The generator is numpy's counter-based Philox keyed with SHA-256 of (seed, d, p). Row lengths are summed without rounding error
    (``math.fsum``), because vectorised sums round differently from one processor to the next.

    Parameters
    ----------
    seed : bytes or int
        What the partners share.
    d, p : int
        Embedding width before and after.

    Returns
    -------
    (d, p) float32 array with rows of unit length

    Examples
    --------
    >>> r = projection(b"shared secret", 4, 3)
    >>> r.shape, bool(np.allclose((r**2).sum(axis=1), 1.0)), bool((r == projection(b"shared secret", 4, 3)).all())
    ((4, 3), True, True)
    """
    # Imported here: keys.py needs torch, and nothing else in this package does.
    from emdcfl.core.keys import digest

    if d < 1 or p < 1:
        raise ConfigError(f"expected a projection of at least 1 x 1, got {d} x {p}")
    kind = b"bytes" if isinstance(seed, bytes) else b"int"
    key = int.from_bytes(digest(b"emdcfl projection", kind, seed, d, p)[:16], "big")
    r = np.random.Generator(np.random.Philox(key=key)).standard_normal((d, p))
    length = np.array([math.sqrt(math.fsum(row)) for row in (r * r).tolist()])
    return np.asarray(r / length[:, None], dtype=np.float32)
