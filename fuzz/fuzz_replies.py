"""Replies of a client: whatever one of three says to a task, the round ends, and nobody but that client is blamed."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from emdcfl.core.client import TaskInfo
from emdcfl.core.errors import QuorumError
from emdcfl.core.federation import Failure, Federation, Inputs
from emdcfl.core.schema import Reply
from emdcfl.core.tasks import Training
from emdcfl.data import scenarios
from emdcfl.engines.local import SequentialFederation
from emdcfl.methods import make
from emdcfl.runs.loop import play
from fuzz.feed import Feed, any_value, changed_value, one_line

METHODS = ("emdcfl", "fedavg", "ifca", "fedrc", "fedsac", "fedsoft", "pacfl", "fedce", "cflgp", "pfedgraph")
ROUNDS = 2


class Recorded(Federation):
    """Three clients whose honest replies were recorded once; one of them changes its replies as the feed says."""

    def __init__(self, method: str, feed: Feed | None = None) -> None:
        scenario = small()
        names = [site.name for site in scenario.sites]
        super().__init__(names, scenario.model, training=TRAINING, on_failure="continue", truth=scenario.groups, k=scenario.k)
        self.method, self.feed, self.liar = method, feed, names[0]

    def _dispatch(self, info: TaskInfo, inputs: Mapping[str, Inputs], common: Inputs) -> Iterator[tuple[str, Reply | Failure]]:
        honest = recorded(self.method)
        for name, asked in inputs.items():
            reply = honest.get((info.name, name, self.index))
            if reply is None:  # asked for something that an honest run did not need
                reply = {}
            if name == self.liar and self.feed is not None and info.name != "describe":  # on which the shapes of recorded replies depend
                lie: Any = changed_value(self.feed, reply) if self.feed.number(16) else any_value(self.feed)
                yield name, lie
            elif reply:
                yield name, _fitted(reply, {**common, **asked})
            else:
                yield name, Failure(name, info.name, self.index, "not recorded")


def _fitted(reply: Reply, asked: Inputs) -> Reply:
    """Return the parts of an honest reply that were asked for, where others were asked about than in the honest run."""
    wanted = set(asked.get("rows", asked.get("partners", ()))) | {"*"}
    cut = {
        name: {k: v for k, v in reply[name].items() if k in wanted} for name in ("samples", "boxes", "matched", "refused") if name in reply
    }
    return {**reply, **cut}


TRAINING = Training(local_epochs=1, batch_size=16, lr=0.02)


@cache
def small() -> Any:
    """Return three clients of the digits, of three groups, with a part of the samples."""
    logging.getLogger("emdcfl").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    whole = scenarios.build("rotated-digits", groups=3, clients_per_group=4)
    sites = whole.sites[::4]
    return replace(whole, sites=sites, groups={site.name: whole.groups[site.name] for site in sites})


@cache
def recorded(method: str) -> dict[tuple[str, str, int], Reply]:
    """Play a method honestly and keep every reply."""
    found: dict[tuple[str, str, int], Reply] = {}

    class Recording(SequentialFederation):
        def _dispatch(self, info: TaskInfo, inputs: Mapping[str, Inputs], common: Inputs) -> Iterator[tuple[str, Reply | Failure]]:
            for name, reply in super()._dispatch(info, inputs, common):
                assert not isinstance(reply, Failure), str(reply)
                found[info.name, name, self.index] = reply
                yield name, reply

    fed = Recording(small(), device="cpu", training=TRAINING, on_failure="continue")
    list(play(fed, make(method), rounds=ROUNDS))
    return found


def seeds() -> list[bytes]:
    """Every method, with replies changed in some place; they are recorded here, before the fuzzer counts the time of an input."""
    for method in METHODS:
        recorded(method)
    return [bytes([method, 1, 2, place, 7, 1, 1, value]) for method in range(len(METHODS)) for place in range(4) for value in (0, 3)]


def one(data: bytes) -> None:
    """Play a method with the liar."""
    feed = Feed(data)
    name = feed.choice(METHODS)
    fed = Recorded(name, feed)
    try:
        list(play(fed, make(name), rounds=ROUNDS, retries=0))
    except QuorumError as error:
        one_line(error)
    blamed = set(fed.guard.ledger.faults) - {fed.liar}
    assert not blamed, f"{blamed}: {fed.guard.ledger.faults}"
    for failure in fed.failures:
        one_line(ValueError(str(failure)))
