"""What Flower loses on the way, over an in-process grid: it is noticed long before the deadline, and asked for again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra emdcfl[flower]")

import httpx
import torch
from flwr.app import Error, Message, RecordDict
from flwr.proto.message_pb2 import PullObjectResponse
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from tests.engines.flower import loopback
from tests.engines.flower.loopback import QUICK, LoopbackGrid, LoopbackLink
from tests.engines.flower.test_federation import SCENARIO, fed_of, train

from emdcfl.core import tasks
from emdcfl.core.errors import EmdcflError
from emdcfl.engines.flower import codec, messages, polling
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


def test_a_request_is_sent_before_the_next_is_encoded() -> None:
    grid = loopback.loopback(SCENARIO)
    fed = met(grid)
    encoded: list[int] = []

    def count(message: Message, answer: Callable[[Message], Message]) -> Message:
        encoded.append(fed.task_traffic["train"][2])
        return answer(message)

    grid.tamper = dict.fromkeys(grid.nodes, count)
    train(fed, 2)
    assert encoded == [1, 2, 3, 4]


def test_a_phase_begins_when_all_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = loopback.loopback(SCENARIO)
    fed, clock, held = met(grid), [0.0], list[tuple[str, Message]]()

    def hold_back(message: Message, answer: Callable[[Message], Message]) -> None:
        held.append((message.metadata.message_id, answer(message)))

    def sleep(seconds: float) -> None:
        clock[0] += 10
        grid._replies |= dict(held)

    monkeypatch.setattr(messages, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    grid.tamper[103] = hold_back
    answers = dict(ask_all(fed, lambda: sleep(0), deadline=300.0, phase=25.0))
    assert [client for client, answer in answers.items() if isinstance(answer, dict)] == list(fed.clients)


def test_a_node_that_is_slow_to_say_who_it_is_holds_up_nobody_and_is_asked_when_it_has() -> None:
    grid = loopback.loopback(SCENARIO)
    grid.online.remove(103)
    fed = met(grid)
    held: list[tuple[str, Message]] = []

    def hold_back(message: Message, answer: Callable[[Message], Message]) -> Message | None:
        if message.metadata.message_type == "query.train":
            return answer(message)
        held.append((message.metadata.message_id, answer(message)))
        return None

    def release(message: Message, answer: Callable[[Message], Message]) -> Message:
        grid._replies |= dict(held[:1])
        return answer(message)

    grid.tamper = {100: release, 103: hold_back}
    grid.online.add(103)
    assert train(fed, 2).clients == fed.clients
    assert kinds(grid, 103) == ["query.hello", "query.train"]


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
    asked = kinds(grid, 103)[before:]
    assert asked[:2] == ["query.train", "query.ping"] and asked.count("query.train") == 2  # more pings, where the machine is busy
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


@pytest.mark.parametrize("cut_off", [False, True])
def test_a_node_that_was_killed_and_is_back_is_asked_again_and_one_that_was_cut_off_is_not(cut_off: bool) -> None:
    """Both have left and come back; the one that was cut off is still at work, and answers before the question whether it is there."""
    grid = loopback.loopback(SCENARIO)
    fed = met(grid, patience=1000.0)
    held: list[tuple[str, Message]] = []

    def leave(message: Message, answer: Answer) -> Message | None:
        if message.metadata.message_type == "query.train" and not held:
            held.append((message.metadata.message_id, answer(message)))
            grid.since[103] = "later"
            return None
        if message.metadata.message_type == "query.ping" and cut_off:
            grid._replies[held[0][0]] = held[0][1]
        return answer(message)

    grid.tamper[103], before = leave, len(kinds(grid, 103))
    replies = train(fed, 2)
    assert kinds(grid, 103)[before:] == ["query.train", "query.ping", *([] if cut_off else ["query.hello", "query.train"])]
    assert replies.clients == fed.clients and not fed.failures
    assert torch.equal(replies["site-3"]["theta"], codec.decode(held[0][1].content)["reply"]["theta"])
    assert fed.task_traffic["train"][2] == 4 + (not cut_off)


@pytest.mark.parametrize("returns", [False, True])
def test_a_node_that_is_gone_is_waited_for_a_while_and_not_until_the_deadline(returns: bool) -> None:
    grid = loopback.loopback(SCENARIO)
    fed = met(grid, patience=1000.0, grace=60.0 if returns else 0.05)
    online = grid.get_node_ids

    def die(message: Message, answer: Answer) -> Message | None:
        del grid.tamper[103]
        grid.online.remove(103)
        return None

    def look() -> Any:
        found = online()
        if returns and 103 not in found:
            grid.online.add(103)
            grid.since[103] = "later"
        return found

    grid.tamper[103], grid.get_node_ids = die, look  # type: ignore[method-assign]
    before = len(kinds(grid, 103))
    reasons = [failure.reason for failure in train(fed, 2).failures.values()]
    assert not reasons if returns else "is gone since" in reasons[0]
    again = ["query.ping", "query.hello", "query.train"] if returns else []
    assert kinds(grid, 103)[before:] == ["query.train", *again]


def test_a_node_that_dies_of_every_request_is_asked_twice() -> None:
    grid = loopback.loopback(SCENARIO)
    fed = met(grid, patience=1000.0)

    def die(message: Message, answer: Answer) -> Message | None:
        if message.metadata.message_type != "query.train":
            return answer(message)
        grid.since[103] = message.metadata.message_id
        return None

    grid.tamper[103], before = die, len(kinds(grid, 103))
    assert list(train(fed, 2).failures) == ["site-3"]
    assert kinds(grid, 103)[before:].count("query.train") == 2


def test_a_node_that_answers_nothing_is_late() -> None:
    grid = loopback.loopback(SCENARIO)
    fed = met(grid, deadline=0.3)
    grid.tamper[103] = lambda message, answer: None
    assert train(fed, 2).failures["site-3"].reason == "no answer within 0 s"


def test_a_request_that_expires_is_late_and_not_lost() -> None:
    """Flower answers in the place of a node whose time is over."""
    grid = loopback.loopback(SCENARIO)
    fed = met(grid, deadline=1.0, patience=1000.0)
    asked: list[Message] = []

    class Link(LoopbackLink):
        def PullMessages(self, request: Any) -> Any:
            for message in asked:
                if time.time() - message.metadata.created_at > message.metadata.ttl:
                    self.replies[message.metadata.message_id] = Message(Error(code=3, reason="not found"), reply_to=message)
            return super().PullMessages(request)

    grid._runtime_client = Link(grid._replies)
    grid.tamper[103] = lambda message, answer: asked.append(message)
    assert train(fed, 2).failures["site-3"].reason == "no answer within 1 s"
    assert len(asked) == 1


def test_a_request_that_nobody_fetched_is_deleted_with_the_next_exchange() -> None:
    grid = loopback.loopback(SCENARIO)
    fed = met(grid, deadline=0.3)
    asked: list[str] = []
    deleted: list[str] = []
    done = threading.Event()

    class Link(LoopbackLink):
        def ConfirmMessageReceived(self, request: Any) -> None:
            deleted.append(request.message_object_id)
            if set(asked) <= set(deleted):
                done.set()

    grid._runtime_client = Link(grid._replies)
    grid.tamper[103] = lambda message, answer: asked.append(message.metadata.message_id)
    assert list(train(fed, 2).failures) == ["site-3"] and asked
    del grid.tamper[103]
    assert not set(asked) & set(deleted) and not train(fed, 3).failures
    assert done.wait(10)


class SlowLink(LoopbackLink):
    """Node 103's first answer to ``query.train`` lacks a part until ``rest`` is set. As at the SuperLink, it is given out once."""

    def __init__(self, grid: SlowGrid) -> None:
        super().__init__(grid._replies)
        self.grid, self.rest, self.confirmed = grid, threading.Event(), set[str]()
        self.slow: Message | None = None

    def PullMessages(self, request: Any) -> Any:
        if self.slow is not None and self.slow.metadata.reply_to_message_id in request.message_ids:
            asked = next(m for m, reply in self.grid.log if reply is self.slow)
            self.replies[asked.metadata.message_id] = Message(Error(code=3, reason="not found"), reply_to=asked)
        elif self.slow is None:
            trained = [(m, self.replies.get(m.metadata.message_id)) for m, _ in self.grid.log if m.metadata.message_type == "query.train"]
            self.slow = next((reply for m, reply in trained if reply is not None and m.metadata.dst_node_id == 103), None)
        return super().PullMessages(request)

    def PullObject(self, request: Any) -> Any:
        if self.slow is not None and request.object_id == self.slow.metadata.message_id and not self.rest.is_set():
            return PullObjectResponse(object_found=True)
        return super().PullObject(request)

    def ConfirmMessageReceived(self, request: Any) -> None:
        self.confirmed.add(request.message_object_id)


