"""Pairs in units of their tolerance, and borderline clients."""

from __future__ import annotations

import numpy as np
import pytest

from emdcfl.clustering import PairRatios

NAN = float("nan")


def ratios(w: list[list[float]], clusters: list[int], *, kind: list[list[int]] | None = None, epsilon: float = 0.1) -> PairRatios:
    values = np.array(w)
    tolerance = np.where(np.eye(len(w), dtype=bool), np.nan, epsilon)
    kinds = np.where(np.isnan(values), 0, 1) if kind is None else np.array(kind)
    return PairRatios(values, tolerance, kinds.astype(np.int8), clusters)


def test_the_larger_direction_decides() -> None:
    g = ratios([[NAN, 0.02, 0.5], [0.05, NAN, 0.4], [0.3, 0.2, NAN]], [0, 0, 1])
    assert g.deciding[0, 1] == g.deciding[1, 0] == pytest.approx(0.5)
    assert g.deciding[0, 2] == pytest.approx(5)
    edge = g.edge(2, same=False)
    assert edge is not None and (edge.other, edge.kind) == (1, 1)
    assert g.edge(2, same=True) is None
    assert g.borderline() == [] and g.tightness(0) == pytest.approx(2)


def test_one_direction_refuses_but_does_not_accept() -> None:
    g = ratios([[NAN, 0.02, 0.5], [NAN, NAN, NAN], [NAN, 0.01, NAN]], [0, 1, 2])
    assert g.deciding[0, 2] == pytest.approx(5) and g.deciding_kind[0, 2] == g.deciding_kind[2, 0] == 2
    assert np.isnan(g.deciding[0, 1]) and g.deciding_kind[0, 1] == 0
    assert g.count() == {"exact": 0, "bound": 1, "unset": 2}


def test_borderline_only_where_measured() -> None:
    w = [[NAN, 0.095, 0.5], [0.05, NAN, 0.5], [0.5, 0.5, NAN]]
    assert ratios(w, [0, 0, 1]).borderline() == [0, 1]
    bounded = ratios(w, [0, 0, 1], kind=[[0, 3, 2], [1, 0, 2], [2, 2, 0]])
    assert bounded.borderline() == [] and bounded.near_bounds() == 1
    # The deciding entry is exact: what the other one is does not matter.
    assert ratios(w, [0, 0, 1], kind=[[0, 1, 2], [3, 0, 2], [2, 2, 0]]).borderline() == [0, 1]


def test_zero_tolerance_is_all_or_nothing() -> None:
    g = ratios([[NAN, -0.01], [0.01, NAN]], [0, 1], epsilon=0.0)
    assert g.ratio[0, 1] == 0 and g.ratio[1, 0] > 1 and g.deciding[0, 1] > 1
