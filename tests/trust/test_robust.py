from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from emdcfl.core.params import average
from emdcfl.trust import Guard, Trust
from emdcfl.trust import guard as guards
from emdcfl.trust.robust import SMALL, capped_weights, cut, distance, distances, outliers, trimmed_mean

WEIGHTS = st.lists(st.floats(1e-3, 1e9), min_size=1, max_size=12)


@given(WEIGHTS, st.floats(0.01, 1.0))
@settings(max_examples=200, deadline=None)
def test_nobody_has_more_than_its_share(weights: list[float], share: float) -> None:
    capped = capped_weights(weights, share)
    limit = max(share, 1 / len(weights))
    assert max(capped) <= limit * sum(capped) * (1 + 1e-9)
    if max(weights) <= share * sum(weights):
        assert capped == weights
    elif share * len(weights) > 1:
        assert all(c <= w for c, w in zip(capped, weights, strict=True))
        below = [(c, w) for c, w in zip(capped, weights, strict=True) if c < max(capped)]
        assert all(c == w for c, w in below)  # only the largest are touched


def test_a_share_of_one_changes_no_bit() -> None:
    weights = [3.0, 1e9, 7.0]
    assert capped_weights(weights, 1.0) == weights


@pytest.mark.parametrize("k", range(1, 9))
def test_trimmed_means_and_medians_are_numpys(k: int) -> None:
    rng = np.random.default_rng(k)
    rows = [torch.from_numpy(rng.standard_normal(2000).astype(np.float32)) for _ in range(k)]
    table = torch.stack(rows).double().numpy()
    ends = cut(k, 0.2)
    by_hand = np.sort(table, axis=0)[ends : k - ends].mean(0)
    np.testing.assert_allclose(trimmed_mean(rows, ends).numpy(), by_hand, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(trimmed_mean(rows, cut(k, 0.5)).numpy(), np.median(table, axis=0), rtol=1e-6, atol=1e-7)


def test_one_state_among_five_moves_a_trimmed_mean_no_farther_than_the_others_reach() -> None:
    honest = [torch.full((4,), v) for v in (1.0, 2.0, 3.0, 4.0)]
    for lie in (1e30, -1e30):
        for policy in (Trust(aggregate="trimmed-mean"), Trust(aggregate="median")):
            out = Guard(policy).average([*honest, torch.full((4,), lie)], [1.0] * 5)
            assert (out >= 1.0).all() and (out <= 4.0).all()


@given(st.lists(st.floats(0.5, 1.5), min_size=1, max_size=20))
@settings(deadline=None)
def test_values_within_a_factor_of_three_are_no_outliers(values: list[float]) -> None:
    assert not any(outliers(values, z=6, factor=3))


@pytest.mark.parametrize("values", [[1.0, 50.0], [0.0, 0.0, 0.0, 5.0], []])
def test_where_there_is_nothing_to_compare_with_nothing_stands_out(values: list[float]) -> None:
    assert not any(outliers(values, z=6, factor=3))


def test_norms_and_flags() -> None:
    start = torch.zeros(10)
    assert distance(torch.full((10,), 2.0), start) == pytest.approx(40**0.5)
    guard = Guard(Trust(clip=2.0))
    guard.ledger.begin(4)
    local = {"a": start + 1, "b": start + 1.1, "c": start + 0.9, "d": start + 30}
    out = guard.clip_updates(local, dict.fromkeys(local, start), [list(local)])
    assert all(out[c] is local[c] for c in "abc")
    assert distance(out["d"], start) == pytest.approx(2 * np.median([distance(t, start) for t in local.values()]))
    (flag,) = guard.ledger.flagged()
    assert (flag["client"], flag["what"], flag["first"], flag["times"]) == ("d", "update norm", 4, 1)
    assert flag["value"] == pytest.approx(900**0.5 * 10**0.5)


def test_the_default_policy_is_the_ordinary_mean_bit_for_bit() -> None:
    rng = np.random.default_rng(0)
    thetas = [torch.from_numpy(rng.standard_normal(50).astype(np.float32)) for _ in range(4)]
    weights = [3, 10, 7, 100000]
    plain = average(thetas, weights)
    mean = Guard().mean()
    for i, (theta, weight) in enumerate(zip(thetas, weights, strict=True)):
        mean.add(theta, weight, client=str(i), start=torch.zeros(50))
    assert torch.equal(mean.result(), plain) and torch.equal(Guard().average(thetas, weights), plain)


@pytest.mark.parametrize("shape", [(1,), (23,), (3, 40), (4811,), (SMALL + 1,)])
def test_norms_looked_at_together_have_the_bits_of_each_alone(shape: tuple[int, ...]) -> None:
    rng = torch.Generator().manual_seed(0)
    thetas = [torch.randn(shape, generator=rng) for _ in range(5)]
    start, own = torch.randn(shape, generator=rng), [torch.randn(shape, generator=rng) for _ in range(5)]
    assert distances(thetas, [start] * 5) == [distance(t, start) for t in thetas]
    assert distances(thetas, own) == [distance(t, s) for t, s in zip(thetas, own, strict=True)]
    assert distances(thetas[:1], own[:1]) == [distance(thetas[0], own[0])]


@pytest.mark.parametrize("policy", [Trust(), Trust(clip=1.0), Trust(aggregate="median"), Trust(flag=0.0)])
def test_how_many_states_wait_changes_no_bit_of_an_average(policy: Trust, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = torch.Generator().manual_seed(0)
    thetas, start = [torch.randn(50, generator=rng) * (1 + i) ** 3 for i in range(7)], torch.zeros(50)

    def play(together: int) -> tuple[torch.Tensor, float, list[dict[str, object]]]:
        monkeypatch.setattr(guards, "TOGETHER", together)
        guard = Guard(policy)
        mean, half = guard.mean(), 0.0
        for i, theta in enumerate(thetas):
            mean.add(theta, i + 1, client=str(i), start=start if i != 2 else None)
            half = mean.total if i == 3 else half
        return mean.result(), half, guard.ledger.flagged()

    alone, half, flags = play(0)
    assert half == 1 + 2 + 3 + 4
    for together in (150, 350, 10**6):
        found = play(together)
        assert torch.equal(found[0], alone) and found[1:] == (half, flags)


def test_far_values_are_cut_back_to_the_largest_that_is_not() -> None:
    guard = Guard()
    values = {"a": 0.03, "b": 0.04, "c": 0.035, "d": 2.0, "e": 1.9}
    assert guard.cap_outliers(values, "τ") == {"d": 0.04, "e": 0.04}
    assert [f["client"] for f in guard.ledger.flagged()] == ["d", "e"]
    assert Guard(Trust(flag=0.0)).cap_outliers(values, "τ") == {}
    assert Guard().cap_outliers({"a": 0.02, "b": 0.021, "c": 0.02, "d": 0.08}, "τ") == {}  # four times the median may be honest


def test_an_outlier_is_logged_once_per_round_and_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard()
    with caplog.at_level("DEBUG", logger="emdcfl"):
        for index in (1, 2, 3):
            guard.ledger.begin(index)
            for _ in range(10):  # one client in ten averages of a round
                guard.scales({"a": 1.0, "b": 1.1, "c": 0.9, "d": 50.0})
    assert [record.levelname for record in caplog.records] == ["WARNING", "DEBUG", "DEBUG"]
    assert [flag["times"] for flag in guard.ledger.flagged()] == [3]
