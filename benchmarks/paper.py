"""The paper's comparisons at full size, on one GPU, as a queue that may be killed at any moment and started again.

    EMDCFL_DATA=… python benchmarks/paper.py --out runs/paper --seconds 1800
    python benchmarks/paper.py --list --out runs/paper         # what is there, what is left, in order

Every run is one ``emdcfl compare`` in a process and a folder of its own (``parts/``), and its row goes to ``results.jsonl`` when it ends.
Runs whose row is there, or in a file of ``--done``, are not repeated; scenarios whose data are not below ``EMDCFL_DATA``, or whose
weights are neither in ``EMDCFL_WEIGHTS`` nor in torch's own folder, are left out (with ``--wait``: until they are). ``results.jsonl``
merges like any other.

A run that takes longer than ``--longest`` is stopped. One whose engine gives up on graphs, which costs ten times the time, is stopped too,
and its whole scenario is left out.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from emdcfl.engines.cuda.engine import FALLBACKS, ONE_AFTER_THE_OTHER
from emdcfl.studies.results import Results, read_results

EMDCFL = ("emdcfl:tolerance=auto", "emdcfl:tolerance=0.025")
BENEFIT = "emdcfl:grouping=benefit"
FIVE = (EMDCFL[0], "oracle", "fedavg", "ifca", "cfl")
HARD = ("ifca", "pacfl", "fedclust", "cfl", "flexcfl", "fesem", "cflgp")
SOFT = ("fedprox", "fedsoft", "fedce", "pfedgraph", "fedsac", "local")
SLOW = ("fedem", "fedrc")
"""Methods that train every cluster's model at every client: several times the time of the others."""
PATIENCE = 30.0
"""Seconds a run that was told to stop has until it is killed."""
Settings = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Wanted:
    """One run: scenario, method with options, seed, and what differs from the scenario's own settings."""

    scenario: str
    method: str
    seed: int = 0
    settings: Settings = ()

    @property
    def name(self) -> str:
        changed = "".join(f"-{key.rpartition('.')[2]}{value}" for key, value in self.settings)
        return re.sub(r"[^A-Za-z0-9.-]", "_", f"{self.scenario}-{self.method}-seed{self.seed}{changed}")

    def asks(self) -> dict[str, Any]:
        """Return the settings by which a row is recognised, whatever else a config may hold by now."""
        name, *options = self.method.split(":")
        given = dict(option.split("=") for option in options)
        batch = 128 if "mnist" in self.scenario else 64
        trained = {"run.rounds": 10, "training.local_epochs": 10, "training.batch_size": batch, "run.participants": None}
        asked: dict[str, Any] = {**trained, **dict(self.settings)}
        return {"scenario.name": self.scenario, "method.name": name, "run.seed": self.seed, **asked} | {
            f"method.{key}": _number(value) for key, value in given.items()
        }

    def is_row(self, row: Mapping[str, Any]) -> bool:
        """Say whether a row of results is this run's."""
        settings = row["settings"]
        if settings["scenario"].get("scale", "paper") != "paper" or "personalize" in settings or not row.get("commit"):
            return False
        if (settings["method"].get("grouping") == "benefit") != (self.method == BENEFIT):
            return False
        return all(settings.get(t, {}).get(k) == v for (t, k), v in ((key.split("."), v) for key, v in self.asks().items()))

    def command(self, out: Path, device: str) -> list[str]:
        """Return the command that makes the row."""
        # a short run does not compile by itself, but here all of them share what was compiled
        fixed = {"engine.name": "cuda", "engine.precision": "bf16", "engine.compile": "yes"} if device.startswith("cuda") else {}
        settings = [part for key, value in (fixed | dict(self.settings)).items() for part in ("--set", f"{key}={value}")]
        chosen = ["--scenario", self.scenario, "--methods", self.method, "--seeds", str(self.seed), "--device", device]
        chosen += ["--personalize", "off"]  # fine-tuning FedAvg, which the paper does not, takes a quarter of its time once more
        return [sys.executable, "-m", "emdcfl", "compare", *chosen, *settings, "--out", str(out), "--quiet"]


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def queue() -> list[Wanted]:
    """Return every run, important and cheap first."""

    def runs(scenario: str, methods: Sequence[str], seeds: Iterable[int] = (0,), settings: Settings = ()) -> list[Wanted]:
        return [Wanted(scenario, method, seed, settings) for seed in seeds for method in methods]

    every = [
        # what must be shown: both tolerances, grouping by benefit, Oracle and FedAvg
        *runs("rotated-mnist", ("oracle", EMDCFL[0], BENEFIT, "fedavg")),
        *runs("backdoor-mnist", (EMDCFL[0], BENEFIT, "oracle", "fedavg")),
        *runs("pacs", ("oracle", BENEFIT, EMDCFL[0], "fedavg")),
        *runs("rotated-mnist", ("ifca", "cfl", "pacfl", "fedclust")),
        *runs("backdoor-mnist", ("ifca", "cfl", "pacfl", "fedclust")),
        *runs("rotated-cifar10", (EMDCFL[0], "fedavg")),
        *runs("backdoor-cifar10", (EMDCFL[0], "fedavg")),
        # more seeds
        *runs("rotated-mnist", (EMDCFL[0], "oracle", "fedavg"), (1, 2)),
        *runs("backdoor-mnist", (EMDCFL[0], "oracle", "fedavg"), (1, 2)),
        *runs("pacs", (EMDCFL[0], "oracle", "fedavg"), (1, 2)),
        # every method, one seed
        *(run for name in ("backdoor-mnist", "rotated-mnist", "pacs") for run in runs(name, (*HARD, *SOFT))),
        *(run for name in ("rotated-mnist", "backdoor-mnist", "pacs") for run in runs(name, SLOW)),
        # extended scenarios and partial participation
        *runs("rotated-mnist-two", FIVE),
        *runs("rotated-mnist-min", FIVE),
        *runs("mnist-base", FIVE),
        *(run for n in (10, 20, 30) for run in runs("rotated-mnist", FIVE, settings=(("run.participants", n),))),
        # the rest
        *(run for name in ("rotated-mnist", "backdoor-mnist", "pacs", "rotated-mnist-two") for run in runs(name, EMDCFL[1:])),
        *(run for name in ("rotated-mnist", "backdoor-mnist", "pacs") for run in runs(name, (*HARD, *SOFT), (1, 2))),
        *runs("backdoor-cifar10", ("oracle", "ifca", "pacfl")),
        *runs("rotated-cifar10", ("oracle", "ifca", "pacfl")),
    ]
    return list(dict.fromkeys(every))


