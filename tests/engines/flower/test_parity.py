"""The same method file over messages and in one process: the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import tiny
from tests.engines.flower import loopback
from tests.methods import toy
from tests.tiny import same

from emdcfl.data.types import Scenario, Split
from emdcfl.engines.flower.messages import MessageSettings
from emdcfl.engines.flower.node.policy import Policy
from emdcfl.methods import METHODS, make
from emdcfl.report import render
from emdcfl.runs.config import EngineConfig, PersonalizeConfig
from emdcfl.runs.loop import play
from emdcfl.runs.plan import RunPlan
from emdcfl.runs.runner import run

SCENARIO = toy.toy(groups=2, per_group=2, n=48)
TRAINING = toy.Training(local_epochs=1, batch_size=16, lr=0.05)


def both(
    name: str,
    *,
    scenario: Scenario = SCENARIO,
    settings: MessageSettings = loopback.QUICK,
    participants: int | None = None,
    rounds: int = 3,
    **options: Any,
) -> None:
    method = make(name, **options)
    local = toy.federation(scenario, training=TRAINING, participants=participants)
    flower = loopback.federation(scenario, training=TRAINING, number=participants, settings=settings)
    first, second = (toy.play(fed, method, rounds) for fed in (local, flower))
    assert same(first, second)
    assert torch.equal(first[1].models, second[1].models)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_gives_the_same_bits(name: str) -> None:
    both(name, rounds=2)


@pytest.mark.parametrize(("name", "options"), [("emdcfl", {}), ("emdcfl", {"grouping": "benefit"}), ("fedem", {}), ("ifca", {})])
def test_the_same_bits_where_some_sit_out_and_join_later(name: str, options: dict[str, Any]) -> None:
    both(name, participants=3, **options)


def test_the_same_bits_where_a_site_lacks_a_class_and_another_is_too_small() -> None:
    """``recalibrate`` and the scoring of clusters' models travel too."""
    lacking, small, *others = SCENARIO.sites
    parts = {name: getattr(lacking, name) for name in ("train", "val")}
    lacking = replace(lacking, **{name: Split(part.x[part.y > 0], part.y[part.y > 0]) for name, part in parts.items()})
    small = replace(small, val=Split(small.val.x[:8], small.val.y[:8]))
    both("emdcfl", scenario=replace(SCENARIO, sites=(lacking, small, *others)), rounds=2)


WAYS = (
    {"projection": "pair"},
    {"preset": "reference"},
    {"cost": "label-aware"},
    {"tolerance": "auto"},
    {"privacy_epsilon": 64.0},
    {"grouping": "benefit"},
)


@pytest.mark.parametrize("options", WAYS)
def test_every_way_of_comparing_gives_the_same_bits_in_requests_of_many_parts(options: dict[str, Any]) -> None:
    """Requests in one part: every method, above."""
    both("emdcfl", rounds=2, settings=MessageSettings(deadline=5, poll=0.001, wait=0, part_mb=1e-4), **options)


def test_a_run_over_messages_leaves_the_models_of_a_local_one_plain_and_fine_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = replace(tiny.config(rounds=2, grouping="benefit", tolerance="auto"), personalize=PersonalizeConfig("on", epochs=2))
    chosen = replace(chosen, engine=EngineConfig("sequential", device="cpu"))
    local = run(chosen, tmp_path / "local")
    monkeypatch.setattr(RunPlan, "federation", lambda planned: loopback.federation(planned.scenario, training=planned.training))
    flower = run(chosen, tmp_path / "flower")
    assert flower.summary["clusters"] == local.summary["clusters"] == [0, 0, 1, 1]
    assert flower.summary["personalized"] == local.summary["personalized"] and len(flower.summary["personalized"]["kept"]) == 4
    both = [tiny.contents(tmp_path / name) for name in ("local", "flower")]
    files = [name for name in both[0] if name.startswith(("models/", "personal/"))]
    assert len(files) == 2 + 1 + 4 + 1, "clusters, fine-tuned models, and an index of each"
    assert all(both[0][name] == both[1][name] for name in files)
    x = tiny.tiny().sites[0].tests["test"].x
    assert not torch.equal(flower.predict_proba("site-0", x), flower.predict_proba("site-0", x, plain=True))
    assert "fine-tuned at home" in render(tmp_path / "flower")


def rows_of(fed: Any, name: str, rounds: int, every: int = 1, **options: Any) -> list[dict[str, Any]]:
    return [row for done in play(fed, make(name, **options), rounds=rounds, evaluate_every=every) for row in done.rows]


