"""Every bound on measured quantities, on random data and on digits; and that none is trivial."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emdcfl.core.errors import DataError
from emdcfl.data.sources import digits
from emdcfl.paper import theory


def sample(rng: np.random.Generator, n: int, d: int, classes: int, shift: float = 0.0) -> theory.Sample:
    return theory.Sample(rng.normal(size=(n, d)) + shift, rng.integers(0, classes, n))


def head(rng: np.random.Generator, d: int, classes: int, scale: float = 1.0) -> theory.Head:
    return theory.Head(scale * rng.normal(size=(classes, d)), rng.normal(size=classes))


problems = st.tuples(st.integers(0, 10_000), st.integers(1, 12), st.integers(1, 12), st.integers(1, 5), st.floats(0, 3), st.floats(0.05, 8))


@settings(max_examples=40, deadline=None)
@given(problems)
def test_every_bound_holds_on_random_problems(problem: tuple[int, int, int, int, float, float]) -> None:
    seed, n, m, d, shift, scale = problem
    rng = np.random.default_rng(seed)
    i, j = sample(rng, n, d, 3), sample(rng, m, d, 3, shift)
    h, other = head(rng, d, 3, scale), head(rng, d, 3)
    assert theory.disagreement_bound(h, other, i, j).holds
    assert theory.disagreement_bound(h, other, j, i).holds
    alpha = float(rng.uniform())
    assert theory.merging_bound(h, i, j, alpha, [other]).holds
    assert theory.ensemble_bound(h, other, i, j, alpha, [other, h]).holds
    assert theory.gradient_bound(h, i, j).holds
    assert theory.parameter_bound(h, i, j, 0.1).holds


def test_head_is_as_steep_as_its_constant_says_and_no_steeper() -> None:
    rng = np.random.default_rng(0)
    h = head(rng, 4, 3, 2.0)
    z = rng.normal(size=(2000, 4))
    step = 1e-4 * rng.normal(size=z.shape)
    slopes = np.linalg.norm(h(z + step) - h(z), axis=1) / np.linalg.norm(step, axis=1)
    assert slopes.max() <= h.lipschitz * (1 + 1e-6)
    two = theory.Head(np.array([[1.0, 0.0], [-1.0, 0.0]]), np.zeros(2))  # two opposite rows: softmax is steepest at the border
    at, beside = np.zeros((1, 2)), np.array([[1e-5, 0.0]])
    slope = np.linalg.norm(two(beside) - two(at)) / 1e-5
    assert slope == pytest.approx(two.lipschitz, rel=1e-3)


def test_gradient_is_the_gradient() -> None:
    rng = np.random.default_rng(1)
    s, h = sample(rng, 9, 3, 4), head(rng, 3, 4)

    def loss(weight: np.ndarray, bias: np.ndarray) -> float:
        return float(-np.log(theory.Head(weight, bias)(s.z)[np.arange(9), s.y]).mean())

    found = theory.gradient(h, s)
    for k, d in ((0, 0), (2, 1), (3, 2)):
        moved = h.weight.copy()
        moved[k, d] += 1e-6
        assert found[k, d] == pytest.approx((loss(moved, h.bias) - loss(h.weight, h.bias)) / 1e-6, abs=1e-4)
    assert found[:, -1] == pytest.approx((h(s.z) - np.eye(4)[s.y]).mean(0))


def test_labels_that_differ_alone_move_the_gradient_and_its_bound() -> None:
    z = np.array([[1.0, 0.0], [0.0, 1.0]])
    i, j = theory.Sample(z, np.array([0, 1])), theory.Sample(z, np.array([1, 0]))
    h = theory.Head(np.eye(2), np.zeros(2))
    assert theory.w1(i.z, j.z) == pytest.approx(0.0)  # M·W1 of the embeddings alone would be zero, and the gradients do differ
    found = theory.gradient_bound(h, i, j)
    assert found.measured > 0.5
    assert found.holds


def test_parameter_distance_is_kappa_times_the_gradients() -> None:
    rng = np.random.default_rng(2)
    i, j, h = sample(rng, 8, 3, 3), sample(rng, 8, 3, 3, 1.0), head(rng, 3, 3)
    for kappa in (0.01, 2.0):
        assert theory.parameter_bound(h, i, j, kappa).measured == pytest.approx(kappa * theory.gradient_bound(h, i, j).measured)


def rotated_digits() -> tuple[theory.Sample, theory.Sample, theory.Sample]:
    """Pixels as embeddings: two shares of upright digits, and one turned by 90°."""
    source = digits()
    x = source.images.reshape(len(source), 8, 8).astype(np.float64) / 255
    order = np.random.default_rng(0).permutation(len(x))[:480]
    a, b, c = np.split(order, 3)
    turned = np.rot90(x, axes=(1, 2))
    pick = lambda images, rows: theory.Sample(images[rows].reshape(len(rows), -1), source.labels[rows])  # noqa: E731
    return pick(x, a), pick(x, b), pick(turned, c)


def test_merging_digits_costs_more_across_a_rotation_and_never_more_than_the_bound() -> None:
    one, two, turned = rotated_digits()
    same, different = theory.merging(one, two, 10), theory.merging(one, turned, 10)
    assert same.merged.holds
    assert different.merged.holds
    assert different.distance > same.distance
    assert different.at_most > same.at_most
    assert different.did > same.did + 0.02
    assert same.did <= same.at_most
    assert "could raise the error by at most" in same.sentence("a", "b")
    empty = [pair.alone + pair.at_most > 2**0.5 for pair in (same, different)]
    assert empty == ["more than an error can rise at all" in pair.sentence() for pair in (same, different)] and any(empty)


def test_ideal_head_is_chosen_to_make_the_bound_small() -> None:
    one, two, _ = rotated_digits()
    ideals = theory.ideal_heads(one, two, 10)
    h = theory.fit_head(one, 10)
    together = theory.merging_bound(h, one, two, 0.5, ideals)
    alone = [theory.merging_bound(h, one, two, 0.5, [ideal]).bound for ideal in ideals]
    assert together.bound == pytest.approx(min(alone))
    assert [ideal.lipschitz for ideal in ideals] == sorted((ideal.lipschitz for ideal in ideals), reverse=True)


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(DataError, match="n labels"):
        theory.Sample(np.zeros((3, 2)), np.zeros(2, dtype=int))
    rng = np.random.default_rng(0)
    i = sample(rng, 3, 2, 2)
    with pytest.raises(DataError, match="alpha"):
        theory.merging_bound(head(rng, 2, 2), i, i, 1.5, [head(rng, 2, 2)])
    with pytest.raises(DataError, match="candidate"):
        theory.merging_bound(head(rng, 2, 2), i, i, 0.5, [])
