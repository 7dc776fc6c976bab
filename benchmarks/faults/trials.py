"""One fault each: injected into a run, which is then resumed until it is finished and compared with the undisturbed one."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults.forked import Forked
from faults.runs import PATIENCE, Lab, Reference, command, committed, differing, explained, first_played, play, resume, start

Row = dict[str, Any]
ERRORS = ("ENOSPC", "EDQUOT", "EROFS", "EIO")
ATTEMPTS = 6
"""Times a moment is drawn anew because the run had ended before it."""

MISSED: Row = {"faults": 0, "finished": True, "wrong": [], "lost": False, "crash": False, "note": "always ended before the moment"}

DAMAGE: dict[str, Callable[[bytes, random.Random], bytes | None]] = {
    "cut off": lambda b, r: b[: r.randrange(len(b))] if b else b"",
    "a bit flipped": lambda b, r: _flipped(b, r),
    "half overwritten with zeros": lambda b, r: b[: len(b) // 2] + bytes(len(b) - len(b) // 2),
    "emptied": lambda b, r: b"",
    "deleted": lambda b, r: None,
    "a block twice": lambda b, r: b[: len(b) // 2] + b[len(b) // 4 :],
}


def _flipped(content: bytes, rng: random.Random) -> bytes:
    if not content:
        return b"\x01"
    changed = bytearray(content)
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def kill(reference: Reference, work: Path, rng: random.Random, *, aimed: bool) -> Row:
    """Kill -9 at a random moment, or at a random write; in a third of the cases the resumed run is killed as well."""
    for attempt in range(ATTEMPTS):
        out, log = work / f"run-{attempt}", work / f"log-{attempt}"
        notes, sessions = [], []
        for life in range(2 if rng.random() < 1 / 3 else 1):
            arguments = resume(reference.setting, out) if life else command(reference.setting, out)
            fault = (rng.choice(["before", "after", "torn"]), rng.randrange(1, reference.events + 1)) if aimed else None
            moment = rng.uniform(0, reference.seconds)
            process = start(arguments, log, fault=fault)
            if not _killed(process, None if aimed else moment):
                break
            sessions.append(process.pid)
            notes.append(f"after {moment:.2f} s" if fault is None else f"{fault[0]} event {fault[1]}")
        if not sessions:
            continue  # the run had ended before: another moment
        there = committed(out)
        code, said = play(resume(reference.setting, out), log)  # at once: nothing of the dead process may be in the way
        again = first_played(said)
        return {
            "faults": len(sessions), "finished": code == 0, "wrong": differing(out, reference.path) if code == 0 else [],
            "lost": there > 0 and again is not None and again <= there, "crash": "Traceback" in said, "orphans": not _gone(sessions),
            "note": ", ".join(notes), "committed": there, "said": "" if code == 0 else said[-400:],
        }  # fmt: skip
    return dict(MISSED)


def _killed(process: Forked, after: float | None) -> bool:
    try:
        process.wait(PATIENCE if after is None else after)
    except subprocess.TimeoutExpired:
        os.kill(process.pid, signal.SIGKILL)  # the command alone: its workers must notice by themselves
    return process.wait() == -signal.SIGKILL


def _gone(sessions: list[int]) -> bool:
    """Whether no process of these sessions is left, at the latest after ten seconds."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        if not any(_session(p) in sessions for p in Path("/proc").glob("[0-9]*/stat")):
            return True
        time.sleep(0.1)
    return False


def _session(stat: Path) -> int:
    try:
        fields = stat.read_text(encoding="utf-8", errors="replace").rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return 0
    return 0 if fields[0] == "Z" else int(fields[3])


def terminate(reference: Reference, work: Path, rng: random.Random) -> Row:
    """SIGTERM at a random moment after the start of Python: exit code 143, nothing half-written, resumable."""
    out, log = work / "run", work / "log"
    for _ in range(ATTEMPTS):
        shutil.rmtree(out, ignore_errors=True)
        process = start(command(reference.setting, out), log)
        try:
            code = process.wait(rng.uniform(0.1, 1) * reference.seconds)
            continue
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            code = process.wait()
        if code != 0:
            break
    else:
        return dict(MISSED)
    said = log.read_text(encoding="utf-8", errors="replace")
    halves = [p.name for p in out.rglob(".tmp-*")]
    early = code == -signal.SIGTERM and not out.exists()  # Python had not reached the program yet
    there = committed(out)
    wrong = [] if code == 143 or early else [f"exit code {code}"]
    code, resumed = play(resume(reference.setting, out), log)
    again = first_played(resumed)
    wrong += halves + (differing(out, reference.path) if code == 0 else [])
    lost = there > 0 and again is not None and again <= there
    return {
        "faults": 1,
        "finished": code == 0,
        "wrong": wrong,
        "lost": lost,
        "crash": "Traceback" in said + resumed,
        "note": f"round {there}",
    }


