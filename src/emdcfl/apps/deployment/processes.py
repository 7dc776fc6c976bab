"""Start, list and stop the processes of a federation on this machine; ``processes.json`` holds their process ids and start times."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from emdcfl.apps.deployment import control
from emdcfl.apps.deployment.folder import Deployment
from emdcfl.apps.supernode import HOST
from emdcfl.core.errors import ConfigError
from emdcfl.core.files import replace_text

LINK = "superlink"
PATIENCE = 300.0
"""Seconds the SuperLink may take to start, on a machine that is busy with other work."""

RELEASE = 30.0
"""Seconds that the port of a SuperLink which was killed may take to be free again."""

GRACE = 20.0
"""Seconds that processes have to end when they are asked to."""

NICENESS = 5
"""Added to the nodes' niceness, so that the SuperLink and the run on the same machine go first."""


def up(deployment: Deployment) -> list[str]:
    """Start what is not running: the SuperLink, then the nodes, registered first. Returns the names of what was started.

    ``report.wait_accepted`` waits until the nodes are connected.
    """
    running = {name for name, pid in process_ids(deployment).items() if pid is not None}
    started = []
    if LINK not in running:
        end = time.monotonic() + RELEASE
        while _listens(deployment.port) and time.monotonic() < end:
            time.sleep(0.2)
        if _listens(deployment.port):
            raise ConfigError(f"port {deployment.port} of {HOST} is taken by another program; stop it, or make a new federation")
        start(deployment, LINK)
        started.append(LINK)
    _until_listening(deployment)
    register(deployment)
    for node in deployment.nodes:
        if node not in running:
            start(deployment, node)
            started.append(node)
    return started


def start(deployment: Deployment, name: str) -> int:
    """Start one process, detached from this one; its output goes to ``logs/<name>.log``."""
    node = None if name == LINK else name
    command = deployment.link_command() if node is None else deployment.node_command(node)
    with (deployment.path / "logs" / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, **deployment.environment()},
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            umask=0o077,
            cwd=deployment.path,
        )
    if node is not None:  # many nodes on one machine must not keep the SuperLink from its database: Flower gives up after five seconds
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
    records = _records(deployment)
    records[name] = {"pid": process.pid, "started": start_time(process.pid)}
    record(deployment, records)
    return process.pid


def register(deployment: Deployment) -> None:
    """Register the public keys of the nodes of this machine with the SuperLink."""
    known = {node.name for node in control.enrolled(deployment)} if deployment.nodes else set()
    for node in (node for node in deployment.nodes if node not in known):
        control.enrol(deployment, node, (deployment.home(node) / "auth.pub").read_bytes())


def down(deployment: Deployment) -> list[str]:
    """Stop everything that ``up`` started; returns what was stopped.

    The SuperLink goes last: a node that could not be deactivated counts as connected for a minute.
    """
    recorded = {name: pid for name, pid in process_ids(deployment).items() if pid is not None}
    nodes, link = [name for name in recorded if name != LINK], [name for name in recorded if name == LINK]
    for stage in (nodes, link):
        _end({recorded[name] for name in stage})
    record(deployment, {})
    return nodes + link


def _end(pids: set[int]) -> None:
    for pid in pids:
        _signal(pid, signal.SIGTERM)
    end = time.monotonic() + GRACE
    while (left := _groups() & pids) and time.monotonic() < end:
        time.sleep(0.2)
    for pid in left:
        _signal(pid, signal.SIGKILL)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)  # every process was started as the leader of its own group


def _groups() -> set[int]:
    """Process groups that have a member: what a process started may outlive it."""
    found = (_stat(entry.name) for entry in Path("/proc").glob("[0-9]*"))
    return {int(fields[2]) for fields in found if fields and fields[0] != "Z"}


def _records(deployment: Deployment) -> dict[str, Any]:
    path = deployment.path / "processes.json"
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def record(deployment: Deployment, records: Mapping[str, Any]) -> None:
    """Write ``processes.json``: name → ``pid`` and ``started``."""
    replace_text(deployment.path / "processes.json", json.dumps(records))


def identity(deployment: Deployment, name: str) -> tuple[int, str] | None:
    """Process id and start time of a process that runs; ``None`` if it does not (its number may belong to another process now)."""
    entry = _records(deployment).get(name)
    return (entry["pid"], entry["started"]) if entry and start_time(entry["pid"]) == entry["started"] != "" else None


def process_ids(deployment: Deployment) -> dict[str, int | None]:
    """Name → process id of everything that was started, ``None`` where that process is gone."""
    found = {name: identity(deployment, name) for name in _records(deployment)}
    return {name: None if entry is None else entry[0] for name, entry in found.items()}


def seconds_running(deployment: Deployment, name: str) -> float | None:
    """How long a process has been running; ``None`` if it does not run."""
    found = identity(deployment, name)
    return None if found is None else time.clock_gettime(time.CLOCK_BOOTTIME) - int(found[1]) / os.sysconf("SC_CLK_TCK")


def start_time(pid: int) -> str:
    """When a process started, in the kernel's clock ticks; empty if it is gone or a zombie."""
    fields = _stat(pid)
    return "" if not fields or fields[0] == "Z" else fields[19]


def _stat(pid: int | str) -> list[str]:
    """State and what follows it in ``/proc/PID/stat``; empty if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return []


def _listens(port: int) -> bool:
    with socket.socket() as s:
        s.settimeout(1.0)
        return s.connect_ex((HOST, port)) == 0


def _until_listening(deployment: Deployment) -> None:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if _listens(deployment.port):
            return
        if process_ids(deployment).get(LINK) is None:
            raise ConfigError(f"the SuperLink ended at once; see {deployment.path}/logs/{LINK}.log")
        time.sleep(0.2)
    raise ConfigError(
        f"the SuperLink does not listen on port {deployment.port} after {PATIENCE:.0f} s; see {deployment.path}/logs/{LINK}.log"
    )
