from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from tests.tiny import TRAINING, SequentialFederation, federation, same_bits, tamper, tiny

from emdcfl.core import rounds
from emdcfl.core.client import Client, TaskInfo, task
from emdcfl.core.errors import ClientError, ConfigError, QuorumError
from emdcfl.core.federation import Clock, Failure, Inputs, Round, participants
from emdcfl.core.schema import Field, Reply
from emdcfl.methods import make

NAMES = [f"site-{i}" for i in range(8)]


class Tampering(SequentialFederation):
    """Replies of named clients are changed on their way, in every try or only in the first ones."""

    def __init__(self, changes: Mapping[str, Any], *, tries: int = 1000, **options: Any) -> None:
        super().__init__(tiny(), device="cpu", training=TRAINING, **options)
        self.changes, self.tries = dict(changes), tries

    def _dispatch(self, info: TaskInfo, inputs: Mapping[str, Inputs], common: Inputs) -> Iterator[tuple[str, Reply | Failure]]:
        for name, reply in super()._dispatch(info, inputs, common):
            if info.name == "train" and name in self.changes and self.tries > 0:
                reply = self.changes[name](reply)
            yield name, reply
        self.tries -= info.name == "train"


def lost(reply: Any) -> Failure:
    return Failure("site-1", "train", 1, "no answer")


@task(phase="evaluate", returns={"value": Field(int)})
def stumble(client: Client, *, value: int) -> Reply:
    if client.name == "site-2":
        raise RuntimeError("first line\nsecond line")
    return {"value": value}


def test_participants_depend_on_seed_and_round_alone() -> None:
    drawn = [participants(NAMES, 3, seed=0, round=r) for r in range(1, 401)]
    assert all(len(set(d)) == 3 and list(d) == sorted(d) for d in drawn)
    assert len(set(drawn)) > 40
    share = Counter(c for d in drawn for c in d)
    assert all(110 < share[c] < 190 for c in NAMES)  # 150 expected, 9.7 the standard deviation
    assert drawn[4] == participants(NAMES, 3, seed=0, round=5) != participants(NAMES, 3, seed=1, round=5)
    assert participants(NAMES, 8, seed=0, round=1) == participants(NAMES, None, seed=0, round=1) == tuple(NAMES)


@pytest.mark.parametrize("number", [0, -1, 9])
def test_a_wrong_number_of_participants_is_refused(number: int) -> None:
    with pytest.raises(ConfigError, match=rf"expected participants between 1 and 8 .* got {number}"):
        participants(NAMES, number, seed=0, round=1)


def test_a_federation_refuses_it_before_anything_is_trained() -> None:
    with pytest.raises(ConfigError, match="between 1 and 4"):
        federation(participants=5)


def test_every_method_meets_the_same_clients() -> None:
    seen = {}
    for name in ("emdcfl", "oracle", "fedavg", "local"):
        fed, asked = federation(tiny(clients_per_group=3), participants=2), []
        fed.observer = lambda t, c, r, asked=asked: asked.append(c) if t == "train" else None
        method = make(name)
        state = method.init(fed, fed.begin(0))
        for index in (1, 2, 3):
            state = method.step(fed, state, fed.begin(index))
        seen[name] = asked
    assert len({tuple(v) for v in seen.values()}) == 1
    assert len(seen["emdcfl"]) == 6


def test_names_must_differ() -> None:
    scenario = tiny()
    with pytest.raises(ConfigError, match="names to differ"):
        federation(type(scenario)(**{**vars(scenario), "sites": scenario.sites[:1] * 2}))


def test_replies_come_in_client_order_and_stack() -> None:
    fed = federation()
    replies = fed.evaluate(fed.clients[::-1], fed.initial()[None])
    assert replies.clients == fed.clients and len(replies) == 4
    assert replies.stack("table").shape == (4, 1, 1)
    assert list(replies.column("n")) == list(fed.clients)
    assert replies["site-1"] is replies.valid["site-1"]


def test_fold_sees_replies_in_client_order_and_they_are_not_kept() -> None:
    fed, order = federation(), []
    replies = fed.train(dict.fromkeys(reversed(fed.clients), fed.initial()), fold=lambda c, r: order.append((c, r["n"])))
    assert order == [(c, 80) for c in fed.clients]
    assert replies.valid == {c: {} for c in fed.clients}


