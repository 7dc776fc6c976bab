"""What ``emdcfl node check`` prints is what a node releases: every other task is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra emdcfl[flower]")

from tests.attacks.hostile import HostileServer

from emdcfl.apps import deployment
from emdcfl.cli.node import RELEASES, released, report
from emdcfl.core.client import TASKS
from emdcfl.engines.flower.node.home import read_config
from emdcfl.engines.flower.node.policy import TASKS as POLICY_TASKS


def printed(home: Path) -> list[str]:
    return list(report(read_config(home / "node.toml"), home))


def test_a_default_node_refuses_every_task_that_is_not_printed(tmp_path: Path) -> None:
    server = HostileServer(tmp_path / "home")
    told = {line.split()[0] for line in printed(server.home) if line.startswith("  ")}
    assert told == {*POLICY_TASKS, "personalize"}
    for task in set(TASKS) - told:
        request = {"task": task, "round": 1, "client": server.name, "job": {}, "inputs": {}}
        assert "policy.tasks" in server.send("describe", request)["failure"]


def test_every_built_in_task_has_its_sentence() -> None:
    assert {name for name, info in TASKS.items() if info.run.__module__.startswith("emdcfl.")} == set(RELEASES)


def test_for_programs_it_names_the_survey_too(tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text('data = "patients.csv"')
    own = read_config(tmp_path / "node.toml")
    assert released(own)["releases"]["survey"] and any(line.startswith("  survey ") for line in report(own, tmp_path))
    assert released(replace(own, data="scenario"))["releases"]["survey"] is None


def test_it_fits_on_a_screen_and_says_what_is_dangerous(tmp_path: Path) -> None:
    toml = 'trust = "relay"\n[policy]\ntasks = ["deposit", "embed", "trian"]\ncosts = ["label-aware"]\nmodels = ["mine:net"]'
    text = "\n".join(lines := printed(HostileServer(tmp_path / "home", toml=toml).home))
    assert len(lines) <= 30
    for said in ("RAW SAMPLES", "RAW EMBEDDINGS", "LABELS", "mine:net", "relays", "'trian'"):
        assert said in text


def test_the_trial_federations_policy_is_read(tmp_path: Path) -> None:
    there = deployment.create(tmp_path / "fed", nodes=2)
    lines = printed(there.home(next(iter(there.nodes))))
    assert any("data_subspace" in line for line in lines)
    (refused,) = (line for line in lines if line.startswith("It never receives: "))
    assert "deposit" in refused and "embed" in refused
