"""How much privacy noise the groups survive: one JSON line per scenario, seed, projection ratio, sample size, cost and ε.

    python -m benchmarks.privacy --out privacy.jsonl                                              # rotated digits, seeds 0 to 4
    python -m benchmarks.privacy --out mnist.jsonl --scenarios rotated-mnist --seeds 0,1,2        # small scale: 128 validation images
    python -m benchmarks.privacy --out mnist.jsonl --scenarios rotated-mnist --model small_cnn    # minutes instead of an hour on one core
    python -m benchmarks.privacy --out large.jsonl --scenarios rotated-mnist-512 --samples 512,256,128,64
    python -m benchmarks.privacy --null null.jsonl                            # is W centred where distributions are equal?
    python -m benchmarks.privacy --table privacy.jsonl mnist.jsonl large.jsonl  # tables, as in docs/results/tables/privacy.md

Every client trains once from θ⁰; embeddings are kept, and the comparison itself is that of a run: the clients' tasks, their noise, the
exact solver on all pairs. Lines that are in the file with the same network and training are not computed again, so an interrupted run
continues.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.rows import Row, append, key, read
from benchmarks.tolerance import distances, extremes
from torch import Tensor

from emdcfl.clustering import adjusted_rand, links, neighbourhoods
from emdcfl.core.client import Client
from emdcfl.core.keys import NodeSecret, digest
from emdcfl.core.tasks import Training
from emdcfl.data import scenarios
from emdcfl.data.types import Scenario, Site, Split
from emdcfl.engines import make_federation
from emdcfl.methods.emdcfl import EMDCFL
from emdcfl.methods.emdcfl.comparison import Comparison
from emdcfl.methods.emdcfl.interpret import doubts
from emdcfl.methods.emdcfl.privacy_budget import releases
from emdcfl.models.recipe import ModelRecipe
from emdcfl.privacy.noise import DELTA, gaussian_sigma, released, total_epsilon
from emdcfl.studies.results import commit, hardware
from emdcfl.transport import cost_matrix, dual_variance, exact, projected_width, projection, quantile

EPSILONS = "0.5,1,2,4,8,16,32,64,128,256,512,1024,inf"
SETTING = ("scenario", "seed", "ratio", "samples", "cost", "epsilon")
KEY = (*SETTING, "training", "model")
TRAIN, VALIDATION = 600, 512


def build(name: str, seed: int, model: str | None = None) -> Scenario:
    """Digits with two clients per rotation; MNIST at small scale; or as small, with 512 validation images instead of 128."""
    if name == "rotated-digits":
        return scenarios.build(name, clients_per_group=2, data_seed=seed)
    if model:
        scenario = build(name, seed)
        return replace(scenario, model=ModelRecipe(model, scenario.model.options))
    if name != "rotated-mnist-512":
        return scenarios.build(name, scale="small", data_seed=seed)
    small, full = (scenarios.build("rotated-mnist", scale=scale, data_seed=seed) for scale in ("small", "paper"))
    assert full.groups is not None
    names = {s.name for s in small.sites}
    sites = tuple(
        Site(s.name, Split(s.train.x[:TRAIN], s.train.y[:TRAIN]), Split(s.val.x[:VALIDATION], s.val.y[:VALIDATION]), s.tests)
        for s in full.sites
        if s.name in names
    )
    return replace(small, sites=sites)


class Remembered:
    """A client's embeddings, computed once per model and split: noise, projection and sample size do not change them."""

    def __init__(self, client: Client) -> None:
        self.client, self.compute, self.known = client, client.embeddings, dict[tuple[bytes, str], Tensor]()

    def __call__(self, state: Tensor, split: str, indices: Tensor, *, mode: str = "eval") -> Tensor:
        held_out = len(self.client.site.val)
        if split == "all" and int(indices.max()) < held_out:  # validation samples alone, as here without matched classes
            split = "val"
        which = digest(state.numpy().tobytes()), split
        if which not in self.known and split == "all":
            self.known[which] = torch.cat([self(state, part, torch.arange(len(self.client.split(part)))) for part in ("val", "train")])
        if which not in self.known:
            self.known[which] = self.compute(state, split, torch.arange(len(self.client.split(split))), mode="eval")
        return self.known[which][indices]


def settings(options: argparse.Namespace) -> Iterator[Row]:
    asked = (text.split(",") for text in (options.costs, options.ratios, options.samples, options.epsilons))
    for cost, ratio, samples, epsilon in product(*asked):
        limit = None if math.isinf(float(epsilon)) else float(epsilon)
        yield {"ratio": float(ratio), "samples": int(samples), "cost": cost, "epsilon": limit}


