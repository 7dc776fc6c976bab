"""One client's update is enormous but within a hundred times its start: it is left out, and its honest mates are not blamed for it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from tests.tiny import federation, tiny
from tests.trust.liars import LyingFederation

from emdcfl.core.errors import ClientError, QuorumError
from emdcfl.core.schema import DivergedError, Reply
from emdcfl.methods import make
from emdcfl.runs.loop import play
from emdcfl.trust.bounds import MAX_GROWTH, Bounds, Update, excesses

LIAR = "site-1"


def growing(*, rounds: tuple[int, ...] = (1,), clients: int = 3) -> LyingFederation:
    """One client sends states of nearly the largest norm that a state by itself may have, in some rounds."""

    def lie(fed: LyingFederation, task: str, asked: Any, reply: Reply) -> Reply:
        key = next((key for key in ("theta", "models") if key in reply), None)
        if key is None or fed.index not in rounds:
            return reply
        size = 0.9 * MAX_GROWTH * max(1.0, float(asked.get("theta", asked.get("models")).norm()))
        return {**reply, key: torch.full_like(reply[key], size / reply[key].numel() ** 0.5)}

    return LyingFederation(tiny(clients_per_group=clients, n=(32,), val=(32,), test=16), liar=LIAR, lie=lie)


@pytest.mark.parametrize("method", ["fedavg", "emdcfl", "ifca", "fedem", "pfedgraph", "fedsoft", "cfl"])
def test_ninety_times_the_start_is_left_out_and_nobody_honest(method: str) -> None:
    fed = growing()
    *_, last = play(fed, make(method), rounds=3)
    assert {f.client for f in fed.failures} == {LIAR}
    assert set(fed.guard.ledger.faults) <= {LIAR}
    assert all(row["accuracy"] for row in last.rows)
    assert float(last.serving.models.abs().max()) < 50


def test_where_two_clients_share_a_model_the_honest_one_is_not_blamed() -> None:
    """Nobody can say which of two updates is wrong: the honest client may diverge from what it is served, and is not at fault."""
    fed = growing(rounds=(1, 2, 3, 4), clients=1)
    with suppress(QuorumError):
        list(play(fed, make("fedavg"), rounds=5, retries=0))
    assert "site-0" not in fed.guard.ledger.faults


@pytest.mark.parametrize("method", ["fedavg", "ifca", "fedem", "pfedgraph"])
def test_honest_runs_are_bit_identical_with_and_without_the_bound(method: str) -> None:
    found = []
    for mode in ("stop", "continue"):
        fed = federation(tiny(n=(16, 80), val=(32,), test=8), on_failure=mode)
        *_, last = play(fed, make(method), rounds=2)
        assert not fed.failures
        found.append(last.serving.models)
    assert torch.equal(*found)


def updates(**norms: float) -> dict[str, Update]:
    return {name: Update("start", norm, 4.0, 0.0, 10) for name, norm in norms.items()}


def test_a_large_site_among_small_ones_may_move_farther() -> None:
    """Measured: 5 steps of 16 samples move by 0.042, 4,000 steps of 12,800 samples by 6.7."""
    small = updates(a=0.042, b=0.05, c=0.04)
    assert not excesses({**small, "large": Update("start", 6.7, 2.2, 0.0, 8000)})
    assert excesses({**small, "large": Update("start", 6.7, 2.2, 0.0, 10)})
    assert excesses({**small, "liar": Update("start", 60.0, 2.2, 0.0, 10**8)})


def test_a_newcomer_beside_converged_clients_is_not_left_out() -> None:
    converged = updates(a=1e-4, b=1e-4, c=1e-4)
    assert not excesses({**converged, "new": Update("initial", 5.0, 4.0, 0.0, 10)})
    assert excesses({**converged, "liar": Update("initial", 50.0, 4.0, 0.0, 10)}).keys() == {"liar"}


def test_where_all_diverge_from_the_same_model_nobody_is_left_out() -> None:
    assert not excesses(updates(a=1e6, b=3e6, c=2e5, d=4.0))


def test_where_few_diverge_from_a_huge_model_they_are_left_out_without_fault() -> None:
    fed = federation()
    bounds = Bounds(fed.layout, fed.initial)
    assert bounds.healthy(float(fed.initial().norm()))
    assert not bounds.healthy(50 * float(fed.initial().norm()))
    start = 50 * fed.initial()
    with pytest.raises(DivergedError):
        bounds.check_state(200 * start, start)
    with pytest.raises(ClientError) as caught:
        bounds.check_state(200 * fed.initial(), fed.initial())
    assert not isinstance(caught.value, DivergedError)


@pytest.mark.parametrize(("value", "fault"), [(-1.0, "variances"), (1e30, "statistics")])
def test_statistics_that_break_evaluation_for_others_are_refused(value: float, fault: str) -> None:
    def lie(fed: LyingFederation, task: str, asked: Any, reply: Reply) -> Reply:
        if task == "train":
            (where,) = [e.slice for e in fed.layout.entries if e.name.endswith("running_var")]
            reply["theta"][where] = value
        return reply

    fed = LyingFederation(tiny(model="tiny_bn"), liar=LIAR, lie=lie)
    *_, last = play(fed, make("fedavg"), rounds=2)
    assert set(fed.guard.ledger.faults) == {LIAR}
    assert fault in fed.guard.ledger.faults[LIAR][0].reason
    assert all(row["accuracy"] and row["test_loss"]["test"] < 10 for row in last.rows if row["client"] != LIAR)
