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

from emdcfl.apps import deployment
from emdcfl.apps.deployment import control
from emdcfl.apps.deployment.processes import LINK, record, start_time
from emdcfl.apps.deployment.submit import follow
from emdcfl.cli.app import main
from emdcfl.cli.federation import runner_over, show_event
from emdcfl.core.errors import EmdcflError
from emdcfl.runs.config import Config, load, override


def emdcfl(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)


def test_init_says_fingerprints_and_what_comes_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "fed"
    assert emdcfl("federation", "init", str(folder), "--nodes", "2") == 0
    said = capsys.readouterr().out
    assert said.count("SHA256:") == 2
    assert f"emdcfl federation up {folder}" in said
    assert emdcfl("federation", "status", str(folder)) == 1
    assert capsys.readouterr().out.count("stopped") == 3
    assert emdcfl("federation", "status", str(folder), "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["superlink"]["state"], found["run"]) == (False, "stopped", None)
    assert {name: node["process"] for name, node in found["nodes"].items()} == {"rot0-1": "stopped", "rot0-2": "stopped"}
    assert emdcfl("federation", "down", str(folder)) == 0
    assert "nothing was running" in capsys.readouterr().out


def test_a_run_over_flower_needs_a_federation(capsys: pytest.CaptureFixture[str]) -> None:
    assert emdcfl("run", "--engine", "flower") == 2
    assert "add --federation DIR" in capsys.readouterr().err


def test_a_folder_that_is_no_federation_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert emdcfl("run", "--federation", str(tmp_path)) == 2
    assert "emdcfl federation init" in capsys.readouterr().err


def test_without_a_config_the_federations_own_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, seen = deployment.create(tmp_path / "fed", nodes=4), []

    def submit(config: Config, *_: Any, **__: Any) -> None:
        seen.append(config)
        raise EmdcflError("enough")

    monkeypatch.setattr("emdcfl.cli.federation.runner_over", lambda *_, **__: submit)
    assert emdcfl("run", "--federation", str(there.path), "--rounds", "3") == 2
    assert seen == [override(load(there.path / "run.toml"), {"run.rounds": 3})]


@pytest.mark.slow
def test_a_federation_that_is_not_up_is_told(tmp_path: Path) -> None:
    deployment.create(tmp_path / "fed", nodes=2)
    with pytest.raises(EmdcflError, match="is the federation up"):
        runner_over(tmp_path / "fed")(Config(), tmp_path / "out")


def test_a_superlink_that_is_gone_is_told_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = deployment.create(tmp_path / "fed", nodes=2)
    job = there.path / "jobs" / "1"
    job.mkdir()
    (job / "run-config.toml").write_text(f"out = {str(tmp_path / 'out')!r}")
    (job / "run.json").write_text('{"run": 1, "link": null}')
    for command in ("attach", "stop"):  # nobody listens on the port
        assert emdcfl("federation", command, str(there.path)) == 2
        told = capsys.readouterr().err
        assert "the SuperLink does not answer" in told and f"--resume --out {tmp_path / 'out'}" in told
    monkeypatch.setattr(sys.modules[follow.__module__], "CHECK", 0.0)
    monkeypatch.setattr(sys.modules[follow.__module__], "SILENCE", 0.0)
    with pytest.raises(EmdcflError, match="has not answered"):
        follow(there, job, 1, print, link=None)
    with subprocess.Popen(["sleep", "300"]) as link:
        record(there, {LINK: {"pid": link.pid, "started": start_time(link.pid)}})
        (job / "run.json").write_text(json.dumps({"run": 1, "link": [link.pid, start_time(link.pid)]}))
        monkeypatch.setattr(control, "run_status", lambda *_: link.kill() or "running")
        assert emdcfl("federation", "attach", str(there.path)) == 2
    assert "the SuperLink ended during the run" in capsys.readouterr().err


def test_the_servers_journal_reaches_the_terminals_observer(caplog: pytest.LogCaptureFixture) -> None:
    seen = Mock()
    caplog.set_level(logging.INFO, "emdcfl")
    for event in (
        {"event": "begin", "round": 1, "total": 2, "participants": ["a", "b"]},
        {"event": "reply", "task": "train", "client": "a", "loss": 0.5, "accuracy": None},
        {"event": "log", "level": "WARNING", "text": "not connected: b"},
        {"event": "end", "round": 1, "total": 2, "rows": [], "clusters": [0, 1]},
    ):
        show_event(event, seen)
    assert seen.mock_calls[:2] == [call.begin(1, 2, ("a", "b")), call.reply("train", "a", {"loss": 0.5, "accuracy": {}})]
    *ended, serving = seen.end.call_args.args
    assert ended == [1, 2, []] and serving.clusters.tolist() == [0, 1]
    assert "not connected: b" in caplog.text