def available(run: Wanted) -> bool:
    """Say whether data and weights of a run are there."""
    source = next((name for name in ("mnist", "cifar10", "pacs") if name in run.scenario), None)
    if source is None:
        return True
    root = Path(os.environ.get("EMDCFL_DATA", ""))
    folders = [Path(torch.hub.get_dir()) / "checkpoints", *map(Path, filter(None, [os.environ.get("EMDCFL_WEIGHTS")]))]
    weights = source == "mnist" or any(any(folder.glob("resnet18-*.pth")) for folder in folders)
    return weights and any((root / source).rglob("train*.parquet"))


class Queue:
    """Runs in order, a few at a time, until nothing is left or the time is up."""

    def __init__(self, out: Path, done: Sequence[Path], *, at_once: int, device: str, longest: float = 1200.0) -> None:
        self.out, self.at_once, self.device, self.longest = out, at_once, device, longest
        self.known = [row for path in done for row in read_results(path)]
        self.running: dict[Wanted, tuple[subprocess.Popen[bytes], float]] = {}
        self.failed: list[Wanted] = []
        self.slow: set[str] = set()
        self._told: set[str] = set()
        self.took: dict[str, float] = {}

    def rows(self) -> list[Any]:
        """Return what is finished, rows of ended runs taken in first."""
        with Results(self.out) as results:
            for part in sorted(self.out.glob("parts/*/results.jsonl")):
                results.add(read_results(part))
            return [*self.known, *results.rows]

    def left(self) -> list[Wanted]:
        """Return what is neither finished nor failed, in order; nothing of a scenario whose engine gave up."""
        rows, skipped = self.rows(), self.failed
        return [run for run in queue() if run not in skipped and run.scenario not in self.slow and not any(map(run.is_row, rows))]

    def play(self, seconds: float, *, wait: bool = False) -> None:
        """Work until the time is up; runs that have not ended by then are stopped, and begin again another time."""
        deadline = time.monotonic() + seconds
        left = self.left()
        try:
            while left and time.monotonic() < deadline:
                for run in left:
                    if len(self.running) < self.at_once and run not in self.running and available(run) and self._fits(run, deadline):
                        self._start(run)
                if not self.running and not wait:
                    break
                time.sleep(1)
                self._stop_where_slow()
                if self._collect():
                    left = self.left()
        finally:
            for process, _ in self.running.values():
                process.terminate()
            for process, _ in self.running.values():
                try:
                    process.wait(PATIENCE)
                except subprocess.TimeoutExpired:
                    process.kill()
            self.rows()

    def _fits(self, run: Wanted, deadline: float) -> bool:
        """Say whether a run can end in time; a scenario that was not run yet needs at least as long as the quickest."""
        expected = self.took.get(run.scenario, min(self.took.values(), default=0.0)) * (4 if run.method in SLOW else 1)
        return time.monotonic() + expected < deadline

    def _start(self, run: Wanted) -> None:
        place = self.out / "parts" / run.name
        place.mkdir(parents=True, exist_ok=True)
        threads = max(1, (os.cpu_count() or 1) // (2 * self.at_once))  # four runs with all cores each did not end
        with (place / "log").open("wb") as log:
            env = {"OMP_NUM_THREADS": str(threads), **os.environ}
            process = subprocess.Popen(run.command(place, self.device), stdout=log, stderr=log, env=env)
        self.running[run] = (process, time.monotonic())
        say(f"begins {run.name}")

    def _stop_where_slow(self) -> None:
        """Stop runs that take too long or whose engine gave up on graphs; say it where one became slower in another way."""
        for run, (process, begun) in self.running.items():
            limit = self.longest * (4 if run.method in SLOW else 1)
            for line in self._warnings(run) if self.device.startswith("cuda") else ():
                if f"{run.name} {line}" not in self._told:
                    self._told.add(f"{run.name} {line}")
                    say(f"WARNING {run.name} says: {line}")
                if ONE_AFTER_THE_OTHER in line and run.scenario not in self.slow:
                    self.slow.add(run.scenario)
                    say(f"WARNING {run.scenario} is left out: it would take ten times the time")
            if time.monotonic() - begun > limit + PATIENCE:
                process.kill()
            elif run.scenario in self.slow or time.monotonic() - begun > limit:
                process.terminate()

    def _warnings(self, run: Wanted) -> list[str]:
        said = (self.out / "parts" / run.name / "log").read_text(errors="replace").splitlines()
        return [line.strip() for line in said if any(words in line for words in FALLBACKS)]

    def _collect(self) -> bool:
        """Note runs that ended; say whether any did."""
        ended = [(run, process.returncode, begun) for run, (process, begun) in self.running.items() if process.poll() is not None]
        for run, code, begun in ended:
            del self.running[run]
            took = time.monotonic() - begun
            if any(run.is_row(row) for row in self.rows()):
                self.took[run.scenario] = took / (4 if run.method in SLOW else 1)
                say(f"{took:6.0f} s {run.name}")
            else:
                self.failed.append(run)
                text = (self.out / "parts" / run.name / "log").read_text(errors="replace").strip()
                say(f"failed {run.name} after {took:.0f} s (code {code}): {text.splitlines()[-1] if text else 'no output'}")
        return bool(ended)


def say(text: str) -> None:
    """Print a line at once, with the time of day."""
    print(time.strftime("%H:%M:%S"), text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/paper"))
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--at-once", type=int, default=2, help="runs at a time")
    parser.add_argument(
        "--longest", type=float, default=1200.0, help="seconds after which a run is stopped (four times that for slow methods)"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--done", type=Path, nargs="*", help="rows that need not be made again (those of docs/results/data)")
    parser.add_argument("--wait", action="store_true", help="for data that are still to come")
    parser.add_argument("--list", action="store_true", help="say what is left, and do nothing")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    named = list(dict.fromkeys(f"docs/results/data/{run.scenario}.jsonl" for run in queue()))
    done = [Path(name) for name in named if Path(name).exists()] if args.done is None else args.done
    work = Queue(args.out, done, at_once=args.at_once, device=args.device, longest=args.longest)
    if args.list:
        for run in work.left():
            print(("" if available(run) else "no data: ") + " ".join(run.command(args.out / "parts" / run.name, args.device)[3:]))
        return
    say(f"{len(work.left())} runs left")
    work.play(args.seconds, wait=args.wait)
    say(f"{len(work.left())} runs left, {len(work.failed)} failed; rows in {args.out / 'results.jsonl'}")


if __name__ == "__main__":
    main()