class SlowGrid(LoopbackGrid):
    def __init__(self, nodes: dict[int, loopback.MemoryNode]) -> None:
        super().__init__(nodes)
        self._runtime_client = self.link = SlowLink(self)


@pytest.fixture
def slow() -> Iterator[SlowGrid]:
    grid = SlowGrid(loopback.loopback(SCENARIO).nodes)
    yield grid
    grid.link.rest.set()


def test_a_reply_that_does_not_end_holds_up_nobody_and_is_asked_for_again(slow: SlowGrid, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling, "STUCK", 0.2)
    fed = met(slow)
    before = len(kinds(slow, 103))
    assert train(fed, 2).clients == fed.clients and not fed.failures
    assert kinds(slow, 103)[before:].count("query.train") == 2 and not slow.link.rest.is_set()


def ask_all(fed: FlowerFederation, encoding: Callable[[], None] = lambda: None, **how: Any) -> Iterator[tuple[Any, Any]]:
    """Let all nodes train, in one exchange of messages."""
    request = {"task": "train", "round": 2, "job": fed.job, "inputs": {"theta": fed.initial(), "training": fed.training.as_dict()}}

    def requests() -> Iterator[tuple[Any, int, RecordDict]]:
        for client, node in fed.connected.nodes.items():
            encoding()
            yield client, node, codec.encode({**request, "client": client})

    return fed.connected.messenger.exchange("query.train", requests(), group="2", **how)


