"""A long run over a real federation in which a node is killed every ten rounds: do memory, open files and databases stay bounded?

    PYTHONPATH=benchmarks python -m faults.soak --out runs/soak --rounds 200

FedAvg over four nodes on this machine. A line per ten rounds goes to ``soak.jsonl``: memory and open files of the SuperLink with the
server program and of the largest node; bytes of the database, how many of them are free, what it holds. The last line says whether the
run finished, which clients were missing, and by what factor each number grew from the first third of the run to the last.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sqlite3
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from emdcfl.apps import deployment
from emdcfl.apps.deployment.processes import LINK, identity, process_ids, start
from emdcfl.runs.config import from_dict
from faults.flower import host_processes

NODES = 4


def usage(group: int) -> tuple[float, int]:
    """Memory in MB (shared pages counted once) and open files of all processes of a group."""
    memory, files = 0.0, 0
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            if int((process / "stat").read_text().rsplit(")", 1)[1].split()[2]) != group:
                continue
            lines = (process / "smaps_rollup").read_text().splitlines()
            memory += next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024
            files += len(list((process / "fd").iterdir()))
        except (OSError, StopIteration):  # it ended meanwhile
            continue
    return memory, files


HELD = ("message_ins", "message_res", "objects", "run_objects", "object_push_sessions", "nonce_store", "task_logs")
"""Tables of the SuperLink's database that messages pass through."""


def held(database: Path) -> dict[str, int]:
    """Bytes of the database that are free, and rows of the tables that hold any."""
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=30)) as link:
        free = link.execute("PRAGMA freelist_count").fetchone()[0] * link.execute("PRAGMA page_size").fetchone()[0]
        rows = {name: link.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in HELD}
    return {"free_bytes": free, **{name: count for name, count in rows.items() if count}}


def sample(there: deployment.Deployment, round: int) -> dict[str, Any]:
    """One line of ``soak.jsonl``."""
    found = {name: usage(pid) for name, pid in process_ids(there).items() if pid is not None}
    nodes = [value for name, value in found.items() if name != LINK]
    link = found.get(LINK, (0.0, 0))
    databases = sum(path.stat().st_size for path in there.operator.glob("link.db*"))
    states = sum(path.stat().st_size for path in there.path.glob("nodes/*/state/**/*") if path.is_file())
    return {
        "round": round,
        "superlink_mb": round_(link[0]),
        "superlink_files": link[1],
        "node_mb": round_(max((mb for mb, _ in nodes), default=0.0)),
        "node_files": max((files for _, files in nodes), default=0),
        "database_bytes": databases,
        "node_state_bytes": states,
        **held(there.operator / "link.db"),
    }


def growth(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Median of the last third of the samples over that of the first third; the sample before round 1 does not count."""
    later = [row for row in rows if row.get("round", 0) > 0]
    third = max(1, len(later) // 3)
    numbers = ("superlink_mb", "superlink_files", "node_mb", "node_files", "database_bytes", "node_state_bytes")
    found = {name: [median(row[name] for row in part) for part in (later[:third], later[-third:])] for name in numbers if later}
    return {name: round(last / first, 2) for name, (first, last) in found.items() if first}


def round_(value: float) -> float:
    return float(f"{value:.1f}")


def main() -> None:
    """Run, kill, measure."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path("runs/soak"))
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--every", type=int, default=10, help="rounds between kills")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    host_processes()
    there = deployment.create(given.out / "federation", nodes=NODES, deadline=300.0)
    tables: dict[str, Any] = {
        "run": {"rounds": given.rounds, "evaluate_every": given.rounds},
        "scenario": {"name": "rotated-digits", "groups": 2, "clients_per_group": NODES // 2},
        "method": {"name": "fedavg"},
        "training": {"local_epochs": 1},
        "engine": {"name": "flower", "device": "cpu", "on_failure": "continue"},
    }
    ended = threading.Event()
    rows: list[dict[str, Any]] = []

    def note(row: dict[str, Any]) -> None:
        rows.append(row)
        with (given.out / "soak.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)

    def supervise() -> None:  # what systemd does
        while not ended.wait(15):
            for name in there.nodes:
                if identity(there, name) is None:
                    start(there, name)

    def watch(event: dict[str, Any]) -> None:
        if event["event"] == "end" and event["round"] % given.every == 0:
            note(sample(there, event["round"]))
            victim = list(there.nodes)[event["round"] // given.every % NODES]
            if (found := identity(there, victim)) is not None and event["round"] < given.rounds:
                os.killpg(found[0], signal.SIGKILL)

    began = time.monotonic()
    try:
        deployment.up(there)
        deployment.wait_accepted(there)
        note(sample(there, 0))
        threading.Thread(target=supervise, daemon=True).start()
        deployment.submit(there, from_dict(tables), given.out / "run", watch=watch)
    finally:
        ended.set()
        deployment.down(there)
    summary = json.loads((given.out / "run" / "summary.json").read_text(encoding="utf-8"))
    missing = sorted({failure["client"] for failure in summary["failures"]})
    seconds = round_(time.monotonic() - began)
    note({"finished": summary["finished"], "rounds": summary["rounds"], "missing": missing, "seconds": seconds, "growth": growth(rows)})


if __name__ == "__main__":
    main()
