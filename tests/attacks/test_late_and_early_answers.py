"""A node lies where requests travel together or come late: nothing gets past validation that would not on time, and nobody else loses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra emdcfl[flower]")

from flwr.app import Error, Message
from tests.engines.flower import loopback
from tests.engines.flower.test_federation import SCENARIO, SHORT, P, fed_of, junk, train
from tests.engines.flower.test_stragglers import SlowGrid, trainings

from emdcfl.engines.flower import codec
from emdcfl.engines.flower.connected import ALONG, HELLO, SURVEY
from emdcfl.methods import make
from emdcfl.runs.loop import Finished, play
from emdcfl.trust.policy import Trust

LIAR = 103
Change = Callable[[dict[str, Any]], Any]


def slow(**options: Any) -> tuple[SlowGrid, Any]:
    """A federation that waits for late trainings, and the grid on which site-3 is late in round 1."""
    grid = SlowGrid(loopback.loopback(SCENARIO).nodes)
    return grid, fed_of(grid, settings=replace(SHORT, deadline=60.0), phase_deadline=0.05, late_updates=True, **options)


def release(grid: SlowGrid, change: Change) -> None:
    """Let the late answer come, changed."""
    assert grid.held is not None
    identity, message = grid.held
    changed = change(codec.decode(message.content))
    grid._replies[identity] = changed if isinstance(changed, Message) else Message(content=codec.encode(changed), reply_to=message)
    grid._replies[identity].metadata.__dict__["_reply_to_message_id"] = identity


def with_reply(**fields: Any) -> Change:
    return lambda said: {**said, "reply": {**said["reply"], **fields}}


def error(code: int) -> Change:
    asked = Message(content=codec.encode({}), message_type="query.train", dst_node_id=LIAR)
    return lambda said: Message(Error(code=code, reason="gone"), reply_to=asked)


BAD_LATE: dict[str, tuple[Change, str]] = {
    "NaN": (with_reply(theta=torch.full((P,), torch.nan)), "not finite"),
    "infinite": (with_reply(theta=torch.full((P,), torch.inf)), "not finite"),
    "huge": (with_reply(theta=torch.full((P,), 1e30)), "expected a state of norm"),
    "overflow": (with_reply(theta=torch.full((P,), 3.4e38)), "expected a state of norm"),
    "long": (with_reply(theta=torch.full((P,), 3.0)), "expected an update of norm"),
    "shape": (with_reply(theta=torch.zeros(1, P)), "expected theta of shape"),
    "dtype": (with_reply(theta=torch.zeros(P, dtype=torch.int64)), "expected theta as"),
    "n as text": (with_reply(n="48"), "expected n"),
    "n of nobody": (with_reply(n=0), "expected n >= 1"),
    "n beyond the limit": (with_reply(n=130), "expected n <="),
    "largest n": (with_reply(n=2**63 - 1), "expected n <="),
    "another name": (lambda said: {**said, "client": "site-0"}, "in the name of 'site-0'"),
    "text": (lambda said: "later", "in the name of None"),
    "list": (lambda said: [said], "in the name of None"),
    "failure": (lambda said: {"client": said["client"], "failure": "no"}, "no"),
    "crash": (error(2), "error 2"),
}


@pytest.mark.parametrize("kind", BAD_LATE)
def test_a_bad_late_training_is_refused_as_one_on_time_and_its_client_asked_again(kind: str) -> None:
    grid, fed = slow(trust=Trust(max_n=100))
    assert train(fed, 1).failures["site-3"].reason.startswith("late: ")
    change, expected = BAD_LATE[kind]
    release(grid, change)
    replies = train(fed, 2)
    assert replies.clients == fed.clients[:3] and expected in replies.failures["site-3"].reason
    assert bool(fed.guard.ledger.faults) == (kind not in ("failure", "crash"))
    assert fed.late == [], "it did not count"
    assert train(fed, 3).clients == fed.clients and trainings(grid, LIAR) == 2, "nobody waits for that answer any longer"


def test_a_late_training_that_is_lost_is_asked_for_again_at_once() -> None:
    grid, fed = slow()
    train(fed, 1)
    release(grid, error(3))
    fed._phase = 60.0
    assert train(fed, 2).clients == fed.clients and fed.late == [] and trainings(grid, LIAR) == 2


def test_a_late_training_of_a_quarantined_client_is_not_read() -> None:
    grid, fed = slow()
    train(fed, 1)
    release(grid, lambda said: said)
    for index in range(2, 2 + fed.guard.policy.max_faults):
        fed.begin(index)
        fed.guard.ledger.fault("site-3", "evaluate", "lied")
    replies = train(fed, 9)
    assert replies.clients == fed.clients[:3] and "quarantined for the run" in replies.failures["site-3"].reason
    assert fed.late == []


def test_a_late_training_counts_once_and_a_bent_one_is_flagged() -> None:
    grid, fed = slow()
    start = fed.initial()
    done = play(fed, make("fedavg"), rounds=4, evaluate_every=4)
    next(done)
    release(grid, lambda said: {**said, "reply": {**said["reply"], "theta": start + 15 * (said["reply"]["theta"] - start)}})
    next(done)
    assert {(flag.client, flag.what) for flag in fed.guard.ledger.flags.values()} == {("site-3", "update norm")}
    release(grid, lambda said: said)
    last = list(done)[-1]
    assert [(one["round"], one["used_in"]) for one in fed.late] == [(1, 2)]
    assert trainings(grid, LIAR) == 3 and all(row["accuracy"] is not None for row in last.rows)


def liar(change: Change, kind: str = "query.train") -> Callable[[Message, Callable[[Message], Message]], Message]:
    def tamper(message: Message, answer: Callable[[Message], Message]) -> Message:
        reply = answer(message)
        if message.metadata.message_type != kind:
            return reply
        return Message(content=codec.encode(change(codec.decode(reply.content))), reply_to=message)

    return tamper


def played(change: Change | None, *, rounds: int = 3) -> tuple[Any, list[Finished]]:
    grid = loopback.loopback(SCENARIO)
    if change is not None:
        grid.tamper[LIAR] = liar(change)
    fed = fed_of(grid, settings=replace(SHORT, deadline=5.0))
    return fed, list(play(fed, make("fedavg"), rounds=rounds))


def told(changed: Any) -> Change:
    """Change what the node says of the test that came along, where one did."""
    return lambda said: {**said, ALONG: changed(said[ALONG]) if callable(changed) else changed} if ALONG in said else said


def scored(**fields: Any) -> Change:
    return told(lambda answers: [{**answers[0], "reply": {**answers[0]["reply"], **fields}}])


ASKED_AGAIN = {
    "nothing": told(None),
    "none": told([]),
    "an empty one": told([None]),
    "two": told(lambda answers: answers * 2),
    "many": told(lambda answers: answers * 1000),
    "table": told(lambda answers: {"0": answers[0]}),
    "text": told("tested"),
    "tensor": told(torch.zeros(1)),
}
AT_FAULT = {
    "list": told([[]]),
    "number": told([7]),
    "another name": told(lambda answers: [{**answers[0], "client": "site-0"}]),
    "no name": told(lambda answers: [{"reply": answers[0]["reply"]}]),
    "no reply": told([{"client": "site-3"}]),
    "reply of a training": lambda said: told([{"client": "site-3", "reply": said["reply"]}])(said),
    "accuracy beyond 1": scored(accuracy={"test": 2.0}),
    "accuracy NaN": scored(accuracy={"test": torch.nan}),
    "another variant": scored(accuracy={"other": 0.5}),
    "large": told(lambda answers: [{**answers[0], "reply": {"accuracy": torch.zeros(1 << 20)}}]),
}


@pytest.fixture(scope="module")
def honest() -> list[Finished]:
    return played(None)[1]


@pytest.mark.parametrize("kind", [*ASKED_AGAIN, *AT_FAULT])
def test_a_bad_answer_to_what_came_along_costs_its_sender_a_row_and_nobody_a_training(kind: str, honest: list[Finished]) -> None:
    fed, done = played({**ASKED_AGAIN, **AT_FAULT}[kind])
    assert {fault.task for fault in fed.guard.ledger.faults.get("site-3", [])} == ({"test"} if kind in AT_FAULT else set())
    assert set(fed.guard.ledger.faults) <= {"site-3"}
    for finished, before in zip(done, honest, strict=True):
        assert torch.equal(finished.state.theta, before.state.theta)
        for row, usual in zip(finished.rows, before.rows, strict=True):
            if row["client"] == "site-3" and row["round"] < 3 and kind in AT_FAULT:
                assert row["accuracy"] is None
            else:
                assert row == usual


def test_a_test_of_a_round_from_which_a_client_was_excluded_is_not_taken(honest: list[Finished]) -> None:
    seen = []

    def uninvited(said: dict[str, Any]) -> dict[str, Any]:
        seen.append(said)
        bad = {**said["reply"], "n": 0} if len(seen) == 1 else said["reply"]
        test = {"client": "site-3", "reply": {"accuracy": {"test": 1.0}, "loss": {"test": 0.0}, "n": {"test": 64}}}
        return {**said, "reply": bad, ALONG: [test]}

    _, done = played(uninvited, rounds=2)
    first = {row["client"]: row["accuracy"] for finished in done for row in finished.rows if row["round"] == 1}
    assert ALONG not in seen[1], "it was not asked"
    assert first.pop("site-3") is None and None not in first.values()


GREETED = {
    "two": lambda said: {**said, ALONG: said[ALONG] * 2},
    "table": lambda said: {**said, ALONG: {"0": said[ALONG][0]}},
    "text": lambda said: {**said, ALONG: ["describe"]},
    "nothing": lambda said: {key: value for key, value in said.items() if key != ALONG},
    "another name": lambda said: {**said, ALONG: [{**said[ALONG][0], "client": "site-0"}]},
    "no samples": lambda said: {**said, ALONG: [{**said[ALONG][0], "reply": {**said[ALONG][0]["reply"], "n": -1}}]},
}


@pytest.mark.parametrize("kind", GREETED)
def test_a_bad_description_in_the_greeting_is_asked_for_again_or_its_senders_fault(kind: str) -> None:
    grid = loopback.loopback(SCENARIO)
    grid.tamper[LIAR] = liar(GREETED[kind], f"query.{HELLO}")
    fed = fed_of(grid)
    fed.begin(1)
    guilty = kind in ("another name", "no samples")
    assert list(fed.describe(fed.clients)) == list(fed.clients[:3] if guilty else fed.clients)
    assert set(fed.guard.ledger.faults) == ({"site-3"} if guilty else set())


def test_what_nobody_asked_for_in_a_greeting_is_not_kept() -> None:
    grid = loopback.loopback(SCENARIO)
    grid.tamper[LIAR] = liar(lambda said: {**said, SURVEY: torch.zeros(1 << 20)}, f"query.{HELLO}")
    fed = fed_of(grid)
    fed.connected.refresh()
    assert {client: set(said) for client, said in fed.connected.answers.items()} == {client: {ALONG} for client in fed.clients}


def test_a_late_answer_that_is_no_message_of_this_program_is_its_senders_fault() -> None:
    grid, fed = slow()
    train(fed, 1)
    assert grid.held is not None
    answer = junk(grid.held[1], lambda message: message)
    assert answer is not None
    release(grid, lambda said: answer)
    assert "expected a message of this program" in train(fed, 2).failures["site-3"].reason
    assert train(fed, 3).clients == fed.clients


VOTES = {
    "n": with_reply(n=65),
    "n of all": with_reply(n=2**29),
    "fewer models": lambda said: {**said, "reply": {key: value[:1] if key != "n" else value for key, value in said["reply"].items()}},
    "no models": lambda said: {**said, "reply": {key: value[:0] if key != "n" else value for key, value in said["reply"].items()}},
    "more models": lambda said: with_reply(mean=torch.cat([said["reply"]["mean"]] * 2))(said),
    "covariance NaN": lambda said: with_reply(covariance=said["reply"]["covariance"] * torch.nan)(said),
    "covariance of one": lambda said: with_reply(covariance=said["reply"]["covariance"][:1, :1])(said),
    "covariance below zero": lambda said: with_reply(covariance=-said["reply"]["covariance"])(said),
    "float32": lambda said: with_reply(mean=said["reply"]["mean"].float())(said),
}


def voted(liars: list[int], change: Change) -> tuple[Any, Finished]:
    grid = loopback.loopback(SCENARIO)
    grid.tamper |= dict.fromkeys(liars, liar(change, "query.loss_moments"))
    fed = fed_of(grid, settings=replace(SHORT, deadline=5.0))
    (done,) = play(fed, make("emdcfl", grouping="benefit"), rounds=1)
    return fed, done


@pytest.mark.parametrize("kind", VOTES)
def test_a_vote_whose_arrays_do_not_fit_is_left_out(kind: str) -> None:
    fed, done = voted([LIAR], VOTES[kind])
    assert {c: [fault.task for fault in faults] for c, faults in fed.guard.ledger.faults.items()} == {"site-3": ["loss_moments"]}
    assert bool(torch.isfinite(done.serving.models).all())


def test_without_any_vote_nobody_is_divided() -> None:
    fed, done = voted([100, 101, 102, 103], VOTES["fewer models"])
    assert set(fed.guard.ledger.faults) == set(fed.clients)
    assert done.serving.clusters is not None and set(done.serving.clusters.tolist()) == {0}
