"""Kill -9 of the server or of nodes of a real federation on this machine; a supervisor starts them again, and the run must finish.

FedAvg over two nodes and two rounds: the method does not matter here.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import emdcfl
from emdcfl.apps import deployment
from emdcfl.apps.deployment.processes import LINK, identity, start
from emdcfl.core.errors import EmdcflError
from emdcfl.runs import runner
from emdcfl.runs.config import from_dict
from faults.runs import committed, differing

ROUNDS = 2
NODES = 2
TABLES: dict[str, dict[str, Any]] = {
    "run": {"rounds": ROUNDS, "evaluate_every": ROUNDS},
    "scenario": {"name": "rotated-digits", "groups": 1, "clients_per_group": 2},
    "method": {"name": "fedavg"},
    "training": {"local_epochs": 1},
    "engine": {"name": "flower", "device": "cpu", "on_failure": "continue"},
}
DEADLINE = 180.0
ATTEMPTS = 6

Row = dict[str, Any]


def host_processes() -> None:
    """Let the processes of a federation import this source, and SIGTERM raise SystemExit, so that the federation is stopped in any case."""
    source = str(Path(emdcfl.__file__).parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join([source, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def kills(number: int, seed: int, work: Path, done: set[int], note: Callable[[Row], None]) -> None:
    """Inject the kills that are missing, one run after the other, into one federation."""
    missing = [i for i in range(number) if i not in done]
    if not missing:
        return
    folder = work / "federation"
    there = deployment.create(folder, nodes=NODES, deadline=DEADLINE) if not folder.exists() else deployment.Deployment.read(folder)
    host_processes()
    try:
        wait_online(there)
        seconds = _undisturbed(there, work)
        for index in missing:
            row = kill_once(there, work / f"flower-{index}", random.Random(f"{seed} flower {index}"), seconds)
            note({"index": index, "setting": f"fedavg, flower, {NODES} nodes", **row})
            print(f"flower {index}: {json.dumps(row)[:300]}", flush=True)
    finally:
        deployment.down(there)


def _undisturbed(there: deployment.Deployment, work: Path) -> float:
    began = time.monotonic()
    if not (work / "flower-seconds").exists():
        shutil.rmtree(work / "flower-reference", ignore_errors=True)
        deployment.submit(there, from_dict(TABLES), work / "flower-reference")
        (work / "flower-seconds").write_text(str(time.monotonic() - began), encoding="utf-8")
    local = work / "flower-local"
    if not (local / "summary.json").exists():
        runner.run(from_dict({**TABLES, "engine": {"name": "sequential", "device": "cpu"}}), local)
    return float((work / "flower-seconds").read_text(encoding="utf-8"))


def wait_online(there: deployment.Deployment, patience: float = 300.0) -> None:
    """Start what is not running, as a supervisor would, and wait until all nodes are online and stay so."""
    end = time.monotonic() + patience
    looks = 0
    while time.monotonic() < end:
        deployment.up(there)
        looks = looks + 1 if deployment.report(there)["ok"] else 0
        if looks == 3:
            return
        time.sleep(5)
    raise RuntimeError(f"some nodes are not online: {deployment.report(there)}")


def kill_once(there: deployment.Deployment, out: Path, rng: random.Random, seconds: float) -> Row:
    """Submit a run, kill a process at a random moment, let a supervisor bring it back, resume until finished."""
    wait_online(there)
    victim = rng.choice([LINK, *there.nodes])
    moment = rng.uniform(0, seconds)
    done = threading.Event()
    killed: list[float] = []
    began = time.monotonic()

    def kill() -> None:
        if done.wait(moment):
            return
        found = identity(there, victim)
        if found is not None:
            os.killpg(found[0], signal.SIGKILL)
            killed.append(time.monotonic() - began)
        while victim != LINK and not done.wait(10):  # the SuperLink is started again before the next attempt
            if identity(there, victim) is None:
                start(there, victim)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    said: list[str] = []
    finished = lost = False
    for attempt in range(ATTEMPTS):
        before, begun = committed(out), []

        def watch(event: Row, begun: list[int] = begun) -> None:
            if event["event"] == "begin":
                begun.append(event["round"])

        try:
            deployment.submit(there, from_dict(TABLES), out, resume=attempt > 0, watch=watch)
            finished = True
            break
        except EmdcflError as error:
            said.append(str(error))
            wait_online(there)
        finally:
            lost |= any(index <= before for index in begun)
    done.set()
    thread.join()
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8")) if finished else {}
    return {
        "faults": len(killed), "finished": bool(summary.get("finished")), "wrong": _wrong(summary, out, victim), "lost": lost,
        "crash": any("Traceback" in text for text in said),
        "note": f"{victim} after {moment:.1f} of {seconds:.1f} s; {len(summary.get('failures', []))} failures noted, {len(said)} resumes",
        "said": said, "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip


def _wrong(summary: Row, out: Path, victim: str) -> list[str]:
    """Return what is wrong: with all clients' work, models other than a local run's; else, missing clients other than the victim."""
    if not summary:
        return []
    missing = {failure["client"] for failure in summary["failures"]}
    if not missing:
        return [name for name in differing(out, out.parent / "flower-local") if name.startswith("models/")]
    return [] if victim == LINK or missing <= {victim} else [f"missing: {sorted(missing)}"]
