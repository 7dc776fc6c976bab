"""How trainings are dealt out to streams, tested without a GPU: fakes record their calls."""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from emdcfl.engines.cuda import streams as cuda_streams

STEPS = {"a": 3, "b": 1, "c": 2, "d": 1, "e": 4}


class FakeStream:
    """A stream whose clients and fits are names; ``said`` is shared by all streams."""

    def __init__(self, said: list[str], ahead: int = 0) -> None:
        self.said, self.ahead, self.name, self.steps = said, [1] * ahead, "nobody", 0

    def prepare(self, client: str, fit: str) -> tuple[str, list[int]]:
        if client not in STEPS:
            raise ValueError(client)
        return client, [1] * STEPS[client]

    def begin(self, plan: str, sizes: list[int], fit: str, start: str) -> None:
        assert start == f"start of {fit}"
        self.name, self.ahead, self.steps = plan, sizes[::-1], len(sizes)
        self.said.append(f"begin {plan}")

    def capture(self) -> None:
        self.said.append(f"capture {self.name}")

    def advance(self) -> None:
        self.ahead.pop()
        self.said.append(self.name)

    def result(self) -> tuple[str, str, str]:
        return self.name, f"loss of {self.name}", "event"


class FakeStates:
    def start(self, theta: str) -> str:
        return f"start of {theta}"

    def to_host(self, client: str, fit: Any, steps: int, theta: str, total: str, done: str) -> tuple[Any, ...]:
        return client, steps, theta, total


class FakeFit:
    def __init__(self, theta: str) -> None:
        self.theta = theta

    def __str__(self) -> str:
        return self.theta


def keep_busy(streams: list[FakeStream], names: str) -> dict[int, Any]:
    pieces: Any = deque((10 + i, name, FakeFit(name.upper())) for i, name in enumerate(names))
    states: Any = FakeStates()
    with ThreadPoolExecutor(2) as copying:
        given: Any = streams
        return {i: future.result() for i, future in cuda_streams.keep_busy(given, pieces, states, copying).items()}


@pytest.mark.parametrize("number", [1, 2, 3, 7])
def test_everybody_takes_all_steps_whatever_the_number_of_streams(number: int) -> None:
    said: list[str] = []
    found = keep_busy([FakeStream(said) for _ in range(number)], "abcde")
    assert found == {10 + i: (name, STEPS[name], name, f"loss of {name}") for i, name in enumerate("abcde")}
    assert all(said.count(name) == steps and said.count(f"capture {name}") == 1 for name, steps in STEPS.items())


def test_streams_launch_in_turn_and_take_the_next_client_when_done() -> None:
    said: list[str] = []
    keep_busy([FakeStream(said), FakeStream(said)], "abc")
    begun = [word for word in said if not word.startswith("capture")]
    assert begun == ["begin a", "begin b", "a", "b", "a", "begin c", "a", "c", "c"]


def test_steps_left_from_a_drive_that_was_interrupted_hold_nothing_up() -> None:
    said: list[str] = []
    found = keep_busy([FakeStream(said, ahead=2), FakeStream(said, ahead=5)], "abc")
    assert sorted(found) == [10, 11, 12]
    assert [said.count(name) for name in "abc"] == [3, 1, 2]


def test_what_cannot_begin_is_told() -> None:
    with pytest.raises(ValueError, match="x"):
        keep_busy([FakeStream([]), FakeStream([])], "axb")
