from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emdcfl.clustering import links, neighbourhoods
from emdcfl.core.errors import DataError


def blocks(*sizes: int) -> np.ndarray:
    k = np.repeat(np.arange(len(sizes)), sizes)
    return k[:, None] == k[None, :]


def test_block_matrix_gives_blocks() -> None:
    labels, sets = neighbourhoods(blocks(3, 1, 2))
    assert labels.tolist() == [0, 0, 0, 1, 2, 2]
    assert sets == [(0, 1, 2), (3,), (4, 5)]


def test_one_missing_link_in_ten_gives_three_overlapping_clusters() -> None:
    m = blocks(10)
    m[2, 7] = m[7, 2] = False
    labels, sets = neighbourhoods(m)
    assert np.unique(labels).size == 3
    assert sorted(np.bincount(labels).tolist()) == [1, 1, 8]
    assert [len(s) for s in sets] == [10, 9, 9]


def test_a_link_needs_both_directions_and_is_strict() -> None:
    w = np.array([[9.0, 0.01, 0.02], [0.03, 9.0, 0.024], [0.025, 0.02, 9.0]])
    m = links(w, 0.025)
    assert m.tolist() == [[True, False, False], [False, True, True], [False, True, True]]
    assert not links(w, 0.025, force_diagonal=False).diagonal().any()


def test_nan_is_no_link_and_warns_nobody() -> None:
    w = np.array([[0.0, np.nan], [0.0, 0.0]])
    assert links(w, 1.0).tolist() == [[True, False], [False, True]]


def test_tolerance_per_row_and_per_pair() -> None:
    w = np.array([[0.0, 0.1, 0.1], [0.2, 0.0, 0.1], [0.1, 0.1, 0.0]])
    assert links(w, [0.15, 0.25, 0.05])[0].tolist() == [True, True, False]
    pair = np.full((3, 3), 0.15)
    pair[1, 0] = 0.25
    assert links(w, pair).tolist() == [[True, True, True], [True, True, True], [True, True, True]]


def test_empty_neighbourhoods_become_singletons_and_selfless_ones_stay() -> None:
    m = np.zeros((4, 4), dtype=bool)
    m[0, 1] = m[1, 0] = True
    labels, sets = neighbourhoods(m)
    assert sets == [(1,), (0,), (2,), (3,)]
    assert labels.tolist() == [0, 1, 2, 3]


def test_not_square_is_refused() -> None:
    with pytest.raises(DataError, match="square"):
        neighbourhoods(np.zeros((2, 3)))


@given(st.integers(1, 9).flatmap(lambda c: st.lists(st.integers(0, 3), min_size=c, max_size=c)))
def test_unions_of_cliques_are_the_groups(groups: list[int]) -> None:
    k = np.array(groups)
    m = k[:, None] == k[None, :]
    labels, sets = neighbourhoods(m)
    assert sorted(i for members in sets for i in members) == list(range(len(k)))
    assert np.array_equal(labels[:, None] == labels[None, :], m)


@given(st.integers(1, 7).flatmap(lambda c: st.lists(st.booleans(), min_size=c * c, max_size=c * c)), st.randoms(use_true_random=False))
def test_whatever_is_linked_the_sets_are_the_neighbourhoods_and_names_do_not_matter(entries: list[bool], rng: Random) -> None:
    c = math.isqrt(len(entries))
    m = np.array(entries).reshape(c, c)
    labels, sets = neighbourhoods(m)
    for client in range(c):
        assert sets[labels[client]] == (tuple(np.flatnonzero(m[client])) or (client,))
    assert sorted(set(labels.tolist())) == list(range(len(sets)))
    order = np.array(rng.sample(range(c), c))
    again, _ = neighbourhoods(m[np.ix_(order, order)])
    full = [frozenset(np.flatnonzero(row)) or frozenset([i]) for i, row in enumerate(m)]
    assert all((again[a] == again[b]) == (full[order[a]] == full[order[b]]) for a in range(c) for b in range(c))
