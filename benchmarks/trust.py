"""What one liar does to the others, and what a backdoor does to its targets.

    python benchmarks/trust.py --what liars --out liars.jsonl --jobs 16
    python benchmarks/trust.py --what backdoor --out backdoor.jsonl --jobs 6
    python benchmarks/trust.py --table liars.jsonl backdoor.jsonl

``liars``: Rotated MNIST, 2 rotations × 5 clients, at most 600/128 train/validation samples each (the small scale), every client's whole
test slice. The first client lies in one way at a time; the mean test accuracy of the other nine is compared with that of a run in which it
is not there. ``backdoor``: Backdoor MNIST at small scale, the targets' accuracy on clean and on triggered images.

A line per run goes to ``--out``; runs that are there with the same options are not repeated. Needs EMDCFL_DATA.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the liars are the tests'

import torch
from benchmarks.rows import Row, append, key, read
from tests.trust.liars import LIES, LyingFederation, flipped, honest, more_samples, without

from emdcfl.clustering import adjusted_rand
from emdcfl.core.tasks import Training
from emdcfl.data import scenarios
from emdcfl.data.scenarios.plan import CNN_SCALES, PAPER_TRAINING, Share, shrink
from emdcfl.data.scenarios.rotated import MNIST, mnist_shares
from emdcfl.data.sources import load
from emdcfl.data.transforms import rotate
from emdcfl.data.types import Scenario, Site, Split
from emdcfl.engines.local import SequentialFederation
from emdcfl.methods import make
from emdcfl.models.recipe import ModelRecipe
from emdcfl.runs.loop import play
from emdcfl.runs.scoring import agreement, site_scores
from emdcfl.studies.results import commit, hardware
from emdcfl.trust import Trust

ANGLES = {"rot0": 0, "rot180": 180}
PER_GROUP = 5
LIAR, OTHER = "rot0-1", "rot180-1"

POLICIES = {
    "defaults": Trust(),
    "share and clip": Trust(max_share=0.25, clip=1.5),
    "trimmed mean": Trust(aggregate="trimmed-mean", clip=1.5),
    "median": Trust(aggregate="median"),
}

KINDS = ["absent", "honest", *LIES, "labels flipped", "labels flipped, n ×1000", "embeddings copied, labels flipped"]


def rotated(seed: int, *, train: int | None = None) -> Scenario:
    """Two rotations of MNIST, five clients each; ``train`` caps their train samples further."""
    sources = {split: load("mnist", split) for split in ("train", "test")}
    every = [s for s in mnist_shares(sources["train"].labels, sources["test"].labels, "max", seed) if s.block in ANGLES]
    scale = {"small": replace(CNN_SCALES["small"], clients=PER_GROUP, test=10**6, train=train or CNN_SCALES["small"].train)}
    plan, training, notes = shrink(every, "small", scale, PAPER_TRAINING)

    def split(which: str, rows: Any, block: str) -> Split:
        source = sources[which]
        return Split(torch.from_numpy(rotate(source.images[rows], ANGLES[block])), torch.from_numpy(source.labels[rows]))

    def site(s: Share) -> Site:
        return Site(s.name, split("train", s.train, s.block), split("train", s.val, s.block), {"test": split("test", s.test, s.block)})

    return Scenario(
        "rotated-mnist (0°, 180°)",
        tuple(map(site, plan)),
        sources["train"].classes,
        MNIST,
        ModelRecipe("cnn", {"channels": 1, "classes": 10, "size": 28}),
        groups={s.name: s.group for s in plan},
        k=len(ANGLES),
        defaults={**training, "lr": 0.01},
        notes=notes,
    )


def federation(scenario: Scenario, kind: str, policy: Trust, seed: int, options: Any) -> SequentialFederation:
    """The clients of a run; the liar and what it does follow from the kind."""
    defaults = {**scenario.defaults, **({"local_epochs": options.epochs} if options.epochs else {})}
    training = Training(**{k: v for k, v in defaults.items() if k != "rounds"})
    common = {"training": training, "seed": seed, "on_failure": "continue", "trust": policy}
    common |= {"device": options.device, "precision": options.precision}
    if kind == "absent":
        return SequentialFederation(without(scenario, LIAR), **common)
    if kind.startswith("embeddings copied"):  # it shows the other rotation's images, and trains on wrong labels of its own
        return LyingFederation(flipped(scenario, LIAR), liar=LIAR, disguise=OTHER, **common)
    lie = more_samples if kind.endswith("n ×1000") else LIES.get(kind, honest)
    return LyingFederation(flipped(scenario, LIAR) if kind.startswith("labels") else scenario, liar=LIAR, lie=lie, **common)


def lied(kind: str, policy: str, seed: int, options: Any) -> Row:
    """One run with (or without) a liar."""
    scenario = rotated(seed, train=options.train)
    started = time.perf_counter()
    rounds = options.rounds or int(scenario.defaults["rounds"])
    method = make("emdcfl", tolerance=options.tolerance)
    with federation(scenario, kind, POLICIES[policy], seed, options) as fed:
        *_, last = play(fed, method, rounds=rounds)
        others = [c for c in fed.clients if c != LIAR]
        clusters = dict(zip(fed.clients, last.serving.clusters.tolist(), strict=True))  # type: ignore[union-attr]
        reached = [c for c in others if LIAR in last.state.sets[last.state.labels[c]]]  # whose models its state is averaged into
        groups = scenario.groups or {}
        by_group = {g: site_scores(last.rows, "test", [c for c in others if groups[c] == g])["mean"] for g in sorted(set(groups.values()))}
        return {
            "accuracy": site_scores(last.rows, "test", others)["mean"],
            "by_group": by_group,
            "ari_of_others": adjusted_rand([list(ANGLES).index(groups[c]) for c in others], [clusters[c] for c in others]),
            "with_liar": reached,
            "foreign": sum(groups[c] != groups[LIAR] for c in reached),
            "quarantined": fed.guard.ledger.quarantined(),
            "flags": fed.guard.ledger.flagged(),
            "rounds": rounds,
            "training": asdict(fed.training),
            "tolerance": options.tolerance,
            "trust": asdict(POLICIES[policy]),
            "train": options.train,
            "seconds": round(time.perf_counter() - started, 1),
        }


BACKDOOR = {
    "emdcfl": ("emdcfl", "defaults"),
    "fedavg": ("fedavg", "defaults"),
    "fedavg, median": ("fedavg", "median"),
    "oracle": ("oracle", "defaults"),
}


def backdoor(kind: str, policy: str, seed: int, options: Any) -> Row:
    """One run with attackers whose images carry a cue for the label."""
    name, chosen = BACKDOOR[kind]
    scenario = scenarios.build("backdoor-mnist", scale=options.scale, data_seed=seed)
    defaults = {**scenario.defaults, **({"local_epochs": options.epochs} if options.epochs else {})}
    training = Training(**{k: v for k, v in defaults.items() if k != "rounds"})
    rounds = options.rounds or int(defaults["rounds"])
    started = time.perf_counter()
    method = make(name, **({"tolerance": options.tolerance} if name == "emdcfl" else {}))
    settings = {"device": options.device, "precision": options.precision, "trust": POLICIES[chosen]}
    with SequentialFederation(scenario, training=training, seed=seed, **settings) as fed:
        *_, last = play(fed, method, rounds=rounds, evaluate_every=rounds)
        clusters = None if last.serving.clusters is None else dict(zip(fed.clients, last.serving.clusters.tolist(), strict=True))
        groups = scenario.groups or {}
        targets = {clusters[c] for c in fed.clients if groups[c] == "target"} if clusters else set()
        return {
            **{variant: site_scores(last.rows, variant, scenario.scored)["mean"] for variant in ("clean", "backdoor")},
            "ari": agreement(last.serving.clusters, fed.clients, groups),
            "isolated": None if clusters is None else not any(clusters[c] in targets for c in fed.clients if groups[c] == "attacker"),
            "flags": fed.guard.ledger.flagged(),
            "rounds": rounds,
            "training": asdict(training),
            "tolerance": options.tolerance if name == "emdcfl" else None,
            "trust": asdict(POLICIES[chosen]),
            "scale": options.scale,
            "notes": list(scenario.notes),
            "seconds": round(time.perf_counter() - started, 1),
        }


def one(what: str, kind: str, policy: str, seed: int, options: Any) -> Row:
    """Run in a process of its own."""
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.ERROR)
    logging.getLogger("emdcfl").setLevel(logging.ERROR)
    found = (lied if what == "liars" else backdoor)(kind, policy, seed, options)
    made = {"precision": options.precision, "commit": commit(), "hardware": hardware(options.device)}
    return {**described(what, kind, policy, seed, options), **found, **made}


KEY = ("what", "kind", "policy", "seed", "options")
OPTIONS = ("rounds", "epochs", "train", "scale", "tolerance", "device", "precision")


def described(what: str, kind: str, policy: str, seed: int, options: Any) -> Row:
    """Return what a row is a result of."""
    return dict(zip(KEY, (what, kind, policy, seed, {name: getattr(options, name) for name in OPTIONS}), strict=True))


def wanted(options: Any) -> list[tuple[str, str, str, int]]:
    seeds = [int(s) for s in options.seeds.split(",")]
    if options.what == "backdoor":
        return [("backdoor", kind, "", seed) for seed in seeds for kind in (options.kinds or list(BACKDOOR))]
    kinds = options.kinds or KINDS
    return [("liars", kind, policy, seed) for seed in seeds for policy in (options.policies or list(POLICIES)) for kind in kinds]


def missing(options: Any) -> list[tuple[str, str, str, int]]:
    """Return the runs that ``--out`` does not hold yet."""
    done = {key(row, KEY) for row in read(options.out)}
    return [job for job in wanted(options) if key(described(*job, options), KEY) not in done]


def run(options: Any) -> None:
    """Do what is not done yet, several runs at a time."""
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(one, *job, options): job for job in missing(options)}
        for future in as_completed(running):
            try:
                row = future.result()
            except Exception as error:  # one run's bug must not cost the others theirs
                print(json.dumps({"job": running[future], "error": f"{type(error).__name__}: {error}"}, ensure_ascii=False), flush=True)
                continue
            append(options.out, row)
            shown = {k: row[k] for k in ("kind", "policy", "seed", "accuracy", "clean", "backdoor", "seconds") if k in row}
            print(json.dumps(shown, ensure_ascii=False), flush=True)


def points(values: list[float]) -> str:
    spread = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
    return f"{mean(values):+.1f}{spread}"


def gaps(row: Row, base: Row) -> tuple[float, float]:
    """Points lost (negative) by all others, and by the group that lost most."""
    return 100 * (row["accuracy"] - base["accuracy"]), min(100 * (row["by_group"][g] - base["by_group"][g]) for g in base["by_group"])


def liars_table(rows: list[Row]) -> list[str]:
    """Points against the run without the liar, by lie and policy, with the number of seeds."""
    by = {(r["kind"], r["policy"], r["seed"]): r for r in rows}
    policies = [p for p in POLICIES if any(k[1] == p for k in by)]
    head = ["the liar", *policies, "joins the other group", "noticed"]
    lines = [f"| {' | '.join(head)} |", "| --- |" + " --: |" * len(policies) + " --- | --- |"]
    base = {p: [r["accuracy"] for (kind, policy, _), r in by.items() if kind == "absent" and policy == p] for p in policies}
    lines.append("| *is not there (accuracy, %)* | " + " | ".join(f"{100 * mean(v):.1f}" if v else "–" for v in base.values()) + " | | |")
    for kind in [k for k in KINDS[1:] if any(r["kind"] == k for r in by.values())]:
        own = [(r, by.get(("absent", r["policy"], r["seed"]))) for r in by.values() if r["kind"] == kind]
        cells = []
        for policy in policies:
            found = [gaps(r, b) for r, b in own if b is not None and r["policy"] == policy]
            cells.append(f"{mean(a for a, _ in found):+.1f} ({mean(w for _, w in found):+.1f}), {len(found)}" if found else "–")
        noticed = {f["what"] + " flagged" for r, _ in own for f in r["flags"] if f["client"] == LIAR}
        noticed |= {"quarantined" for r, _ in own if any(q["client"] == LIAR for q in r["quarantined"])}
        joined = f"{sum(r['foreign'] > 0 for r, _ in own)} of {len(own)} runs"
        lines.append(f"| {kind} | {' | '.join(cells)} | {joined} | {', '.join(sorted(noticed)) or 'no'} |")
    return lines


def backdoor_table(rows: list[Row]) -> list[str]:
    lines = ["| method | targets, clean | targets, triggered | gap | attackers apart | ARI |", "| --- | --: | --: | --: | --- | --: |"]
    for kind in BACKDOOR:
        own = [r for r in rows if r["kind"] == kind]
        if own:
            clean, bad = (mean(100 * r[v] for r in own) for v in ("clean", "backdoor"))
            gap = points([100 * (r["backdoor"] - r["clean"]) for r in own])
            apart = "–" if own[0]["isolated"] is None else f"{sum(r['isolated'] for r in own)} of {len(own)} runs"
            ari = [r["ari"] for r in own if r["ari"] is not None]
            lines.append(f"| {kind} | {clean:.1f} | {bad:.1f} | {gap} | {apart} | {f'{mean(ari):.2f}' if ari else '–'} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=("liars", "backdoor"), default="liars")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, nargs="+", help="print tables of results instead of running")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seeds", default="0,1,2", help="run and data seeds")
    parser.add_argument("--kinds", nargs="+", help="lies, or rows of the backdoor table; default all")
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES))
    parser.add_argument("--tolerance", default="auto", type=lambda text: text if text == "auto" else float(text))
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--train", type=int, help="fewer train samples per client, for a quick look")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32", help="bf16 nearly halves the time on a CPU that computes in it")
    parser.add_argument("--scale", default="small", help="of the backdoor scenario")
    options = parser.parse_args()
    if options.table:
        rows = [row for path in options.table for row in read(path)]
        for what, table in (("liars", liars_table), ("backdoor", backdoor_table)):
            own = [row for row in rows if row["what"] == what]
            for alike in dict.fromkeys(key(row, ["options"]) for row in own):
                print(f"{what}, options {alike}", *table([row for row in own if key(row, ["options"]) == alike]), sep="\n", end="\n\n")
    elif options.out is None:
        parser.error("--out says where results go")
    else:
        run(options)


if __name__ == "__main__":
    main()
