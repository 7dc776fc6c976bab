"""A script for ``test_compare.py``: a comparison undisturbed, then one that is killed (SIGKILL) again and again until it is done.

Prints one line of JSON per life: the configs whose rows were there when it began, and those it began to run.
"""

from __future__ import annotations

import json
import random
import sys
import time
from dataclasses import replace
from pathlib import Path

import ot  # noqa: F401
import sklearn  # noqa: F401
import tests.tiny
from tests.experiments.crash import forked

from emdcfl.experiments import compare
from emdcfl.experiments.compare import Job, configs, parse_methods
from emdcfl.experiments.results import read_results
from emdcfl.experiments.tables import write_tables

WANTED = configs(replace(tests.tiny.config(rounds=1)), parse_methods("oracle,fedavg,ifca"), [0, 1])


def life(out: Path) -> None:
    """Compare, noting each run as it begins, and write the table."""
    attempt = compare.attempt

    def noted(job: Job, *rest: object) -> compare.Done:
        with (out / "begun").open("a") as file:
            file.write(job.key + "\n")
        return attempt(job, *rest)  # type: ignore[arg-type]

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
    start = time.perf_counter()
    forked(lambda: life(whole))
    duration = time.perf_counter() - start
    for number in range(40):
        before, asked = there(killed), len(begun(killed))
        patience = None if number == 39 else duration * rng.uniform(0.05, 0.6)
        dead = forked(lambda: life(killed), after=patience)
        print(json.dumps({"there": before, "begun": begun(killed)[asked:], "killed": dead}))
        if not dead:
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]))