def lines(name: str, seed: int, options: argparse.Namespace, done: set[str]) -> Iterator[Row]:
    """Train once, then measure under every setting that is missing."""
    scenario = build(name, seed, options.model)
    assert scenario.groups is not None
    order = list(dict.fromkeys(scenario.groups.values()))
    truth = [order.index(scenario.groups[s.name]) for s in scenario.sites]
    training = Training(**{k: scenario.defaults[k] for k in ("local_epochs", "batch_size", "lr") if k in scenario.defaults})
    made = {"training": training.as_dict(), "model": scenario.model.as_dict()}
    every = [{"scenario": name, "seed": seed, **setting, **made} for setting in settings(options)]
    wanted = [one for one in every if key(one, KEY) not in done]
    if not wanted:
        return
    with make_federation(scenario, training=training, seed=seed, device="cpu", engine="sequential") as fed:
        fed.begin(1)
        local = fed.train(dict.fromkeys(fed.clients, fed.initial())).column("theta")
        for client in fed._clients.values():  # type: ignore[attr-defined]  # no public way to keep embeddings
            client.embeddings = Remembered(client)
        for one in wanted:
            chosen = {
                "projection_ratio": one["ratio"],
                "max_samples": one["samples"],
                "cost": one["cost"],
                "privacy_epsilon": one["epsilon"],
            }
            # classes are not matched under noise, so that they are not without it either
            method = EMDCFL(tolerance="auto", distances="all", match_classes=False, min_validation=min(64, one["samples"]), **chosen)
            yield {**one, **measured(method, fed, local, truth), "commit": commit(), "hardware": hardware("cpu")}


def measured(method: EMDCFL, fed: Any, local: dict[str, Tensor], truth: list[int]) -> Row:
    """W of all pairs under one setting, and the groups they give under a calibrated and under a fixed tolerance."""
    started = time.perf_counter()
    clients, epsilon, delta = fed.clients, method.privacy_epsilon, method.privacy_delta
    comparison = Comparison(method, fed, local)
    found = distances(comparison.measure([(c, d) for c in clients for d in clients if c != d]), clients)
    q, p = quantile(method.alpha, len(clients)), comparison.dims["p"]
    sigma = 0.0 if epsilon is None else gaussian_sigma(epsilon, delta)
    z = found.W / found.epsilon * q
    same = np.equal.outer(truth, truth) & ~np.eye(len(truth), dtype=bool)

    def ari(tolerance: Any) -> float:
        return round(adjusted_rand(truth, neighbourhoods(links(found.W, tolerance))[0]), 3)

    counts = releases(method, len(clients))
    return {
        "clients": len(clients),
        "validation": max(comparison.sizes.values()),
        "p": p,
        "delta": None if epsilon is None else delta,
        "sigma": round(sigma, 4),
        "shrink": round(1 + p * sigma**2, 2),
        "releases": {"train": counts.train, "val": counts.val},
        "total": None if epsilon is None else {k: round(total_epsilon(epsilon, delta, getattr(counts, k)), 2) for k in ("train", "val")},
        "ari_auto": ari(found.epsilon),
        "ari_fixed": ari(0.025),
        "ari_shrunk": ari(0.025 / (1 + p * sigma**2)),
        "tau": round(float(found.tau.mean()), 4),
        "W": extremes(found.W, truth),
        "W_in_mean": round(float(found.W[same].mean()), 5),
        "q": round(q, 2),
        "standard_errors": extremes(z, truth),
        "z_in": [round(float(z[same].mean()), 2), round(float(z[same].std()), 2)],
        "doubts": [text.partition(":")[0] for text in doubts(found, clients, neighbourhoods(links(found.W, found.epsilon))[0].tolist())],
        "seconds": round(time.perf_counter() - started, 1),
    }


def null_line(ratio: float, epsilon: float | None, trials: int, *, d: int = 64, n: int = 512, m: int = 180) -> Row:
    """W between samples of one law, in standard errors: mean 0 and deviation 1 if the tolerance accounts for the noise."""
    sigma, p = 0.0 if epsilon is None else gaussian_sigma(epsilon, DELTA), projected_width(ratio, d)
    found = []
    for trial in range(trials):
        draw = np.random.default_rng(trial)
        centres = np.abs(draw.standard_normal((10, d)))

        def sample(size: int, name: str, trial: int = trial, draw: Any = draw, centres: Any = centres) -> Any:
            x = np.maximum(centres[draw.integers(10, size=size)] + 0.7 * draw.standard_normal((size, d)), 0.0)
            z = x.astype(np.float32) @ projection(trial, d, p)
            whose = [f"{name} {i}".encode() for i in range(size)]
            return released(z, whose, sigma=sigma, secret=NodeSecret(bytes(32)), query=str(trial).encode()) if sigma else z

        train = sample(n, "train")
        tau = exact(cost_matrix(train, sample(m, "val")), duals=True)
        other = exact(cost_matrix(train, sample(m, "partner"))).value
        found.append((other - tau.value) / math.sqrt(2 * dual_variance(tau.g) / m))
    z = np.array(found)
    return {"ratio": ratio, "p": p, "epsilon": epsilon, "sigma": round(sigma, 4), "trials": trials, "mean": round(float(z.mean()), 2)} | {
        "deviation": round(float(z.std(ddof=1)), 2),
        "largest": round(float(z.max()), 2),
    }


