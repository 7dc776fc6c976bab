"""Trainings that come after ``phase_deadline``, over an in-process grid."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra emdcfl[flower]")

from flwr.app import Message
from tests.engines.flower import loopback
from tests.engines.flower.loopback import LoopbackGrid
from tests.engines.flower.test_federation import SCENARIO, SHORT, fed_of, train

from emdcfl.engines.flower import codec
from emdcfl.methods import make
from emdcfl.runs.loop import play


class SlowGrid(LoopbackGrid):
    """Node 103's first answer to ``query.train`` arrives when it is ``released``."""

    held: tuple[str, Message] | None = None

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        identities = list(super().push_messages(messages))
        (message, reply), first = self.log[-1], self.held is None
        if first and reply is not None and (message.metadata.dst_node_id, message.metadata.message_type) == (103, "query.train"):
            self.held = identities[-1], self._replies.pop(identities[-1])
        return identities

    def release(self) -> None:
        assert self.held is not None
        self._replies[self.held[0]] = self.held[1]


def trainings(grid: LoopbackGrid, node: int) -> int:
    return sum((m.metadata.dst_node_id, m.metadata.message_type) == (node, "query.train") for m, _ in grid.log)


@pytest.mark.parametrize("cut_off", [False, True])
def test_a_late_training_counts_in_the_round_in_which_it_comes(cut_off: bool) -> None:
    """Also if its node has left and is back, at work on it all the time."""
    grid = SlowGrid(loopback.loopback(SCENARIO).nodes)
    fed = fed_of(grid, settings=replace(SHORT, deadline=60.0), phase_deadline=0.5, late_updates=True)
    seen: list[tuple[int, str, Any]] = []
    states = [fed.initial()]
    for done in play(fed, make("fedavg"), rounds=4, evaluate_every=4):
        seen += [(f.round, f.client, f.reason) for f in fed.failures]
        fed.failures.clear()
        states.append(done.state.theta)
        if done.index == 1 and cut_off:
            grid.since[103] = "later"
            grid.tamper[103] = lambda message, answer: None if message.metadata.message_type == "query.ping" else answer(message)
        if done.index == 2:
            grid.release()
    assert [(t, c) for t, c, _ in seen] == [(1, "site-3"), (2, "site-3")] and all(reason.startswith("late: ") for *_, reason in seen)
    assert fed.late == [{"client": "site-3", "round": 1, "used_in": 3, "weight": round(3**-0.5, 4)}]
    assert trainings(grid, 103) == 2 and trainings(grid, 102) == 4, "it is asked again when it is free"
    third = [codec.decode(r.content)["reply"] for m, r in grid.log if r and m.metadata.message_type == "query.train"][7:10]
    assert grid.held is not None
    late = codec.decode(grid.held[1].content)["reply"]
    parts = [(reply["theta"], reply["n"]) for reply in third] + [(late["theta"] - states[0] + states[2], round(late["n"] * 3**-0.5))]
    expected = sum(theta * n for theta, n in parts) / sum(n for _, n in parts)
    assert torch.allclose(states[3], expected, atol=1e-6)
    assert done.rows[-1]["accuracy"] is not None


def test_a_method_that_takes_no_late_training_drops_it_and_asks_again() -> None:
    grid = SlowGrid(loopback.loopback(SCENARIO).nodes)
    fed = fed_of(grid, settings=replace(SHORT, deadline=60.0), phase_deadline=0.5)
    replies = train(fed, 1)
    assert replies.failures["site-3"].reason.startswith("late: ")
    grid.release()
    assert len(train(fed, 2)) == 4 and fed.late == [] and trainings(grid, 103) == 2
