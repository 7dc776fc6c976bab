from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import ot
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emdcfl.clustering import links
from emdcfl.core.errors import ConfigError, DataError, EmdcflError
from emdcfl.transport import (
    EXACT,
    LOWER,
    UNKNOWN,
    UPPER,
    Decision,
    Screen,
    SolverPool,
    Source,
    cosine_lower_bounds,
    cost_matrix,
    exact,
    solve,
    unit,
)
from emdcfl.transport.bounds import minima, refine, slack


def embeddings(rng: np.random.Generator, n: int, d: int, shift: float, zeros: int, duplicates: int) -> np.ndarray:
    z = np.maximum(rng.standard_normal((n, d)) + shift * np.arange(d) / d, 0.0).astype(np.float32)
    z[: min(zeros, n)] = 0.0
    z[n - min(duplicates, n) :] = z[n - 1]
    return z


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 40), st.booleans(), st.integers(0, 5), st.integers(0, 5), st.floats(0, 4))
def test_bounds_enclose_the_value_and_tighten(seed: int, n: int, m: int, equal: bool, zeros: int, duplicates: int, shift: float) -> None:
    rng = np.random.default_rng(seed)
    m = n if equal else m
    a, b = embeddings(rng, n, 4, 0.0, zeros, duplicates), embeddings(rng, m, 4, shift, duplicates, zeros)
    for cost in ("cosine", "euclidean"):
        c = cost_matrix(100 * a, 100 * b, cost=cost)
        value, margin = exact(c).value, slack(c)
        last_low, last_high = minima(c), np.inf
        assert last_low <= value + margin
        for low, high in refine(c, last_low):
            assert last_low <= low <= value + margin
            assert last_high >= high >= value - margin
            last_low, last_high = low, high
        assert max(c.min(axis=0).mean(), c.min(axis=1).mean()) <= minima(c) + margin


def test_bounds_are_tight_on_embeddings_like_ours() -> None:
    rng = np.random.default_rng(0)
    mix = rng.standard_normal((6, 40))
    a, b = (np.maximum(rng.standard_normal((n, 6)) @ mix, 0.0) for n in (200, 200))
    c = cost_matrix(a, b)
    value = exact(c).value
    *_, (low, high) = refine(c, minima(c))
    assert low > 0.95 * value
    assert high < 1.15 * value
    c = cost_matrix(a, b[:170])
    value = exact(c).value
    *_, (low, high) = refine(c, minima(c))
    assert low > 0.95 * value
    assert high < 1.35 * value


def test_identical_samples_and_zero_costs() -> None:
    assert list(refine(np.zeros((3, 4), np.float32), 0.0)) == [(0.0, 0.0)]
    z = np.eye(6, dtype=np.float32)
    c = cost_matrix(z, z)
    *_, (low, high) = refine(c, minima(c))
    assert low == pytest.approx(0.0, abs=1e-6)
    assert high == pytest.approx(0.0, abs=1e-6)


Case = tuple[dict[int, np.ndarray], dict[tuple[int, int], np.ndarray], dict[int, float]]


def federation(seed: int, clients: int, *, equal: bool, groups: int = 2, size: int = 24, apart: float = 1.5) -> Case:
    """Clients of some groups; the model of each row client is a random linear map, zero vectors and duplicates included."""
    rng = np.random.default_rng(seed)
    n = [size if equal else int(rng.integers(2, size)) for _ in range(clients)]
    data = [embeddings(rng, 2 * n[c], 5, apart * (c % groups), int(rng.integers(0, 3)), int(rng.integers(0, 3))) for c in range(clients)]
    models = [rng.standard_normal((5, 7)).astype(np.float32) for _ in range(clients)]

    def embed(x: np.ndarray, c: int) -> np.ndarray:
        return np.maximum(x @ models[c], 0.0)

    rows = {c: embed(data[c][: n[c]], c) for c in range(clients)}
    columns = {(c, k): embed(data[k][n[k] :], c) for c, k in itertools.permutations(range(clients), 2)}
    tau = {c: exact(cost_matrix(rows[c], embed(data[c][n[c] :], c))).value for c in range(clients)}
    return rows, columns, tau


