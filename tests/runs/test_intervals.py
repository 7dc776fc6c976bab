"""Intervals of accuracies: they hold as often as they say, whatever sites and samples there are."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from emdcfl.runs.verdict.intervals import Interval, SiteScores, difference, new_sites, over_seeds, these_sites, wilson

TIMES = 400


def draw(generator: np.random.Generator, p: np.ndarray, n: np.ndarray) -> SiteScores:
    return SiteScores(tuple((generator.binomial(n, p) / np.maximum(n, 1)).tolist()), tuple(n.tolist()))


CASES = {
    "few large sites": ([0.9, 0.6, 0.75], [200, 400, 300]),
    "one site": ([0.93], [40]),
    "many small sites, hardly an error": ([0.98] * 20, [10] * 20),
    "single samples": ([0.8] * 30, [1] * 30),
    "sites that differ very much": ([0.02, 0.98, 0.5, 0.9], [20, 20, 60, 5]),
}


@pytest.mark.parametrize("case", CASES)
def test_the_mean_of_these_sites_is_covered(case: str) -> None:
    p, n = map(np.array, CASES[case])
    generator = np.random.Generator(np.random.Philox(1))
    found = [these_sites(draw(generator, p, n)) for _ in range(TIMES)]
    held = np.mean([f.low <= p.mean() <= f.high for f in found if f is not None])
    assert held >= 0.92  # as of Wilson's own: 0.935 for 200 samples at 0.98


@pytest.mark.parametrize("agreement", [0.0, 1.0])
@pytest.mark.parametrize(("sites", "n"), [(3, 150), (6, 40), (20, 15)])
def test_differences_are_covered_whether_errors_coincide_or_not(sites: int, n: int, agreement: float) -> None:
    generator = np.random.Generator(np.random.Philox(2))
    p = np.linspace(0.6, 0.9, sites)
    q = p + np.linspace(-0.05, 0.09, sites)
    held, seen = 0, 0
    for _ in range(TIMES):
        u, v = generator.uniform(size=(2, sites, n))
        v = np.where(generator.uniform(size=(sites, n)) < agreement, u, v)
        one, other = ((w < share[:, None]).mean(1) for w, share in ((u, p), (v, q)))
        found = difference(SiteScores(tuple(other), (n,) * sites), SiteScores(tuple(one), (n,) * sites))
        held += found.low <= (q - p).mean() <= found.high
        seen += found.sign == -1
    assert held / TIMES >= 0.94 and seen / TIMES <= 0.03


def test_new_sites_are_not_known_better_than_these_even_if_all_agree() -> None:
    alike = SiteScores((1.0, 1.0, 1.0), (12, 12, 12))
    here, others = these_sites(alike), new_sites(alike)
    assert others.low == here.low < 0.95


def test_the_mean_of_new_sites_is_covered() -> None:
    generator = np.random.Generator(np.random.Philox(3))
    found = [new_sites(draw(generator, generator.beta(8, 2, size=6), np.full(6, 30))) for _ in range(TIMES)]
    assert 0.91 <= np.mean([f.low <= 0.8 <= f.high for f in found if f is not None]) <= 0.99


def test_pairing_sees_what_two_intervals_hide() -> None:
    """Sites differ much more than methods: only the differences show which is better."""
    p = np.linspace(0.5, 0.95, 12)
    one, other = SiteScores(tuple(p + 0.04), (100,) * 12), SiteScores(tuple(p), (100,) * 12)
    a, b, d = new_sites(one), new_sites(other), difference(one, other)
    assert a.low < b.high and d.low > 0 and d.mean == pytest.approx(0.04)


def test_a_gain_that_only_some_sites_have_is_seen_with_many_samples() -> None:
    found = difference(SiteScores((0.9, 0.9, 0.7, 0.7), (1000,) * 4), SiteScores((0.7, 0.7, 0.7, 0.7), (1000,) * 4))
    assert found.low > 0.05


def test_sites_without_samples_do_not_count() -> None:
    some = SiteScores((0.9, 0.0, 0.8), (50, 0, 50))
    assert these_sites(some) == these_sites(SiteScores((0.9, 0.8), (50, 50)))
    assert difference(some, SiteScores((0.0, 1.0, 0.8), (0, 50, 50))) == difference(SiteScores((0.8,), (50,)), SiteScores((0.8,), (50,)))
    nobody = SiteScores((0.0, 0.0), (0, 0))
    assert these_sites(nobody) is new_sites(nobody) is difference(nobody, some) is over_seeds([]) is None
    assert new_sites(SiteScores((0.9,), (50,))) is None


@pytest.mark.parametrize("errors", [None, (0.1, 0.2, 0.3)])
def test_each_site_alone_has_the_interval_it_has_where_no_other_counts(errors: tuple[float, ...] | None) -> None:
    scores = SiteScores((0.9, 0.5, 0.8), (50, 0, 70), errors)
    alone = [replace(scores, samples=tuple(n if i == site else 0 for i, n in enumerate(scores.samples))) for site in range(3)]
    assert [these_sites(one) for one in scores.each()] == [these_sites(one) for one in alone]
    assert these_sites(scores.only([0, 2])) == these_sites(scores)


def test_nothing_is_certain_without_errors() -> None:
    perfect = these_sites(SiteScores((1.0, 1.0), (20, 30)))
    opposite = these_sites(SiteScores((1.0, 0.0), (20, 20)))
    assert perfect.high == 1.0 and 0.85 < perfect.low < 0.98
    assert opposite.high - opposite.low > 0.05
    same = difference(SiteScores((1.0,) * 5, (20,) * 5), SiteScores((1.0,) * 5, (20,) * 5))
    assert same.mean == 0 and same.low < -0.01 and same.high > 0.01


def test_one_site_has_wilsons_interval() -> None:
    found = these_sites(SiteScores((0.9,), (10,)))
    assert found.low == pytest.approx(wilson(0.9, 10).low) and found.high == pytest.approx(0.98212, abs=1e-4)


def test_more_seeds_narrow_training_noise_and_not_the_test_data() -> None:
    few, many = (over_seeds([Interval(0.5 + 0.01 * (-1) ** r, 0.4, 0.6) for r in range(2 * times)]) for times in (1, 20))
    assert few.high - few.mean > 0.12 and many.high - many.mean == pytest.approx(0.1, abs=0.002)
    assert math.isclose((-many).low, -many.high)


@pytest.mark.parametrize(
    "score",
    [{}, {"sites": [0.5], "tested": [10, 10]}, {"sites": ["x"], "tested": [1]}, {"sites": [7.0], "tested": [1]}, {"sites": 3, "tested": 4}],
)
def test_scores_that_are_none_are_not_read(score: dict[str, object]) -> None:
    assert SiteScores.of(score) is None
