"""K-means, linkage, label matching."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emdcfl.clustering import bipartition, cut, edc, gram_features, kmeans, match_labels
from emdcfl.core.errors import DataError


def distances(seed: int, clients: int, dim: int = 3) -> np.ndarray:
    x = np.random.default_rng(seed).standard_normal((clients, dim))
    return np.linalg.norm(x[:, None] - x[None], axis=2)


def same_partition(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.array_equal(a[:, None] == a, b[:, None] == b))


def test_kmeans_finds_blobs_whatever_the_seed() -> None:
    rng = np.random.default_rng(0)
    truth = np.repeat(np.arange(4), 10)
    x = 10 * np.eye(4)[truth] + 0.1 * rng.standard_normal((40, 4))
    for seed in (0, 1, 2**40 + 3):
        assert np.array_equal(kmeans(x, 4, seed=seed), truth)


def test_kmeans_is_a_function_of_its_seed() -> None:
    x = np.random.default_rng(1).standard_normal((30, 2))
    assert np.array_equal(kmeans(x, 5, seed=3, max_iter=1), kmeans(x, 5, seed=3, max_iter=1))
    assert len({kmeans(x, 5, seed=s, max_iter=1).tobytes() for s in range(8)}) > 1


def test_kmeans_with_more_clusters_than_points() -> None:
    assert kmeans([[0.0, 1.0], [-0.0, 1.0], [2.0, 2.0]], 7, seed=0).tolist() == [0, 0, 1]
    with pytest.raises(DataError):
        kmeans([[np.nan]], 1, seed=0)


def wpgma_loop(d: np.ndarray, threshold: float) -> np.ndarray:
    """PACFL's merge loop: closest pair first, the merged row is the plain mean of the two."""
    d = d.astype(float).copy()
    np.fill_diagonal(d, np.inf)
    groups = [[i] for i in range(len(d))]
    while len(groups) > 1 and d.min() <= threshold:
        i, j = sorted(int(x) for x in np.unravel_index(d.argmin(), d.shape))
        merged = (d[i] + d[j]) / 2
        d[i], d[:, i] = merged, merged
        d[i, i] = np.inf
        d = np.delete(np.delete(d, j, 0), j, 1)
        groups[i] += groups.pop(j)
    labels = np.empty(sum(map(len, groups)), dtype=int)
    for k, members in enumerate(groups):
        labels[members] = k
    return labels


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 14), st.floats(0.1, 6.0))
def test_pacfl_merge_loop_equals_a_wpgma_cut(seed: int, clients: int, threshold: float) -> None:
    d = distances(seed, clients)
    assert same_partition(cut(d, threshold, linkage="weighted"), wpgma_loop(d, threshold))


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 14), st.floats(0.1, 6.0))
def test_fedclust_recursion_equals_a_single_complete_cut(seed: int, clients: int, threshold: float) -> None:
    d = distances(seed, clients)

    def recurse(members: np.ndarray) -> list[np.ndarray]:
        labels = cut(d[np.ix_(members, members)], threshold)
        if labels.max() == 0:
            return [members]
        return [part for k in range(labels.max() + 1) for part in recurse(members[labels == k])]

    labels = np.empty(clients, dtype=int)
    for k, part in enumerate(recurse(np.arange(clients))):
        labels[part] = k
    once = cut(d, threshold)
    assert same_partition(labels, once)
    for k in range(once.max() + 1):
        assert d[np.ix_(once == k, once == k)].max() <= threshold


def test_linkages_differ_where_they_should() -> None:
    x = np.array([0.0, 1.0, 2.2, 5.0])
    d = np.abs(x[:, None] - x)
    assert cut(d, 1.8, linkage="average").tolist() == [0, 0, 0, 1]
    assert cut(d, 1.8, linkage="complete").tolist() == [0, 0, 1, 2]
    # 5.0 is (5 + 4 + 2.8) / 3 = 3.93 from {0, 1, 2.2} by UPGMA, but 3.65 by WPGMA ((5 + 4) / 2 + 2.8) / 2
    assert cut(d, 3.7, linkage="average").tolist() == [0, 0, 0, 1]
    assert cut(d, 3.7, linkage="weighted").tolist() == [0, 0, 0, 0]


def test_bad_distances_are_named() -> None:
    with pytest.raises(DataError, match="symmetric"):
        cut([[0, 1], [2, 0]], 1.0)
    with pytest.raises(DataError, match="NaN"):
        cut([[0, np.nan], [np.nan, 0]], 1.0)
    assert cut([[0]], 1.0).tolist() == [0]


def test_bipartition_always_has_two_parts() -> None:
    assert bipartition(1 - np.eye(5)).max() == 1  # all heights equal
    assert bipartition([[0.0]]).tolist() == [0]
    d = np.full((6, 6), 5.0)
    d[:2, :2] = d[2:, 2:] = 1.0
    assert bipartition(d).tolist() == [0, 0, 1, 1, 1, 1]


@given(
    st.integers(1, 4).flatmap(
        lambda k: st.tuples(st.just(k), st.lists(st.tuples(st.integers(0, k - 1), st.integers(0, k - 1)), max_size=12))
    )
)
def test_matching_is_the_best_permutation(case: tuple[int, list[tuple[int, int]]]) -> None:
    k, pairs = case
    new, old = np.array([p[0] for p in pairs], dtype=int), np.array([p[1] for p in pairs], dtype=int)
    matched = match_labels(new, old, k)
    assert same_partition(matched, new)
    best = max(sum(int(p[a] == b) for a, b in pairs) for p in itertools.permutations(range(k)))
    assert int((matched == old).sum()) == best


def test_matching_keeps_numbers_without_evidence() -> None:
    assert match_labels([0, 1, 2], [0, 0, 0], 3)[0] == 0


# --- spectral features ---


def vectors(seed: int, clients: int, d: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((clients, d)) * np.linspace(1, 3, d)


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 10), st.integers(3, 40), st.integers(1, 4))
def test_gram_features_equal_direct_svd_up_to_sign(seed: int, clients: int, d: int, k: int) -> None:
    x = vectors(seed, clients, d)
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    k = min(k, len(s))
    gaps = np.abs(np.diff(np.concatenate([s, [0.0]]))[:k])
    if gaps.min() < 1e-3:
        return
    ours = gram_features(x @ x.T, k)
    direct = u[:, :k] * s[:k]
    np.testing.assert_allclose(np.abs(ours), np.abs(direct), atol=1e-6)
    signs = np.sign((ours * direct).sum(axis=0))
    np.testing.assert_allclose(ours, direct * signs, atol=1e-6)
    # FlexCFL: cosines of every update with the leading directions
    cosines = (x @ vt[:k].T) / np.linalg.norm(x, axis=1, keepdims=True)
    np.testing.assert_allclose(edc(x @ x.T, k), cosines * signs, atol=1e-6)


def test_signs_are_fixed_and_surplus_directions_are_zero() -> None:
    x = vectors(0, 5, 9)
    g = x @ x.T
    f = gram_features(g, 7)
    assert f.shape == (5, 7)
    assert np.array_equal(f[:, 5:], np.zeros((5, 2)))
    peak = np.abs(f[:, :5]).argmax(axis=0)
    assert (f[peak, np.arange(5)] > 0).all()
    np.testing.assert_allclose(f, gram_features((-x) @ (-x).T, 7))


def test_zero_updates_have_no_direction() -> None:
    assert not edc(np.zeros((3, 3)), 2).any()
    with pytest.raises(DataError):
        gram_features([[np.nan]], 1)
