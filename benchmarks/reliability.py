"""Inject faults and bad inputs into real runs, and count what finished: the rows of docs/results/tables/reliability.md, in one command.

    python benchmarks/reliability.py --out runs/reliability                        # a small sample of everything, some minutes
    python benchmarks/reliability.py --out runs/reliability --kills 180 --terms 40 --disk 60 --pairs 20 --damage 240 --inputs 3000 --jobs 16
    python benchmarks/reliability.py --out runs/reliability --flower 20            # needs the extra flower; a minute or more each

Every fault goes into a real ``emdcfl run`` on rotated digits, which is resumed until it is finished and compared byte for byte with an
undisturbed one. Rows are appended to ``faults.jsonl`` in --out as they come, and what is there is not done again; the table is printed and
written to ``table.md``. ``--table-only`` makes it from the rows alone. See benchmarks/faults/ for each kind.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from faults.runs import ENVIRONMENT, SETTINGS, Lab, command, play, turn

os.environ |= ENVIRONMENT  # before torch is imported

from faults import inputs, trials
from faults.forked import warm
from faults.table import ANY, DAMAGED, DISK, FLOWER, INPUTS, PAIR, TERM, WRITES, write_table
from rows import Row, append, read

Trial = tuple[str, int, str, Callable[..., Row]]


class Journal:
    """The rows so far, one line each; several processes may add to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.read()

    def read(self) -> None:
        self.rows = read(self.path)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        append(self.path, row)

    def done(self, kind: str) -> set[int]:
        return {row["index"] for row in self.rows if row["kind"] == kind}


def planned(given: argparse.Namespace, lab: Lab) -> Iterator[Trial]:
    """Yield every trial, the settings taking turns."""
    aimed = given.kills // 3
    kinds: list[tuple[str, int, Callable[..., Row]]] = [
        (ANY, given.kills - aimed, partial(trials.kill, aimed=False)),
        (WRITES, aimed, partial(trials.kill, aimed=True)),
        (TERM, given.terms, trials.terminate),
        (DISK, given.disk, trials.disk),
        (PAIR, given.pairs, trials.together),
        (DAMAGED, given.damage, partial(trials.damage, lab=lab)),
    ]
    for kind, times, function in kinds:
        for i in range(times):
            yield kind, i, turn(i), function


def inject(given: argparse.Namespace, journal: Journal, lab: Lab) -> None:
    """Do the trials that have no row yet, several at a time, in an order that leaves some of every kind if time runs out."""
    end = time.monotonic() + 60 * given.minutes
    todo = [trial for trial in planned(given, lab) if trial[1] not in journal.done(trial[0])]
    random.Random(given.seed).shuffle(todo)
    for setting in sorted({setting for _, _, setting, _ in todo}):
        lab.prepare(setting)
    for setting in sorted({setting for kind, _, setting, _ in todo if kind == DAMAGED}):
        trials.prepare_half(lab.references[setting], lab)

    def one(trial: Trial) -> None:
        if time.monotonic() < end:
            attempt(trial, given, journal, lab)

    share_out(todo, given.jobs, one)
    journal.read()


def share_out(todo: Sequence[Any], jobs: int, do: Callable[[Any], None]) -> None:
    """Let forks of this process each do a part; an error in one of them is an error here too."""
    workers = []
    for k in range(jobs):
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                for one in todo[k::jobs]:
                    do(one)
                code = 0
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(code)
        workers.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in workers]
    if any(codes):
        raise RuntimeError(f"workers ended with codes {codes}, so trials are missing; start again to do the rest")


def attempt(trial: Trial, given: argparse.Namespace, journal: Journal, lab: Lab) -> None:
    """Do one trial; keep its files if it failed."""
    kind, index, setting, function = trial
    place = Path(tempfile.mkdtemp(prefix="trial-", dir=lab.work))
    try:
        row = function(lab.references[setting], place, random.Random(f"{given.seed} {kind} {index}"))
    except Exception as error:
        row = {"faults": 1, "finished": False, "crash": True, "note": f"{type(error).__name__}: {error}"}
    if row.get("crash") or row.get("wrong") or row.get("lost") or not (row["finished"] or row.get("told")):
        kept = journal.path.parent / "failed" / f"{kind.replace(' ', '-').replace(',', '')}-{index}"
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(place, kept)
    shutil.rmtree(place, ignore_errors=True)
    journal.add({"kind": kind, "index": index, "setting": setting, **row})
    print(f"{kind} {index} ({setting}): {json.dumps(row)[:300]}", flush=True)


def feed(given: argparse.Namespace, journal: Journal, lab: Lab) -> None:
    """Give bad inputs to the command, in as many processes as there are jobs."""
    missing = sorted(set(range(given.inputs)) - journal.done(INPUTS))
    if not missing:
        return
    bad = lab.work / "bad-run"
    if not (bad / "results.jsonl").exists():
        shutil.rmtree(bad, ignore_errors=True)
        once = ["--scenario", "rotated-digits", "--methods", "fedavg", "--seeds", "0", "--set", "run.rounds=1"]
        for arguments in (command(next(iter(SETTINGS)), bad), ["compare", *once, "--out", str(bad)]):
            code, said = play(arguments, lab.work / "bad-run.log")
            if code:
                raise RuntimeError(said)
    share_out(missing, given.jobs, lambda index: journal.add({"kind": INPUTS, **inputs.attempt(index, given.seed, bad)}))
    journal.read()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/reliability"))
    parser.add_argument("--kills", type=int, default=6, help="kill -9 of local runs, a third aimed at writes")
    parser.add_argument("--terms", type=int, default=3, help="SIGTERM")
    parser.add_argument("--disk", type=int, default=4, help="full, read-only and broken disks")
    parser.add_argument("--pairs", type=int, default=2, help="two commands on one directory")
    parser.add_argument("--damage", type=int, default=12, help="damaged files")
    parser.add_argument("--inputs", type=int, default=120, help="bad inputs")
    parser.add_argument("--flower", type=int, default=0, help="kill -9 of servers and nodes of a real federation")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no fault is injected later than this")
    parser.add_argument("--table-only", action="store_true")
    given = parser.parse_args()
    given.out = given.out.resolve()
    journal = Journal(given.out / "faults.jsonl")
    if not given.table_only:
        lab = Lab(given.out / "work")
        lab.work.mkdir(parents=True, exist_ok=True)
        warm()
        inject(given, journal, lab)
        feed(given, journal, lab)
        if given.flower:
            from faults.flower import kills

            kills(given.flower, given.seed, given.out / "work", journal.done(FLOWER), lambda row: journal.add({"kind": FLOWER, **row}))
    text, clean = write_table(journal.rows)
    (given.out / "table.md").write_text(text, encoding="utf-8")
    print(text)
    sys.exit(0 if clean else 1)


if __name__ == "__main__":
    main()
