"""What Flower loses on the way, over an in-process grid: it is noticed long before the deadline, and asked for again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra emdcfl[flower]")

import httpx
import torch
from flwr.app import Error, Message, RecordDict
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from tests.engines.flower import loopback
from tests.engines.flower.loopback import QUICK, LoopbackGrid
from tests.engines.flower.test_federation import SCENARIO, fed_of, train

from emdcfl.core import tasks
from emdcfl.core.errors import EmdcflError
from emdcfl.engines.flower import codec, messages
from emdcfl.engines.flower.federation import FlowerFederation

LONG = replace(QUICK, deadline=300.0, patience=0.05)
"""A test that waited for this deadline would never end."""

Answer = Callable[[Message], Message]


def met(grid: LoopbackGrid, **changes: float) -> FlowerFederation:
    """A federation that knows its nodes: what follows is tasks alone."""
    fed = fed_of(grid, settings=replace(LONG, **changes))
    fed.begin(1)
    fed.run(tasks.describe, {c: {} for c in fed.clients})
    return fed


def kinds(grid: LoopbackGrid, node: int) -> list[str]:
    return [m.metadata.message_type for m, _ in grid.log if m.metadata.dst_node_id == node]


def test_a_lost_reply_is_noticed_and_asked_for_again() -> None:
    grid = loopback.loopback(SCENARIO)
    fed = met(grid)
    lost: list[str] = []

    def lose_the_first(message: Message, answer: Answer) -> Message | None:
        reply = answer(message)
        if message.metadata.message_type == "query.train" and not lost:
            lost.append(message.metadata.message_id)
            return None
        return reply

    grid.tamper[103] = lose_the_first
    before = len(kinds(grid, 103))
    replies = train(fed, 2)
    assert replies.clients == fed.clients and not fed.failures
    assert kinds(grid, 103)[before:] == ["query.train", "query.ping", "query.train"]
    assert "query.ping" not in kinds(grid, 102)  # nobody asks after a node that has answered


def test_replies_that_are_lost_every_time_are_a_failure_with_its_reason() -> None:
    grid = loopback.loopback(SCENARIO)
    fed = met(grid)
    grid.tamper[103] = lambda message, answer: answer(message) if message.metadata.message_type == "query.ping" else None
    failures = train(fed, 2).failures
    assert failures["site-3"].reason == "its node has answered, but the answer was lost on its way"


def test_a_busy_node_answers_in_order_and_loses_nothing() -> None:
    grid = loopback.loopback(SCENARIO)
    fed = met(grid)
    held: list[tuple[Message, Message]] = []

    def busy(message: Message, answer: Answer) -> Message | None:
        """Hand the reply over together with that of the third question whether the node is there."""
        if message.metadata.message_type == "query.train":
            held.append((message, answer(message)))
        elif len(kinds(grid, 103)) - before < 3:  # the questions before it expire unread
            return Message(Error(code=0, reason="expired"), reply_to=message)
        else:
            grid._replies[held[0][0].metadata.message_id] = held[0][1]
            return answer(message)
        return None

    grid.tamper[103], before = busy, len(kinds(grid, 103))
    assert train(fed, 2).clients == fed.clients
    assert kinds(grid, 103)[before:] == ["query.train", *["query.ping"] * 3]


def test_a_node_that_answers_nothing_is_late() -> None:
    grid = loopback.loopback(SCENARIO)
    fed = met(grid, deadline=0.3)
    grid.tamper[103] = lambda message, answer: None
    assert train(fed, 2).failures["site-3"].reason == "no answer within 0 s"


def test_a_request_that_nobody_fetched_is_deleted_with_the_next_exchange() -> None:
    grid = loopback.loopback(SCENARIO)
    fed = met(grid, deadline=0.3)
    asked: list[str] = []
    deleted: list[str] = []
    done = threading.Event()

    class Link:
        def ConfirmMessageReceived(self, request: Any) -> None:
            deleted.append(request.message_object_id)
            if set(asked) <= set(deleted):
                done.set()

    grid._runtime_client = Link()  # type: ignore[attr-defined]
    grid.tamper[103] = lambda message, answer: asked.append(message.metadata.message_id)
    assert list(train(fed, 2).failures) == ["site-3"] and asked
    del grid.tamper[103]
    assert not deleted and not train(fed, 3).failures
    assert done.wait(10)


class SlowGrid(LoopbackGrid):
    """Node 103's first answer to ``query.train`` is not complete until ``rest`` is set: who fetches it waits, for others it is gone."""

    def __init__(self, nodes: dict[int, loopback.MemoryNode]) -> None:
        super().__init__(nodes)
        self.rest = threading.Event()
        self.slow: Message | None = None
        self.taken = False
        self.tamper[103] = self._note

    def _note(self, message: Message, answer: Answer) -> Message:
        if message.metadata.message_type == "query.train" and self.slow is None:
            self.slow = message
        return answer(message)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        wanted = list(message_ids)
        if self.slow is not None and self.slow.metadata.message_id in wanted and not self.rest.is_set():
            if self.taken:
                wanted.remove(self.slow.metadata.message_id)
                return [*super().pull_messages(wanted), Message(Error(code=3, reason="not found"), reply_to=self.slow)]
            self.taken = True
            found = super().pull_messages(wanted)
            self.rest.wait(300)
            return found
        return super().pull_messages(wanted)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowGrid]:
    monkeypatch.setattr(messages, "POLL_TIMEOUT", 0.05)
    grid = SlowGrid(loopback.loopback(SCENARIO).nodes)
    yield grid
    grid.rest.set()


