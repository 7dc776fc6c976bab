"""The runs that faults are injected into: settings, how they are started, and whether what came out is what an undisturbed run gives."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faults.forked import Forked

ROUNDS = 3
COMMON = [
    "--scenario", "rotated-digits", "--set", "scenario.groups=2", "--set", "scenario.clients_per_group=2", "--rounds", str(ROUNDS),
    "--local-epochs", "1", "--device", "cpu",
]  # fmt: skip
SETTINGS = {
    "fedavg, batched": ["--method", "fedavg", "--engine", "batched"],
    "emdcfl, sequential": ["--method", "emdcfl", "--engine", "sequential"],
    "ifca, sequential": ["--method", "ifca", "--engine", "sequential"],
    "cfl, 3 of 4 clients a round": ["--method", "cfl", "--engine", "sequential", "--participants", "3"],
    "emdcfl, batched": ["--method", "emdcfl", "--engine", "batched"],
    "emdcfl, 2 processes": ["--method", "emdcfl", "--engine", "sequential", "--workers", "2"],
}
FEW = "emdcfl, 2 processes"
"""Takes several times as long as the others, because its workers load Python anew: every fifteenth trial."""
PATIENCE = 600.0


ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "Agg", "NO_COLOR": "1", "COLUMNS": "160"}
"""One thread, as the promise of equal bits is made for it; no GPU."""


def turn(number: int) -> str:
    """Return the setting of a trial."""
    if number % 15 == 14:
        return FEW
    others = [setting for setting in SETTINGS if setting != FEW]
    return others[number % len(others)]


def command(setting: str, out: Path) -> list[str]:
    """Return the arguments of a first start."""
    return ["run", *COMMON, *SETTINGS[setting], "--out", str(out)]


def resume(setting: str, out: Path) -> list[str]:
    """Return the arguments of a resume: short where the directory knows its config, else the first command again."""
    known = (out / "state" / "run.json").exists()
    return ["run", "--out", str(out), "--resume"] if known else [*command(setting, out), "--resume"]


def start(arguments: list[str], log: Path, *, fault: tuple[str, int] | None = None) -> Forked:
    """Start the command in a session of its own; what it says goes to the log."""
    return Forked(arguments, log, fault)


def play(arguments: list[str], log: Path, *, fault: tuple[str, int] | None = None) -> tuple[int, str]:
    """Run the command to its end; return exit code and what it said."""
    before = log.stat().st_size if log.exists() else 0
    code = start(arguments, log, fault=fault).wait(PATIENCE)
    return code, log.read_bytes()[before:].decode(errors="replace")


def contents(out: Path) -> dict[str, Any]:
    """Return every file as something to compare: bytes, without the times of day, their checksums, the lock and the page showing times."""
    found: dict[str, Any] = {}
    for path in sorted(p for p in out.rglob("*") if p.is_file() and p.name not in (".lock", "report.html")):
        name = path.relative_to(out).as_posix()
        content = path.read_bytes()
        if name == "summary.json":
            found[name] = {k: v for k, v in json.loads(content).items() if k not in ("seconds", "sha256")}
        elif re.fullmatch(r"state/round-\d+\.json", name):
            found[name] = _body(content)
        else:
            found[name] = content
    return found


def _body(content: bytes) -> Any:
    try:
        body = json.loads(content)["body"]
        body["value"]["m"]["extra"]["m"].pop("seconds")
    except (ValueError, KeyError, TypeError):
        return content  # damaged
    return body


def differing(out: Path, reference: Path, *, older: bool = True) -> list[str]:
    """Return the names of files that differ; without ``older``, the round that is kept to fall back to does not count."""
    try:
        ours, theirs = contents(out), contents(reference)
    except (ValueError, KeyError, OSError) as error:
        return [f"{type(error).__name__}: {error}"]
    names = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    if not older:
        newest = f"state/round-{ROUNDS}.json"
        names = [name for name in names if not re.match(r"state/(round-|tensors/)", name) or name == newest]
    return names


def committed(out: Path) -> int:
    """Return the newest round on the disk, damaged or not."""
    return max((int(p.stem.partition("-")[2]) for p in (out / "state").glob("round-*.json")), default=0)


def first_played(said: str) -> int | None:
    """Return the first round that a command said it played."""
    found = re.search(r"^round +(\d+)/", said, re.MULTILINE)
    return int(found[1]) if found else None


def explained(code: int, said: str) -> bool:
    """Whether an error was explained in one line, without a traceback."""
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    return code == 2 and len(lines) == 1 and "Traceback" not in said


@dataclass
class Reference:
    """An undisturbed run: what must come out, how long it takes, how many file events it has."""

    setting: str
    path: Path
    seconds: float
    events: int


@dataclass
class Lab:
    """References, and a place to work in."""

    work: Path
    references: dict[str, Reference] = field(default_factory=dict)

    def prepare(self, setting: str) -> Reference:
        """Play the undisturbed run, counting its file events, and once more on the clock."""
        name = re.sub(r"\W+", "-", setting)
        kept, about = self.work / f"reference-{name}", self.work / f"reference-{name}.json"
        if not about.exists():
            shutil.rmtree(kept, ignore_errors=True)
            kept.parent.mkdir(parents=True, exist_ok=True)
            count, log = self.work / f"events-{name}", self.work / f"reference-{name}.log"
            os.environ["MORTAL_COUNT"] = str(count)
            code, said = play(command(setting, kept), log, fault=("count", 0))
            if code:
                raise RuntimeError(f"the undisturbed run of {setting} failed: {said[-500:]}")
            again = self.work / f"again-{name}"
            shutil.rmtree(again, ignore_errors=True)
            began = time.monotonic()
            code, said = play(command(setting, again), log)
            seconds = time.monotonic() - began
            if code or differing(again, kept):
                raise RuntimeError(f"two undisturbed runs of {setting} differ in {differing(again, kept)}: {said[-500:]}")
            shutil.rmtree(again)
            about.write_text(json.dumps({"seconds": seconds, "events": int(count.read_text())}), encoding="utf-8")
        told = json.loads(about.read_text(encoding="utf-8"))
        self.references[setting] = Reference(setting, kept, told["seconds"], told["events"])
        return self.references[setting]