def plain_loop(rows: dict[int, np.ndarray], columns: dict[tuple[int, int], np.ndarray], tau: dict[int, float]) -> np.ndarray:
    w = np.zeros((len(rows), len(rows)))
    for (c, k), b in columns.items():
        w[c, k] = ot.emd2([], [], cost_matrix(rows[c], b).astype(np.float64), numItermax=10**6) - tau[c]
    return w


def decide(case: Case, epsilon: Any, pool: SolverPool, **options: Any) -> Decision:
    """Screen all pairs of a case."""
    rows, columns, tau = case
    screen = Screen(pool, **options)
    sources = {client: Source(a) for client, a in rows.items()}
    for (row, column), b in columns.items():
        screen.add(row, column, sources[row], b, tau=tau[row], epsilon=epsilon[row] if isinstance(epsilon, dict) else epsilon)
    return screen.finish(tuple(rows))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 5), st.booleans(), st.floats(-0.05, 0.3), st.sampled_from([1, 2]))
def test_links_equal_those_of_a_plain_loop(seed: int, clients: int, equal: bool, epsilon: float, workers: int) -> None:
    rows, columns, tau = federation(seed, clients, equal=equal)
    w = plain_loop(rows, columns, tau)
    with SolverPool(workers) as pool:
        found = decide((rows, columns, tau), epsilon, pool)
    near = np.abs(w - epsilon) <= 1e-6
    expected = links(w, epsilon)
    clear = ~(near | near.T)
    assert np.array_equal(links(found.w, epsilon)[clear], expected[clear])
    off = ~np.eye(clients, dtype=bool)
    assert (found.w[found.kind == LOWER] <= w[found.kind == LOWER]).all()
    assert (found.w[found.kind == UPPER] >= w[found.kind == UPPER]).all()
    np.testing.assert_allclose(found.w[found.kind == EXACT], w[found.kind == EXACT], atol=1e-9)
    assert (found.kind[off] != UNKNOWN).all()
    assert found.pairs == clients * (clients - 1)
    assert (found.kind == EXACT).sum() == found.exact_solves


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.booleans())
def test_ties_are_left_to_the_float64_solver(seed: int, above: bool) -> None:
    """A tolerance set exactly at a pair's value, or one unit in the last place above it."""
    rows, columns, tau = federation(seed, 2, equal=False)
    value = exact(cost_matrix(rows[0], columns[0, 1])).value - tau[0]
    other = exact(cost_matrix(rows[1], columns[1, 0])).value - tau[1]
    epsilon = {0: np.nextafter(value, np.inf) if above else value, 1: other + 1.0}
    with SolverPool(1) as pool:
        found = decide((rows, columns, tau), epsilon, pool)
    assert bool(links(found.w, [epsilon[0], epsilon[1]])[0, 1]) is above
    assert found.kind[0, 1] == EXACT
    assert found.w[0, 1] == value


def same(a: Decision, b: Decision) -> bool:
    return a.w.tobytes() == b.w.tobytes() and a.kind.tobytes() == b.kind.tobytes()


def test_neither_order_nor_workers_change_anything() -> None:
    rows, columns, tau = federation(3, 6, equal=False)
    results = []
    for seed, workers in ((0, 1), (1, 1), (2, 2), (3, 4)):
        order = random.Random(seed).sample(list(columns), len(columns))
        with SolverPool(workers) as pool:
            results.append(decide((rows, {pair: columns[pair] for pair in order}, tau), 0.02, pool))
    assert all(same(results[0], other) for other in results[1:])


def test_groups_that_are_clear_need_no_exact_solve() -> None:
    case = federation(0, 6, equal=True, size=100, apart=8.0)
    with SolverPool(2) as pool:
        found, everything = decide(case, 0.1, pool), decide(case, 0.1, pool, distances="all")
        assert same(everything, decide(case, 0.1, pool, distances="precise"))
    assert np.array_equal(links(found.w, 0.1), np.add.outer(np.arange(6), np.arange(6)) % 2 == 0)
    assert np.array_equal(links(found.w, 0.1), links(everything.w, 0.1))
    assert found.exact_solves < everything.exact_solves / 3
    assert everything.exact_solves == 30
    assert (everything.kind[~np.eye(6, dtype=bool)] == EXACT).all()