def test_a_reply_that_does_not_end_holds_up_nobody_and_is_asked_for_again(slow: SlowGrid, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "INCOMPLETE", 0.2)
    fed = met(slow)
    before = len(kinds(slow, 103))
    assert train(fed, 2).clients == fed.clients and not fed.failures
    assert kinds(slow, 103)[before:].count("query.train") == 2 and not slow.rest.is_set()


def test_a_reply_that_takes_its_time_is_waited_for(slow: SlowGrid) -> None:
    fed = met(slow, patience=1000.0)
    before = len(kinds(slow, 103))
    threading.Timer(0.5, slow.rest.set).start()  # ten looks later
    assert train(fed, 2).clients == fed.clients and not fed.failures
    assert kinds(slow, 103)[before:] == ["query.train"]


@pytest.mark.slow
def test_a_reply_that_does_not_end_before_the_deadline_costs_its_own_client_only(slow: SlowGrid) -> None:
    fed = met(slow, patience=1000.0, deadline=3.0)
    held: list[str] = []
    others = [node for node in slow.nodes if node != 103]
    for node in others:  # their replies come later than the one that is caught

        def later(message: Message, answer: Answer, node: int = node) -> Message | None:
            if message.metadata.message_type != "query.train":
                return answer(message)
            threading.Timer(0.2, lambda: slow._replies.update({message.metadata.message_id: answer(message)})).start()
            held.append(message.metadata.message_id)
            return None

        slow.tamper[node] = later
    failures = train(fed, 2).failures
    assert {c: f.reason for c, f in failures.items()} == {"site-3": "no answer within 3 s"} and len(held) == 3


def test_what_is_being_fetched_when_a_phase_ends_counts_later_and_so_does_what_was_found_beside_it(slow: SlowGrid) -> None:
    fed = fed_of(slow, settings=replace(LONG, patience=1000.0), phase_deadline=0.2, late_updates=True)
    asked = {c: {"theta": fed.initial()} for c in fed.clients}
    answered = []
    for index in (1, 2, 3):
        fed.begin(index)
        answered.append(fed.run(tasks.train, asked, training=fed.training.as_dict()).clients)
        if index == 2:
            slow.rest.set()
    assert answered == [(), (), fed.clients]
    assert [(one["round"], one["used_in"]) for one in fed.late] == [(1, 3)] * 4
    assert [kinds(slow, node).count("query.train") for node in slow.nodes] == [1] * 4


