"""Positions of clients on the map."""

from __future__ import annotations

import numpy as np
import pytest

from emdcfl.report.projection import classical_mds, symmetric

NAN = float("nan")


def test_missing_distances_are_bridged() -> None:
    d = symmetric(np.array([[NAN, 0.1, NAN], [0.3, NAN, 0.2], [NAN, 0.2, NAN]]))
    assert d[0, 1] == pytest.approx(0.2) and d[0, 2] == pytest.approx(0.4)
    assert np.array_equal(d, d.T) and not np.diag(d).any()
    assert np.isfinite(symmetric(np.full((2, 2), NAN))).all()


def test_map_keeps_planar_distances() -> None:
    points = np.random.Generator(np.random.Philox(1)).normal(size=(20, 2))
    d = np.linalg.norm(points[:, None] - points[None], axis=2)
    found, share = classical_mds(d)
    assert np.allclose(np.linalg.norm(found[:, None] - found[None], axis=2), d)
    assert share == pytest.approx(1)
    assert classical_mds(np.zeros((1, 1)))[0].tolist() == [[0, 0]]
