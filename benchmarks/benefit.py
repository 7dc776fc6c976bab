"""Do groups pay? Grouping by benefit beside the paper's rule, the calibrated tolerance, other methods and every simple strategy.

    EMDCFL_DATA=… python benchmarks/benefit.py --out runs/benefit --jobs 2
    python benchmarks/benefit.py --list

Natural sites (watch, hapt, chem97) and digits whose groups are known, or absent. The seed draws the data's division too where it is random.
The defaults were chosen with seeds 0 to 2 and 10 to 13; digits get more seeds because a site tests on 18 to 45 images.
Rows go to ``results.jsonl`` of ``--out``; runs whose row is there are not repeated. ``--publish`` writes what ``benchmarks/results.py``
makes the tables from: rows without rounds, bytes and single sites, and without settings that are their defaults.
``--public`` compares the simple strategies and EMD-CFL on the folders that ``benchmarks/public_sites.py`` wrote instead, and with
``--advice`` it says what ``emdcfl run --data`` advises there, and how far that training is behind the best on the same test data.
``--place`` trains without some sites and places them, with their labels and without. ``--chance`` says how often a split that gains nothing
is believed, in per cent of simulated votes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.calibration import Case, sites
from benchmarks.rows import append, read

from benchmarks import public_sites
from emdcfl.api.fitting import configure
from emdcfl.core import tasks
from emdcfl.core.metric import metric_of, score_of
from emdcfl.data.types import Scenario
from emdcfl.methods import find
from emdcfl.methods.emdcfl.client.losses import moments_of
from emdcfl.methods.emdcfl.member_losses import MemberLosses
from emdcfl.runs.config import OWN_FILES, Choice, Config, override
from emdcfl.runs.new_sites.nearest import fits, groups_of, mixture, unlabelled, with_site
from emdcfl.runs.new_sites.place import place_site
from emdcfl.runs.plan import plan
from emdcfl.runs.runner import run
from emdcfl.runs.verdict.advice import BASELINES, LOGISTIC, advice, scores_of_sites, used
from emdcfl.runs.verdict.baselines import run_baselines
from emdcfl.runs.verdict.intervals import difference
from emdcfl.studies.compare import compare, configs, parse_methods, parse_seeds
from emdcfl.studies.results import commit, hardware, read_results

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


STRANGERS = "4 rotations × 3 sites, one rotation left out"
PLACED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "4 rotations × 3 sites": CASES["4 rotations × 3 sites"],
    STRANGERS: CASES["4 rotations × 3 sites"],
    "tables, two laws and a stranger": ("tables", {"rotate": True}),
    "tables, labels permuted and a stranger": ("tables", {"permute": True}),
    "watch": ("watch", {}),
    "hapt": ("hapt", {}),
}
"""Cases whose sites are placed → scenario and options, or those of ``calibration.Case``."""


def wanted(case: str, methods: str, seeds: Sequence[int]) -> list[Config]:
    """Return the runs of a case."""
    name, options = CASES[case]
    found = []
    for seed in seeds:
        drawn = {"data_seed": seed} if name in DRAWN or "train_rows" in options else {}
        base = override(replace(Config(), scenario=Choice(name, {**options, **drawn})), {"engine.threads": 1})
        found += configs(base, parse_methods(methods), [seed])
    return found


def public(case: str, home: Path, methods: str, seeds: Sequence[int]) -> list[Config]:
    """Return the runs of a public data set, as ``emdcfl compare --data`` has them."""
    found = public_sites.CASES[case]
    options = {"path": str(home / public_sites.folder(case)), "label": found.label, **found.flags}
    base = override(replace(Config(), scenario=Choice(OWN_FILES, options)), {"engine.threads": 1})
    return configs(base, parse_methods(methods), seeds)


def advise(config: Config) -> dict[str, Any]:
    """Run a case with its baselines; return the training that is advised, or for now, and its score less that of the best."""
    result = run(config)
    others = {name: other.summary for name, other in run_baselines(result).items()}
    found = advice(result.summary, others)
    assert found is not None
    trained = {"this run": used(result.summary), **others}
    named = found.choice
    if named == "undecided":
        told = found.headline.partition(":")[0].removesuffix(", the simplest choice")
        named = max((name for name in others if told.endswith(BASELINES[name])), key=lambda name: len(BASELINES[name]), default="this run")
    scores = {name: scores_of_sites(one) for name, one in trained.items()}
    frequent = others.get(LOGISTIC, {}).get("most_frequent")
    best = max(trained, key=lambda name: score_of(trained[name])["mean"])
    behind = None if named == "none" else difference(scores[named], scores[best])
    return {
        "seed": config.run.seed,
        "k": result.summary["k"],
        "choice": found.choice,
        "named": named,
        "best": best,
        "behind": None if behind is None else [round(end, 6) for end in (behind.mean, behind.low, behind.high)],
        "scores": {name: round(score_of(one)["mean"], 6) for name, one in trained.items()},
        "most_frequent": None if frequent is None else round(mean(frequent["sites"]), 6),
        "headline": found.headline,
        "commit": commit(),
        "hardware": hardware("cpu"),
    }


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
    metric, score = metric_of(row).value, score_of(row)
    found = {"mean": round(score["mean"], 6)}
    if row["settings"]["scenario"]["name"] == OWN_FILES:  # a public data set, whose differences get intervals
        settings["scenario"] = {**settings["scenario"], "path": Path(settings["scenario"]["path"]).name}
        sites = next(iter(score["variants"].values()))
        found |= {name: [round(value, 5) for value in sites[name]] for name in ("sites", "errors", "tested") if name in sites}
    return kept | {metric: found, "seconds": seconds, "settings": settings}


def left_out(case: str, seed: int) -> Iterator[tuple[Config, Scenario, list[str]]]:
    """Yield configs with their sites, and those of them that take no part in training."""
    name, options = PLACED[case]
    if name == "tables":
        drawn = Case([400] * 9, [0, 0, 0, 1, 1, 1, 0, 1, 2], **options)
        config, scenario = configure(sites(drawn, seed), None, "emdcfl", {"run.seed": seed, "method.grouping": "benefit"})
        assert scenario is not None
        yield config, scenario, [site.name for site in scenario.sites[6:]]
        return
    drawn_by = {"data_seed": seed} if name in DRAWN else {}
    config = override(replace(Config(), scenario=Choice(name, {**options, **drawn_by})), {"run.seed": seed, "method.grouping": "benefit"})
    whole = plan(config).scenario
    names = [site.name for site in whole.sites]
    if case == STRANGERS:
        folds = [names[i : i + 3] for i in range(0, len(names), 3)]
    elif name == "watch":
        folds = [names[i : i + 2] for i in range(0, len(names), 2)]
    else:
        folds = [names[i :: 3 if name == "digit-sites" else 10] for i in range(3 if name == "digit-sites" else 10)]
    for held in folds:
        yield config, whole, held


def placements(case: str, seed: int, done: Collection[str]) -> Iterator[dict[str, Any]]:
    """Yield where each site that took no part is placed, and how well the models serve it; but for those that are done."""
    for config, whole, held in left_out(case, seed):
        missing = set(held).difference(done)
        if not missing:
            continue
        rest = replace(whole, sites=tuple(site for site in whole.sites if site.name not in held), groups=None)
        found = plan(override(config, {"engine.threads": 1, "personalize.mode": "off"}), rest)
        result, truth = run(found), whole.groups or {}
        groups = groups_of(result.serving, result.clients)
        for site in (site for site in whole.sites if site.name in missing):
            placed = place_site(found, site, result.serving)
            with with_site(found, unlabelled(site)).federation() as fed:
                fed.begin(1)
                near = fits(groups, fed, [site.name])[site.name]
                models, weights = mixture(groups, near)
                tested = fed.run(tasks.test, {site.name: {"models": models, "weights": weights}})[site.name]
            chosen = min(near, key=lambda k: near[k].misfit)
            scores = {c.cluster: c.score for c in placed.candidates}
            shares = {k: mean([truth[c] == truth[site.name] for c in members]) if truth else None for k, (_, members) in groups.items()}
            yield {
                "case": case,
                "seed": seed,
                "site": site.name,
                "known": not truth or any(shares.values()),
                "alone": placed.alone,
                "best": max(scores.values()),
                "cluster": placed.cluster,
                "linked": any(c.ratio < 1 for c in placed.candidates),
                "score": scores.get(placed.cluster),
                "share": shares.get(placed.cluster),
                "nearest": scores[chosen],
                "nearest_share": shares[chosen],
                "mixture": next(iter(tested["accuracy"].values())),
                "mixture_share": round(sum(near[k].weight * shares[k] for k in near), 9) if truth else None,
                "unsure": round(near[chosen].unsure, 2),
                "commit": commit(),
                "hardware": hardware("cpu"),
            }


def place(file: Path, cases: Sequence[str], seeds: Sequence[int]) -> None:
    """Add a line per site that takes no part and has none yet."""
    there = read(file)
    for case, seed in product(cases, seeds):
        done = {row["site"] for row in there if (row["case"], row["seed"]) == (case, seed)}
        for row in placements(case, seed, done):
            append(file, row)


def believed(clients: int, samples: int, skewed: bool, draws: int) -> float:
    """Share of splits into halves that pay although no client's expected loss changes; skewed: their new losses are exponential."""
    rng, names = np.random.default_rng(0), tuple(f"c{i}" for i in range(clients))
    halves, found = [names[: clients // 2], names[clients // 2 :]], 0
    for _ in range(draws):
        new = 0.5 * rng.exponential(size=(clients, samples)) if skewed else 3 + 0.5 * rng.normal(size=(clients, samples))
        old = np.full_like(new, 0.5) if skewed else 3 + 0.5 * rng.normal(size=(clients, samples))
        losses = torch.from_numpy(np.stack([old, new], 1))
        votes = MemberLosses({c: moments_of(own, own * 0) for c, own in zip(names, losses, strict=True)}, [names, *halves])
        found += votes.pays([names], halves, find("emdcfl").evidence)
    return found / draws


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/benefit"))
    parser.add_argument("--seeds", default="6-8", help="of the comparison")
    parser.add_argument("--digit-seeds", default="3-9,14-16", help="of the comparison on digits")
    parser.add_argument("--group-seeds", default="0-9", help="of the rotated digits, grouping by benefit alone")
    parser.add_argument("--equal-seeds", default="0-19", help="of the equal sites, grouping by benefit alone")
    parser.add_argument("--cases", nargs="*", choices=[*CASES, *public_sites.CASES], help="with --public: of these; all by default")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, help="begin no run after so long")
    parser.add_argument("--publish", type=Path, metavar="FILE", help="write the finished rows, and run nothing")
    parser.add_argument("--public", type=Path, metavar="FOLDER", help="run these cases of public_sites.py instead, seeds 0 to 2")
    parser.add_argument("--advice", type=Path, metavar="FILE", help="with --public: write what runs advise, and compare nothing")
    parser.add_argument("--list", action="store_true", help="say what would run, and do nothing")
    parser.add_argument("--place", type=Path, metavar="FILE", help="write where sites that take no part are placed, and run nothing else")
    parser.add_argument("--place-cases", nargs="*", default=list(PLACED), choices=list(PLACED))
    parser.add_argument("--place-seeds", default="0-2")
    parser.add_argument("--chance", type=int, metavar="DRAWS", help="say how often a split is believed by chance, and run nothing else")
    args = parser.parse_args()
    if args.chance:
        for skewed, clients in product((False, True), (2, 3, 6, 12)):
            rates = [f"{m}: {100 * believed(clients, m, skewed, args.chance):.2f}" for m in (4, 8, 16, 64, 256)]
            print(f"{'skewed' if skewed else 'normal'}, {clients} clients; validation samples: per cent  {', '.join(rates)}")
        return
    if args.place:
        place(args.place, args.place_cases, parse_seeds(args.place_seeds))
        return
    known = public_sites.CASES if args.public else CASES
    cases = args.cases or list(known)
    if unknown := [case for case in cases if case not in known]:
        parser.error(f"--cases: expected some of {', '.join(known)}, got {unknown[0]}")
    if args.public and args.advice:
        done = {(row["case"], row["seed"]) for row in read(args.advice)}
        for seed, case in product(range(3), cases):
            if (case, seed) not in done:
                append(args.advice, {"case": case, **advise(public(case, args.public, "emdcfl+ft", [seed])[0])})
        return
    if args.public:
        runs = [run for case in cases for run in public(case, args.public, f"{SIMPLE},{EMDCFL}", range(3))]
    else:
        seeds = {case: parse_seeds(args.digit_seeds if CASES[case][0] == "digit-sites" else args.seeds) for case in cases}
        runs = [run for case in cases for run in wanted(case, f"{SIMPLE},{EMDCFL}", seeds[case])]
        for case in cases:
            if "rotations" in case or "groups of" in case:
                runs += wanted(case, "emdcfl+ft", parse_seeds(args.group_seeds))
            if "equal" in case:
                runs += wanted(case, "emdcfl+ft", parse_seeds(args.equal_seeds))
        runs += [run for case in cases for run in wanted(case, OTHERS, seeds[case])]
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
