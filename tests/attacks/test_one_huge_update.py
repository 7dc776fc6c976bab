"""One client sends an enormous state once, then behaves: it is left out of that round, and nobody else is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.tiny import tiny
from tests.trust.liars import LyingFederation

from emdcfl.core.schema import Reply
from emdcfl.methods import make
from emdcfl.runs.loop import play
from emdcfl.runs.scoring import site_scores

LIAR = "site-1"


def shouting(value: float, *, groups: int = 2, rounds: tuple[int, ...] = (1,)) -> LyingFederation:
    """One client's states are replaced in some rounds."""

    def lie(fed: LyingFederation, task: str, asked: Any, reply: Reply) -> Reply:
        signs = {key: torch.ones_like(reply[key]) for key in ("theta", "models") if key in reply and fed.index in rounds}
        for sign in signs.values():
            sign[..., ::2] = -1
        return {**reply, **{key: value * sign for key, sign in signs.items()}}

    return LyingFederation(tiny(groups=groups, clients_per_group=3), liar=LIAR, lie=lie)


@pytest.mark.slow
@pytest.mark.parametrize("value", [1e5, 1e30])
@pytest.mark.parametrize("method", ["emdcfl", "fedavg", "fedprox", "oracle", "ifca", "fedem", "cfl", "fedsoft"])
def test_the_liar_alone_is_left_out(method: str, value: float) -> None:
    fed = shouting(value)
    *_, last = play(fed, make(method), rounds=4)
    assert set(fed.guard.ledger.faults) == {LIAR}
    assert [entry["for"] for entry in fed.guard.ledger.quarantined()] == ["round"]
    assert all(row["accuracy"] for row in last.rows)
    mean = site_scores(last.rows, "test")["mean"]
    assert mean is not None
    assert mean > 0.3


def test_a_run_with_one_group_goes_on() -> None:
    fed = shouting(1e5, groups=1)
    *_, last = play(fed, make("emdcfl"), rounds=4)
    assert set(fed.guard.ledger.faults) == {LIAR}
    assert all(row["accuracy"] for row in last.rows)


def test_a_liar_that_goes_on_is_excluded_from_the_run() -> None:
    fed = shouting(1e5, rounds=(1, 2, 3, 4))
    *_, last = play(fed, make("fedavg"), rounds=4)
    assert fed.guard.ledger.banned(LIAR)
    assert {row["client"] for row in last.rows if not row["accuracy"]} == {LIAR}


@pytest.mark.parametrize("lost", [{"loss": 1e9}, {"loss": float("inf")}])
def test_a_client_whose_served_model_diverged_is_not_at_fault(lost: dict[str, Any]) -> None:
    fed = LyingFederation(tiny(), liar="site-0", lie=lambda fed, task, asked, reply: {**reply, **lost} if task == "train" else reply)
    list(play(fed, make("fedavg"), rounds=4))
    assert not fed.guard.ledger.faults
    assert {(f.client, f.round) for f in fed.failures} == {("site-0", t) for t in range(1, 5)}
