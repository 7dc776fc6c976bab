"""A model under which embeddings overflow, and samples that no network takes: a pair is lost, or the sender; never an honest partner."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.tiny import SequentialFederation, federation, tamper, tiny

from emdcfl.core.errors import ClientError
from emdcfl.core.federation import Failure
from emdcfl.core.schema import Reply
from emdcfl.engines.flower.parts import join
from emdcfl.methods import make
from emdcfl.runs.loop import play

LIAR = "site-1"
SCENARIO = tiny(clients_per_group=3, n=(32,), val=(32,), test=8)


def answering(task: str, change: Callable[[str, Reply], Reply]) -> SequentialFederation:
    """Replies to one task are replaced: those of the liar, or what all others say about the liar."""
    fed = federation(SCENARIO, on_failure="continue")
    return tamper(fed, lambda asked, name, reply: change(name, reply) if asked == task and not isinstance(reply, Failure) else reply)


def test_columns_that_overflow_under_one_model_blame_nobody_and_lose_one_pair() -> None:
    def overflow(name: str, reply: Reply) -> Reply:
        return {**reply, "samples": {row: z * torch.inf if row == LIAR else z for row, z in reply["samples"].items()}}

    fed = answering("project", overflow)
    *_, last = play(fed, make("emdcfl", tolerance=0.3), rounds=1)
    assert not fed.guard.ledger.faults
    i = fed.clients.index(LIAR)
    assert last.state.W[i].isnan().sum() >= 5
    honest = [j for j in range(6) if j != i]
    assert int(last.state.W[honest][:, honest].isnan().sum()) == 5  # the diagonal
    assert all("counts against neither" in f.reason for f in fed.failures)


@pytest.mark.parametrize("field", ["samples", "tau", "variance"])
def test_a_row_that_overflows_under_the_model_it_was_served_is_left_out_without_fault(field: str) -> None:
    fed = answering("reference", lambda c, r: {**r, field: {k: v * torch.nan for k, v in r[field].items()}} if c == LIAR else r)
    list(play(fed, make("emdcfl", tolerance=0.3), rounds=1))
    assert not fed.guard.ledger.faults
    assert {f.client for f in fed.failures} == {LIAR}


@pytest.mark.parametrize("shape", [(4,), (2, 2), (8,) + (1,) * 200], ids=["four features", "an image", "two hundred axes"])
def test_deposited_samples_that_the_network_does_not_take_cost_their_sender_alone(shape: tuple[int, ...]) -> None:
    def forged(name: str, reply: Reply) -> Reply:
        return {**reply, "inputs": reply["inputs"][:, : math.prod(shape)], "shape": torch.tensor(shape)} if name == LIAR else reply

    fed = answering("deposit", forged)
    list(play(fed, make("emdcfl", tolerance=0.3, exchange="server-samples"), rounds=1))
    assert set(fed.guard.ledger.faults) == {LIAR}


SUBSPACES: dict[str, Callable[[Any], Any]] = {
    "fewer features": lambda b: b[:-1],
    "more features": lambda b: torch.cat([b, b]),
    "no vectors": lambda b: b[:, :0],
    "no features": lambda b: b[:0],
    "long vectors": lambda b: 1e20 * b,
}


@pytest.mark.parametrize("lie", SUBSPACES)
@pytest.mark.parametrize("liar", ["site-0", "site-5"])
def test_a_subspace_of_another_size_costs_its_sender_alone_even_where_it_is_first(lie: str, liar: str) -> None:
    fed = answering("data_subspace", lambda c, r: {"basis": SUBSPACES[lie](r["basis"])} if c == liar else r)
    *_, last = play(fed, make("pacfl", threshold=40.0), rounds=1)
    assert set(fed.guard.ledger.faults) == {liar}
    assert all(row["accuracy"] for row in last.rows if row["client"] != liar)


REPLIES: dict[str, tuple[str, str, str, Callable[[Any], Any]]] = {
    "principal directions without number": ("fedsac", "train_and_basis", "basis", lambda b: b.repeat(1000, 1)),
    "principal directions without bound": ("fedsac", "train_and_basis", "basis", lambda b: 1e30 * b),
    "label mass of a million samples": ("fedrc", "em_step", "mass", lambda m: 1e5 * m),
    "no label mass": ("fedrc", "em_step", "mass", lambda m: 0 * m),
    "votes for nobody": ("fedsoft", "soft_train", "a", lambda a: 0 * a),
    "votes without bound": ("fedsoft", "soft_train", "a", lambda a: 1e300 * a),
    "a key of a megabyte": ("emdcfl", "describe", "key", lambda k: bytes(1 << 20)),
    "an empty key": ("emdcfl", "describe", "key", lambda k: b""),
}


@pytest.mark.parametrize("lie", REPLIES)
def test_values_that_no_honest_client_sends_are_its_senders_fault(lie: str) -> None:
    method, task, field, change = REPLIES[lie]
    fed = answering(task, lambda c, r: {**r, field: change(r[field])} if c == LIAR else r)
    list(play(fed, make(method), rounds=1))
    assert set(fed.guard.ledger.faults) == {LIAR}


MOMENTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "losses of fewer models": ("mean", lambda v: v[:-1]),
    "losses of no model": ("mean", lambda v: v[:0]),
    "losses below zero": ("mean", lambda v: v - 100),
    "losses beyond the cut": ("mean", lambda v: v + 1e6),
    "losses that are no numbers": ("mean", lambda v: v * torch.nan),
    "a negative variance": ("covariance", lambda v: -v - torch.eye(len(v), dtype=v.dtype)),
    "a variance without bound": ("covariance", lambda v: v + 1e30 * torch.eye(len(v), dtype=v.dtype)),
    "a covariance that is not symmetric": ("covariance", lambda v: v + torch.triu(torch.ones_like(v), 1)),
    "a covariance beyond the variances": ("covariance", lambda v: torch.ones_like(v) - torch.eye(len(v), dtype=v.dtype)),
    "hits that vary without bound": ("accuracy_covariance", lambda v: v + 1e30 * torch.eye(len(v), dtype=v.dtype)),
    "hits of fewer models": ("accuracy_covariance", lambda v: v[:-1, :-1]),
    "accuracies of 200%": ("accuracy", lambda v: v + 2),
    "more samples than it has": ("n", lambda n: n + 1),
    "a million samples": ("n", lambda n: 10**6),
}


@pytest.mark.parametrize("lie", MOMENTS)
def test_moments_that_no_losses_have_are_their_senders_fault(lie: str) -> None:
    field, change = MOMENTS[lie]
    fed = answering("loss_moments", lambda c, r: {**r, field: change(r[field])} if c == LIAR else r)
    list(play(fed, make("emdcfl", grouping="benefit"), rounds=1))
    assert set(fed.guard.ledger.faults) == {LIAR}


def test_weights_that_are_not_numbers_may_be_the_served_models_fault() -> None:
    fed = answering("em_step", lambda c, r: {**r, "pi": r["pi"] * torch.nan} if c == LIAR else r)
    list(play(fed, make("fedem"), rounds=1))
    assert not fed.guard.ledger.faults
    assert {f.client for f in fed.failures} == {LIAR}


def test_a_reason_that_fills_pages_is_refused() -> None:
    def slander(name: str, reply: Reply) -> Reply:
        return {**reply, "samples": {}, "refused": dict.fromkeys(reply["samples"], "x\x1b" * 10**5)} if name == LIAR else reply

    fed = answering("project", slander)
    list(play(fed, make("emdcfl", tolerance=0.3, match_classes=False), rounds=1))
    assert set(fed.guard.ledger.faults) == {LIAR}
    assert max(len(f.reason) for f in fed.failures) < 1000


def test_a_sparse_state_is_refused() -> None:
    fed = answering("train", lambda c, r: {**r, "theta": r["theta"].to_sparse()} if c == LIAR else r)
    list(play(fed, make("fedavg"), rounds=1))
    assert set(fed.guard.ledger.faults) == {LIAR}


@pytest.mark.parametrize("field", [[torch.zeros(2)], [[torch.zeros(2)]], torch.zeros(2), 1])
def test_parts_of_a_reply_that_cannot_be_compared_are_their_senders_fault(field: Any) -> None:
    with pytest.raises(ClientError, match="expected labels to be the same in all parts"):
        join([{"labels": [torch.zeros(2)]}, {"labels": field}])


ONE = torch.zeros(1, dtype=torch.int64)


@pytest.mark.parametrize(
    ("options", "task", "field", "value"),
    [
        ({"match_classes": False}, "project", "matched", lambda reply: dict.fromkeys(reply["samples"], 10**18)),
        ({"grouping": "benefit"}, "project", "offers", lambda reply: {"nobody": b"box"}),
        ({"cost": "euclidean"}, "project", "labels", lambda reply: ONE),
        ({"tolerance": 0.3}, "project", "labels", lambda reply: ONE),
        ({"tolerance": 0.3}, "reference", "labels", lambda reply: ONE),
        ({"tolerance": 0.3}, "reference", "within", lambda reply: {"nobody": ONE.double()}),
    ],
)
def test_fields_of_another_request_are_their_senders_fault(
    options: dict[str, Any], task: str, field: str, value: Callable[[Reply], Any]
) -> None:
    fed = answering(task, lambda name, reply: {**reply, field: value(reply)} if name == LIAR else reply)
    list(play(fed, make("emdcfl", **options), rounds=1))
    assert set(fed.guard.ledger.faults) == {LIAR}


def test_an_answer_without_offers_where_none_is_needed_harms_nobody() -> None:
    fed = answering("project", lambda name, reply: {k: v for k, v in reply.items() if k != "offers"} if name == LIAR else reply)
    list(play(fed, make("emdcfl"), rounds=1))
    assert not fed.guard.ledger.faults
