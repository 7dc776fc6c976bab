"""The bounds of many problems at once against those of one at a time, on CPU tensors; the same on CUDA where there is one."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.transport.test_screening import decide, embeddings, federation, plain_loop

from emdcfl.clustering import links
from emdcfl.core.errors import DataError
from emdcfl.engines.cuda import transport_bounds, transport_queue
from emdcfl.engines.cuda.transport_queue import DeviceQueue
from emdcfl.transport import EXACT, LOWER, UPPER, QueueFactory, Screen, SolverPool, Source, bounds, cost_matrix, exact, pairs

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))]


def on(device: str) -> QueueFactory:
    return partial(DeviceQueue, device=device)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 30), st.integers(1, 30), st.booleans(), st.integers(0, 5), st.integers(0, 5), st.floats(0, 4))
def test_bounds_enclose_the_value_and_tighten(seed: int, n: int, m: int, equal: bool, zeros: int, duplicates: int, shift: float) -> None:
    rng = np.random.default_rng(seed)
    m = n if equal else m
    a = np.stack([embeddings(rng, n, 4, 0.0, zeros, duplicates) for _ in range(3)])
    b = np.stack([embeddings(rng, m, 4, shift * k, duplicates, zeros) for k in range(3)])
    for cost in ("cosine", "euclidean"):
        plain = [cost_matrix(100 * x, 100 * y, cost=cost) for x, y in zip(a, b, strict=True)]
        c = transport_bounds.costs(torch.from_numpy(100 * a), torch.from_numpy(100 * b), cost=cost)
        margin = transport_bounds.rounding(c, 4).numpy()
        assert (np.abs(c.numpy() - plain).max((1, 2)) <= margin).all()
        value = np.array([exact(x).value for x in plain])
        low = transport_bounds.minima(c)
        np.testing.assert_allclose(low.numpy(), [bounds.minima(x) for x in plain], atol=margin.max())
        last_low, last_high = low.numpy(), np.full(3, np.inf)
        for lower, upper in transport_bounds.refine(c, low):
            assert (lower.numpy() >= last_low).all() and (lower.numpy() <= value + margin).all()
            assert (upper.numpy() <= last_high).all() and (upper.numpy() >= value - margin).all()
            last_low, last_high = lower.numpy(), upper.numpy()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("columns", [200, 170])
def test_bounds_are_tight_on_embeddings_like_ours(device: str, columns: int) -> None:
    rng = np.random.default_rng(0)
    mix = rng.standard_normal((6, 40))
    a, b = (np.maximum(rng.standard_normal((n, 6)) @ mix, 0.0).astype(np.float32) for n in (200, columns))
    value = exact(cost_matrix(a, b)).value
    c = transport_bounds.costs(torch.from_numpy(a)[None].to(device), torch.from_numpy(b)[None].to(device), cost="cosine")
    *_, (low, high) = transport_bounds.refine(c, transport_bounds.minima(c))
    assert float(low[0]) > 0.99 * value
    assert float(high[0]) < 1.05 * value


@pytest.mark.parametrize("device", DEVICES)
def test_later_stages_go_on_with_the_problems_that_are_sent_back(device: str) -> None:
    rng = np.random.default_rng(0)
    a, b = (torch.from_numpy(rng.random((6, n, 9), dtype=np.float32)).to(device) for n in (40, 30))
    c = transport_bounds.costs(a, b, cost="cosine")
    everything = list(transport_bounds.refine(c, transport_bounds.minima(c)))
    stages, left, kept = transport_bounds.refine(c, transport_bounds.minima(c)), torch.arange(6), None
    for lower, upper in everything:
        found = stages.send(kept)
        for mine, whole in zip(found, (lower, upper), strict=True):
            torch.testing.assert_close(mine.cpu(), whole.cpu()[left], rtol=1e-5, atol=1e-6)
        kept = torch.tensor([len(left) - 1, 0], device=device)
        left = left[kept.cpu()]


@pytest.mark.parametrize("device", DEVICES)
def test_links_are_those_of_threads_and_of_a_plain_loop(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for together in (3, 256):
        monkeypatch.setattr(transport_queue, "TOGETHER", together)
        monkeypatch.setattr(transport_queue, "REFINED_TOGETHER", together)
        for seed in range(4):
            rows, columns, tau = federation(seed, 5, equal=seed % 2 == 0)
            w = plain_loop(rows, columns, tau)
            for epsilon in (-0.01, 0.02, 0.1):
                with SolverPool(2) as pool:
                    found = decide((rows, columns, tau), epsilon, pool, queue=on(device))
                assert np.array_equal(links(found.w, epsilon), links(w, epsilon))
                assert (found.w[found.kind == LOWER] <= w[found.kind == LOWER]).all()
                assert (found.w[found.kind == UPPER] >= w[found.kind == UPPER]).all()
                np.testing.assert_allclose(found.w[found.kind == EXACT], w[found.kind == EXACT], atol=1e-9)
                assert (found.kind == EXACT).sum() == found.exact_solves


@pytest.mark.parametrize("device", DEVICES)
def test_groups_that_are_clear_leave_nothing_to_the_solver(device: str) -> None:
    with SolverPool(1) as pool:
        found = decide(federation(0, 6, equal=True, size=100, apart=8.0), 0.1, pool, queue=on(device))
    assert found.exact_solves == 0
    assert np.array_equal(links(found.w, 0.1), np.add.outer(np.arange(6), np.arange(6)) % 2 == 0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cost", ["cosine", "euclidean", "label-aware"])
def test_blocks_and_labels(device: str, cost: str) -> None:
    rng = np.random.default_rng(0)
    samples = [np.maximum(rng.standard_normal((60, 6)) + 0.3 * c, 0) for c in (0, 1)]
    labels = [rng.integers(0, 2, 60) for _ in (0, 1)]
    results = []
    for queue in (None, on(device)):
        with SolverPool(1) as pool:
            screen = Screen(pool, cost=cost, queue=queue)
            for r, c in ((1, 0), (0, 1)):
                row = Source(samples[r][:40], labels[r][:40])
                screen.add(r, c, row, samples[c], labels=labels[c], blocks=3, tau=0.0, epsilon=0.3)
            results.append(screen.finish())
    assert np.array_equal(links(results[0].w, 0.3), links(results[1].w, 0.3))


@pytest.mark.parametrize("device", DEVICES)
def test_precise_entries_are_values_or_bounds_near_them(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, off = federation(0, 6, equal=True, size=100, apart=8.0), ~np.eye(6, dtype=bool)
    with SolverPool(2) as pool:
        w = decide(case, 0.1, pool, distances="all").w
        small = decide(case, 0.1, pool, distances="precise", queue=on(device))
        monkeypatch.setattr(pairs, "LARGE", 0)
        found = decide(case, 0.1, pool, distances="precise", queue=on(device))
    np.testing.assert_array_equal(small.w[off], w[off])
    bound = found.kind == LOWER
    assert 0 < found.exact_solves == (found.kind == EXACT).sum() == off.sum() - bound.sum() < off.sum()
    np.testing.assert_array_equal(found.w[off & ~bound], w[off & ~bound])
    assert (found.w[bound] <= w[bound]).all()
    assert (w[bound] <= (1 + pairs.PRECISE) * found.w[bound]).all()


@pytest.mark.parametrize("device", DEVICES)
def test_precise_bounds_lie_on_the_side_of_the_tolerance_of_their_values(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grouping by benefit compares them with it in round 1, as other engines compare values."""
    monkeypatch.setattr(pairs, "LARGE", 0)
    case = federation(0, 6, equal=True, size=100, apart=8.0)
    with SolverPool(2) as pool:
        w = decide(case, 0.1, pool, distances="all").w
        found = decide(case, 0.1, pool, distances="precise", queue=on(device))
        i, j = np.argwhere(found.kind == LOWER)[0]
        between = float(found.w[i, j] + w[i, j]) / 2
        found = decide(case, between, pool, distances="precise", queue=on(device))
    assert (found.kind == LOWER).any()
    assert np.array_equal(found.w < between, w < between)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("distances", ["needed", "precise", "all"])
