"""Do groups pay? Grouping by benefit beside the paper's rule, the calibrated tolerance, other methods and every simple strategy.

    EMDCFL_DATA=… python benchmarks/benefit.py --out runs/benefit --jobs 2
    python benchmarks/benefit.py --list

Natural sites (watch, hapt, chem97) and digits whose groups are known, or absent. The seed draws the data's division too where it is random.
The defaults were chosen with seeds 0 to 2 and 10 to 13; digits get more seeds because a site tests on 18 to 45 images.
Rows go to ``results.jsonl`` of ``--out``; runs whose row is there are not repeated. ``--publish`` writes what ``benchmarks/results.py``
makes the tables from: rows without rounds, bytes and single sites, and without settings that are their defaults.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from emdcfl.methods import find
from emdcfl.runs.config import Choice, Config, override
from emdcfl.studies.compare import compare, configs, parse_methods, parse_seeds
from emdcfl.studies.results import read_results

SIMPLE = "local,fedavg+ft"
EMDCFL = "emdcfl:tolerance=0.025,emdcfl:grouping=neighbourhoods,emdcfl+ft"
OTHERS = "ifca,cfl,fedem:rate=times-k,pfedgraph"
TURNS = [0, 90, 180, 270]

CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "chem97": ("chem97", {}),
    "hapt": ("hapt", {}),
    "hapt-later": ("hapt-later", {}),
    "watch": ("watch", {}),
    "watch, 14 training rows": ("watch", {"train_rows": 14}),
    "4 rotations × 2 sites": ("digit-sites", {"angles": TURNS, "clients_per_group": 2}),
    "4 rotations × 3 sites": ("digit-sites", {"angles": TURNS, "clients_per_group": 3}),
    "4 rotations × 5 sites": ("digit-sites", {"angles": TURNS, "clients_per_group": 5}),
    "12 equal sites": ("digit-sites", {"angles": [0], "clients_per_group": 12}),
    "12 sites turned by 0° to 165°": ("digit-sites", {"angles": list(range(0, 180, 15)), "clients_per_group": 1}),
    "labels shifted at 4 of 8 sites": ("digit-sites", {"angles": [0], "label_shifts": [0, 1], "clients_per_group": 4}),
    "groups of 1, 3 and 12 sites": ("digit-sites", {"angles": [0, 90, 180], "clients_per_group": [1, 3, 12]}),
}
"""What the tables call a case → its scenario and options."""

DRAWN = ("digit-sites", "chem97")
"""Scenarios whose division into train, validation and test is drawn."""


def wanted(case: str, methods: str, seeds: Sequence[int]) -> list[Config]:
    """Return the runs of a case."""
    name, options = CASES[case]
    found = []
    for seed in seeds:
        drawn = {"data_seed": seed} if name in DRAWN or "train_rows" in options else {}
        base = override(replace(Config(), scenario=Choice(name, {**options, **drawn})), {"engine.threads": 1})
        found += configs(base, parse_methods(methods), [seed])
    return found


def publish(out: Path, file: Path) -> None:
    """Write the rows of a comparison, each without what no table needs, and settings without those that are the same in all."""
    with file.open("w", encoding="utf-8") as lines:
        for row in read_results(out / "results.jsonl"):
            lines.write(json.dumps(slim(row), separators=(",", ":")) + "\n")


def slim(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the tables need of a row, and where it comes from."""
    name = row["method"]
    own = {key: value for key, value in row["settings"]["method"].items() if key == "name" or value != getattr(find(name), key, None)}
    settings = {table: row["settings"][table] for table in ("scenario", "personalize") if table in row["settings"]} | {"method": own}
    seconds = {phase: row["seconds"][phase] for phase in ("train", "embed", "transport", "evaluate")}
    seconds["evaluate"] += row["seconds"].get("decide", 0.0)
    kept = {key: row[key] for key in ("scenario", "method", "seed", "k", "ari", "commit", "hardware")}
    return kept | {"accuracy": {"mean": round(row["accuracy"]["mean"], 6)}, "seconds": seconds, "settings": settings}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/benefit"))
    parser.add_argument("--seeds", default="6-8", help="of the comparison")
    parser.add_argument("--digit-seeds", default="3-9,14-16", help="of the comparison on digits")
    parser.add_argument("--group-seeds", default="0-9", help="of the rotated digits, grouping by benefit alone")
    parser.add_argument("--equal-seeds", default="0-19", help="of the equal sites, grouping by benefit alone")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, help="begin no run after so long")
    parser.add_argument("--publish", type=Path, metavar="FILE", help="write the finished rows, and run nothing")
    parser.add_argument("--list", action="store_true", help="say what would run, and do nothing")
    args = parser.parse_args()
    seeds = {case: parse_seeds(args.digit_seeds if CASES[case][0] == "digit-sites" else args.seeds) for case in args.cases}
    runs = [run for case in args.cases for run in wanted(case, f"{SIMPLE},{EMDCFL}", seeds[case])]
    for case in args.cases:
        if "rotations" in case or "groups of" in case:
            runs += wanted(case, "emdcfl+ft", parse_seeds(args.group_seeds))
        if "equal" in case:
            runs += wanted(case, "emdcfl+ft", parse_seeds(args.equal_seeds))
    runs += [run for case in args.cases for run in wanted(case, OTHERS, seeds[case])]
    if args.publish:
        publish(args.out, args.publish)
        return
    if args.list:
        for run in runs:
            print(run.scenario.name, dict(run.scenario.options), run.method.name, dict(run.method.options), run.run.seed)
        return
    outcome = compare(runs, args.out, jobs=args.jobs, time_limit=args.seconds)
    print(f"{outcome.found} rows were there, {outcome.ran} are new, {len(outcome.failed)} failed, {outcome.left} left; {args.out}")
    for failed in outcome.failed:
        print(f"{failed.job}: {failed.error.strip().splitlines()[-1]}")


if __name__ == "__main__":
    main()
