"""``emdcfl federation`` and ``emdcfl run --engine flower`` as far as they go without starting a process."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest

pytest.importorskip("flwr", reason="needs the extra emdcfl[flower]")

from tests.e2e.shell import called

from emdcfl.apps import deployment
from emdcfl.apps.deployment import control
from emdcfl.apps.deployment.processes import LINK, record, start_time
from emdcfl.apps.deployment.submit import follow
from emdcfl.cli.federation import runner_over, show_event
from emdcfl.core.errors import EmdcflError
from emdcfl.runs.config import Config, load, override


def test_init_says_fingerprints_and_what_comes_next(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "fed"
    made = called(capfd, "federation", "init", folder, "--nodes", 2)
    assert made.code == 0 and made.out.count("SHA256:") == 2 and f"emdcfl federation up {folder}" in made.out
    status = called(capfd, "federation", "status", folder)
    assert status.code == 1 and status.out.count("stopped") == 3
    status = called(capfd, "federation", "status", folder, "--json")
    found = json.loads(status.out)
    assert (status.code, found["ok"], found["superlink"]["state"], found["run"]) == (1, False, "stopped", None)
    assert {name: node["process"] for name, node in found["nodes"].items()} == {"rot0-1": "stopped", "rot0-2": "stopped"}
    down = called(capfd, "federation", "down", folder)
    assert down.code == 0 and "nothing was running" in down.out


def test_init_refuses_what_no_run_over_nodes_could_do(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for site in ("aachen", "st anna"):
        (tmp_path / "sites" / site).mkdir(parents=True)
        (tmp_path / "sites" / site / "data.csv").write_text("age,label\n" + "\n".join(f"{i},{'ab'[i % 2]}" for i in range(40)))
    config, folder = tmp_path / "fix.toml", tmp_path / "fed"
    config.write_text(f'[run]\nhold_out = ["aachen"]\n[scenario]\nname = "folder"\npath = "{tmp_path / "sites"}"\n')
    for given, why in (
        (["--data", config], "run.hold_out needs the data of all sites on one machine"),
        (["--data", tmp_path / "sites"], "rename its file or folder"),
        (["--host", "fl.example.org", "--site", "a", "--site", "b", "--site", "a"], "expected each site once, got a, b, a"),
    ):
        ended = called(capfd, "federation", "init", folder, *given)
        assert ended.code == 2 and why in ended.err and not folder.exists()
    checked = called(capfd, "data", "check", tmp_path / "sites")
    assert "st anna: cannot name a node of a federation" in " ".join(checked.out.split())


def test_a_run_over_flower_needs_a_federation(capfd: pytest.CaptureFixture[str]) -> None:
    ended = called(capfd, "run", "--engine", "flower")
    assert ended.code == 2 and "add --federation DIR" in ended.err


def test_a_folder_that_is_no_federation_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ended = called(capfd, "run", "--federation", tmp_path)
    assert ended.code == 2 and "emdcfl federation init" in ended.err


def test_without_a_config_the_federations_own_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    there, seen = deployment.create(tmp_path / "fed", nodes=4), []

    def submit(config: Config, *_: Any, **__: Any) -> None:
        seen.append(config)
        raise EmdcflError("enough")

    monkeypatch.setattr("emdcfl.cli.federation.runner_over", lambda *_, **__: submit)
    assert called(capfd, "run", "--federation", there.path, "--rounds", 3).code == 2
    assert seen == [override(load(there.path / "run.toml"), {"run.rounds": 3})]


@pytest.mark.slow
def test_a_federation_that_is_not_up_is_told(tmp_path: Path) -> None:
    deployment.create(tmp_path / "fed", nodes=2)
    with pytest.raises(EmdcflError, match="is the federation up"):
        runner_over(tmp_path / "fed")(Config(), tmp_path / "out")


def test_a_superlink_that_is_gone_is_told_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    there = deployment.create(tmp_path / "fed", nodes=2)
    job = there.path / "jobs" / "1"
    job.mkdir()
    (job / "run-config.toml").write_text(f"out = {str(tmp_path / 'out')!r}")
    (job / "run.json").write_text('{"run": 1, "link": null}')
    for command in ("attach", "stop"):  # nobody listens on the port
        ended = called(capfd, "federation", command, there.path)
        assert ended.code == 2 and "the SuperLink does not answer" in ended.err and f"--resume --out {tmp_path / 'out'}" in ended.err
    monkeypatch.setattr(sys.modules[follow.__module__], "CHECK", 0.0)
    monkeypatch.setattr(sys.modules[follow.__module__], "SILENCE", 0.0)
    with pytest.raises(EmdcflError, match="has not answered"):
        follow(there, job, 1, print, link=None)
    with subprocess.Popen(["sleep", "300"]) as link:
        record(there, {LINK: {"pid": link.pid, "started": start_time(link.pid)}})
        (job / "run.json").write_text(json.dumps({"run": 1, "link": [link.pid, start_time(link.pid)]}))
        monkeypatch.setattr(control, "run_status", lambda *_: link.kill() or "running")
        ended = called(capfd, "federation", "attach", there.path)
    assert ended.code == 2 and "the SuperLink ended during the run" in ended.err


def test_the_servers_journal_reaches_the_terminals_observer(caplog: pytest.LogCaptureFixture) -> None:
    seen = Mock()
    caplog.set_level(logging.INFO, "emdcfl")
    for event in (
        {"event": "begin", "round": 1, "total": 2, "participants": ["a", "b"]},
        {"event": "reply", "task": "train", "client": "a", "loss": 0.5, "accuracy": None},
        {"event": "log", "level": "WARNING", "text": "not connected: b"},
        {"event": "end", "round": 1, "total": 2, "rows": [], "clusters": 2},
    ):
        show_event(event, seen)
    assert seen.mock_calls[:2] == [call.begin(1, 2, ("a", "b")), call.reply("train", "a", {"loss": 0.5, "accuracy": {}})]
    *ended, serving = seen.end.call_args.args
    assert ended == [1, 2, []] and serving.clusters.tolist() == [0, 1]
    assert "not connected: b" in caplog.text
