from __future__ import annotations

from typing import Any

import pytest
from tests.core.test_federation import Tampering, lost
from tests.tiny import federation, same_bits

from emdcfl.core.errors import QuorumError
from emdcfl.methods import make
from emdcfl.runs.loop import play


class Watching:
    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def begin(self, index: int, total: int, participants: tuple[str, ...]) -> None:
        self.events.append(("begin", index, total, len(participants)))

    def reply(self, task: str, client: str, reply: dict[str, Any]) -> None:
        self.events.append((task, client))

    def end(self, index: int, total: int, rows: list[dict[str, Any]], serving: Any) -> None:
        self.events.append(("end", index, len(rows)))


def test_rounds_are_played_scored_and_observed() -> None:
    watch = Watching()
    rounds = list(play(federation(participants=2), make("fedavg"), rounds=3, evaluate_every=2, observer=watch))
    assert [r.index for r in rounds] == [1, 2, 3]
    assert [len(r.rows) for r in rounds] == [0, 4, 4]
    assert watch.events[0] == ("begin", 1, 3, 2)
    assert [e for e in watch.events if e[0] == "end"] == [("end", 1, 0), ("end", 2, 4), ("end", 3, 4)]
    assert sum(e[0] == "train" for e in watch.events) == 6 and sum(e[0] == "test" for e in watch.events) == 8
    trained = [r["train_loss"] is not None for r in rounds[-1].rows]
    assert sum(trained) == 2  # only who trained in this round has a training loss


def test_going_on_from_a_state_is_going_on() -> None:
    whole = list(play(federation(), make("emdcfl"), rounds=3))
    part = list(play(federation(), make("emdcfl"), rounds=3, state=whole[0].state, done=1))
    assert [r.index for r in part] == [2, 3]
    assert same_bits(part[-1].serving.models, whole[-1].serving.models) and part[-1].rows == whole[-1].rows


def test_a_round_below_the_quorum_is_tried_again() -> None:
    changes = dict.fromkeys(("site-0", "site-1", "site-2"), lost)
    fed = Tampering(changes, tries=2, on_failure="continue")
    results = list(play(fed, make("fedavg"), rounds=1, retries=2))
    assert same_bits(results[0].serving.models, next(iter(play(federation(), make("fedavg"), rounds=1))).serving.models)
    assert len(fed.failures) == 6  # each is on record
    with pytest.raises(QuorumError, match="expected 50% of 4 clients to train in round 1, got 1"):
        list(play(Tampering(changes, tries=3, on_failure="continue"), make("fedavg"), rounds=1, retries=2))
    with pytest.raises(QuorumError):
        list(play(Tampering(changes, tries=1, on_failure="continue"), make("fedavg"), rounds=1, retries=0))
