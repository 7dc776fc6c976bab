"""Processes of a real federation killed, stopped, restarted and lying. Every case ends with a finished run and a correct account.

Minutes each, so it is not part of ``make test``: ``make test-faults`` runs it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra emdcfl[flower]")

from tests.faults.cases import (
    LONG,
    VICTIM,
    Event,
    account,
    bring_back,
    came_back,
    end,
    same_as_local,
    send,
    short,
    start_changed,
    wait_online,
    when,
)

import emdcfl
from emdcfl.apps import deployment
from emdcfl.apps.deployment import control
from emdcfl.apps.deployment.certificates import make_node_key, put_aside
from emdcfl.apps.deployment.processes import LINK, identity, start
from emdcfl.core.errors import EmdcflError

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(not os.environ.get("EMDCFL_FAULTS"), reason="kills processes and takes many minutes; run 'make test-faults'"),
]

MOMENTS: dict[str, Callable[[Event], bool]] = {
    "training": lambda e: e["event"] == "begin" and e["round"] == 2,
    "embedding": lambda e: e["event"] == "reply" and e["task"] == "reference",
    "between rounds": lambda e: e["event"] == "end" and e["round"] == 1,
}


@pytest.mark.parametrize("moment", sorted(MOMENTS))
def test_a_node_killed_during(there: deployment.Deployment, tmp_path: Path, moment: str) -> None:
    """It is asked again when it is back, and nothing is lost."""
    wait_online(there)
    before, given = identity(there, VICTIM), short(4)

    def act() -> None:
        if moment == "training":
            time.sleep(2)
        send(there, VICTIM, signal.SIGKILL)
        bring_back(there, VICTIM)

    deployment.submit(there, given, tmp_path / "run", watch=when(MOMENTS[moment], act))
    assert came_back(there, tmp_path / "run", 4)["failures"] == []
    assert identity(there, VICTIM) not in (None, before), "it was killed, and another process took its place"
    same_as_local(given, tmp_path / "run")


def test_a_node_killed_and_not_started_again(there: deployment.Deployment, tmp_path: Path) -> None:
    """It is missing as soon as Flower notices, before the deadline."""
    wait_online(there)
    deployment.submit(there, short(3), tmp_path / "run", watch=when(MOMENTS["between rounds"], lambda: send(there, VICTIM, signal.SIGKILL)))
    trained = [failure for failure in account(there, tmp_path / "run")["failures"] if failure["task"] == "train"]
    assert [failure["round"] for failure in trained] == [2, 3]
    assert all("its node was connected and is gone since" in failure["reason"] for failure in trained)


def test_a_node_killed_while_it_sends_its_answer(there: deployment.Deployment, tmp_path: Path) -> None:
    """The first part of its training of round 2 reaches the SuperLink; the rest comes from the process that takes its place."""
    given = short(3, name="fedavg")

    def act() -> None:
        time.sleep(10)
        send(there, VICTIM, signal.SIGKILL)
        bring_back(there, VICTIM)

    with changed(there, CUT="3"):
        deployment.submit(there, given, tmp_path / "run", watch=when(MOMENTS["training"], act))
        assert account(there, tmp_path / "run")["failures"] == []
    same_as_local(given, tmp_path / "run")


def test_a_node_stopped_past_the_deadline(there: deployment.Deployment, tmp_path: Path) -> None:
    wait_online(there)
    shorter = replace(there, deadline=there.deadline / 2)

    def act() -> None:
        time.sleep(1)
        send(there, VICTIM, signal.SIGSTOP)
        time.sleep(shorter.deadline + 10)
        send(there, VICTIM, signal.SIGCONT)

    deployment.submit(shorter, short(LONG), tmp_path / "run", watch=when(MOMENTS["training"], act))
    # on idle cores it may have answered in round 2 already
    assert {(2, "train"), (3, "train")} & {(f["round"], f["task"]) for f in came_back(there, tmp_path / "run", LONG)["failures"]}


def test_a_node_that_joins_in_the_middle_and_comes_back_under_another_id(there: deployment.Deployment, tmp_path: Path) -> None:
    """A new key towards the SuperLink makes it a new node to Flower; its name and the key of its own say who it is."""
    wait_online(there)
    end(there, VICTIM)
    said: list[str] = []

    def another_id() -> None:
        end(there, VICTIM)
        for name in ("auth.key", "auth.pub"):
            put_aside(there.home(VICTIM) / name)
        make_node_key(there.home(VICTIM))
        assert control.enrol(there, VICTIM, (there.home(VICTIM) / "auth.pub").read_bytes(), replace=True)
        start(there, VICTIM)

    joins = when(lambda e: e["event"] == "end" and e["round"] == 1, lambda: start(there, VICTIM))
    changes = when(lambda e: e["event"] == "reply" and e["client"] == VICTIM and e["task"] == "train", another_id)

    def watch(event: Event) -> None:
        joins(event)
        changes(event)
        said.append(event.get("text", ""))

    deployment.submit(replace(there, wait=5.0), short(LONG), tmp_path / "run", watch=watch)
    summary = came_back(there, tmp_path / "run", LONG)
    assert (1, "train") in {(f["round"], f["task"]) for f in summary["failures"]}
    ids = [text for text in said if text.startswith(f"client {VICTIM!r} is node ")]
    assert len(ids) == len(set(ids)) == 2


@contextmanager
def changed(there: deployment.Deployment, **variables: str) -> Iterator[None]:
    """Run one node with a changed program."""
    wait_online(there)
    end(there, VICTIM)
    start_changed(there, **variables)
    try:
        yield
    finally:
        if identity(there, VICTIM) is not None:
            end(there, VICTIM)


@pytest.fixture
def liar(there: deployment.Deployment, request: pytest.FixtureRequest) -> Iterator[str]:
    with changed(there, LIE=request.param, LATE=str(there.deadline / 2 + 15)):
        yield request.param


REASONS = {
    "nan": "not finite",
    "shape": "expected theta of shape",
    "name": "in the name of 'rot0-1'",
    "many": "entries of dicts and lists",
    "junk": "expected theta as torch.float32",
}


@pytest.mark.parametrize("liar", [",".join(REASONS)], indirect=True)
def test_a_node_that_lies_in_another_way_every_round(there: deployment.Deployment, tmp_path: Path, liar: str) -> None:
    """Whatever it sends is refused in words, the round goes on; when it is honest again it takes part again."""
    rounds = len(REASONS) + 2
    given = short(rounds)
    deployment.submit(there, replace(given, trust=replace(given.trust, max_faults=rounds)), tmp_path / "run")
    trained = [f for f in came_back(there, tmp_path / "run", rounds)["failures"] if f["task"] == "train"]
    assert [f["round"] for f in trained] == list(range(1, len(REASONS) + 1))
    for failure, reason in zip(trained, REASONS.values(), strict=True):
        assert reason in failure["reason"]


@pytest.mark.parametrize("liar", ["late"], indirect=True)
def test_a_node_that_answers_late(there: deployment.Deployment, tmp_path: Path, liar: str) -> None:
    """It sleeps through the deadline in round 2, then answers; nobody waits for that answer any more."""
    deployment.submit(replace(there, deadline=there.deadline / 2), short(3), tmp_path / "run")
    failures = came_back(there, tmp_path / "run", 3)["failures"]
    assert (failures[0]["round"], failures[0]["task"]) == (2, "train")
    assert "no answer within" in failures[0]["reason"]


@pytest.mark.parametrize("liar", ["late"], indirect=True)
def test_a_late_training_counts_in_a_later_round(there: deployment.Deployment, tmp_path: Path, liar: str) -> None:
    """The rounds go on without the node that sleeps in round 2, and take its model when it comes."""
    given = short(8, name="fedavg")
    deployment.submit(there, replace(given, engine=replace(given.engine, phase_deadline=30.0)), tmp_path / "run")
    summary = account(there, tmp_path / "run")
    (late,) = summary["late"]
    assert (late["client"], late["round"]) == (VICTIM, 2) and 2 < late["used_in"] <= 8
    assert [f["round"] for f in summary["failures"] if f["task"] == "train"] == list(range(2, late["used_in"]))
    assert all(failure["reason"].startswith("late: ") for failure in summary["failures"])


def test_an_answer_that_is_cut_off_is_asked_for_again(there: deployment.Deployment, tmp_path: Path) -> None:
    """The first part of its training of round 2 reaches the SuperLink, and the rest never does; the node lives."""
    given = short(4, name="fedavg")
    with changed(there, CUT="3"):
        deployment.submit(there, given, tmp_path / "run")
        assert account(there, tmp_path / "run")["failures"] == []
    same_as_local(given, tmp_path / "run")


def test_a_node_whose_clock_is_two_minutes_behind_takes_part(there: deployment.Deployment, tmp_path: Path) -> None:
    with changed(there, SKEW="-120"):
        deployment.submit(there, short(2), tmp_path / "run")
        assert account(there, tmp_path / "run")["failures"] == []


def test_a_node_whose_clock_is_a_minute_ahead_is_refused_until_it_is_set_right(there: deployment.Deployment, tmp_path: Path) -> None:
    """The SuperLink takes no request from the future; the node ends and its log says why, and the run goes on without its client."""
    with changed(there, SKEW="60"):
        end = time.monotonic() + 240
        while identity(there, VICTIM) is not None and time.monotonic() < end:
            time.sleep(1)
        assert identity(there, VICTIM) is None, "it ends"
        deployment.submit(replace(there, wait=5.0), short(2), tmp_path / "run")
        failures = account(there, tmp_path / "run")["failures"]
        assert failures and all("no node with this name" in failure["reason"] for failure in failures)
    wait_online(there)


def test_a_node_of_an_incompatible_version_is_refused_in_one_line(there: deployment.Deployment, tmp_path: Path) -> None:
    with changed(there, VERSION="0.2.0"):
        deployment.submit(there, short(2), tmp_path / "run")
        failures = account(there, tmp_path / "run")["failures"]
        assert "expected a node with emdcfl" in failures[-1]["reason"] and "got '0.2.0'" in failures[-1]["reason"]
        assert {failure["round"] for failure in failures if failure["task"] == "train"} == {1, 2}


def test_a_node_upgraded_in_the_middle_goes_on_and_its_versions_are_recorded(there: deployment.Deployment, tmp_path: Path) -> None:
    wait_online(there)
    said: list[str] = []

    def upgrade() -> None:
        end(there, VICTIM)
        start_changed(there, VERSION=f"{emdcfl.__version__}.post1")

    upgrades = when(MOMENTS["between rounds"], upgrade)

    def watch(event: Event) -> None:
        upgrades(event)
        said.append(event.get("text", ""))

    deployment.submit(there, short(15), tmp_path / "run", watch=watch)
    came_back(there, tmp_path / "run", 15)
    versions = [text.rpartition(" ")[2] for text in said if text.startswith(f"client {VICTIM!r} is node ")]
    assert versions == [emdcfl.__version__, f"{emdcfl.__version__}.post1"]
    end(there, VICTIM)


def test_a_node_that_takes_another_clients_name(there: deployment.Deployment, tmp_path: Path) -> None:
    wait_online(there)
    end(there, VICTIM)

    class Forged(deployment.Deployment):
        def node_command(self, node: str) -> list[str]:
            return [*super().node_command(node), "--name", "rot0-1"]

    start(Forged(**vars(there)), VICTIM)
    try:
        said: list[str] = []
        deployment.submit(replace(there, wait=20.0), short(2), tmp_path / "run", watch=lambda e: said.append(e.get("text", "")))
    finally:
        end(there, VICTIM)
    failures = account(there, tmp_path / "run")["failures"]
    assert {f["client"] for f in failures} == {VICTIM}, "the true rot0-1 takes part; the node that left its own name is missing"
    assert any("another node uses its name" in text for text in said)


def test_the_superlink_killed_and_restarted_resumes_from_the_last_complete_round(there: deployment.Deployment, tmp_path: Path) -> None:
    """The test of round 1, which was on its way with the training of round 2, is not lost either."""
    wait_online(there)
    given = short(3)
    given = replace(given, run=replace(given.run, evaluate_every=1))

    with pytest.raises(EmdcflError, match="--resume"):
        deployment.submit(there, given, tmp_path / "run", watch=when(MOMENTS["training"], lambda: send(there, LINK, signal.SIGKILL)))
    wait_online(there)
    deployment.submit(there, given, tmp_path / "run", resume=True)
    summary = account(there, tmp_path / "run")
    assert summary["rounds"] == 3 and summary["failures"] == []
    same_as_local(given, tmp_path / "run")