def test_a_direction_that_never_came_is_unknown() -> None:
    rows, columns, tau = federation(0, 3, equal=True)
    with SolverPool(1) as pool:
        found = decide((rows, {pair: columns[pair] for pair in ((0, 1), (1, 0), (0, 2))}, tau), 9.0, pool)
    assert links(found.w, 9.0).tolist() == [[True, True, False], [True, True, False], [False, False, True]]
    assert np.isnan(found.w[2, 0])
    assert found.kind[2, 0] == UNKNOWN


def test_a_pair_may_have_a_sample_and_a_reference_distance_of_its_own() -> None:
    rows, columns, tau = federation(1, 2, equal=True)
    rng = np.random.default_rng(0)
    r = rng.standard_normal((7, 5))
    with SolverPool(1) as pool:
        screen = Screen(pool, distances="all")
        screen.add(0, 1, Source(rows[0] @ r), columns[0, 1] @ r, tau=0.125, epsilon=0.5)
        screen.add(1, 0, Source(rows[1]), columns[1, 0], tau=tau[1], epsilon=0.5)
        w = screen.finish().w
    assert w[0, 1] == exact(cost_matrix(rows[0] @ r, columns[0, 1] @ r)).value - 0.125
    assert w[1, 0] == exact(cost_matrix(rows[1], columns[1, 0])).value - tau[1]


def test_sinkhorn_links_equal_those_of_solving_everything() -> None:
    for seed in range(4):
        rows, columns, _ = federation(seed, 4, equal=seed % 2 == 0)
        tau = dict.fromkeys(rows, 0.15)
        w = np.zeros((4, 4))
        for (c, k), b in columns.items():
            w[c, k] = solve(cost_matrix(rows[c], b), solver="sinkhorn", reg=0.1).value - 0.15
        with SolverPool(2) as pool:
            found = decide((rows, columns, tau), 0.05, pool, solver="sinkhorn", reg=0.1)
        assert np.array_equal(links(found.w, 0.05), links(w, 0.05))
        assert not (found.kind == UPPER).any()


def test_label_aware_screening_sees_permuted_labels() -> None:
    x = np.random.default_rng(0).standard_normal((20, 4))
    y = np.arange(20) % 2
    results = {}
    for cost in ("cosine", "label-aware"):
        with SolverPool(1) as pool:
            screen = Screen(pool, cost=cost)
            for c, labels in ((0, y), (1, 1 - y)):
                screen.add(1 - c, c, Source(x, 1 - labels), x, labels=labels, tau=0.0, epsilon=0.025)
            results[cost] = bool(links(screen.finish().w, 0.025)[0, 1])
    assert results == {"cosine": True, "label-aware": False}


def test_mistakes_are_named() -> None:
    x, row = np.ones((3, 2)), Source(np.ones((3, 2)))
    numbers = {"tau": 0.0, "epsilon": 0.1}
    with SolverPool(2) as pool:
        with pytest.raises(ConfigError, match="did you mean 'needed'"):
            Screen(pool, distances="need")
        screen = Screen(pool)
        with pytest.raises(EmdcflError, match="tau=nan"):
            screen.add("b", "a", row, x, tau=float("nan"), epsilon=0.1)
        with pytest.raises(EmdcflError, match="'a' twice"):
            screen.add("a", "a", row, x, **numbers)
        screen.add("b", "a", row, x, **numbers)
        with pytest.raises(EmdcflError, match="second one of 'a' for 'b'"):
            screen.add("b", "a", row, x, **numbers)
        screen.add("a", "b", row, np.full((3, 2), np.nan), **numbers)
        with pytest.raises(DataError, match=r"client 'b' under the model of client 'a'.*NaN"):
            screen.finish()


def test_bounds_of_many_problems_are_below_the_exact_values_and_near_them() -> None:
    rng = np.random.default_rng(0)
    x = np.maximum(rng.normal(size=(40, 8)), 0)
    y = np.maximum(rng.normal(size=(70, 25, 8)) + rng.normal(size=(70, 1, 8)), 0)
    x[3], y[5, 2], y[6] = 0, 0, x[:25]
    exactly = np.array([exact(cost_matrix(x, b)).value for b in y])
    bounds = cosine_lower_bounds(unit(x), y)
    assert (bounds <= exactly).all() and (exactly - bounds).max() < 0.03
    assert np.corrcoef(bounds, exactly)[0, 1] > 0.99