BAD: dict[str, Any] = {
    "theta is NaN": (lambda r: r | {"theta": r["theta"] * torch.nan}, "theta holds values that are not finite"),
    "a field too many": (lambda r: r | {"data": 1}, "expected a reply with fields .* got .*'data'"),
    "not a reply": (lambda r: None, "got NoneType"),
    "no answer": (lost, "no answer"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_reply_is_a_failure_with_a_name(kind: str) -> None:
    change, message = BAD[kind]
    fed = Tampering({"site-1": change}, on_failure="continue")
    fed.begin(3)
    replies = fed.train(dict.fromkeys(fed.clients, fed.initial()))
    assert replies.clients == ("site-0", "site-2", "site-3")
    assert list(replies.failures) == ["site-1"] and [f.client for f in fed.failures] == ["site-1"]
    assert re.search(message, replies.failures["site-1"].reason)
    strict = Tampering({"site-1": change})
    strict.begin(3)
    with pytest.raises(ClientError, match=rf"client 'site-1' failed in round \d \(train\): .*{message}"):
        strict.train(dict.fromkeys(strict.clients, strict.initial()))


def test_a_failing_fold_client_is_left_out() -> None:
    fed, seen = Tampering({"site-1": lost}, on_failure="continue"), []
    fed.train(dict.fromkeys(fed.clients, fed.initial()), fold=lambda c, _: seen.append(c))
    assert seen == ["site-0", "site-2", "site-3"]


def test_a_clients_bug_is_reported_on_one_line_with_its_traceback_aside() -> None:
    fed = federation(on_failure="continue")
    fed.begin(1)
    replies = fed.run(stumble, {c: {} for c in fed.clients}, value=3)
    failure = replies.failures["site-2"]
    assert str(failure) == "client 'site-2' failed in round 1 (stumble): RuntimeError: first line second line"
    assert "Traceback" in failure.traceback and "first line\nsecond line" in failure.traceback
    with pytest.raises(ClientError, match="first line second line") as caught:
        federation().run(stumble, {"site-2": {}}, value=3)
    assert "\n" not in str(caught.value)


def test_a_method_may_verify_more_than_the_schema() -> None:
    def verify(client: str, reply: Reply) -> None:
        if client == "site-3":
            raise ClientError("not what was agreed")

    fed = federation(on_failure="continue")
    replies = fed.run(stumble, {"site-0": {}, "site-3": {}}, value=3, verify=verify)
    assert replies.clients == ("site-0",)
    assert "client 'site-3' failed in round 0 (stumble): not what was agreed" in str(replies.failures["site-3"])


def test_too_few_trained_is_below_the_quorum() -> None:
    changes = dict.fromkeys(("site-0", "site-1", "site-2"), BAD["theta is NaN"][0])
    fed = Tampering(changes, on_failure="continue")
    fed.begin(2)
    with pytest.raises(QuorumError, match=r"expected 50% of 4 clients to train in round 2, got 1: client 'site-0' .* client 'site-2'"):
        fed.train(dict.fromkeys(fed.clients, fed.initial()))
    half = Tampering({c: changes[c] for c in ("site-0", "site-1")}, on_failure="continue")
    assert len(half.train(dict.fromkeys(half.clients, half.initial()))) == 2
    lenient = Tampering(changes, on_failure="continue", quorum=0.25)
    assert len(lenient.train(dict.fromkeys(lenient.clients, lenient.initial()))) == 1


def test_options_for_all_and_per_client() -> None:
    fed = federation()
    fed.begin(1)
    theta = fed.initial()
    starts = dict.fromkeys(fed.clients, theta)
    plain = fed.train(starts)
    pulled = fed.train(starts, own={"site-0": {"prox": {"anchor": theta, "mu": 5.0}}})
    assert same_bits(pulled["site-1"]["theta"], plain["site-1"]["theta"])
    assert (pulled["site-0"]["theta"] - theta).norm() < 0.9 * (plain["site-0"]["theta"] - theta).norm()
    everybody = fed.train(starts, prox={"anchor": theta, "mu": 5.0})
    assert same_bits(everybody["site-0"]["theta"], pulled["site-0"]["theta"])
    assert not torch.equal(everybody["site-1"]["theta"], plain["site-1"]["theta"])


def test_describe_asks_once() -> None:
    fed, asked = federation(), []
    fed.observer = lambda t, c, r: asked.append((t, c))
    fed.describe(["site-0", "site-1"])
    about = fed.describe(["site-1", "site-2"])
    assert asked == [("describe", f"site-{i}") for i in range(3)]
    assert {c: (r["n"], r["m"], len(r["key"])) for c, r in about.items()} == {"site-1": (80, 70, 32), "site-2": (80, 70, 32)}


def test_initial_models_differ_by_number_and_follow_the_seed() -> None:
    fed = federation()
    torch.rand(3)
    assert same_bits(fed.initial(), federation().initial())
    assert not torch.equal(fed.initial(0), fed.initial(1))
    assert not torch.equal(fed.initial(), federation(seed=1).initial())


def test_who_answers_always() -> None:
    assert federation().everyone_answers and federation(participants=4).everyone_answers
    assert not federation(participants=3).everyone_answers
    assert not federation(on_failure="continue").everyone_answers


def test_the_clock_counts_every_second_once(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 2.0, 7.0, 8.0, 10.0, 14.0])
    monkeypatch.setattr(rounds.time, "perf_counter", lambda: next(times))
    clock = Clock()
    with clock("outer"), clock("inner"):
        pass
    with pytest.raises(KeyError), clock("inner"):
        raise KeyError
    assert clock.seconds == {"outer": 3.0, "inner": 5.0 + 4.0}


def test_the_servers_generators_are_keyed() -> None:
    a, b = Round(1, ("x",), 0), Round(2, ("x",), 0)
    assert a.generator("k").random() == Round(1, (), 0).generator("k").random() != b.generator("k").random()


def test_a_table_of_the_wrong_size_is_refused() -> None:
    shorter = {"site-2": lambda table: table[:, :1], "site-3": lambda table: table[:1]}
    fed = federation(tiny(val=(70,)), on_failure="continue")
    tamper(fed, lambda _, client, reply: {**reply, "table": shorter[client](reply["table"])} if client in shorter else reply)
    replies = fed.evaluate(fed.clients, torch.stack([fed.initial(), fed.initial(1)]), reduction="per_sample")
    assert "site-2" not in replies.valid
    assert "70 columns" in replies.failures["site-2"].reason
    assert "shape (2, 'any')" in replies.failures["site-3"].reason
    assert replies.clients == ("site-0", "site-1")


def test_losses_are_of_the_validation_samples_announced() -> None:
    fed = federation(tiny(val=(70,)), on_failure="continue")
    fed.describe(fed.clients)
    tamper(fed, lambda _, client, reply: {**reply, "n": 7_000} if client == "site-2" else reply)
    replies = fed.evaluate(fed.clients, fed.initial()[None])
    assert "the 70 validation samples announced, got 7000" in replies.failures["site-2"].reason
    assert replies.clients == ("site-0", "site-1", "site-3")
