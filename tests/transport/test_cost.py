from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import cdist

from emdcfl.core.errors import ConfigError, DataError
from emdcfl.transport import cost_matrix, projected_width, projection


def sample(seed: int, n: int, d: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, d))


@pytest.mark.parametrize("cost", ["cosine", "euclidean"])
def test_equals_scipy(cost: str) -> None:
    a, b = sample(0, 7), sample(1, 9)
    c = cost_matrix(a, b, cost=cost)
    assert c.dtype == np.float32
    np.testing.assert_allclose(c, cdist(a, b, cost), atol=1e-6)


def test_zero_vectors() -> None:
    z = np.array([[0.0, 0.0], [3.0, 4.0], [0.0, 0.0]])
    c = cost_matrix(z, z)
    np.testing.assert_allclose(c, [[0, 1, 0], [1, 0, 1], [0, 1, 0]], atol=1e-6)


def test_huge_and_tiny_vectors_neither_overflow_nor_vanish() -> None:
    a = np.array([[1e30, 1e30], [1e-30, 0.0]], dtype=np.float32)
    np.testing.assert_allclose(cost_matrix(a, a), [[0, 1 - 0.5**0.5], [1 - 0.5**0.5, 0]], atol=1e-6)


def test_close_points_far_from_the_origin_keep_their_distance() -> None:
    a = np.array([[1000.0, 1000.0]])
    assert cost_matrix(a, a + np.array([[0.0, 0.25]]), cost="euclidean")[0, 0] == pytest.approx(0.25, rel=1e-5)


def test_label_aware_adds_the_weight_where_labels_differ() -> None:
    a, b = sample(0, 4), sample(1, 3)
    plain = cost_matrix(a, b)
    aware = cost_matrix(a, b, cost="label-aware", labels_a=[0, 1, 0, 1], labels_b=[0, 0, 2], label_weight=0.3)
    expected = 0.3 * (np.array([0, 1, 0, 1])[:, None] != np.array([0, 0, 2]))
    np.testing.assert_allclose(aware - plain, expected, atol=1e-6)


def test_bad_samples_are_named() -> None:
    a = sample(0, 3)
    with pytest.raises(ConfigError, match="did you mean 'cosine'"):
        cost_matrix(a, a, cost="cosin")
    with pytest.raises(DataError, match=r"sample b.*NaN"):
        cost_matrix(a, np.full((2, 5), np.nan))
    with pytest.raises(DataError, match="width, got 5 and 4"):
        cost_matrix(a, np.ones((2, 4)))
    with pytest.raises(DataError, match="non-empty"):
        cost_matrix(np.ones((0, 5)), a)
    with pytest.raises(DataError, match="labels"):
        cost_matrix(a, a, cost="label-aware")
    with pytest.raises(DataError, match="3 and 3 labels"):
        cost_matrix(a, a, cost="label-aware", labels_a=[1], labels_b=[1, 2, 3])


@given(st.integers(0, 1000), st.integers(1, 6), st.integers(1, 6))
def test_cosine_is_symmetric_bounded_and_blind_to_scale(seed: int, n: int, m: int) -> None:
    a, b = sample(seed, n), sample(seed + 1, m)
    a[0] = 0
    c = cost_matrix(a, b)
    assert c.min() >= 0
    assert c.max() <= 2 + 1e-6
    np.testing.assert_allclose(c, cost_matrix(b, a).T, atol=1e-6)
    np.testing.assert_allclose(c, cost_matrix(7.5 * a, 0.01 * b), atol=1e-6)


def test_projection_has_unit_rows_and_the_same_bits_for_the_same_seed() -> None:
    r = projection(b"pair secret", 64, 57)
    assert r.shape == (64, 57)
    assert r.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(r, axis=1), 1.0, atol=1e-6)
    assert r.tobytes() == projection(b"pair secret", 64, 57).tobytes()
    others = [projection(b"pair secres", 64, 57), projection(1, 64, 57), projection(b"1", 64, 57), projection(2, 64, 57)]
    assert len({x.tobytes() for x in [r, *others]}) == 5


def test_projection_is_isotropic_normal() -> None:
    r = projection(7, 300, 200).astype(np.float64)
    entries = r.ravel() * np.sqrt(200)
    assert abs(entries.mean()) < 0.02
    assert entries.std() == pytest.approx(1.0, abs=1e-3)
    assert (entries**4).mean() == pytest.approx(3.0, abs=0.1)
    gram = r @ r.T
    assert np.abs(gram - np.eye(300)).max() < 0.45


def test_projection_bits_are_pinned() -> None:
    """Two clients with different versions of this package must draw the same matrix."""
    r = projection(b"emdcfl", 3, 2)
    np.testing.assert_array_equal(r, PINNED)


PINNED = np.array(
    [[-0.019827349111437798, 0.9998034238815308], [-0.6191897392272949, -0.785241425037384], [-0.9227932691574097, -0.38529545068740845]],
    dtype=np.float32,
)


@pytest.mark.parametrize(
    ("ratio", "d", "p"),
    [
        (0.9, 128, 115),
        (0.9, 512, 460),
        (0.9, 10, 9),
        (0.29, 100, 29),
        (0.57, 100, 57),
        (1.0, 64, 64),
        (1, 64, 64),
        (0.1, 5, 1),
        (0.3, 10, 3),
    ],
)
def test_projected_width(ratio: float, d: int, p: int) -> None:
    assert projected_width(ratio, d) == p


def test_projection_refuses_nonsense() -> None:
    for ratio in (0.0, 1.5, float("nan")):
        with pytest.raises(ConfigError, match="ratio"):
            projected_width(ratio, 10)
    with pytest.raises(ConfigError):
        projection(0, 3, 0)
