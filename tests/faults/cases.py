"""What the fault suite shares: short runs over a federation, signals to its processes, and the account that a run must give."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.apps.trial_runs import SOURCE, config, over_flower

from emdcfl.apps import deployment
from emdcfl.apps.deployment.processes import identity, start
from emdcfl.runs import runner
from emdcfl.runs.config import Config

VICTIM = "rot90-2"
LONG = 30
"""Rounds that outlast the minute after which the SuperLink takes a silent node for gone, and a restart."""
Event = dict[str, Any]


def deadline() -> float:
    """Two minutes on an idle machine; more where other work slows everything down."""
    if "EMDCFL_FAULTS_DEADLINE" in os.environ:
        return float(os.environ["EMDCFL_FAULTS_DEADLINE"])
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", "import emdcfl.apps.client"], env={**os.environ, "PYTHONPATH": SOURCE}, check=True)
    return min(300.0, max(120.0, 12 * (time.monotonic() - started)))


def short(rounds: int = 4, **method: Any) -> Config:
    return over_flower(
        config(run={"rounds": rounds, "evaluate_every": rounds}, training={"local_epochs": 1}, method={"name": "emdcfl", **method})
    )


def send(there: deployment.Deployment, name: str, number: signal.Signals) -> None:
    found = identity(there, name)
    assert found is not None, f"{name} is not running"
    os.killpg(found[0], number)


def end(there: deployment.Deployment, name: str) -> None:
    """Let a process take its leave, and wait until it is gone: another one in its place would be refused before."""
    send(there, name, signal.SIGTERM)
    last = time.monotonic() + 60
    while identity(there, name) is not None:
        assert time.monotonic() < last, f"{name} did not end"
        time.sleep(0.5)


def bring_back(there: deployment.Deployment, name: str) -> None:
    """What a supervisor (systemd) does: start the node until it stays up."""
    end = time.monotonic() + 240
    while time.monotonic() < end:
        if identity(there, name) is None:
            start(there, name)
        time.sleep(15)
        if identity(there, name) is not None:
            return
    raise AssertionError(f"{name} did not come back")


def start_changed(there: deployment.Deployment, **variables: str) -> None:
    """Start the node with the changes of ``liar/sitecustomize.py`` that these variables name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{Path(__file__).parent / 'liar'}{os.pathsep}{SOURCE}")
        for name, value in variables.items():
            patch.setenv(name, value)
        start(there, VICTIM)


def wait_online(there: deployment.Deployment) -> None:
    """Have all nodes running and online before a case begins."""
    deployment.up(there)
    end = time.monotonic() + 240
    while time.monotonic() < end:
        deployment.up(there)
        if deployment.report(there)["ok"]:
            return
        time.sleep(5)
    raise AssertionError(f"some nodes are not online: {deployment.report(there)}")


def journal(there: deployment.Deployment) -> list[Event]:
    """What the server of the latest run said."""
    latest = max((there.path / "jobs").iterdir(), key=lambda job: int(job.name))
    return [json.loads(line) for line in (latest / "progress.jsonl").read_text().splitlines()]


def account(there: deployment.Deployment, out: Path) -> dict[str, Any]:
    """Read the summary of a run that must have finished with one client named, if any, and nothing lost of the others."""
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    print(json.dumps({k: summary[k] for k in ("rounds", "finished", "clusters", "ari", "seconds", "failures")}))
    assert summary["finished"]
    assert {f["client"] for f in summary["failures"]} <= {VICTIM}
    told = [event["text"] for event in journal(there) if event["event"] == "log"]
    for failure in summary["failures"]:
        assert failure["reason"] and "\n" not in failure["reason"]
        assert [text for text in told if failure["client"] in text and failure["reason"] in text], "the log says what the summary says"
    tested = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert {r["client"] for r in tested if r["round"] == summary["rounds"] and r["accuracy"]} >= set(summary["clients"]) - {VICTIM}
    return summary


def came_back(there: deployment.Deployment, out: Path, rounds: int) -> dict[str, Any]:
    """Check that the client was back before the last round, and is in the right cluster at the end."""
    summary = account(there, out)
    assert summary["rounds"] == rounds
    assert max([f["round"] for f in summary["failures"]], default=0) < rounds, "the client should be back before the last round"
    assert summary["ari"] == 1.0
    tested = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [r["client"] for r in tested if r["round"] == rounds and r["accuracy"]] == summary["clients"]
    return summary


def same_as_local(given: Config, out: Path) -> None:
    """Check that models and metrics are those of a local run, byte for byte."""
    local = out.parent / "local"
    runner.run(replace(given, engine=replace(given.engine, name="sequential", on_failure="stop")), local)
    for path in [local / "metrics.jsonl", *(local / "models").glob("*.safetensors")]:
        assert path.read_bytes() == (out / path.relative_to(local)).read_bytes(), path.name


def when(test: Callable[[Event], bool], act: Callable[[], None]) -> Callable[[Event], None]:
    """Act once, in a thread of its own, at the first event that passes the test."""
    done = threading.Event()

    def watch(event: Event) -> None:
        if not done.is_set() and test(event):
            done.set()
            threading.Thread(target=act, daemon=True).start()

    return watch
