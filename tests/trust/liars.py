"""Federations in which one client lies, one lie each. Everybody else, and the liar in all that the lie does not touch, is honest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from tests.tiny import TRAINING

from emdcfl.core.client import TASKS, TaskInfo
from emdcfl.core.federation import Failure, Inputs
from emdcfl.core.keys import generator
from emdcfl.core.schema import Reply
from emdcfl.data.types import Scenario, Split
from emdcfl.engines.local.sequential import SequentialFederation, answer, intra_op_threads, simulated_clients

Change = Callable[["LyingFederation", str, Inputs, Reply], Reply]
"""(federation, task, what was asked, honest reply) → what the liar says."""


def more_samples(fed: LyingFederation, task: str, asked: Inputs, reply: Reply) -> Reply:
    """A thousand times the samples it has."""
    return {**reply, "n": 1000 * reply["n"]} if task in ("describe", "train") else reply


def too_many_samples(fed: LyingFederation, task: str, asked: Inputs, reply: Reply) -> Reply:
    """More samples than anybody may claim."""
    return {**reply, "n": 10**9} if task == "train" else reply


def large_tau(fed: LyingFederation, task: str, asked: Inputs, reply: Reply) -> Reply:
    """The largest reference distance the schema allows: everybody looks near in its row."""
    return {**reply, "tau": {k: torch.full_like(v, 2.0) for k, v in reply["tau"].items()}} if task == "reference" else reply


def impossible_tau(fed: LyingFederation, task: str, asked: Inputs, reply: Reply) -> Reply:
    return {**reply, "tau": {k: torch.full_like(v, 50.0) for k, v in reply["tau"].items()}} if task == "reference" else reply


def large_variance(fed: LyingFederation, task: str, asked: Inputs, reply: Reply) -> Reply:
    """The largest variance the schema allows: its tolerance is many times the others'."""
    if task != "reference":
        return reply
    fields = [name for name in ("variance", "within") if name in reply]
    return {**reply, **{name: {k: torch.full_like(v, 4.0) for k, v in reply[name].items()} for name in fields}}


def modest_tau(fed: LyingFederation, task: str, asked: Inputs, reply: Reply) -> Reply:
    """Four times its reference distance: more than is true, less than is flagged."""
    return {**reply, "tau": {k: 4 * v for k, v in reply["tau"].items()}} if task == "reference" else reply


def fake_row(fed: LyingFederation, task: str, asked: Inputs, reply: Reply) -> Reply:
    """Its train embeddings are zero and τ is 1, the distance of everything from zero: W is 0 for everybody in its row."""
    if task != "reference":
        return reply
    samples = {k: torch.zeros_like(z) for k, z in reply["samples"].items()}
    return {**reply, "samples": samples, "tau": {k: torch.ones_like(v) for k, v in reply["tau"].items()}}


def scaled(fed: LyingFederation, task: str, asked: Inputs, reply: Reply) -> Reply:
    """Ten times its update."""
    return {**reply, "theta": asked["theta"] + 10 * (reply["theta"] - asked["theta"])} if task == "train" else reply


def reversed_update(fed: LyingFederation, task: str, asked: Inputs, reply: Reply) -> Reply:
    """Its update, backwards: of the usual length."""
    return {**reply, "theta": asked["theta"] - (reply["theta"] - asked["theta"])} if task == "train" else reply


def garbage(fed: LyingFederation, task: str, asked: Inputs, reply: Reply) -> Reply:
    """Normal noise of ten times the length of its update."""
    if task != "train":
        return reply
    drawn = generator(fed.seed, fed.liar, fed.index, "lie").standard_normal(len(reply["theta"]))
    noise = torch.from_numpy(drawn).float()
    length = 10 * (reply["theta"] - asked["theta"]).norm() / noise.norm()
    return {**reply, "theta": asked["theta"] + length * noise}


def not_a_number(fed: LyingFederation, task: str, asked: Inputs, reply: Reply) -> Reply:
    return {**reply, "theta": reply["theta"] * torch.nan} if task == "train" else reply


def bad_boxes(fed: LyingFederation, task: str, asked: Inputs, reply: Reply) -> Reply:
    """Boxes of the right size that nobody can open."""
    return {**reply, "boxes": {k: bytes(len(box)) for k, box in reply["boxes"].items()}} if task == "reference" else reply