def test_samples_that_lie_on_the_device_give_the_same(device: str, distances: str) -> None:
    rows, columns, tau = federation(1, 5, equal=False)
    with SolverPool(2) as pool:
        here = decide((rows, columns, tau), 0.05, pool, queue=on(device), distances=distances)
        there = {pair: torch.from_numpy(np.asarray(b, dtype=np.float32)).to(device) for pair, b in columns.items()}
        found = decide((rows, there, tau), 0.05, pool, queue=on(device), distances=distances)
    assert found.exact_solves == here.exact_solves
    np.testing.assert_array_equal(found.w, here.w)


@pytest.mark.parametrize("distances", ["needed", "precise", "all"])
@pytest.mark.parametrize("device", [None, *DEVICES])
def test_numbers_that_would_overflow_are_far_away_and_end_nothing(device: str | None, distances: str) -> None:
    x = np.random.default_rng(0).standard_normal((20, 4)).astype(np.float32)
    with SolverPool(1) as pool:
        screen = Screen(pool, cost="euclidean", distances=distances, queue=on(device) if device else None)
        screen.add(0, 1, Source(x), np.full((15, 4), np.finfo(np.float32).max), tau=1.0, epsilon=0.1)
        screen.add(1, 0, Source(x), x, tau=1.0, epsilon=0.1)
        found = screen.finish()
    assert 1e29 < found.w[0, 1] < 1e31 and found.w[1, 0] < 0


@pytest.mark.parametrize("device", DEVICES)
def test_a_sample_on_the_device_that_is_no_sample_is_named(device: str) -> None:
    with SolverPool(1) as pool:
        screen = Screen(pool, queue=on(device))
        row, numbers = Source(np.ones((3, 2))), {"tau": 0.0, "epsilon": 0.1}
        with pytest.raises(DataError, match=r"client 'c' under the model of client 'a'.*one embedding width"):
            screen.add("a", "c", row, torch.ones(3, 5, device=device), **numbers)
        screen.add("a", "b", row, torch.full((3, 2), torch.nan, device=device), **numbers)
        screen.add("b", "a", row, torch.ones(3, 2, device=device), **numbers)
        with pytest.raises(DataError, match=r"samples of clients 'a' and 'b': .*NaN"):
            screen.finish()


def test_a_sample_that_is_no_sample_is_named() -> None:
    with SolverPool(1) as pool:
        screen = Screen(pool, queue=on("cpu"))
        wrong: list[tuple[Any, str]] = [(np.full((3, 2), np.nan), "NaN"), (np.ones((3, 5)), "one embedding width")]
        for number, (b, message) in enumerate(wrong):
            with pytest.raises(DataError, match=rf"client 'b{number}' under the model of client 'a'.*{message}"):
                screen.add("a", f"b{number}", Source(np.ones((3, 2))), b, tau=0.0, epsilon=0.1)
