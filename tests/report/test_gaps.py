"""Pairs in units of their tolerance, borderline clients, the map."""

from __future__ import annotations

import numpy as np
import pytest

from emdcfl.report.gaps import Gaps, classical_mds

NAN = float("nan")


def gaps(w: list[list[float]], clusters: list[int], *, kind: list[list[int]] | None = None, epsilon: float = 0.1) -> Gaps:
    values = np.array(w)
    tolerance = np.where(np.eye(len(w), dtype=bool), np.nan, epsilon)
    kinds = np.where(np.isnan(values), 0, 1) if kind is None else np.array(kind)
    return Gaps(values, tolerance, kinds.astype(np.int8), clusters)


def test_the_larger_direction_decides() -> None:
    g = gaps([[NAN, 0.02, 0.5], [0.05, NAN, 0.4], [0.3, 0.2, NAN]], [0, 0, 1])
    assert g.deciding[0, 1] == g.deciding[1, 0] == pytest.approx(0.5)
    assert g.deciding[0, 2] == pytest.approx(5)
    assert (g.margins["inside"], g.margins["outside"]) == (pytest.approx(0.5), pytest.approx(4))
    assert g.margins["interval"] == (pytest.approx(0.5), pytest.approx(4))
    edge = g.edge(2, same=False)
    assert edge is not None and (edge.other, edge.kind) == (1, 1)
    assert g.edge(2, same=True) is None
    assert g.borderline() == [] and g.tightness(0) == pytest.approx(2)


def test_one_direction_refuses_but_does_not_accept() -> None:
    g = gaps([[NAN, 0.02, 0.5], [NAN, NAN, NAN], [NAN, 0.01, NAN]], [0, 1, 2])
    assert g.deciding[0, 2] == pytest.approx(5) and g.deciding_kind[0, 2] == g.deciding_kind[2, 0] == 2
    assert np.isnan(g.deciding[0, 1]) and g.deciding_kind[0, 1] == 0
    assert g.count() == {"exact": 0, "bound": 1, "unset": 2}


def test_borderline_only_where_measured() -> None:
    w = [[NAN, 0.095, 0.5], [0.05, NAN, 0.5], [0.5, 0.5, NAN]]
    assert gaps(w, [0, 0, 1]).borderline() == [0, 1]
    bounded = gaps(w, [0, 0, 1], kind=[[0, 3, 2], [1, 0, 2], [2, 2, 0]])
    assert bounded.borderline() == [] and bounded.unmeasured() == 1
    # The deciding entry is exact: what the other one is does not matter.
    assert gaps(w, [0, 0, 1], kind=[[0, 1, 2], [3, 0, 2], [2, 2, 0]]).borderline() == [0, 1]


def test_zero_tolerance_is_all_or_nothing() -> None:
    g = gaps([[NAN, -0.01], [0.01, NAN]], [0, 1], epsilon=0.0)
    assert g.ratio[0, 1] == 0 and g.ratio[1, 0] > 1 and g.deciding[0, 1] > 1


def test_missing_distances_are_bridged() -> None:
    g = gaps([[NAN, 0.1, NAN], [0.3, NAN, 0.2], [NAN, 0.2, NAN]], [0, 1, 2])
    d = g.symmetric()
    assert d[0, 1] == pytest.approx(0.2) and d[0, 2] == pytest.approx(0.4)
    assert np.array_equal(d, d.T) and not np.diag(d).any()
    nobody = gaps([[NAN, NAN], [NAN, NAN]], [0, 1]).symmetric()
    assert np.isfinite(nobody).all()


def test_map_keeps_planar_distances() -> None:
    points = np.random.Generator(np.random.Philox(1)).normal(size=(20, 2))
    d = np.linalg.norm(points[:, None] - points[None], axis=2)
    found, share = classical_mds(d)
    assert np.allclose(np.linalg.norm(found[:, None] - found[None], axis=2), d)
    assert share == pytest.approx(1)
    assert classical_mds(np.zeros((1, 1)))[0].tolist() == [[0, 0]]
