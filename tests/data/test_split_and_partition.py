from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emdcfl.core.errors import ConfigError, DataError
from emdcfl.data import partition
from emdcfl.data.split import split_indices, stratified_indices


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def covers(parts: list[np.ndarray], n: int) -> bool:
    return np.array_equal(np.sort(np.concatenate(parts)), np.arange(n))


@given(st.integers(0, 500))
def test_split_covers_everything_once(n: int) -> None:
    parts = split_indices(n, (0.6, 0.2, 0.2), rng())
    assert covers(list(parts), n)
    assert len(parts[1]) == len(parts[2]) == int(np.floor(0.2 * n + 0.5))


@given(st.lists(st.integers(0, 4), min_size=10, max_size=300))
def test_stratified_split_keeps_proportions(labels: list[int]) -> None:
    y = np.array(labels)
    parts = stratified_indices(y, (0.6, 0.2, 0.2), rng())
    assert covers(list(parts), len(y))
    for part, fraction in zip(parts, (0.6, 0.2, 0.2), strict=True):
        for label in np.unique(y):
            assert abs((y[part] == label).sum() - fraction * (y == label).sum()) <= 2


def test_a_lone_sample_goes_into_training() -> None:
    y = np.array([0] * 20 + [1])
    train, val, test = stratified_indices(y, (0.6, 0.2, 0.2), rng())
    assert 20 in train
    assert len(val) >= 4
    assert len(test) >= 4


def test_fractions_must_sum_to_one() -> None:
    with pytest.raises(DataError, match=r"sum to 1, got \(0.5, 0.2\)"):
        split_indices(10, (0.5, 0.2), rng())


@pytest.mark.parametrize("name", ["iid", "balanced", "dirichlet", "shards", "quantity"])
def test_divisions_cover_everything_once_and_repeat(name: str) -> None:
    y = np.random.default_rng(0).integers(0, 10, 1003)
    divide = getattr(partition, name)
    parts = divide(y, 7, rng())
    assert len(parts) == 7
    assert covers(parts, 1003)
    assert all(np.array_equal(a, b) for a, b in zip(parts, divide(y, 7, rng()), strict=True))


def test_what_each_division_skews() -> None:
    y = np.repeat(np.arange(10), 100)

    def spread(parts: list[np.ndarray]) -> float:
        return float(np.mean([np.bincount(y[p], minlength=10).max() / len(p) for p in parts]))

    assert spread(partition.balanced(y, 10, rng())) == pytest.approx(0.1)
    assert spread(partition.dirichlet(y, 10, rng(), alpha=0.1)) > 0.4 > spread(partition.dirichlet(y, 10, rng(), alpha=100))
    assert all(len(np.unique(y[p])) <= 4 for p in partition.shards(y, 10, rng(), per_client=2))
    sizes = [len(p) for p in partition.quantity(y, 5, rng(), ratio=4)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] / sizes[-1] == pytest.approx(4, rel=0.05)


def test_impossible_divisions_say_so() -> None:
    y = np.zeros(20, dtype=np.int64)
    with pytest.raises(ConfigError, match="20 samples cannot give 5 clients 10 each"):
        partition.dirichlet(y, 5, rng())
    with pytest.raises(ConfigError, match="20 samples cannot be divided into 30 parts"):
        partition.iid(y, 30, rng())
    with pytest.raises(ConfigError, match="alpha must be positive"):
        partition.dirichlet(y, 2, rng(), alpha=0)
