r"""Spectral features of clients from the C × C Gram matrix of their update vectors.

With the clients' vectors as rows of X and :math:`XX^\top = V \operatorname{diag}(\sigma^2) V^\top`, the coordinates of client i on the
leading right singular vectors of X are :math:`\sigma_j V_{ij}`; no vector as long as the model is needed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from emdcfl.clustering.labels import Array, square
from emdcfl.core.errors import ConfigError, DataError


def gram_features(gram: Any, k: int) -> Array:
    r"""Coordinates :math:`\sigma_j V_{ij}` on the `k` leading directions (CFLGP's reduced gradient profile).

    The sign of a direction is free; here its entry of largest magnitude (the first of them) is positive.

    Parameters
    ----------
    gram : (C, C) array_like
        Inner products of the clients' vectors.
    k : int
        Number of directions; beyond the number of clients the features are zero.

    Returns
    -------
    (C, k) float64 array

    Examples
    --------
    >>> x = np.array([[2.0, 0.0], [0.0, -1.0]])
    >>> gram_features(x @ x.T, 2) + 0.0
    array([[2., 0.],
           [0., 1.]])
    """
    g = square(gram, "the Gram matrix").astype(np.float64)
    if not np.isfinite(g).all():
        raise DataError("expected a finite Gram matrix, got NaN or infinity; a client's update has diverged")
    if k < 1:
        raise ConfigError(f"expected at least one direction, got k={k}")
    values, vectors = np.linalg.eigh((g + g.T) / 2)
    leading = vectors[:, ::-1][:, :k] * np.sqrt(np.maximum(values[::-1][:k], 0.0))
    # Rounded before the choice, so that entries equal up to rounding do not decide the sign by their last bit.
    size = np.abs(leading)
    peak = np.argmax(size >= size.max(axis=0) * (1 - 1e-9), axis=0)
    leading = leading * np.where(leading[peak, np.arange(leading.shape[1])] < 0, -1.0, 1.0)
    return np.pad(leading, ((0, 0), (0, k - leading.shape[1])))


def edc(gram: Any, k: int) -> Array:
    r"""FlexCFL's features :math:`e_{ij} = \sigma_j V_{ij} / \lVert\Delta_i\rVert`: cosines of each update with the leading directions.

    A client whose update is zero has cosine zero with everything.

    Examples
    --------
    >>> x = np.array([[2.0, 0.0], [0.0, -1.0], [0.0, 0.0]])
    >>> edc(x @ x.T, 2) + 0.0
    array([[1., 0.],
           [0., 1.],
           [0., 0.]])
    """
    features = gram_features(gram, k)
    norms = np.sqrt(np.maximum(np.diag(np.asarray(gram, dtype=np.float64)), 0.0))[:, None]
    return np.divide(features, norms, out=np.zeros_like(features), where=norms > 0)
