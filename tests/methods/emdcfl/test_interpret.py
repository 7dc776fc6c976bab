from __future__ import annotations

import json

import numpy as np
import pytest

from emdcfl.methods.base import Distances
from emdcfl.methods.emdcfl.interpret import LOW_POWER, doubts, read
from emdcfl.runs.figures import heatmap, margin_plot, png

NAMES = ["a", "b", "c", "d"]
CLUSTERS = [0, 0, 1, 1]


def block(inside: float = 0.01, outside: float = 0.1, epsilon: float | None = 0.025, tau: float = 0.1) -> Distances:
    same = np.equal.outer(CLUSTERS, CLUSTERS)
    W = np.where(same, inside, outside)
    np.fill_diagonal(W, np.nan)
    tolerance = np.full((4, 4), 0.025) if epsilon is not None else np.repeat([[0.02], [0.03], [0.02], [0.03]], 4, axis=1)
    return Distances(W, np.full(4, tau), tolerance, np.ones((4, 4), np.int8))


def test_a_clear_clustering_in_words() -> None:
    found = read(block(), NAMES, CLUSTERS)
    assert not found.calibrated and not found.doubts
    assert found.margins["interval"] == (0.01, 0.1)
    assert "above 0.01 and up to 0.1" in found.sentences[0] and "0.025" in found.sentences[0]
    assert "a – b at 0.01" in found.clusters[0] and "c at 0.1" in found.clusters[0]
    assert not found.borderline and not found.not_compared and len(found.sentences) == 1
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False))["interval"] == [0.01, 0.1]


def test_calibrated_tolerances_are_the_unit() -> None:
    found = read(block(epsilon=None), NAMES, CLUSTERS)
    assert found.calibrated
    assert found.margins["inside"] == pytest.approx(0.5) and found.margins["outside"] == pytest.approx(0.1 / 0.03)
    assert "0.5×" in found.clusters[0]
    assert found.as_dict()["unit"] == "tolerances"


@pytest.mark.filterwarnings("error")
def test_a_client_whose_tolerance_is_zero_is_far_from_all_others() -> None:
    """All validation samples of client d are alike, so that they have no variance."""
    d = block(epsilon=None)
    d.epsilon[3] = 0.0
    found = read(d, NAMES, [0, 0, 1, 2])
    assert found.clusters[2] == "nearest outsider a at 1e+03× from d"
    json.dumps(read(d, NAMES, [0, 0, 0, 1]).as_dict(), allow_nan=False)


def test_bounds_are_named_as_such() -> None:
    d = block()
    d.kind[0, 2:] = d.kind[2:, 0] = 2
    d.kind[0, 1] = d.kind[1, 0] = 3
    found = read(d, NAMES, CLUSTERS)
    assert "bounds" in found.sentences[0]
    assert "a – b at ≤ 0.01" in found.clusters[0] and "≥ 0.1" in found.clusters[0]


def test_borderline_and_uncompared_clients_are_named() -> None:
    d = block()
    d.W[0, 1] = 0.024
    found = read(d, NAMES, CLUSTERS)
    assert found.borderline == ["a", "b"] and any("a, b" in sentence for sentence in found.sentences)
    d.kind[:] = 3
    found = read(d, NAMES, CLUSTERS)
    assert not found.borderline and found.near_bounds == 1
    d.W[0], d.W[:, 0] = np.nan, np.nan
    found = read(d, NAMES, [0, 1, 2, 2])
    assert found.not_compared == ["a"] and any("not compared: a;" in sentence for sentence in found.sentences)


def test_one_cluster_has_an_open_interval() -> None:
    d = block(outside=0.012)
    found = read(d, NAMES, [0, 0, 0, 0])
    assert found.as_dict()["interval"] == [0.012, None]
    assert "up to" not in found.sentences[0] and "nearest" not in found.clusters[0]


def test_links_across_clusters_are_a_doubt() -> None:
    d = block()
    d.W[1, 2] = d.W[2, 1] = 0.02
    assert "b – c are linked but in different clusters" in doubts(d, NAMES, CLUSTERS)[0]