def table(rows: Sequence[Row]) -> str:
    """Mean ARI over the seeds, ε down, and below each heading the setting."""
    parts = []
    kind = ("scenario", "model", "training", "cost", "samples")
    for alike in dict.fromkeys(key(r, kind) for r in rows):
        here = [r for r in rows if key(r, kind) == alike]
        ratios = sorted({r["ratio"] for r in here}, reverse=True)
        first, seeds = here[0], sorted({r["seed"] for r in here})
        about = f"{first['clients']} clients, {max(r['validation'] for r in here)} validation samples, seeds {', '.join(map(str, seeds))}"
        parts.append(f"\n{first['scenario']}, {first['model']['name']}, {first['cost']}, max_samples {first['samples']}: {about}\n")
        shown = [f"ratio {ratio} (p = {next(r['p'] for r in here if r['ratio'] == ratio)}): σ√p" for ratio in ratios]
        heads = " | ".join(f"{s} | auto | 0.025 | z in / out" for s in shown)
        parts.append(f"| ε per release | total, validation record | σ | {heads} |")
        parts.append("| --- " * (3 + 4 * len(ratios)) + "|")
        for epsilon in sorted({r["epsilon"] for r in here}, key=lambda e: math.inf if e is None else e):
            parts.append(_row([r for r in here if r["epsilon"] == epsilon], epsilon, ratios))
    return "\n".join(parts)


def _row(rows: Sequence[Row], epsilon: float | None, ratios: Sequence[float]) -> str:
    first = rows[0]
    cells = ["∞", "∞", "0"] if epsilon is None else [f"{epsilon:g}", f"{first['total']['val']:.0f}", f"{first['sigma']:.2f}"]
    for ratio in ratios:
        mine = [r for r in rows if r["ratio"] == ratio]
        if not mine:
            cells += [""] * 4
            continue
        inside, outside = max(r["standard_errors"]["in"] for r in mine), min(r["standard_errors"]["out"] for r in mine)
        cells.append(f"{mine[0]['sigma'] * math.sqrt(mine[0]['p']):.2f}")
        cells += [_spread([r[key] for r in mine]) for key in ("ari_auto", "ari_fixed")]
        cells.append(f"{inside:.1f} / {outside:.1f}")
    return "| " + " | ".join(cells) + " |"


def _spread(values: Sequence[float]) -> str:
    right = sum(v == 1.0 for v in values)
    return f"{np.mean(values):.2f} ({right}/{len(values)})"


def keep(path: Path, row: Row) -> None:
    append(path, row)
    print(json.dumps({k: row[k] for k in (*SETTING, "ari_auto", "ari_fixed", "mean", "deviation") if k in row}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, nargs="+", help="print tables of these files instead")
    parser.add_argument("--null", type=Path, help="simulate samples of one law instead, and write what came out here")
    parser.add_argument("--trials", type=int, default=200, help="with --null")
    parser.add_argument("--scenarios", default="rotated-digits")
    parser.add_argument("--seeds", default="0,1,2,3,4", help="run and data seeds")
    parser.add_argument("--epsilons", default=EPSILONS, help="per record and release")
    parser.add_argument("--ratios", default="0.9,0.1", help="projection ratios")
    parser.add_argument("--samples", default="512", help="max_samples")
    parser.add_argument("--model", help="another network for MNIST than the paper's CNN, such as small_cnn")
    parser.add_argument("--costs", default="cosine")
    options = parser.parse_args()
    if options.table:
        print(table([row for path in options.table for row in read(path)]))
        return
    if options.null:
        simulated = {(row["ratio"], row["epsilon"], row["trials"]) for row in read(options.null)}
        for ratio, epsilon in dict.fromkeys((setting["ratio"], setting["epsilon"]) for setting in settings(options)):
            if (ratio, epsilon, options.trials) not in simulated:
                keep(options.null, null_line(ratio, epsilon, options.trials))
        return
    if options.out is None:
        parser.error("expected --out or --table")
    logging.basicConfig(level=logging.ERROR)
    done = {key(row, KEY) for row in read(options.out)}
    for name in options.scenarios.split(","):
        for seed in map(int, options.seeds.split(",")):
            for found in lines(name, seed, options, done):
                keep(options.out, found)


if __name__ == "__main__":
    main()
