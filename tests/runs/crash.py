"""A script for ``test_runner.py``: play one run undisturbed, then again and again, killed at some moment and resumed.

Every run is a fork of this process, which has imported everything and started no thread, so that a moment costs no start-up.
Moments are told in seconds of the run's own processor time, so that a busy machine moves none of them.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import ot  # noqa: F401
import sklearn  # noqa: F401
import tests.tiny

from emdcfl.runs import outputs, runner
from emdcfl.runs.config import Choice
from emdcfl.runs.store import run_store

vars(outputs).update(tests.tiny.SKETCHES)
os.fsync = lambda file: None  # processes are killed here, not machines
CONFIG = replace(tests.tiny.config(rounds=2, participants=3), model=Choice("mlp", {"hidden": [64]}))
"""Large enough that its states are in files of their own."""


@dataclass(frozen=True)
class End:
    """How a fork ended, and the processor time it took."""

    killed: bool
    seconds: float


def forked(work: Callable[[], None], after: float | None = None) -> End:
    """Run ``work`` in a fork, which the kernel ends without a word once it has had so many seconds of processor time."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            if after is not None:
                doomed(after)
            work()
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    _, status, usage = os.wait4(pid, 0)
    if not os.WIFSIGNALED(status) and os.WEXITSTATUS(status) != 0:
        sys.exit("a run failed")
    return End(os.WIFSIGNALED(status), usage.ru_utime + usage.ru_stime)


def doomed(seconds: float) -> None:
    """End this process after so much more of its processor time: a signal nobody handles, like SIGKILL in all but its number."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, max(seconds, 1e-3))


def play(out: Path, resume: bool = False) -> None:
    runner.run(CONFIG, out, resume=resume)


def until_file(out: Path, number: int, *, before: bool) -> None:
    """Play, and die just before or just after the file of this number is put in its place."""
    move, numbers = os.replace, itertools.count(1)

    def counting(source: str, target: str) -> None:
        mine = next(numbers)  # meanwhile, another thread may put a file in its place
        if mine == number and before:
            os.kill(os.getpid(), signal.SIGKILL)
        move(source, target)
        if mine == number:
            os.kill(os.getpid(), signal.SIGKILL)

    os.replace = counting
    play(out)


def count_files(out: Path, report: Path) -> None:
    move, names = os.replace, []

    def noting(source: str, target: str) -> None:
        move(source, target)
        names.append(Path(target).relative_to(out).as_posix())

    os.replace = noting
    play(out)
    report.write_text(json.dumps(names))


def main(root: Path) -> None:
    root.mkdir()
    rng = random.Random(root.name)
    duration = forked(lambda: count_files(root / "reference", root / "files.json")).seconds
    files = json.loads((root / "files.json").read_text())
    first = files.index("state/round-1.json") + 1
    moments = [1, rng.randrange(2, first), first, *sorted(rng.sample(range(first + 1, len(files)), 2)), len(files)]
    killed = []
    for i, number in enumerate(moments):
        out = root / f"file-{number}"
        killed.append(forked(lambda out=out, number=number, i=i: until_file(out, number, before=bool(i % 2))).killed)
        forked(lambda out=out: play(out, resume=True))
    for i in range(4):
        out, after = root / f"time-{i}", duration * rng.uniform(0.02, 0.95)
        while not forked(lambda out=out: play(out), after=after).killed:
            shutil.rmtree(out)  # it took less time than the first
            after /= 2
        killed.append(True)
        forked(lambda out=out: play(out, resume=True))
    out = root / "twice"  # the second life is cut short too
    forked(lambda: until_file(out, first + 2, before=False))
    forked(lambda: play(out, resume=True), after=duration * 0.2)
    forked(lambda: play(out, resume=True))
    print(json.dumps({"killed": sum(killed), "tried": len(killed)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]) / "small")
    run_store.LARGE = outputs.OFTEN = 0  # written beside the next round, and the models with the last one
    main(Path(sys.argv[1]) / "large")
