"""A script for ``test_compare.py``: a comparison undisturbed, then one that is killed again and again until it is done.

Prints one line of JSON per life: the configs whose rows were there when it began, those it began to run, and whether it was killed.
A life is doomed when it begins a certain run, and ends some processor time later: by then the rows of the runs before are written.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import ot  # noqa: F401
import sklearn  # noqa: F401
import tests.tiny
from tests.runs.crash import doomed, forked

from emdcfl.studies import compare
from emdcfl.studies.compare import Job, configs, parse_methods
from emdcfl.studies.results import read_results
from emdcfl.studies.table_files import write_tables

WANTED = configs(replace(tests.tiny.config(rounds=1)), parse_methods("oracle,fedavg,ifca"), [0, 1])


def life(out: Path, last: int = 0, after: float = 0.0) -> None:
    """Compare, noting each run as it begins, and write the table; the beginning of run ``last`` of this life is that of its end."""
    attempt, count = compare.attempt, 0

    def noted(job: Job, *rest: object) -> compare.Done:
        nonlocal count
        count += 1
        with (out / "begun").open("a") as file:
            file.write(job.key + "\n")
        if count == last:
            doomed(after)
        return attempt(job, *rest)

    compare.attempt = noted
    compare.compare(WANTED, out)
    write_tables(read_results(out), out)


def begun(out: Path) -> list[str]:
    return (out / "begun").read_text().split() if (out / "begun").exists() else []


def there(out: Path) -> list[str]:
    return [row["config"] for row in read_results(out)] if (out / "results.jsonl").exists() else []


def main(root: Path) -> None:
    rng = random.Random(root.name)
    whole, killed = root / "whole", root / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    share = forked(lambda: life(whole)).seconds / len(WANTED)
    for last in (2, 1, 2, 2, 0):
        before, asked = there(killed), len(begun(killed))
        after = share * rng.uniform(0.0, 0.9)
        dead = forked(lambda last=last, after=after: life(killed, last, after)).killed
        print(json.dumps({"there": before, "begun": begun(killed)[asked:], "killed": dead}))
        if not dead:
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]))
