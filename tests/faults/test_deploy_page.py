"""Every command of the page's several-machines section, as printed, on machines with file systems of their own and one network.

A machine is a mount namespace: its own ``/srv``, a working folder, and a name server that knows ``fl.example.org``. All share a network
namespace, so port 8000 is free. What the page tells people to send each other, the test carries. It needs root on Linux.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra emdcfl[flower]")

from tests.apps.trial_runs import SOURCE

ROOT = Path(__file__).parents[2]
ADDRESS = "10.99.0.1"
LINK, SITES = "fl.example.org", ("hospital-1", "hospital-2")

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(not os.environ.get("EMDCFL_FAULTS"), reason="starts a federation; run 'make test-faults'"),
    pytest.mark.skipif(
        shutil.which("nsenter") is None or shutil.which("ip") is None or os.geteuid() != 0, reason="needs namespaces: root on Linux"
    ),
]


def blocks() -> list[tuple[str, list[str]]]:
    """Machine and commands of each block of the section."""
    page = (ROOT / "docs/guide/deploy.md").read_text(encoding="utf-8")
    section = page.split("\n## Two machines in half an hour\n")[1].split("\n### ")[0]
    found = re.findall(r"^```sh\n# at (\S+)\n(.*?)^```", section, flags=re.M | re.S)
    assert len(found) == section.count("```sh"), "every block says where it is run"
    return [(where, text.strip().splitlines()) for where, text in found]


class Machine:
    """A mount namespace in a network namespace; its working folder is ``/srv/work``."""

    def __init__(self, name: str, hosts: Path, network: int | None) -> None:
        self.name = name
        enter = ["nsenter", "-t", str(network), "-n"] if network else ["unshare", "-n"]
        lines = ["ip link set lo up", f"ip addr add {ADDRESS}/32 dev lo"] if network is None else []
        lines += [f"mount --bind {hosts} /etc/hosts", "mount -t tmpfs none /srv", "mkdir -p /srv/work", "echo ready", "exec sleep infinity"]
        self.process = subprocess.Popen(
            [*enter, "unshare", "-m", "--propagation", "private", "sh", "-ec", "; ".join(lines)],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None and self.process.stdout.readline().strip() == "ready"
        self.background: list[subprocess.Popen[str]] = []

    def command(self, text: str) -> list[str]:
        return ["nsenter", "-t", str(self.process.pid), "-n", "-m", "sh", "-ec", f"cd /srv/work && {text}"]

    def run(self, text: str) -> str:
        """Run a command line and return what it says; one that fails fails the test."""
        done = subprocess.run(self.command(text), capture_output=True, text=True, timeout=900, env=environment(), check=False)
        assert done.returncode == 0, f"{self.name}: {text}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def start(self, text: str) -> None:
        self.background.append(subprocess.Popen(self.command(f"exec {text} > /srv/work/log 2>&1"), env=environment(), text=True))

    def take(self, path: str) -> bytes:
        return subprocess.run(self.command(f"cat {path}"), capture_output=True, check=True).stdout

    def put(self, path: str, content: bytes) -> None:
        subprocess.run(self.command(f"cat > {path}"), input=content, check=True)

    def end(self) -> None:
        for process in self.background:
            process.terminate()
        for process in self.background:
            process.wait(60)
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "COLUMNS": "80"}


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[dict[str, Machine]]:
    hosts = tmp_path / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n{ADDRESS} {LINK}\n", encoding="utf-8")
    found = {LINK: Machine(LINK, hosts, None)}
    for site in SITES:
        found[site] = Machine(site, hosts, found[LINK].process.pid)
    try:
        yield found
    finally:
        for site in SITES:
            found[site].end()
        subprocess.run(found[LINK].command("emdcfl federation down fed"), env=environment(), check=False, capture_output=True)
        found[LINK].end()


def table(shift: int) -> bytes:
    rows = [f"{i % 17 + shift},{(i * 7) % 23},{'ab'[i % 2]}" for i in range(200)]
    return "\n".join(["age,dose,label", *rows]).encode()


def test_the_several_machines_section_runs_as_printed(machines: dict[str, Machine]) -> None:
    link, prints = machines[LINK], dict[str, str]()
    for number, site in enumerate(SITES):
        machines[site].put("/srv/patients.csv", table(3 * number))
    for where, commands in blocks():
        for site in SITES if where in SITES else (LINK,):
            here, other = machines[site], next(s for s in SITES if s != site)
            for command in commands:
                mine = command
                if where in SITES:  # the page shows one of the two hospitals
                    swapped = {where: site, next(s for s in SITES if s != where): other}
                    mine = re.sub("|".join(swapped), lambda m, of=swapped: of[m[0]], command)  # type: ignore[misc]
                named = next((s for s in SITES if f" {s} " in mine), None)
                mine = mine.replace("SHA256:…", prints.get(named, "") if named else "")
                if mine.startswith("emdcfl node serve"):
                    here.start(mine)
                elif mine.startswith("cp ca.crt"):
                    for file in ("ca.crt", "trusted.yaml"):
                        here.put(file, link.take(f"fed/certificates/{file}"))
                    here.run(mine)
                elif mine.startswith("emdcfl federation status"):
                    until_online(link, mine)
                else:
                    here.run(mine)
                if mine.startswith("emdcfl node init"):
                    prints[site] = here.run("emdcfl node fingerprint /srv/emdcfl").strip()
                    link.put(f"{site}.pub", here.take("/srv/emdcfl/auth.pub"))
    summary = json.loads(link.take("fed/runs/study/summary.json"))
    assert summary["finished"] and summary["clients"] == list(SITES) and summary["failures"] == []
    assert b"train" in machines["hospital-2"].take("/srv/emdcfl/state/log.jsonl")


def until_online(link: Machine, command: str) -> None:
    """Wait for the nodes, which take their time to load, then look as the page says."""
    end = time.monotonic() + 180
    while time.monotonic() < end:
        found = subprocess.run(link.command(f"{command} --json"), capture_output=True, text=True, env=environment(), check=False)
        if found.returncode == 0:
            break
        time.sleep(2)
    said = link.run(command)
    assert "2 of 2 nodes online" in said and said.count("online since") == 2