@pytest.mark.parametrize(
    ("name", "participants", "every"),
    [("fedavg", None, 1), ("emdcfl", None, 2), ("emdcfl", 3, 1), ("ifca", 3, 1), ("fedem", None, 1), ("fesem", 3, 1), ("local", 2, 1)],
)
def test_tests_that_travel_with_the_next_round_give_the_same_rows(name: str, participants: int | None, every: int) -> None:
    local = toy.federation(SCENARIO, training=TRAINING, participants=participants)
    flower = loopback.federation(SCENARIO, training=TRAINING, number=participants)
    assert same(*(rows_of(fed, name, 4, every) for fed in (local, flower)))
    assert flower.traffic.bytes == local.traffic.bytes


def test_a_round_is_one_message_to_each_node_its_test_included() -> None:
    grid = loopback.loopback(SCENARIO)
    rows_of(loopback.federation(SCENARIO, grid, training=TRAINING), "fedavg", 5)
    kinds = [message.metadata.message_type for message, _ in grid.log]
    assert kinds == ["query.hello"] * 4 + ["query.train"] * 20 + ["query.test"] * 4
    grid = loopback.loopback(SCENARIO)
    fed = loopback.federation(SCENARIO, grid, training=TRAINING)
    fed.wait_for_clients()
    rows_of(fed, "emdcfl", 3)
    kinds = [message.metadata.message_type for message, _ in grid.log if message.metadata.dst_node_id == 100]
    asked = ["hello", "train", "reference", "project", "train", "train", "test"]
    assert kinds == [f"query.{kind}" for kind in asked], "the description comes with the greeting"


def test_a_policy_without_tests_leaves_the_rows_empty_and_the_training_as_it_is() -> None:
    scenario = tiny.tiny()
    grid = loopback.loopback(scenario)
    grid.nodes[103].policy = Policy(tasks=["describe", "train"])
    fed = loopback.federation(scenario, grid, training=TRAINING, on_failure="continue")
    rows = rows_of(fed, "fedavg", 3)
    assert [(row["round"], row["client"]) for row in rows if row["accuracy"] is None] == [(t, "site-3") for t in (1, 2, 3)]
    assert [(f.round, f.client, f.task) for f in fed.failures] == [(t, "site-3", "test") for t in (1, 2, 3)]
    assert all("policy.tasks" in failure.reason for failure in fed.failures)
    expected = rows_of(toy.federation(scenario, training=TRAINING), "fedavg", 3)
    assert [row for row in rows if row["client"] != "site-3"] == [row for row in expected if row["client"] != "site-3"]


def test_a_node_that_is_gone_when_its_test_travels_leaves_an_empty_row_of_that_round() -> None:
    grid = loopback.loopback(SCENARIO)
    fed = loopback.federation(SCENARIO, grid, training=TRAINING, on_failure="continue")
    rows: list[dict[str, Any]] = []
    for done in play(fed, make("fedavg"), rounds=4):
        rows += done.rows
        grid.online = {100, 101, 102} if done.index == 2 else {100, 101, 102, 103}
    assert [(row["round"], row["client"]) for row in rows if row["accuracy"] is None] == [(2, "site-3")]
    assert [row["round"] for row in rows] == [t for t in (1, 2, 3, 4) for _ in range(4)]
    assert [(f.round, f.task) for f in fed.failures] == [(3, "train"), (2, "test")]


@pytest.mark.parametrize("stopped", [1, 2, 3])
def test_a_run_stopped_after_any_round_goes_on_with_the_test_that_was_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: int
) -> None:
    chosen = replace(tiny.config(rounds=4), engine=EngineConfig("sequential", device="cpu"))
    run(chosen, tmp_path / "local")
    monkeypatch.setattr(RunPlan, "federation", lambda planned: loopback.federation(planned.scenario, training=planned.training))
    with pytest.raises(tiny.Stop):
        run(chosen, tmp_path / "flower", observer=tiny.StopAfter(stopped))
    assert len((tmp_path / "flower" / "metrics.jsonl").read_text().splitlines()) == 4 * (stopped - 1)
    run(chosen, tmp_path / "flower", resume=True)
    both = [tiny.contents(tmp_path / name) for name in ("local", "flower")]
    same = [name for name in both[0] if name.startswith("models/") or name == "metrics.jsonl"]
    assert len(same) > 1 and all(both[0][name] == both[1][name] for name in same)
