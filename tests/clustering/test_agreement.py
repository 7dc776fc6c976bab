from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import adjusted_rand_score

from emdcfl.clustering import adjusted_rand, links, margins, neighbourhoods
from emdcfl.core.errors import DataError


def test_single_group_truth() -> None:
    assert adjusted_rand([7, 7, 7, 7], [3, 3, 3, 3]) == 1.0
    assert adjusted_rand([7, 7, 7, 7], [0, 0, 1, 1]) == 0.0
    assert adjusted_rand(["a"], [0]) == 1.0


def test_equals_scikit_learn_and_takes_names() -> None:
    truth, labels = ["a", "a", "b", "b", "c"], [1, 1, 0, 2, 2]
    assert adjusted_rand(truth, labels) == pytest.approx(adjusted_rand_score([0, 0, 1, 1, 2], labels))
    with pytest.raises(DataError):
        adjusted_rand([0, 1], [0])


def test_margins_of_two_groups() -> None:
    w = np.full((4, 4), 0.5)
    w[:2, :2], w[2:, 2:] = 0.01, 0.02
    w[1, 0] = 0.03
    w[0, 3], w[3, 0] = 0.05, 0.2  # the refusing direction counts
    found = margins(w, [0, 0, 1, 1])
    assert found["inside"] == 0.03
    assert found["outside"] == 0.2
    assert found["interval"] == (0.03, 0.2)
    assert found["weakest"] == {0: {"a": 0, "b": 1, "value": 0.03}, 1: {"a": 2, "b": 3, "value": 0.02}}
    assert found["nearest"] == {0: {"a": 0, "b": 3, "value": 0.2}, 1: {"a": 3, "b": 0, "value": 0.2}}


def test_margins_without_a_tolerance_that_fits() -> None:
    w = np.array([[0, 0.5, 0.1], [0.5, 0, 0.1], [0.1, 0.1, 0.0]])
    found = margins(w, [0, 0, 1])
    assert found["interval"] is None
    assert found["inside"] == 0.5
    assert found["outside"] == 0.1


def test_margins_of_one_cluster_and_of_singletons() -> None:
    w = np.array([[0.0, 0.1], [0.2, 0.0]])
    assert margins(w, [0, 0])["interval"] == (0.2, np.inf)
    assert margins(w, [0, 0])["outside"] is None
    assert margins(w, [0, 1])["interval"] == (-np.inf, 0.2)
    assert margins(w, [0, 1])["inside"] is None


def test_unknown_pairs_are_left_out() -> None:
    w = np.array([[0.0, 0.1, np.nan], [0.1, 0.0, 0.9], [np.nan, 0.8, 0.0]])
    found = margins(w, [0, 0, 1])
    assert found["outside"] == 0.9
    assert found["interval"] == (0.1, 0.9)
    assert margins(w, [0, 1, 0])["interval"] is None


@given(
    st.integers(1, 6).flatmap(lambda c: st.lists(st.lists(st.integers(0, 6), min_size=c, max_size=c), min_size=c, max_size=c)),
    st.integers(0, 7),
)
def test_the_interval_is_the_lowest_run_that_reproduces_the_clusters(rows: list[list[int]], threshold: int) -> None:
    w = np.array(rows, dtype=float)
    k, _ = neighbourhoods(links(w, threshold))
    interval = margins(w, k)["interval"]
    # All values are integers, so one tolerance per half-open piece (v - 1, v] tells everything.
    good = [e for e in range(9) if np.array_equal(neighbourhoods(links(w, e))[0], k)]
    run = [e for e in good if all(f in good for f in range(good[0], e + 1))]
    assert interval is not None
    lo, hi = interval
    inside = [e for e in range(9) if lo < e <= hi]
    assert inside == run


def test_of_several_intervals_the_one_around_the_tolerance_is_told() -> None:
    """A chain a – b – c: alone without links, and alone again when a and c are both linked with b but not with each other."""
    w = [[0, 0.02, 0.5], [0.02, 0, 0.03], [0.5, 0.03, 0]]
    assert margins(w, [0, 1, 2])["interval"] == (-np.inf, 0.02)
    assert margins(w, [0, 1, 2], used=0.1)["interval"] == (0.03, 0.5)
    assert margins(w, [0, 1, 2], used=0.025)["interval"] is None
