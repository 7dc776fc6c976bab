"""What a message costs: processor time of nodes and SuperLink, seconds a round, memory of an idle node, over a real federation.

    PYTHONPATH=benchmarks python -m faults.cost --out runs/cost --nodes 4 --rounds 5

EMD-CFL on rotated digits, tested after the last round (``--test-every``); models and metrics are compared with those of the local engine.
Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from emdcfl.apps import deployment
from emdcfl.apps.deployment.processes import LINK, process_ids
from emdcfl.runs import runner
from emdcfl.runs.config import from_dict
from faults.flower import host_processes
from faults.runs import differing
from faults.soak import usage

TICKS = os.sysconf("SC_CLK_TCK")


def seconds_of(groups: dict[str, int]) -> dict[str, float]:
    """Processor seconds of each process group, children that have ended included."""
    found: dict[int, float] = {}
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                fields = (process / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            found[int(fields[2])] = found.get(int(fields[2]), 0.0) + sum(map(int, fields[11:15])) / TICKS
    return {name: found.get(pid, 0.0) for name, pid in groups.items()}


def main() -> None:
    """Measure one run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path("runs/cost"))
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--test-every", type=int, help="rounds between tests; by default only the last round is tested")
    given = parser.parse_args()
    host_processes()
    there = deployment.create(given.out / "federation", nodes=given.nodes)
    rotations = len({node.partition("-")[0] for node in there.nodes})
    config = from_dict(
        {
            "run": {"rounds": given.rounds, "evaluate_every": given.test_every or given.rounds},
            "scenario": {"name": "rotated-digits", "groups": rotations, "clients_per_group": given.nodes // rotations},
            "training": {"local_epochs": 1},
            "engine": {"device": "cpu"},
        }
    )
    times: list[tuple[str, float]] = []
    try:
        deployment.up(there)
        deployment.wait_accepted(there)
        groups = {name: pid for name, pid in process_ids(there).items() if pid is not None}
        idle = max(usage(pid)[0] for name, pid in groups.items() if name != LINK)
        before, began = seconds_of(groups), time.monotonic()

        def watch(event: dict[str, Any]) -> None:
            times.append((event["event"], time.monotonic() - began))

        over = replace(config, engine=replace(config.engine, name="flower", on_failure="continue"))
        outcome = deployment.submit(there, over, given.out / "flower", watch=watch)
        used = {name: seconds - before[name] for name, seconds in seconds_of(groups).items()}
    finally:
        deployment.down(there)
    runner.run(config, given.out / "local")
    messages = given.nodes + sum(count["requests"] for count in outcome["traffic"].values())
    ends = [moment for kind, moment in times if kind == "end"]
    rounds = [b - a for a, b in pairwise(ends[:-1])]  # without the first, which compares, and the last, which tests
    row = {
        "nodes": given.nodes,
        "messages": messages,
        "messages_by_task": {task: count["requests"] for task, count in outcome["traffic"].items()},
        "cpu_seconds_nodes": round(sum(s for name, s in used.items() if name != LINK), 1),
        "cpu_seconds_a_message": round(sum(s for name, s in used.items() if name != LINK) / messages, 2),
        "cpu_seconds_superlink": round(used[LINK], 1),
        "seconds_before_round_1": round(next(moment for kind, moment in times if kind == "begin"), 1),
        "seconds_a_round": [round(s, 1) for s in rounds],
        "idle_node_mb": round(idle),
        "different": [name for name in differing(given.out / "flower", given.out / "local") if name.startswith(("models/", "metrics"))],
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
