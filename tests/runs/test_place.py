"""Placing a site among the clusters of a run: what is compared decides, and who cannot be compared does not."""

from __future__ import annotations

import json
from math import inf

import pytest
import torch

from emdcfl.methods.emdcfl.comparison import Measured, PairDistance
from emdcfl.runs.new_sites.place import Candidate, Guess, Placement, candidate_of, choose
from emdcfl.transport import EXACT


def measured(**there_and_back: tuple[tuple[float, float], tuple[float, float]]) -> Measured:
    entries = {}
    for c, (there, back) in there_and_back.items():
        entries["new", c], entries[c, "new"] = PairDistance(*there, EXACT), PairDistance(*back, EXACT)
    return Measured({}, entries, 0, 0)


def test_the_farther_direction_of_the_farthest_member_decides() -> None:
    found = measured(a=((0.01, 0.02), (0.01, 0.1)), b=((0.01, 0.1), (0.03, 0.02)))
    one = candidate_of(0, ["a", "b"], "new", found, 0.9)
    assert one.ratio == 1.5 and one.linked == 1


def test_a_member_that_was_not_compared_does_not_count() -> None:
    """It may have too few validation samples for a calibrated tolerance."""
    found = measured(a=((0.01, 0.02), (0.01, 0.1)))
    with_it, alone = candidate_of(0, ["a", "tiny"], "new", found, 0.9), candidate_of(1, ["tiny"], "new", found, 0.5)
    assert (with_it.ratio, with_it.linked) == (0.5, 1) and (alone.ratio, alone.linked) == (inf, 0)
    placement = Placement("new", 0, [with_it, alone], ("rows left out: 3",))
    assert "cluster 0" in placement.verdict() and "0.50" in placement.verdict()
    told = json.loads(json.dumps(placement.as_dict(), allow_nan=False))
    assert told["candidates"][1]["ratio"] is None and told["notes"] == ["rows left out: 3"]


def test_where_nobody_could_be_compared_no_distance_is_named() -> None:
    nobody = Placement("new", None, [candidate_of(0, ["tiny"], "new", measured(), 0.5)], ())
    assert "no member could be compared; train it alone" in nobody.verdict()


def test_a_site_in_no_group_is_told_what_to_do() -> None:
    far = [Candidate(0, ["a"], 3.1, 0, 0.6), Candidate(1, ["b"], 4.0, 0, 1.0)]
    guess = Guess(0.5, 2, 12)
    said = choose("new", far, guess, ()).verdict()
    assert "cluster 0, is at 3.1 times" in said and "cluster 1's model is right for 100.0% of its 12 test samples: use that for now" in said
    assert "train it alone" in choose("new", [Candidate(0, ["a"], 3.1, 0, 0.4)], guess, ()).verdict()


def test_groups_by_benefit_take_a_site_that_does_no_better_alone() -> None:
    """Links made no group of such a run, so that none need make the site one of its members."""
    far, guess = [Candidate(0, ["a"], 3.1, 0, 0.7), Candidate(1, ["b"], 4.0, 0, 0.9)], Guess(0.5, 2, 40)
    fits = choose("new", far, guess, (), 0.95)
    assert fits.cluster == 1 and fits.verdict().startswith("new fits cluster 1: its model is right for 90.0%")
    better = choose("new", far, guess, (), 0.99)
    assert better.cluster is None and "alone is right for 99.0%" in better.verdict() and "cluster 1's: 90.0%" in better.verdict()
    near = [Candidate(0, ["a"], 0.5, 1, 0.7), far[1]]
    assert choose("new", near, guess, (), 0.8).cluster == 0  # the intervals overlap
    assert [choose("new", near[:1], guess, (), alone).cluster for alone in (0.9, 0.99)] == [0, None]
    few = Guess(0.5, 2, 12)  # all right alone is not clearly better than all but one
    assert [choose("new", [Candidate(0, ["a"], 3.1, 0, right / 12)], few, (), 1.0).cluster for right in (11, 10)] == [0, None]
    assert choose("new", near, guess, (), 0.95).cluster == 1
    assert choose("new", far, Guess(0.99, 2, 4000), (), 0.4).cluster is None  # always guessing does better
    assert choose("new", far, Guess(0.0, 0, 40), (), 0.95).cluster is None  # of R² there is no interval
    assert choose("new", near, Guess(0.0, 0, 40), (), 0.95).cluster == 0


def test_a_tolerance_of_zero_is_all_or_nothing() -> None:
    """A client whose samples are all alike calibrates to zero."""
    far = candidate_of(0, ["a"], "new", measured(a=((0.0, 0.0), (0.0, 0.1))), 0.9)
    said = Placement("new", None, [far], ()).verdict()
    assert 1 < far.ratio < inf and "cluster 0" in said and "no member could be compared" not in said
    assert candidate_of(0, ["a"], "new", measured(a=((-0.1, 0.0), (0.05, 0.1))), 0.9).ratio == 0.5


def near(accuracy: float) -> list[Candidate]:
    """One linked cluster, and one farther away that is linked too."""
    return [Candidate(0, ["a"], 0.4, 1, accuracy), Candidate(1, ["b"], 0.8, 1, 0.9), Candidate(2, ["c"], 3.0, 0, 0.95)]


def test_a_model_that_fails_on_the_sites_own_labels_is_never_recommended() -> None:
    guess = Guess.of(torch.tensor([0] * 12 + [1] * 8))
    assert guess == Guess(0.6, 2, 20)
    assert choose("new", near(0.85), guess, ()).cluster == 0
    other = choose("new", near(0.0), guess, ())
    assert (other.cluster, other.refused) == (1, 0) and "cluster 1: at 0.80" in other.verdict()
    nowhere = choose("new", [c for c in near(0.0) if c.cluster != 1], guess, ())
    assert (nowhere.cluster, nowhere.refused) == (None, 0)
    assert "0.0%" in nowhere.verdict() and "60.0%" in nowhere.verdict() and "belongs to cluster" not in nowhere.verdict()
    assert nowhere.as_dict()["refused"] == 0
    assert choose("new", near(0.0), None, ()).cluster == 0  # without labels only distances speak


@pytest.mark.parametrize(
    ("accuracy", "guess", "fails"),
    [
        (0.03, Guess(0.12, 10, 200), True),
        (0.0, Guess(0.2, 10, 10), True),  # few samples, but not even chance
        (0.93, Guess(0.95, 2, 100), False),  # as good as guessing, as far as 100 samples can tell
        (0.7, Guess(0.95, 2, 100), True),
        (0.9, Guess(1.0, 1, 5), False),
        (0.3, Guess(1.0, 1, 30), True),
    ],
)
def test_failing_is_worse_than_guessing_or_no_better_than_chance(accuracy: float, guess: Guess, fails: bool) -> None:
    assert guess.beats(accuracy) is fails
