"""One client sends an enormous state once, then behaves: it is left out of that round, and nobody else is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from tests.tiny import TRAINING, SequentialFederation, tiny

from emdcfl.core.client import TaskInfo
from emdcfl.core.federation import Failure, Inputs
from emdcfl.core.schema import Reply
from emdcfl.methods import make
from emdcfl.runs.loop import play
from emdcfl.runs.scoring import site_scores

LIAR = "site-1"


class Shouting(SequentialFederation):
    """One client's states are replaced in some rounds."""

    def __init__(self, value: float, *, groups: int = 2, rounds: tuple[int, ...] = (1,)) -> None:
        super().__init__(tiny(groups=groups, clients_per_group=3), device="cpu", training=TRAINING, on_failure="continue")
        self.value, self.lying = value, rounds

    def _dispatch(self, info: TaskInfo, inputs: Mapping[str, Inputs], common: Inputs) -> Iterator[tuple[str, Reply | Failure]]:
        for name, reply in super()._dispatch(info, inputs, common):
            if name == LIAR and info.phase == "train" and self.index in self.lying and not isinstance(reply, Failure):
                signs = {key: torch.ones_like(reply[key]) for key in ("theta", "models") if key in reply}
                for sign in signs.values():
                    sign[..., ::2] = -1
                reply = {**reply, **{key: self.value * sign for key, sign in signs.items()}}
            yield name, reply


@pytest.mark.slow
@pytest.mark.parametrize("value", [1e5, 1e30])
@pytest.mark.parametrize("method", ["emdcfl", "fedavg", "fedprox", "oracle", "ifca", "fedem", "cfl", "fedsoft"])
def test_the_liar_alone_is_left_out(method: str, value: float) -> None:
    fed = Shouting(value)
    *_, last = play(fed, make(method), rounds=4)
    assert set(fed.guard.ledger.faults) == {LIAR}
    assert [entry["for"] for entry in fed.guard.ledger.quarantined()] == ["round"]
    assert all(row["accuracy"] for row in last.rows)
    mean = site_scores(last.rows, "test")["mean"]
    assert mean is not None
    assert mean > 0.3


def test_a_run_with_one_group_goes_on() -> None:
    fed = Shouting(1e5, groups=1)
    *_, last = play(fed, make("emdcfl"), rounds=4)
    assert set(fed.guard.ledger.faults) == {LIAR}
    assert all(row["accuracy"] for row in last.rows)


def test_a_liar_that_goes_on_is_excluded_from_the_run() -> None:
    fed = Shouting(1e5, rounds=(1, 2, 3, 4))
    *_, last = play(fed, make("fedavg"), rounds=4)
    assert fed.guard.ledger.banned(LIAR)
    assert {row["client"] for row in last.rows if not row["accuracy"]} == {LIAR}


@pytest.mark.parametrize("lost", [{"loss": 1e9}, {"loss": float("inf")}])
def test_a_client_whose_served_model_diverged_is_not_at_fault(lost: dict[str, Any]) -> None:
    class Diverging(SequentialFederation):
        def _dispatch(self, info: TaskInfo, inputs: Mapping[str, Inputs], common: Inputs) -> Iterator[tuple[str, Reply | Failure]]:
            for name, reply in super()._dispatch(info, inputs, common):
                bad = name == "site-0" and info.name == "train" and not isinstance(reply, Failure)
                yield name, {**reply, **lost} if bad else reply  # type: ignore[dict-item]

    fed = Diverging(tiny(), device="cpu", training=TRAINING, on_failure="continue")
    list(play(fed, make("fedavg"), rounds=4))
    assert not fed.guard.ledger.faults
    assert {(f.client, f.round) for f in fed.failures} == {("site-0", t) for t in range(1, 5)}
