from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import norm, t

from emdcfl.core.errors import ConfigError, DataError
from emdcfl.transport import cost_matrix, dual_variance, exact, min_samples, quantile, tolerance


def test_quantile_is_bonferroni_over_ordered_pairs() -> None:
    assert quantile(0.01, 40) == pytest.approx(norm.isf(0.01 / (40 * 39)))
    assert quantile(0.05, 1) == pytest.approx(norm.isf(0.05))
    assert quantile(1e-9, 1000) == pytest.approx(norm.isf(1e-9 / 999_000), rel=1e-9)
    assert quantile(0.001, 40) > quantile(0.01, 40) > quantile(0.01, 18)


@pytest.mark.parametrize("freedom", [1, 7, 36, 508])
def test_quantile_of_an_estimated_variance_is_students(freedom: int) -> None:
    assert quantile(0.005, 12, freedom) == pytest.approx(t.isf(0.005 / 132, freedom), rel=1e-9)
    assert quantile(0.005, 12, freedom) > quantile(0.005, 12)
    with pytest.raises(DataError, match="degree of freedom"):
        quantile(0.005, 12, 0)


def test_tolerance_formula() -> None:
    assert tolerance(0.04, 100, 100, 3.0) == pytest.approx(3 * np.sqrt(2 * 0.04 / 100))
    assert tolerance(0.04, 100, 50, 3.0) == pytest.approx(3 * np.sqrt(0.04 * (1 / 100 + 1 / 50)))
    assert tolerance(0.0, 10, 10, 3.0) == 0.0


def test_nonsense_is_refused() -> None:
    for alpha in (0.0, 1.0, 2.0):
        with pytest.raises(ConfigError, match="alpha"):
            quantile(alpha, 3)
    with pytest.raises(ConfigError):
        quantile(0.1, 0)
    with pytest.raises(DataError):
        dual_variance([1.0])
    with pytest.raises(DataError):
        dual_variance([1.0, np.nan])
    with pytest.raises(DataError):
        tolerance(-1.0, 3, 3, 1.0)
    with pytest.raises(DataError):
        tolerance(1.0, 0, 3, 1.0)


def draw(rng: np.random.Generator, n: int, shift: float = 0.0) -> np.ndarray:
    """Ten classes of ReLU features, a stand-in for trained embeddings; `shift` moves all of them."""
    structure = np.random.default_rng(0)
    centres, directions = 1.5 * structure.standard_normal((10, 32)), structure.standard_normal((6, 32)) / 2
    z = centres[rng.integers(0, 10, n)] + rng.standard_normal((n, 6)) @ directions + shift * structure.standard_normal(32)
    return np.maximum(z, 0.0)


def test_the_statistic_is_about_standard_normal_under_the_null_and_large_under_a_shift() -> None:
    rng = np.random.default_rng(1)
    m = 128
    source = draw(rng, 128)
    null, shifted = [], []
    for _ in range(30):
        own = exact(cost_matrix(source, draw(rng, m)), duals=True)
        assert own.g is not None
        scale = tolerance(dual_variance(own.g), m, m, 1.0)
        null.append((exact(cost_matrix(source, draw(rng, m))).value - own.value) / scale)
        shifted.append((exact(cost_matrix(source, draw(rng, m, shift=2.0))).value - own.value) / scale)
    assert abs(np.mean(null)) < 0.6
    assert 0.3 < np.std(null) < 1.6
    assert max(null) < quantile(0.001, 18)
    assert min(shifted) > quantile(0.001, 18)


def test_a_large_error_asks_for_two_samples_at_least() -> None:
    assert min_samples(0.5, 1) == 2


def test_below_the_fewest_samples_no_partner_is_large_enough() -> None:
    """A standard deviation of the potential is under the tolerance at any m' with fewer, and above it at some with as many."""
    for clients in (2, 8, 40, 640):
        m = min_samples(0.005, clients)
        fewer, enough = (tolerance(1.0, size, 10**9, quantile(0.005, clients, size - 1)) for size in (m - 1, m))
        assert fewer > 1.0 > enough
