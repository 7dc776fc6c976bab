r"""Gaussian noise on what is released about a record, and the differential privacy it gives.

A *release* is one record's vector, scaled to at most unit length, plus :math:`N(0, \sigma^2 I)`. Replacing the record moves the vector by
at most :math:`\Delta = 2`. With :math:`\mu = \Delta/\sigma`, the release is :math:`(\varepsilon, \delta)`-differentially private if and
only if

.. math:: \delta \ge \Phi\Bigl(\frac{\mu}{2} - \frac{\varepsilon}{\mu}\Bigr)
                     - e^{\varepsilon}\,\Phi\Bigl(-\frac{\mu}{2} - \frac{\varepsilon}{\mu}\Bigr)

(Balle and Wang 2018, theorem 8). This is the exact trade-off, not a bound, for every ε. k releases about one record, each possibly
chosen after seeing the ones before, are together as private as one release with :math:`\sqrt{k}\,\mu` (Dong, Roth and Su 2022).

The noise comes from a node's secret through HMAC-SHA-256 and ChaCha20, so that no other party can recompute it. It is a function of the
query and of the record: a repeated request gets the same noise, so that repetition does not average it out. Any change of the query
or of the record gives independent noise; else the difference of two answers would be the difference of two vectors, without noise. The
vector itself is not part of the key: its last bits depend on the batch a record is embedded in.

Balle, Wang. *Improving the Gaussian mechanism for differential privacy: analytical calibration and optimal denoising.* ICML 2018.
Dong, Roth, Su. *Gaussian differential privacy.* Journal of the Royal Statistical Society B, 2022.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from emdcfl.core.errors import ConfigError
from emdcfl.core.keys import NodeSecret
from emdcfl.core.optional import require

Array = np.ndarray[Any, Any]
SENSITIVITY = 2.0
"""Largest distance between two vectors of at most unit length: what replacing one record changes in a release."""

DELTA = 1e-5
"""δ where none is said."""

BITS = 52
GRID_BITS = 10
HALVINGS = 200


def gaussian_delta(epsilon: float, mu: float) -> float:
    r"""Smallest δ for which a Gaussian release with :math:`\mu = \Delta/\sigma` is (ε, δ)-differentially private.

    Examples
    --------
    >>> round(gaussian_delta(1.0, 1.0), 6), round(gaussian_delta(0.0, 1.0), 6)
    (0.126937, 0.382925)
    """
    from scipy.special import log_ndtr, ndtr

    return max(0.0, float(ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon + float(log_ndtr(-mu / 2 - epsilon / mu)))))


def gaussian_mu(epsilon: float, delta: float) -> float:
    """Largest μ = Δ/σ that is (ε, δ)-differentially private, from below."""
    _check(epsilon, delta)
    low = high = 1.0
    while gaussian_delta(epsilon, low) > delta:
        low /= 2
    while gaussian_delta(epsilon, high) <= delta:
        high *= 2
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if gaussian_delta(epsilon, middle) <= delta else (low, middle)
    return low


def gaussian_sigma(epsilon: float, delta: float) -> float:
    """Smallest standard deviation of the noise that makes one release of a record (ε, δ)-differentially private.

    Examples
    --------
    >>> round(gaussian_sigma(1.0, 1e-5), 4), round(gaussian_sigma(64.0, 1e-5), 4)
    (7.4613, 0.2534)
    """
    return SENSITIVITY / gaussian_mu(epsilon, delta)


def total_epsilon(epsilon: float, delta: float, releases: int) -> float:
    """Return ε of all releases about one record together, at the same δ, where each is calibrated to (ε, δ).

    Examples
    --------
    >>> round(total_epsilon(1.0, 1e-5, 1), 6), round(total_epsilon(1.0, 1e-5, 8), 2)
    (1.0, 3.19)
    """
    if releases < 1:
        raise ConfigError(f"expected at least one release of a record, got {releases}")
    return gaussian_epsilon(gaussian_mu(epsilon, delta) * math.sqrt(releases), delta)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Smallest ε for which a Gaussian release with μ = Δ/σ is (ε, δ)-differentially private, from above."""
    if gaussian_delta(0.0, mu) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while gaussian_delta(high, mu) > delta:
        low, high = high, 2 * high
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if gaussian_delta(middle, mu) <= delta else (middle, high)
    return high


def unit(z: Any) -> Array:
    """Scale rows to unit length in float64. A row that is zero or not finite becomes zero, so that no row is longer than 1.

    Examples
    --------
    >>> unit([[3.0, 4.0], [0.0, 0.0], [np.inf, 1.0]])
    array([[0.6, 0.8],
           [0. , 0. ],
           [0. , 0. ]])
    """
    x = np.asarray(z, dtype=np.float64)
    largest = np.abs(x).max(axis=1, keepdims=True, initial=0.0)
    usable = np.isfinite(x).all(axis=1, keepdims=True) & (largest > 0)
    scaled = np.divide(x, largest, out=np.zeros_like(x), where=usable)
    length = np.linalg.norm(scaled, axis=1, keepdims=True)
    return np.asarray(np.divide(scaled, length, out=np.zeros_like(x), where=usable))


def released(z: Any, records: Sequence[bytes], *, sigma: float, secret: NodeSecret, query: bytes) -> Array:
    """Return the vectors at unit length with Gaussian noise: what may leave the node.

    Parameters
    ----------
    z : (n, p) array_like
        One vector per record, already projected.
    records : sequence of bytes
        Whose vectors these are: something that differs between records.
    sigma : float
        Standard deviation per entry.
    secret : NodeSecret
    query : bytes
        Digest of *everything* that makes a vector from a record: the model, the projection, the preprocessing.

    Returns
    -------
    (n, p) float32 array
        Rounded to a grid of about σ/1000, which hides the last bits of the floating-point sum: they could tell a vector from another
        (Mironov 2012).
    """
    u = unit(z)
    if len(records) != len(u):
        raise ValueError(f"expected one record per vector, got {len(records)} for {len(u)}")
    keys = [secret.derive("privacy noise", query, float(sigma).hex(), record) for record in records]
    grid = 2.0 ** (math.floor(math.log2(sigma)) - GRID_BITS)
    return np.asarray(np.rint((u + sigma * _normals(keys, u.shape[1])) / grid) * grid, dtype=np.float32)


def _normals(keys: Sequence[bytes], width: int) -> Array:
    """One row of standard normals per key: the inverse distribution function at 52 bits of ChaCha20's stream each."""
    from scipy.special import ndtri

    ciphers = require("cryptography.hazmat.primitives.ciphers", "flower", "to draw privacy noise")
    chacha = require("cryptography.hazmat.primitives.ciphers.algorithms", "flower", "to draw privacy noise").ChaCha20
    streams = [ciphers.Cipher(chacha(key, bytes(16)), mode=None).encryptor().update(bytes(8 * width)) for key in keys]
    bits = np.frombuffer(b"".join(streams), dtype="<u8").reshape(len(keys), width) >> (64 - BITS)
    return np.asarray(ndtri((bits + 0.5) * 2.0**-BITS))


def _check(epsilon: float, delta: float) -> None:
    if not (epsilon > 0 and math.isfinite(epsilon)):
        raise ConfigError(f"expected a privacy epsilon above 0, got {epsilon}; leave it out for no noise")
    if not 0 < delta < 1:
        raise ConfigError(f"expected a privacy delta between 0 and 1, got {delta}; 1e-5 is usual, below one over the number of records")