def test_what_an_older_look_brings_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both looks end before anybody asks: the reply that the first one took counts, not that the second one did not find it."""
    monkeypatch.setattr(messages, "POLL_TIMEOUT", 0.05)
    message = Message(RecordDict(), dst_node_id=1, message_type="query.train")
    message.metadata.__dict__["_message_id"] = "m"
    reply, gone = Message(RecordDict(), reply_to=message), Message(Error(code=3, reason="not found"), reply_to=message)
    begun, second = threading.Event(), threading.Event()

    class Slow(LoopbackGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            if begun.is_set():
                second.set()
                first.join(60)
                return [gone]
            begun.set()
            second.wait(60)
            return [reply]

    looks = messages.ReplyPoller(Slow({}))
    assert looks(["m"]) == []
    (first,) = looks.open
    found: list[Message] = []
    while not found:
        found = looks(["m"])
    assert found == [reply]


def test_a_reply_that_is_gone_is_told_when_nobody_else_looks() -> None:
    message = Message(RecordDict(), dst_node_id=1, message_type="query.train")
    message.metadata.__dict__["_message_id"] = "m"
    gone = Message(Error(code=3, reason="not found"), reply_to=message)
    grid = LoopbackGrid({})
    grid._replies["m"] = gone
    assert [found.error.code for found in messages.ReplyPoller(grid)(["m"])] == [3]


def broken(times: int, code: int) -> Callable[[], str]:
    left = [times]

    def call() -> str:
        if left[0]:
            left[0] -= 1
            request = httpx.Request("POST", "https://link/v1")
            raise httpx.HTTPStatusError("no", request=request, response=httpx.Response(code, request=request))
        return "well"

    return call


def test_a_superlink_with_errors_of_its_own_is_asked_again(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(messages, "PAUSES", (0.0, 0.0))
    with caplog.at_level(logging.WARNING, logger="emdcfl"):
        assert messages.retry_when_busy(broken(2, 500)) == "well"
    assert ["error 500" in message for message in caplog.messages] == [True, True]
    with pytest.raises(EmdcflError, match="keeps answering with error 503.*--resume"):
        messages.retry_when_busy(broken(3, 503))
    with pytest.raises(httpx.HTTPStatusError):  # a refusal is not a hiccup
        messages.retry_when_busy(broken(1, 403))
    tries = iter([ObjectPushError("object", 1, "session"), None])

    def push() -> str:
        if (error := next(tries)) is not None:
            raise error
        return "well"

    assert messages.retry_when_busy(push) == "well"


def test_requests_and_replies_survive_an_error_of_the_superlink(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "PAUSES", (0.0, 0.0))
    grid = loopback.loopback(SCENARIO)
    fed = met(grid)
    for name in ("push_messages", "pull_messages", "get_node_ids"):
        trip, honest = broken(1, 500), getattr(grid, name)
        monkeypatch.setattr(grid, name, lambda *given, trip=trip, honest=honest: (trip(), honest(*given))[1])
    assert train(fed, 2).clients == fed.clients and not fed.failures


def test_deleting_a_request_frees_its_model_in_flowers_database(tmp_path: Path) -> None:
    """What a node never fetched would stay until the run ends."""
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
    from flwr.superlink.config_loader import get_federation_manager, get_objectstore_linkstate_factories
    from flwr.superlink.servicer.runtime.runtime_handlers import confirm_message_received

    _, states = get_objectstore_linkstate_factories(str(tmp_path / "link.db"), get_federation_manager())
    state: Any = states.state()
    request = Message(content=codec.encode({"theta": torch.ones(1000)}), dst_node_id=5, message_type="query.train")
    state.object_store.preregister(1, get_object_tree(request))
    for identity, part in get_all_nested_objects(request).items():
        state.object_store.put(identity, part.deflate())

    class Link:
        def ConfirmMessageReceived(self, confirmed: Any) -> None:
            confirm_message_received(confirmed, state, None)  # type: ignore[arg-type]

    grid = loopback.loopback(SCENARIO)
    grid._runtime_client = Link()  # type: ignore[attr-defined]
    assert len(state.object_store) > 1
    messages._delete(grid, {request.object_id})
    assert len(state.object_store) == 0