def test_two_directions_that_only_together_refuse_are_a_doubt() -> None:
    d = block(epsilon=None)
    d.W[0, 1], d.W[1, 0] = 0.8 * 0.02, 0.8 * 0.03
    (text,) = doubts(d, NAMES, CLUSTERS)
    assert "a – b" in text and "both directions together" in text
    d.W[1, 0] = 0.5 * 0.03
    assert not doubts(d, NAMES, CLUSTERS)


def test_a_tolerance_as_wide_as_tau_is_low_power() -> None:
    near = {"epsilon": None, "outside": 0.05}
    (text,) = doubts(block(**near, tau=0.02 / LOW_POWER - 1e-4), NAMES, CLUSTERS)  # type: ignore[arg-type]
    assert text.startswith("low power: the tolerance of a, b, c, d")
    assert not doubts(block(**near, tau=0.02 / LOW_POWER + 1e-4), NAMES, CLUSTERS)  # type: ignore[arg-type]  # half of the clients only
    assert not doubts(block(epsilon=None, outside=0.1, tau=0.01), NAMES, CLUSTERS)  # clusters far apart


def test_pairs_never_compared_do_not_count() -> None:
    d = block()
    d.W[0, 1] = d.W[1, 0] = np.nan
    found = read(d, NAMES, CLUSTERS)
    assert "no pair was compared" in found.clusters[0]


@pytest.mark.slow
@pytest.mark.parametrize(("epsilon", "unset"), [(0.025, False), (None, False), (0.025, True)])
def test_pictures_are_png_and_the_same_every_time(epsilon: float | None, unset: bool) -> None:
    d = block(epsilon=epsilon)
    d.kind[0, 2] = 2
    if unset:
        d.W[:] = np.nan
    for draw in (margin_plot, heatmap):
        first = png(draw(d, NAMES, CLUSTERS))
        assert first[:8] == b"\x89PNG\r\n\x1a\n"
        assert first == png(draw(d, NAMES, CLUSTERS))


def bars(d: Distances, clusters: list[int]) -> float:
    """Pairs that the drawing of margins shows: the heights of its bars, without their outlines' baseline."""
    (axes,) = margin_plot(d, NAMES, clusters).axes
    shown = 0.0
    for patch in axes.patches:
        corners = patch.get_path().vertices
        right, left = corners[1:, 0], corners[:-1, 0]
        assert np.isfinite(corners).all() and corners[:, 0].max() > corners[:, 0].min()
        shown += float(corners[1:, 1][right > left].sum())
    return shown


@pytest.mark.filterwarnings("error")
def test_pictures_show_every_pair_of_a_client_whose_tolerance_is_zero() -> None:
    d = block(epsilon=None)
    d.epsilon[3] = 0.0
    d.W[3] = [-0.01, 0.0, 0.1, np.nan]
    assert bars(d, [0, 0, 1, 2]) == 6
    ratio = heatmap(d, NAMES, [0, 0, 1, 2]).axes[0].images[0].get_array().filled(np.nan)
    assert ratio[3, 0] < 1 < ratio[3, 1] and ratio[3, 2] > 1  # linked where W < 0, and only there
    assert np.isfinite(ratio).sum() == 12


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("outside", [0.1, 0.0])
def test_pictures_where_all_tolerances_are_zero(outside: float) -> None:
    d = block(inside=0.0, outside=outside)
    d.epsilon[:] = 0.0
    assert bars(d, [0, 1, 2, 3]) == 6
    png(heatmap(d, NAMES, [0, 1, 2, 3]))


def test_where_nobody_was_compared_no_tolerance_is_praised() -> None:
    unset = np.full((2, 2), np.nan)
    found = read(Distances(unset, unset[0], unset, np.zeros((2, 2), np.int8)), ["a", "b"], [0, 1])
    assert len(found.sentences) == 1 and "no two clients were compared" in found.sentences[0]
