"""Seconds from starting ``emdcfl run`` to the first SGD step, each time in a new process.

    python benchmarks/startup.py                     # the default scenario
    python benchmarks/startup.py --repeats 5 -- run --scenario rotated-digits --method fedavg

Wall time counts from before the interpreter starts; processor time is what the machine had to do for it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CHILD = """
import os, sys, time
from emdcfl.core import tasks
def first(*args, **kwargs):
    used = os.times()
    os.write(int(os.environ["STARTUP_PIPE"]), f"{time.time()} {used.user + used.system}".encode())
    os._exit(0)
tasks.batches = first  # every engine lays out its batches with it, right before the first step
from emdcfl.cli import main
main(sys.argv[1:])
"""


def once(arguments: list[str]) -> tuple[float, float]:
    """Return wall and processor seconds of one start."""
    reader, writer = os.pipe()
    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        command = [sys.executable, "-c", CHILD, *arguments, "--out", str(Path(folder) / "run")]
        environment = {**os.environ, "STARTUP_PIPE": str(writer)}
        child = subprocess.Popen(command, pass_fds=(writer,), stdout=subprocess.DEVNULL, env=environment)
        os.close(writer)
        child.wait()
    with os.fdopen(reader) as pipe:
        said = pipe.read().split()
    if len(said) != 2:
        raise SystemExit(f"expected {arguments} to reach a training step, it ended with code {child.returncode}")
    return float(said[0]) - began, float(said[1])


def main() -> None:
    """Parse, start several times, print medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("arguments", nargs="*", default=["run", "--scenario", "rotated-digits"])
    args = parser.parse_args()
    load = [round(v, 1) for v in os.getloadavg()]
    walls, processor = zip(*(once(args.arguments) for _ in range(args.repeats)), strict=True)
    result = {"wall": statistics.median(walls), "least wall": min(walls), "processor": statistics.median(processor), "load": load}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