def disk(reference: Reference, work: Path, rng: random.Random) -> Row:
    """The disk refuses from a random write on: one line, and after the cause is gone the run goes on."""
    out, log = work / "run", work / "log"
    error, event = rng.choice(ERRORS), rng.randrange(1, reference.events + 1)
    code, said = play(command(reference.setting, out), log, fault=(error, event))
    met = code != 0
    there = committed(out)
    crash = met and not explained(code, said)
    code, resumed = play(resume(reference.setting, out), log)
    again = first_played(resumed)
    lost = there > 0 and again is not None and again <= there
    return {
        "faults": int(met), "finished": code == 0, "wrong": differing(out, reference.path) if code == 0 else [], "lost": lost,
        "crash": crash or "Traceback" in resumed, "note": f"{error} from event {event}", "said": said[-400:] if crash else "",
    }  # fmt: skip


def together(reference: Reference, work: Path, rng: random.Random) -> Row:
    """Two commands on one directory: one runs, the other is told so; a killed owner's lock holds nobody up."""
    out, log, second = work / "run", work / "log", work / "log-2"
    first = start(command(reference.setting, out), log)
    end = time.monotonic() + 120
    while not (out / "state" / "round-1.json").exists() and first.poll() is None and time.monotonic() < end:
        time.sleep(0.01)
    code, said = play(resume(reference.setting, out), second)
    busy = first.poll() is None or "in use by another emdcfl run" in said
    told = explained(code, said) and "in use by another emdcfl run" in said
    if first.poll() is None and rng.random() < 0.5:
        os.kill(first.pid, signal.SIGKILL)
    first.wait()
    there = committed(out)
    code, resumed = play(resume(reference.setting, out), log)
    again = first_played(resumed)
    return {
        "faults": int(busy), "finished": code == 0, "wrong": differing(out, reference.path) if code == 0 else [],
        "lost": again is not None and again <= there, "crash": (busy and not told) or "Traceback" in said + resumed,
        "note": "two commands", "said": said[-400:] if busy and not told else "",
    }  # fmt: skip


def damage(reference: Reference, work: Path, rng: random.Random, lab: Lab) -> Row:
    """Damage a file of a run, finished or stopped half-way: it is repaired, or the round before is taken, or the error says what to do."""
    out, log = work / "run", work / "log"
    finished = rng.random() < 0.4
    shutil.copytree(reference.path if finished else _half(reference, lab), out)
    names = sorted(p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file() and p.name != ".lock")
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(_kind(name), []).append(name)
    kind = rng.choice(sorted(kinds))
    victim, how = rng.choice(kinds[kind]), rng.choice(sorted(DAMAGE))
    path = out / victim
    changed = DAMAGE[how](path.read_bytes(), rng)
    if changed is None:
        path.unlink()
    else:
        path.write_bytes(changed)
    there = committed(out)
    code, said = play(resume(reference.setting, out), log)
    again = first_played(said)
    told = explained(code, said)
    lost = code == 0 and again is not None and again < there  # one round back is played again, not lost
    return {
        "faults": 1, "finished": code == 0, "told": told, "wrong": differing(out, reference.path, older=False) if code == 0 else [],
        "lost": lost, "crash": code != 0 and not told, "note": f"{victim}: {how} ({'finished' if finished else 'half-way'})",
        "victim": kind, "damage": how, "said": "" if code == 0 else said[-400:],
    }  # fmt: skip


def _kind(name: str) -> str:
    for beginning in ("state/round-", "state/tensors/", "models/"):
        if name.startswith(beginning) and not name.endswith("index.json"):
            return beginning
    return name


def _half(reference: Reference, lab: Lab) -> Path:
    """Return a run that was stopped right after a round in the middle, made once."""
    place = lab.work / f"half-{reference.path.name}"
    if not place.exists():
        raise RuntimeError(f"{place}: prepare it first")
    return place


def prepare_half(reference: Reference, lab: Lab) -> None:
    """Play until a round in the middle is committed, and stop there (kill -9)."""
    place = lab.work / f"half-{reference.path.name}"
    for number in range(reference.events * 6 // 10, reference.events, max(1, reference.events // 15)):
        if place.exists():
            return
        trial = lab.work / f"{place.name}-trial"
        shutil.rmtree(trial, ignore_errors=True)
        play(command(reference.setting, trial), lab.work / f"{place.name}.log", fault=("after", number))
        if 2 <= committed(trial) < committed(reference.path):
            trial.rename(place)
    if not place.exists():
        raise RuntimeError(f"{reference.setting}: no moment in the middle found")
