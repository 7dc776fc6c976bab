"""What an operator does to a running federation, by the commands of ``docs/guide/deploy.md``; and what befalls a site's machine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra emdcfl[flower]")

from tests.faults.cases import VICTIM, account, deadline, end, send, short, wait_online

from emdcfl.apps import deployment
from emdcfl.apps.deployment.processes import start
from emdcfl.engines.flower.survey import FILE
from emdcfl.runs import runner

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(not os.environ.get("EMDCFL_FAULTS"), reason="starts a federation and takes minutes; run 'make test-faults'"),
]

EMDCFL = [sys.executable, "-m", "emdcfl"]
ROUNDS = 12


def command(*given: str | Path, code: int = 0) -> str:
    """Run a command and return what it says; it must end with this code."""
    done = subprocess.run([*EMDCFL, *map(str, given)], capture_output=True, text=True, timeout=600, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == code, f"{given}: {done.returncode}\n{said}"
    return said


@contextmanager
def background(*given: str | Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([*EMDCFL, *map(str, given)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def until(test: Callable[[], Any], patience: float = 600.0) -> Any:
    end = time.monotonic() + patience
    while not (found := test()):
        assert time.monotonic() < end, f"not within {patience:.0f} s"
        time.sleep(1)
    return found


def status(there: deployment.Deployment, code: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(command("federation", "status", there.path, "--json", code=code))
    return found


def scrape(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url, timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def test_a_run_is_watched_stopped_and_resumed_under_a_new_certificate(there: deployment.Deployment, tmp_path: Path) -> None:
    """Resume against a live run, attach, status, metrics, stop, renew, down, up and resume: the models are those of a local run."""
    wait_online(there)
    out = tmp_path / "run"
    given = ["run", there.path / "run.toml", "--federation", there.path, "--out", out, "--rounds", ROUNDS, "--local-epochs", 1]
    run = [str(part) for part in [*given, "--set", f"run.evaluate_every={ROUNDS}", "--device", "cpu"]]
    with background(*run) as first, background("federation", "metrics", there.path, "--port", "0") as serving:
        assert serving.stdout is not None
        url = serving.stdout.readline().strip()
        until(lambda: (job := deployment.report(there)["run"]) and job["state"] == "at work" and job["round"] >= 1)
        assert "still works in" in command(*run, "--resume", code=2)
        with background("federation", "attach", there.path) as watching:
            assert watching.stdout is not None
            assert any(re.match(r"round \d+ of", line) for line in watching.stdout)
            watching.send_signal(signal.SIGINT)
            assert watching.wait(120) == 0
        found, numbers = status(there), scrape(url)
        assert found["ok"] and found["run"]["state"] == "at work" and found["run"]["rounds"] == ROUNDS
        assert numbers["emdcfl_run_active"] == 1 and numbers["emdcfl_run_rounds"] == ROUNDS
        assert sum(value for name, value in numbers.items() if name.startswith("emdcfl_node_online")) == len(there.nodes)
        assert found["run"]["round"] <= numbers["emdcfl_run_round"] < ROUNDS
        assert "--resume" in command("federation", "stop", there.path)
        assert first.wait(300) == 2
        assert status(there)["run"]["state"] == "stopped" and scrape(url)["emdcfl_run_active"] == 0
        assert "no run is at work" in command("federation", "attach", there.path, code=2)
        served = certificate(there)
        command("federation", "renew", there.path)
        command("federation", "down", there.path)
        down = status(there, code=1)
        assert down["superlink"]["state"] == "stopped" and scrape(url)["emdcfl_superlink_up"] == 0
        command("federation", "up", there.path)
        assert certificate(there) != served and status(there)["ok"] and scrape(url)["emdcfl_superlink_up"] == 1
        serving.send_signal(signal.SIGTERM)
        assert serving.wait(60) == 0
    command("run", "--federation", there.path, "--resume", "--out", out)
    assert account(there, out)["failures"] == []
    config = short(ROUNDS)
    runner.run(replace(config, engine=replace(config.engine, name="sequential", on_failure="stop")), tmp_path / "local")
    for path in (tmp_path / "local" / "models").glob("*.safetensors"):
        assert path.read_bytes() == (out / "models" / path.name).read_bytes()


def certificate(there: deployment.Deployment) -> str:
    return ssl.get_server_certificate(("127.0.0.1", there.port))


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk: needs root")
def test_a_full_disk_at_a_node(there: deployment.Deployment, tmp_path: Path) -> None:
    """Its client is missing, with the reason; once there is space it takes part again, in the same run."""
    wait_online(there)
    state = there.home(VICTIM) / "state"
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m,mode=700", "none", state], check=True)
    filler = state / "filler"

    def watch(event: dict[str, Any]) -> None:
        if event["event"] == "end" and event["round"] == 1:
            with filler.open("wb") as file, contextlib.suppress(OSError):
                while True:
                    os.write(file.fileno(), bytes(4096))
        elif event["event"] == "end" and event["round"] == 3:
            filler.unlink()

    try:
        deployment.submit(there, short(6), tmp_path / "run", watch=watch)
        failures = account(there, tmp_path / "run")["failures"]
        assert failures and {failure["client"] for failure in failures} == {VICTIM}
        assert all("cannot read or write its files" in failure["reason"] for failure in failures)
        assert max(failure["round"] for failure in failures) < 6
    finally:
        end(there, VICTIM)
        subprocess.run(["umount", "--lazy", state], check=True)


def test_a_site_is_removed_and_comes_back_with_new_keys(there: deployment.Deployment, tmp_path: Path) -> None:
    """While a partner does not know the new key, that pair alone is left out."""
    wait_online(there)
    home, others = there.home(VICTIM), [name for name in there.nodes if name != VICTIM]
    command("federation", "remove", there.path, VICTIM)
    assert status(there, code=1)["nodes"][VICTIM]["online"] is False
    assert "rotate" in command("federation", "enrol", there.path, VICTIM, home / "auth.pub", code=2)
    until(lambda: deployment.report(there)["nodes"][VICTIM]["process"] != "running")  # it is refused, and ends
    said = command("node", "rotate", home)
    told = re.findall(r"SHA256:\S+", said)[0].rstrip(",")
    assert command("node", "fingerprint", home).strip() == told
    command("federation", "enrol", there.path, VICTIM, home / "auth.pub", told)
    for name in others[:-1]:
        command("node", "trust", there.home(name), VICTIM, told, "--replace")
    start(there, VICTIM)
    until(lambda: deployment.report(there)["ok"])
    deployment.submit(there, short(2), tmp_path / "half")
    summary = json.loads((tmp_path / "half" / "summary.json").read_text())
    assert summary["finished"] and all("shows the key" in failure["reason"] for failure in summary["failures"])
    tested = [json.loads(line) for line in (tmp_path / "half" / "metrics.jsonl").read_text().splitlines()]
    assert [row["client"] for row in tested if row["round"] == 2 and row["accuracy"]] == summary["clients"], "nobody is left out"
    command("node", "trust", there.home(others[-1]), VICTIM, told, "--replace")
    deployment.submit(there, short(2), tmp_path / "whole")
    assert account(there, tmp_path / "whole")["failures"] == []
    assert json.loads((tmp_path / "whole" / "summary.json").read_text())["ari"] == 1.0


def test_a_survey_without_a_site_that_joins_when_the_run_is_resumed(tmp_path: Path) -> None:
    """The survey belongs to the run: a late site with other ages and a ward nobody knows trains with what the others' survey found."""
    data = tmp_path / "data"
    data.mkdir()
    for number, name in enumerate(("north", "south", "west")):
        rows = [f"{i % 17 + 9 * number},{'xyz'[number]},{'ab'[i % 2]}" for i in range(120)]
        (data / f"{name}.csv").write_text("\n".join(["age,ward,label", *rows]), encoding="utf-8")
    there = replace(deployment.create(tmp_path / "fed", data=data, deadline=deadline()), wait=5.0)
    late, out = there.nodes[-1], tmp_path / "run"
    config = replace(short(6), scenario=replace(short().scenario, name="nodes", options={"clients": list(there.nodes)}))
    try:
        deployment.up(there)
        send(there, late, signal.SIGTERM)
        until(lambda: all(node["online"] for name, node in deployment.report(there)["nodes"].items() if name != late))
        stopping = [False]

        def watch(event: dict[str, Any]) -> None:
            if event["event"] == "end" and event["round"] == 2 and not stopping[0]:
                stopping[0] = True
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            deployment.submit(there, config, out, watch=watch)
        before = surveyed(out)
        wait_online(there)
        deployment.submit(there, config, out, resume=True)
        summary = json.loads((out / "summary.json").read_text())
        assert summary["finished"] and {failure["client"] for failure in summary["failures"]} == {late}
        assert max(failure["round"] for failure in summary["failures"]) <= 3
        assert surveyed(out) == before
    finally:
        deployment.down(there)


def surveyed(out: Path) -> bytes:
    return (out / "state" / FILE).read_bytes()