def test_complete_replies_come_at_once_beside_one_that_was_found_with_them_and_has_no_end(slow: SlowGrid) -> None:
    fed = met(slow, patience=1000.0)
    answers = ask_all(fed, deadline=60.0)
    first = dict(next(answers) for _ in range(3))
    assert slow.link.slow is not None and not slow.link.rest.is_set()
    assert all("reply" in answer for answer in first.values()) and "site-3" not in first
    slow.link.rest.set()
    ((client, answer),) = answers
    assert client == "site-3" and "reply" in answer and kinds(slow, 103).count("query.train") == 1


def test_a_reply_that_has_no_end_costs_its_own_client_only_and_no_thread(slow: SlowGrid) -> None:
    fed = met(slow, patience=1000.0)
    answers = dict(ask_all(fed, deadline=0.5))
    assert isinstance(answers.pop("site-3"), messages.LateError) and all("reply" in answer for answer in answers.values())
    for thread in [thread for thread in threading.enumerate() if thread.name == polling.THREAD]:
        thread.join(60)
        assert not thread.is_alive()
    assert slow.link.slow is not None and slow.link.slow.metadata.message_id in slow.link.confirmed, "what has come of it is deleted"


def test_a_reply_that_is_on_its_way_when_a_phase_ends_counts_later(slow: SlowGrid) -> None:
    fed = fed_of(slow, settings=replace(LONG, patience=1000.0), phase_deadline=0.2, late_updates=True)
    asked = {c: {"theta": fed.initial()} for c in fed.clients}
    answered = []
    for index in (1, 2, 3):
        if index == 3:
            slow.link.rest.set()
            fed._phase = 60.0
        fed.begin(index)
        answered.append(fed.run(tasks.train, asked, training=fed.training.as_dict()).clients)
    assert answered == [fed.clients[:3], fed.clients[:3], fed.clients]
    assert [(one["client"], one["round"], one["used_in"]) for one in fed.late] == [("site-3", 1, 3)]
    assert [kinds(slow, node).count("query.train") for node in slow.nodes] == [3, 3, 3, 1]


def test_a_reply_that_is_gone_is_told_when_nobody_else_looks() -> None:
    message = Message(RecordDict(), dst_node_id=1, message_type="query.train")
    message.metadata.__dict__["_message_id"] = "m"
    gone = Message(Error(code=3, reason="not found"), reply_to=message)
    grid = LoopbackGrid({})
    grid._replies["m"] = gone
    assert [found.error.code for found in polling.ReplyPoller(grid)(["m"])] == [3]


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
    monkeypatch.setattr(polling, "PAUSES", (0.0, 0.0))
    with caplog.at_level(logging.WARNING, logger="emdcfl"):
        assert polling.retry_when_busy(broken(2, 500)) == "well"
    assert ["error 500" in message for message in caplog.messages] == [True, True]
    with pytest.raises(EmdcflError, match="keeps answering with error 503.*--resume"):
        polling.retry_when_busy(broken(3, 503))
    with pytest.raises(httpx.HTTPStatusError):  # a refusal is not a hiccup
        polling.retry_when_busy(broken(1, 403))
    tries = iter([ObjectPushError("object", 1, "session"), None])

    def push() -> str:
        if (error := next(tries)) is not None:
            raise error
        return "well"

    assert polling.retry_when_busy(push) == "well"


def test_requests_and_replies_survive_an_error_of_the_superlink(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling, "PAUSES", (0.0, 0.0))
    grid = loopback.loopback(SCENARIO)
    fed = met(grid)
    link = grid._runtime_client
    for at, name in ((grid, "push_messages"), (grid, "get_node_ids"), (link, "PullMessages"), (link, "PullObject")):
        trip, honest = broken(1, 500), getattr(at, name)
        monkeypatch.setattr(at, name, lambda *given, trip=trip, honest=honest: (trip(), honest(*given))[1])
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

    class Link(LoopbackLink):
        def ConfirmMessageReceived(self, confirmed: Any) -> None:
            confirm_message_received(confirmed, state, None)  # type: ignore[arg-type]

    grid = loopback.loopback(SCENARIO)
    grid._runtime_client = Link(grid._replies)
    assert len(state.object_store) > 1
    polling.delete(grid, {request.object_id})
    assert len(state.object_store) == 0
