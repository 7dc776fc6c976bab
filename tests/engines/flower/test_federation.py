"""What can go wrong between a server and its nodes, over an in-process grid: the round goes on, and the account says who and why."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra emdcfl[flower]")

from flwr.app import Array, ArrayRecord, Error, Message, RecordDict
from tests.engines.flower import loopback
from tests.engines.flower.loopback import LoopbackGrid, MemoryNode
from tests.methods import toy

import emdcfl
from emdcfl.core.errors import ConfigError
from emdcfl.core.keys import NodeSecret
from emdcfl.engines.flower import codec
from emdcfl.engines.flower.connected import ALONG
from emdcfl.engines.flower.federation import FlowerFederation
from emdcfl.engines.flower.messages import MessageSettings
from emdcfl.engines.flower.node.serve import perform
from emdcfl.methods import make
from emdcfl.models.recipe import ModelRecipe
from emdcfl.privacy.exchange import fingerprint, public_key
from emdcfl.privacy.keylist import KeyList
from emdcfl.runs.loop import play

SCENARIO = toy.toy(groups=2, per_group=2, n=48)
TRAINING = toy.Training(local_epochs=1, batch_size=16, lr=0.05)
SHORT = MessageSettings(deadline=0.3, poll=0.01, wait=0.0, check_interval=0.01, grace=0.05)


def fed_of(grid: LoopbackGrid, **options: Any) -> FlowerFederation:
    return loopback.federation(SCENARIO, grid, training=TRAINING, **{"on_failure": "continue", "settings": SHORT, **options})


def train(fed: FlowerFederation, index: int = 1) -> Any:
    fed.begin(index)
    theta = fed.initial()
    return fed.train(dict.fromkeys(fed.clients, theta))


Tamper = Callable[[Message, Callable[[Message], Message]], Message | None]


def changed(change: Callable[[dict[str, Any]], Any]) -> Tamper:
    """Let the node answer, then change what it said."""

    def tamper(message: Message, answer: Callable[[Message], Message]) -> Message | None:
        reply = answer(message)
        if message.metadata.message_type == "query.hello":
            return reply
        return Message(content=codec.encode(change(codec.decode(reply.content))), reply_to=message)

    return tamper


def with_reply(**fields: Any) -> Tamper:
    return changed(lambda said: {**said, "reply": {**said["reply"], **fields}})


def instead(reply: Callable[[Message], Message | None]) -> Tamper:
    """Let the node answer the greeting alone."""
    return lambda message, answer: answer(message) if message.metadata.message_type == "query.hello" else reply(message)


JUNK = RecordDict({"junk": ArrayRecord({"0": Array("uint8", (1 << 20,), "numpy.ndarray", b"x" * (1 << 20))})})
junk = instead(lambda message: Message(content=JUNK, reply_to=message))
never = instead(lambda message: None)
crash = instead(lambda message: Message(Error(code=2, reason="<class 'MemoryError'>:<''>"), reply_to=message))


P = 8 * 8 + 8 + 8 * 4 + 4
BAD = {
    "NaN": (with_reply(theta=torch.full((P,), torch.nan)), "not finite"),
    "field": (with_reply(extra=1), "fields"),
    "other name": (changed(lambda said: {**said, "client": "site-0"}), "in the name of 'site-0'"),
    "no reply": (changed(lambda said: {"client": said["client"]}), "neither"),
    "text": (changed(lambda said: "hello"), "in the name of None"),
    "junk": (junk, "expected a message of this program"),
    "silence": (never, "no answer within"),
    "crash": (crash, "error 2"),
}


@pytest.mark.parametrize("kind", sorted(BAD))
def test_a_bad_answer_is_refused_and_the_rest_goes_on(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    grid = loopback.loopback(SCENARIO)
    grid.tamper[103], expected = BAD[kind]
    fed = fed_of(grid)
    replies = train(fed)
    assert replies.clients == ("site-0", "site-1", "site-2")
    assert expected in replies.failures["site-3"].reason
    assert [f.client for f in fed.failures] == ["site-3"]
    assert fed.failures[0].violation == (kind not in ("silence", "crash"))
    assert caplog.text.count("client 'site-3' failed in round 1 (train)") == 1
    assert expected in caplog.text


def test_what_a_client_says_of_its_failure_is_quoted_in_a_short_line() -> None:
    grid = loopback.loopback(SCENARIO)
    grid.tamper[103] = changed(lambda said: {"client": said["client"], "failure": "first\nsecond " + "x" * 100_000})
    reason = train(fed_of(grid)).failures["site-3"].reason
    assert reason.startswith("first second xxx") and len(reason) < 600


def test_a_node_that_could_not_say_who_it_is_is_asked_again() -> None:
    grid = loopback.loopback(SCENARIO)
    fed, asked, fails = fed_of(grid), [], [True]

    def shy(message: Message, answer: Callable[[Message], Message]) -> Message | None:
        if message.metadata.message_type != "query.hello":
            return answer(message)
        asked.append(fed.index)
        return Message(content=codec.encode({"failure": "its disk is full"}), reply_to=message) if fails[0] else answer(message)

    grid.tamper[103] = shy
    for index in range(1, 9):
        assert train(fed, index).failures["site-3"].reason == "no node with this name has connected since the run began"
    assert 2 <= len(asked) <= 5, "less and less often"
    fails[0] = False
    rounds = [len(train(fed, index)) for index in range(9, 15)]
    assert rounds[-1] == 4


def test_a_name_that_cannot_be_printed_or_is_too_long_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    for name in ("", "a\nb", "x" * 5000):
        grid = loopback.loopback(SCENARIO)
        grid.nodes[103].name = name
        assert train(fed_of(grid)).clients == ("site-0", "site-1", "site-2")
    assert caplog.text.count("was refused: expected a name") == 3


def test_a_version_writes_no_line_of_its_own_into_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="emdcfl")
    grid = loopback.loopback(SCENARIO)

    def forge(message: Message, answer: Callable[[Message], Message]) -> Message:
        said = {**codec.decode(answer(message).content), "version": f"{emdcfl.__version__}\nclient 'site-0' failed" + "x" * 10**6}
        return Message(content=codec.encode(said), reply_to=message)

    grid.tamper[103] = forge
    fed_of(grid).wait_for_clients()
    (line,) = [record.getMessage() for record in caplog.records if "'site-3' is node" in record.getMessage()]
    assert "\n" not in line and len(line) < 200


def test_a_reply_over_the_limit_is_refused() -> None:
    grid = loopback.loopback(SCENARIO)
    grid.tamper[103] = with_reply(theta=torch.zeros(1 << 20))
    replies = train(fed_of(grid, settings=replace(SHORT, reply_mb=1.0)))
    assert "at most 1 MB" in replies.failures["site-3"].reason


def test_a_failure_at_home_is_told_in_one_line() -> None:
    grid = loopback.loopback(SCENARIO)
    empty = SCENARIO.sites[3].train
    grid.nodes[103].held.site = replace(SCENARIO.sites[3], train=replace(empty, x=empty.x[:0], y=empty.y[:0]))
    replies = train(fed_of(grid))
    assert "has no training data" in replies.failures["site-3"].reason
    assert "\n" not in replies.failures["site-3"].reason


def test_the_text_of_an_unexpected_error_stays_on_the_node() -> None:
    grid = loopback.loopback(SCENARIO)
    grid.nodes[103].details = False
    grid.nodes[103].held.preprocess = lambda x: (_ for _ in ()).throw(ValueError("patient 4711"))  # type: ignore[assignment]
    reason = train(fed_of(grid)).failures["site-3"].reason
    assert reason == "ValueError (see the node's log)"


def test_a_silent_node_is_waited_for_once_a_round_and_asked_again_in_the_next() -> None:
    grid = loopback.loopback(SCENARIO)
    grid.tamper[103] = never
    fed = fed_of(grid)
    train(fed)
    fed.evaluate(fed.clients, fed.initial()[None])
    assert fed.failures[-1].reason == "it did not answer an earlier request of this round"
    del grid.tamper[103]
    assert len(train(fed, 2)) == 4


def test_a_lost_node_that_is_back_under_another_id_is_asked_again() -> None:
    grid = loopback.loopback(SCENARIO)
    fed = fed_of(grid)

    def die(message: Message) -> Message:
        grid.online.remove(103)
        grid.nodes[203] = grid.nodes[103]
        grid.online.add(203)
        return Message(Error(code=5, reason="node unavailable"), reply_to=message)

    grid.tamper[103] = instead(die)
    replies = train(fed)
    assert replies.clients == fed.clients
    assert fed.connected.nodes["site-3"] == 203
    assert not fed.failures


def test_a_node_that_was_replaced_takes_part_again_when_the_other_one_leaves() -> None:
    grid = loopback.loopback(SCENARIO)
    fed = fed_of(grid)
    train(fed)
    grid.nodes[203] = grid.nodes[103]
    grid.online.add(203)
    train(fed, 2)
    assert fed.connected.nodes["site-3"] == 203
    grid.online.remove(203)
    assert train(fed, 3).clients == fed.clients and fed.connected.nodes["site-3"] == 103
    grid.nodes[50] = grid.nodes[103]
    grid.online.add(50)
    train(fed, 4)
    grid.online -= {100, 103}
    assert train(fed, 5).clients == fed.clients[1:]


def test_a_node_lost_near_the_deadline_and_back_has_a_deadline_of_its_own() -> None:
    grid = loopback.loopback(SCENARIO)
    fed = fed_of(grid, settings=replace(SHORT, deadline=60.0))
    train(fed)
    lifetimes: list[float] = []

    def late_then_gone(message: Message, answer: Callable[[Message], Message]) -> Message | None:
        if message.metadata.message_type != "query.train":
            return answer(message)
        lifetimes.append(message.metadata.ttl)
        if len(lifetimes) > 1:
            return answer(message)
        time.sleep(0.8)
        return Message(Error(code=5, reason="node unavailable"), reply_to=message)

    grid.tamper[103] = late_then_gone
    assert train(fed, 2).clients == fed.clients
    assert lifetimes == [60.0, 60.0]


def test_a_node_that_is_gone_is_missing_and_one_that_joins_later_takes_part() -> None:
    grid = loopback.loopback(SCENARIO)
    grid.online.remove(103)
    fed = fed_of(grid)
    assert train(fed).failures["site-3"].reason == "no node with this name has connected since the run began"
    grid.online.add(103)
    assert train(fed, 2).clients == fed.clients
    grid.online.remove(103)
    assert "is gone since" in train(fed, 3).failures["site-3"].reason


@pytest.mark.parametrize("restarted", [False, True])
def test_a_node_of_another_version_is_refused_with_both_versions(restarted: bool) -> None:
    grid = loopback.loopback(SCENARIO)
    fed = fed_of(grid)
    if restarted:
        assert not train(fed).failures
        grid.since[103] = "later"

    def older(message: Message, answer: Callable[[Message], Message]) -> Message:
        reply = answer(message)
        if message.metadata.message_type != "query.hello":
            return reply
        return Message(content=codec.encode({**codec.decode(reply.content), "version": "0.0.9"}), reply_to=message)

    grid.tamper[103] = older
    assert re.search(r"expected a node with emdcfl \d+\.\d+, got '0\.0\.9'", train(fed, 2).failures["site-3"].reason)


def test_an_old_id_that_has_not_expired_yields_to_the_new_one() -> None:
    grid = loopback.loopback(SCENARIO)
    fed = fed_of(grid)
    train(fed)
    grid.tamper[103] = never  # dead, but still listed
    grid.nodes[203] = grid.nodes[103]
    grid.online.add(203)
    assert train(fed, 2).clients == fed.clients


def impostor(name: str) -> MemoryNode:
    other = loopback.loopback(SCENARIO, seed=99).nodes[103]
    return MemoryNode(other.held, name=name)


def test_a_forged_name_is_noticed_and_the_true_client_served() -> None:
    grid = loopback.loopback(SCENARIO)
    grid.nodes[50] = impostor("site-0")
    fed = fed_of(grid)
    train(fed)
    grid.online.add(50)
    assert train(fed, 2).clients == fed.clients
    assert fed.connected.nodes["site-0"] == 100


def test_a_pinned_list_refuses_an_impostor_that_comes_first() -> None:
    grid = loopback.loopback(SCENARIO)
    grid.nodes[50] = impostor("site-0")
    grid.online = {50, 101, 102, 103}
    keys = KeyList(trust="relay")
    keys.trust, keys.known = "pinned", {n.name: fingerprint(public_key(n.secret)) for i, n in grid.nodes.items() if i != 50}
    fed = fed_of(grid, keys=keys)
    assert "another node uses its name" in train(fed).failures["site-0"].reason


def test_a_server_has_a_list_of_keys() -> None:
    """Without one, a node with any key takes the place of a client that is connected."""
    with pytest.raises(ConfigError, match="any node may take any name"):
        fed_of(loopback.loopback(SCENARIO), keys=KeyList(trust="relay"))


def test_a_stolen_public_key_is_not_enough() -> None:
    grid = loopback.loopback(SCENARIO)
    true_key = public_key(grid.nodes[100].secret)
    grid.nodes[50] = impostor("site-0")
    grid.online = {50, 101, 102, 103}

    def steal(message: Message, answer: Callable[[Message], Message]) -> Message | None:
        said = codec.decode(answer(message).content)
        return Message(content=codec.encode({**said, "key": true_key} if "proof" in said else said), reply_to=message)

    grid.tamper[50] = steal
    assert "does not hold the key" in train(fed_of(grid)).failures["site-0"].reason


def test_a_whole_run_survives_a_node_that_comes_and_goes() -> None:
    grid = loopback.loopback(SCENARIO)
    fed = fed_of(grid)
    told = []
    for finished in play(fed, make("emdcfl"), rounds=4):
        told.append(sorted({f.client for f in fed.failures}))
        fed.failures.clear()
        grid.online = {100, 101, 102} if finished.index == 1 else {100, 101, 102, 103}
    assert told == [[], ["site-3"], [], []]
    assert all(row["accuracy"] is not None for row in finished.rows)


def test_node_keys_swapped_by_the_relay_are_noticed_by_the_nodes() -> None:
    grid = loopback.loopback(SCENARIO)
    true = {node.name: fingerprint(public_key(node.secret)) for node in grid.nodes.values()}
    for node in grid.nodes.values():
        node.partners.trust, node.partners.known = "pinned", true
    fed = fed_of(grid)
    evil = public_key(NodeSecret(bytes(32)))
    fed._described = {
        c: {"n": 48, "m": 64, "key": evil if c == "site-1" else public_key(grid.nodes[100 + i].secret)} for i, c in enumerate(fed.clients)
    }
    method = make("emdcfl")
    method.step(fed, method.init(fed, fed.begin(0)), fed.begin(1))
    noticed = {f.client for f in fed.failures if "shows the key" in f.reason and "'site-1'" in f.reason}
    assert noticed == {"site-0", "site-2", "site-3"}


def test_a_replaced_key_costs_the_pairs_of_nodes_that_have_not_heard_of_it_and_no_others() -> None:
    grid = loopback.loopback(SCENARIO)
    true = {node.name: fingerprint(public_key(node.secret)) for node in grid.nodes.values()}
    for node in grid.nodes.values():
        node.partners.trust, node.partners.known = "pinned", dict(true)
    grid.nodes[100].partners.known["site-1"] = fingerprint(public_key(NodeSecret(b"o" * 32)))  # site-1's key before it was replaced
    fed = fed_of(grid)
    method = make("emdcfl", distances="all")
    state = method.step(fed, method.init(fed, fed.begin(0)), fed.begin(1))
    measured = {tuple(sorted((a, b))) for i, a in enumerate(fed.clients) for j, b in enumerate(fed.clients) if i != j and state.kind[i, j]}
    everyone = {(a, b) for i, a in enumerate(fed.clients) for b in fed.clients[i + 1 :]}
    assert everyone - measured == {("site-0", "site-1")}
    assert {f.client for f in fed.failures} == {"site-0"} and not any(f.violation for f in fed.failures)


def test_bytes_are_counted_by_task() -> None:
    fed = fed_of(loopback.loopback(SCENARIO))
    train(fed)
    sent, received, requests = fed.task_traffic["train"]
    assert requests == 4
    assert 4 * 4 * P < sent < 4 * (4 * P + 1500)
    assert 4 * 4 * P < received < 4 * (4 * P + 500)


def test_the_bytes_of_a_run_are_those_of_the_formula() -> None:
    big = replace(SCENARIO, model=ModelRecipe("mlp", {"features": toy.FEATURES, "classes": toy.CLASSES, "hidden": [300, 64]}))
    fed = loopback.federation(big, training=TRAINING)
    for _ in play(fed, make("emdcfl"), rounds=2):
        pass
    model = {"parameters": fed.layout.size, "embedding": fed.layout.embedding.stop, "width": 57}
    expected = loopback.bytes_of_run(clients=4, **model, train=48, validation=64, rounds=2, tests=2)
    for i in (0, 1):
        assert sum(count[i] for count in fed.task_traffic.values()) == pytest.approx(expected[i], rel=0.05)


def test_a_key_that_was_not_proved_is_its_senders_fault_and_reaches_nobody() -> None:
    grid = loopback.loopback(SCENARIO)

    def forge(message: Message, answer: Callable[[Message], Message]) -> Message | None:
        said = codec.decode(answer(message).content)
        said[ALONG][0]["reply"]["key"] = public_key(NodeSecret(b"x" * 32))
        return Message(content=codec.encode(said), reply_to=message)

    grid.tamper[103] = forge
    fed = fed_of(grid)
    fed.begin(1)
    assert list(fed.describe(fed.clients)) == ["site-0", "site-1", "site-2"]
    (failure,) = fed.failures
    assert failure.client == "site-3" and failure.violation and "shows the key" in failure.reason


def reference_request(keys: Any) -> dict[str, Any]:
    return {"task": "reference", "round": 1, "client": "site-0", "job": {"threads": 1}, "inputs": {"partners": keys}}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"site-1": NodeSecret(b"x" * 32), "site-2": "text"}, "expected partners"),
        ({"site-1": "swapped", "site-2": None}, "expected partners"),
        (["site-1"], "expected partners"),
        (None, "expected partners"),
        ({"site-0": NodeSecret(b"x" * 32)}, "another key than this node's own"),
    ],
)
def test_a_node_refuses_a_request_whose_relayed_keys_are_malformed_or_not_its_own(keys: Any, expected: str) -> None:
    grid = loopback.loopback(SCENARIO)
    node = grid.nodes[100]
    node.partners.trust = "pinned"
    node.partners.known = {n.name: fingerprint(public_key(n.secret)) for n in grid.nodes.values()}
    if isinstance(keys, dict):
        keys = {name: public_key(key) if isinstance(key, NodeSecret) else key for name, key in keys.items()}
    said = perform(node, reference_request(keys))
    assert expected in said["failure"] and "reply" not in said