def short_boxes(fed: LyingFederation, task: str, asked: Inputs, reply: Reply) -> Reply:
    """Boxes that are provably none."""
    return {**reply, "boxes": dict.fromkeys(reply["boxes"], b"")} if task == "reference" else reply


def slander(fed: LyingFederation, task: str, asked: Inputs, reply: Reply) -> Reply:
    """Says of everybody that the box cannot be opened."""
    if task != "project":
        return reply
    emptied = {name: {} for name in ("samples", "matched") if name in reply}
    return {**reply, **emptied, "refused": dict.fromkeys(asked["rows"], "it does not open")}


def useless_key(fed: LyingFederation, task: str, asked: Inputs, reply: Reply) -> Reply:
    """A public key with which nothing can be sealed."""
    return {**reply, "key": bytes(32)} if task == "describe" else reply


def tiny_validation(fed: LyingFederation, task: str, asked: Inputs, reply: Reply) -> Reply:
    """Claims two validation samples, with so few of which chance explains any distance, and fakes its own row."""
    return {**reply, "m": 2} if task == "describe" else fake_row(fed, task, asked, reply)


def no_validation(fed: LyingFederation, task: str, asked: Inputs, reply: Reply) -> Reply:
    return {**reply, "m": 0} if task == "describe" else reply


LIES: Mapping[str, Change] = {
    "n ×1000": more_samples,
    "τ huge": large_tau,
    "τ ×4": modest_tau,
    "variance huge": large_variance,
    "own row faked": fake_row,
    "update ×10": scaled,
    "update reversed": reversed_update,
    "garbage": garbage,
    "NaN": not_a_number,
    "boxes nobody opens": bad_boxes,
    "slander": slander,
    "two validation samples": tiny_validation,
}


def honest(fed: LyingFederation, task: str, asked: Inputs, reply: Reply) -> Reply:
    return reply


class LyingFederation(SequentialFederation):
    """A sequential federation with one liar.

    Parameters
    ----------
    liar : str
        Who lies.
    lie : callable
        How; a lie that fails on a reply leaves it as it is only if it says so itself.
    disguise : str, optional
        Whose data the liar shows wherever embeddings are asked for, instead of its own: it must have come by samples of that law.
    """

    def __init__(
        self, scenario: Scenario, *, liar: str = "site-1", lie: Change = honest, disguise: str | None = None, **options: Any
    ) -> None:
        super().__init__(scenario, **{"training": TRAINING, "device": "cpu", "on_failure": "continue", **options})
        self.liar, self.lie = liar, lie
        self._mask = None
        if disguise is not None:
            sites = {site.name: site for site in scenario.sites}
            shown = replace(scenario, sites=(replace(sites[disguise], name=liar),))
            network, run = self._clients[liar].network, self._clients[liar].run
            self._mask = simulated_clients(shown, [liar], network, seed=self.seed, run=run, precision="fp32")[liar]

    def _dispatch(self, info: TaskInfo, inputs: Mapping[str, Inputs], common: Inputs) -> Iterator[tuple[str, Reply | Failure]]:
        for name, reply in super()._dispatch(info, inputs, common):
            if name == self.liar and not isinstance(reply, Failure):
                asked = {**common, **inputs[name]}
                if self._mask is not None and info.name in ("reference", "project"):
                    with intra_op_threads(self.threads):
                        shown = answer(self._mask, TASKS[info.name], self.index, asked)
                    assert not isinstance(shown, Failure), str(shown)
                    reply = shown
                reply = self.lie(self, info.name, asked, reply)
            yield name, reply


def flipped(scenario: Scenario, liar: str) -> Scenario:
    """The scenario with a liar that trains on wrong labels, class c taken for the last but c."""
    last = len(scenario.classes) - 1
    sites = [replace(s, train=Split(s.train.x, last - s.train.y)) if s.name == liar else s for s in scenario.sites]
    return replace(scenario, sites=tuple(sites))


def without(scenario: Scenario, client: str) -> Scenario:
    """The scenario with one client less."""
    groups = None if scenario.groups is None else {c: g for c, g in scenario.groups.items() if c != client}
    return replace(scenario, sites=tuple(s for s in scenario.sites if s.name != client), groups=groups)
