from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.methods.toy import TRAINING, toy

from emdcfl.core.client import Client, Stages, TaskInfo, Work, staged_task
from emdcfl.core.errors import ClientError
from emdcfl.core.schema import Field
from emdcfl.engines.local import staged
from emdcfl.engines.local.sequential import SequentialFederation
from emdcfl.engines.local.staged import Outcome, StagedFederation, WorkResult, attempt


class Later:
    """An outcome that is made when it is asked for."""

    def __init__(self, client: Client, work: Work, log: list[str]) -> None:
        self._client, self._work, self._log = client, work, log

    def result(self) -> Outcome:
        self._log.append(f"result {self._client.name}")
        return attempt(self._client, self._work)


class Overlapping(StagedFederation):
    """Works are begun at once and done later."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.log: list[str] = []

    def _overlaps(self, info: TaskInfo) -> bool:
        return True

    def _compute(self, works: Sequence[tuple[Client, Work]]) -> Sequence[WorkResult]:
        self.log.append("begin " + " ".join(client.name for client, _ in works))
        return [Later(client, work, self.log) for client, work in works]


class Twice:
    """A piece of work."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __call__(self, client: Client) -> dict[str, Any]:
        if self.value > 100:
            raise ClientError("expected a small number, got a large one")
        return {"value": 2 * self.value}


@staged_task(phase="evaluate", returns={"value": Field(int)})
def doubled(client: Client, *, value: int, times: int) -> Stages:
    """Double a number so many times."""
    for _ in range(times):
        (found,) = yield [Twice(value)]
        value = found["value"]
    return {"value": value}


class Bare:
    """A piece of work whose result is no dict."""

    def __call__(self, client: Client) -> Any:
        return len(client.site.train)


@staged_task(phase="evaluate", returns={"n": Field(int)})
def counted(client: Client) -> Stages:
    """Count samples, as a method's own work."""
    (found,) = yield [Bare()]
    return {"n": found}


@staged_task(phase="evaluate", returns={"n": Field(int)})
def silent(client: Client) -> Stages:
    """Forget to answer."""
    yield [Bare()]
    return None  # type: ignore[return-value]


class AtOnce(Overlapping):
    """Works are done at once."""

    def _compute(self, works: Sequence[tuple[Client, Work]]) -> Sequence[WorkResult]:
        return [attempt(client, work) for client, work in works]


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> Overlapping:
    monkeypatch.setattr(staged, "MIN_GROUP", 2)
    monkeypatch.setattr(staged, "MAX_GROUP", 2)
    return Overlapping(toy(groups=1, per_group=7, n=20), training=TRAINING, device="cpu")


def test_the_next_batch_is_begun_before_the_replies_of_the_last_are_handed_over(fed: Overlapping) -> None:
    names = list(fed.clients)
    fed.run(doubled, {c: {"value": 1, "times": 1} for c in names}, fold=lambda client, reply: fed.log.append(f"fold {client}"))
    a, b, c, d, e, f, _ = names
    assert fed.log[:2] == [f"begin {a} {b}", f"begin {c} {d}"]
    assert fed.log.index(f"begin {e} {f}") < fed.log.index(f"fold {c}")
    assert fed.log.index(f"result {c}") > fed.log.index(f"fold {b}")  # who reads the replies of a batch does not wait for the next one
    assert [line for line in fed.log if line.startswith("fold")] == [f"fold {name}" for name in names]


def test_replies_come_in_the_order_of_the_clients_however_long_each_takes(fed: Overlapping) -> None:
    times = dict(zip(fed.clients, [4, 1, 0, 2, 1, 1, 3], strict=True))
    seen = []
    fed.run(
        doubled, {c: {"value": 1, "times": t} for c, t in times.items()}, fold=lambda client, reply: seen.append((client, reply["value"]))
    )
    assert seen == [(c, 2**t) for c, t in times.items()]


def test_an_error_of_one_is_no_error_of_the_others(fed: Overlapping) -> None:
    fed.on_failure = "continue"
    first, *others = fed.clients
    replies = fed.run(doubled, {c: {"value": 101 if c == first else 1, "times": 2} for c in fed.clients})
    assert list(replies.failures) == [first] and "expected a small number" in replies.failures[first].reason
    assert {reply["value"] for reply in replies.valid.values()} == {4} and list(replies.valid) == others


def test_trainings_are_those_of_the_reference(fed: Overlapping) -> None:
    plain = SequentialFederation(toy(groups=1, per_group=7, n=20), training=TRAINING, device="cpu")
    found = []
    for one in (plain, fed):
        one.begin(1)
        found.append(one.train(dict.fromkeys(one.clients, one.initial())).column("theta"))
    assert all(torch.equal(found[0][c], found[1][c]) for c in plain.clients)


def test_a_work_may_return_anything() -> None:
    fed = AtOnce(toy(groups=1, per_group=3, n=20), training=TRAINING, device="cpu")
    replies = fed.run(counted, {c: {} for c in fed.clients})
    assert replies.column("n") == {c: len(fed._clients[c].site.train) for c in fed.clients}


def test_a_task_that_forgets_to_answer_is_a_failure_and_not_waited_for_for_ever(fed: Overlapping) -> None:
    fed.on_failure = "continue"
    replies = fed.run(silent, {c: {} for c in fed.clients})
    assert list(replies.failures) == list(fed.clients)
    assert all("expected a reply with fields" in failure.reason for failure in replies.failures.values())
