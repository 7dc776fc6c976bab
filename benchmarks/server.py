"""What the server takes for itself when models are large: seconds of whole runs by phase, and the rest, method by method.

    python -m benchmarks.server                                     # 18 clients of ResNet18, three rounds
    python -m benchmarks.server --methods fedavg cflgp --clients 40 --json
    PYTHONPATH=OTHER/src python -m benchmarks.server                # the same with another version's sources, to be run in turn

Random images, very little local training, on the CPU: what is left of a run outside its phases is the start, the method's own arithmetic
and writing (a large state is written while the next round trains). FedAvg, whose arithmetic is one average, is the yardstick.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from benchmarks.memory import Case, config, run, world

METHODS = ("fedavg", "cfl", "fesem", "flexcfl", "cflgp", "fedsoft", "pfedgraph", "fedsac", "pacfl", "fedem", "fedce")


def main() -> None:
    """Parse, play, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--clients", type=int, default=18)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="a line of JSON per method")
    args = parser.parse_args()
    case = Case(args.clients, "resnet18", {"classes": 10, "weights": None}, 3, 32, 8, 4)
    scenario = world(case)
    for method in args.methods:
        wanted = config(case, method, rounds=args.rounds)
        with tempfile.TemporaryDirectory() as folder:
            seconds = run(wanted, Path(folder) / "run", scenario=scenario).summary["seconds"]
        rest = seconds["total"] - sum(value for phase, value in seconds.items() if phase != "total")
        row = {"method": method, **seconds, "rest": round(rest, 2)}
        print(json.dumps(row) if args.json else "  ".join(f"{k} {v}" for k, v in row.items()), flush=True)


if __name__ == "__main__":
    main()
