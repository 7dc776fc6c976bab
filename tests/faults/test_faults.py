"""Processes of a real federation killed, stopped, restarted and lying. Every case ends with a finished run and a correct account.

Minutes each, so it is not part of ``make test``: ``make test-faults`` runs it.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra emdcfl[flower]")

from tests.apps.trial_runs import SOURCE, config, federation, over_flower

from emdcfl.apps import trial
from emdcfl.apps.trial.folder import fingerprints
from emdcfl.apps.trial.processes import LINK, identity, start
from emdcfl.errors import EmdcflError
from emdcfl.experiments import runner
from emdcfl.experiments.config import Config

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(not os.environ.get("EMDCFL_FAULTS"), reason="kills processes and takes many minutes; run 'make test-faults'"),
]

VICTIM = "rot90-2"
DEADLINE = 120.0
Event = dict[str, Any]


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[trial.Trial]:
    with federation(tmp_path_factory.mktemp("faults") / "federation", deadline=DEADLINE) as running:
        yield running


def short(rounds: int = 4, **method: Any) -> Config:
    return over_flower(
        config(run={"rounds": rounds, "evaluate_every": rounds}, training={"local_epochs": 1}, method={"name": "emdcfl", **method})
    )


def send(there: trial.Trial, name: str, number: signal.Signals) -> None:
    found = identity(there, name)
    assert found is not None, f"{name} is not running"
    os.killpg(found[0], number)


def bring_back(there: trial.Trial, name: str) -> None:
    """What a supervisor (systemd) does: start the node until it stays up. After a hard kill it is refused for about a minute."""
    end = time.monotonic() + 240
    while time.monotonic() < end:
        if identity(there, name) is None:
            start(there, name)
        time.sleep(15)
        if identity(there, name) is not None:
            return
    raise AssertionError(f"{name} did not come back")


def everybody(there: trial.Trial) -> None:
    """Have all nodes running and online before a case begins."""
    trial.up(there)
    end = time.monotonic() + 240
    while time.monotonic() < end:
        trial.up(there)
        if f"{len(there.nodes)} of {len(there.nodes)}" in trial.status(there)[LINK]:
            return
        time.sleep(5)
    raise AssertionError(f"not everybody is online: {trial.status(there)}")


def account(out: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    print(json.dumps({k: summary[k] for k in ("rounds", "finished", "clusters", "ari", "seconds", "failures")}))
    return summary


def when(test: Callable[[Event], bool], act: Callable[[], None]) -> Callable[[Event], None]:
    """Act once, in a thread of its own, at the first event that passes the test."""
    done = threading.Event()

    def watch(event: Event) -> None:
        if not done.is_set() and test(event):
            done.set()
            threading.Thread(target=act, daemon=True).start()

    return watch


MOMENTS: dict[str, Callable[[Event], bool]] = {
    "training": lambda e: e["event"] == "begin" and e["round"] == 2,
    "embedding": lambda e: e["event"] == "reply" and e["task"] == "reference",
    "between rounds": lambda e: e["event"] == "end" and e["round"] == 1,
}


@pytest.mark.parametrize("moment", sorted(MOMENTS))
def test_a_node_killed_during(there: trial.Trial, tmp_path: Path, moment: str) -> None:
    everybody(there)

    def act() -> None:
        if moment == "training":
            time.sleep(2)
        send(there, VICTIM, signal.SIGKILL)
        bring_back(there, VICTIM)

    trial.submit(there, short(6), tmp_path / "run", watch=when(MOMENTS[moment], act))
    summary = account(tmp_path / "run")
    assert summary["finished"] and summary["rounds"] == 6
    assert {f["client"] for f in summary["failures"]} == {VICTIM}
    assert all(f["reason"] for f in summary["failures"])
    last = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {r["client"] for r in last if r["round"] == 6 and r["accuracy"]} >= set(there.nodes) - {VICTIM}
    assert max(f["round"] for f in summary["failures"]) < 6, "the client should be back before the last round"


def test_a_node_stopped_past_the_deadline(there: trial.Trial, tmp_path: Path) -> None:
    everybody(there)

    def act() -> None:
        send(there, VICTIM, signal.SIGSTOP)
        time.sleep(DEADLINE + 30)
        send(there, VICTIM, signal.SIGCONT)

    trial.submit(there, short(5), tmp_path / "run", watch=when(MOMENTS["training"], act))
    summary = account(tmp_path / "run")
    assert summary["finished"]
    assert {f["client"] for f in summary["failures"]} == {VICTIM}


@pytest.fixture
def liar(there: trial.Trial, request: pytest.FixtureRequest) -> Iterator[str]:
    """Run one node with a changed program."""
    everybody(there)
    send(there, VICTIM, signal.SIGTERM)
    before = os.environ["PYTHONPATH"]
    os.environ["PYTHONPATH"], os.environ["LIE"] = f"{Path(__file__).parent / 'liar'}{os.pathsep}{SOURCE}", request.param
    try:
        time.sleep(5)
        start(there, VICTIM)
    finally:
        os.environ["PYTHONPATH"] = before
        del os.environ["LIE"]
    try:
        yield request.param
    finally:
        send(there, VICTIM, signal.SIGTERM)
        time.sleep(5)


REASONS = {
    "nan": "not finite",
    "shape": "expected theta of shape",
    "junk": "expected theta as torch.float32",
    "name": "in the name of 'rot0-1'",
}


@pytest.mark.parametrize("liar", sorted(REASONS), indirect=True)
def test_a_node_that_lies(there: trial.Trial, tmp_path: Path, liar: str) -> None:
    trial.submit(there, short(2), tmp_path / "run")
    summary = account(tmp_path / "run")
    assert summary["finished"]
    trained = [f for f in summary["failures"] if f["task"] == "train"]
    assert {f["client"] for f in trained} == {VICTIM}
    assert all(REASONS[liar] in f["reason"] for f in trained)
    assert [f["round"] for f in trained] == [1, 2]


def test_a_node_that_takes_another_clients_name(there: trial.Trial, tmp_path: Path) -> None:
    everybody(there)
    (there.path / "server" / "clients.toml").write_text("".join(f'"{n}" = "{p}"\n' for n, p in fingerprints(there).items()))
    send(there, VICTIM, signal.SIGTERM)
    time.sleep(5)

    class Forged(trial.Trial):
        def node_command(self, node: str) -> list[str]:
            return [part.replace(f'name="{VICTIM}"', 'name="rot0-1"') for part in super().node_command(node)]

    start(Forged(**vars(there)), VICTIM)
    try:
        said: list[str] = []
        trial.submit(there, short(2), tmp_path / "run", trust="pinned", watch=lambda e: said.append(e.get("text", "")))
    finally:
        send(there, VICTIM, signal.SIGTERM)
    summary = account(tmp_path / "run")
    assert summary["finished"]
    assert {f["client"] for f in summary["failures"]} == {VICTIM}, "the true rot0-1 takes part; the node that left its own name is missing"
    assert any("another node uses its name" in text for text in said)


def test_the_superlink_killed_and_restarted_resumes_from_the_last_complete_round(there: trial.Trial, tmp_path: Path) -> None:
    everybody(there)
    given = short(3)

    with pytest.raises(EmdcflError, match="--resume"):
        trial.submit(there, given, tmp_path / "run", watch=when(MOMENTS["training"], lambda: send(there, LINK, signal.SIGKILL)))
    everybody(there)
    trial.submit(there, given, tmp_path / "run", resume=True)
    summary = account(tmp_path / "run")
    assert summary["finished"] and summary["rounds"] == 3
    local = replace(given, engine=replace(given.engine, name="sequential", on_failure="stop"))
    runner.run(local, tmp_path / "local")
    for path in (tmp_path / "local" / "models").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "run" / "models" / path.name).read_bytes()
