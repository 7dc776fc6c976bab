"""Which tolerances find the groups: the interval of fixed ε and the calibrated tolerance, one JSON line per scenario and seed.

    python -m benchmarks.tolerance --out tolerance.jsonl                                   # what a CPU does in minutes
    python -m benchmarks.tolerance --out paper.jsonl --scale paper --device cuda           # paper scale, round 1
    python -m benchmarks.tolerance --out t.jsonl --scenarios rotated-digits --per-group 2,3,5 --seeds 0,1,2,3,4

Lines that are in the file already are not computed again, so an interrupted run continues. Every line: one local training from θ⁰, all
pairs solved exactly in three ways: samples as drawn, with matched classes, and with matched classes in several blocks (``auto``'s default).
Beside the file, in ``….arrays.jsonl``: W, ε and τ of all pairs, from which other rules can be tried without training again.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.rows import append, key, read
from benchmarks.watch import FallbackError, refusing_fallbacks

from emdcfl.clustering import adjusted_rand, links, margins, neighbourhoods
from emdcfl.core.tasks import Training
from emdcfl.data import scenarios
from emdcfl.data.types import Scenario
from emdcfl.engines import make_federation
from emdcfl.methods.base import Distances
from emdcfl.methods.emdcfl import EMDCFL
from emdcfl.methods.emdcfl.comparison import Comparison, Measured
from emdcfl.methods.emdcfl.interpret import doubts
from emdcfl.models.recipe import ModelRecipe
from emdcfl.studies.results import commit, hardware
from emdcfl.transport import quantile

CPU = "rotated-digits,mnist-base,rotated-mnist-min,rotated-mnist,rotated-mnist-two,backdoor-mnist"


def distances(found: Measured, clients: tuple[str, ...]) -> Distances:
    at, size = {c: i for i, c in enumerate(clients)}, len(clients)
    w, epsilon, tau = np.full((size, size), np.nan), np.full((size, size), np.nan), np.zeros(size)
    for (c, d), entry in found.entries.items():
        w[at[c], at[d]], epsilon[at[c], at[d]] = entry.W, entry.epsilon
    for c, value in found.tau.items():
        tau[at[c]] = value
    return Distances(w, tau, epsilon, np.ones((size, size), np.int8))


def extremes(w: Any, truth: list[int]) -> dict[str, float | None]:
    """Largest value inside a true group and smallest between groups, in the direction that decides."""
    both = np.fmax(w, w.T)
    same = np.equal.outer(truth, truth)
    inside, outside = both[same & ~np.eye(len(truth), dtype=bool)], both[~same]
    return {
        "in": round(float(np.nanmax(inside)), 4) if inside.size else None,
        "out": round(float(np.nanmin(outside)), 4) if outside.size else None,
    }


def build(name: str, options: argparse.Namespace, per_group: int | None, seed: int) -> Scenario:
    if name == "rotated-digits":
        return scenarios.build(name, clients_per_group=per_group or 2, data_seed=seed)
    scenario = scenarios.build(name, scale=options.scale, data_seed=seed)
    if options.model:
        keep = {k: v for k, v in scenario.model.options.items() if k in ("channels", "classes", "size")}
        scenario = replace(scenario, model=ModelRecipe(options.model, keep))
    return scenario


def training_of(scenario: Scenario, options: argparse.Namespace) -> Training:
    keep = {k: scenario.defaults[k] for k in ("local_epochs", "batch_size", "lr") if k in scenario.defaults}
    return Training(**{**keep, **({"local_epochs": options.epochs} if options.epochs else {})})


KEY = ("scenario", "scale", "per_group", "seed", "training", "model", "precision", "alpha")


def described(name: str, scenario: Scenario, options: argparse.Namespace, per_group: int | None, seed: int) -> dict[str, Any]:
    """Return what a line is a result of."""
    return {
        "scenario": name,
        "scale": "full" if name == "rotated-digits" else options.scale,
        "per_group": per_group,
        "seed": seed,
        "training": training_of(scenario, options).as_dict(),
        "model": scenario.model.as_dict(),
        "precision": options.precision,
        "alpha": options.alpha,
    }


WAYS: dict[str, dict[str, Any]] = {
    "drawn": {"match_classes": False},
    "matched": {"average_blocks": False},
    "blocks": {},
}


def row(
    name: str, scenario: Scenario, options: argparse.Namespace, per_group: int | None, seed: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train once, measure in all ways; returns a line and the arrays behind it."""
    assert scenario.groups is not None
    order = list(dict.fromkeys(scenario.groups.values()))
    truth = [order.index(scenario.groups[s.name]) for s in scenario.sites]
    training = training_of(scenario, options)
    settings = {"device": options.device, "precision": options.precision, "workers": options.workers, "engine": options.engine}
    settings["gpu"] = {"compile": options.compile}
    started = time.perf_counter()
    found: dict[str, Distances] = {}
    seconds: dict[str, float] = {}
    with make_federation(scenario, training=training, seed=seed, **settings) as fed:
        fed.begin(1)
        local = fed.train(dict.fromkeys(fed.clients, fed.initial())).column("theta")
        seconds["train"] = time.perf_counter() - started
        pairs = [(c, d) for c in fed.clients for d in fed.clients if c != d]
        for way, chosen in WAYS.items():
            begun = time.perf_counter()
            comparison = Comparison(EMDCFL(tolerance="auto", distances="all", alpha=options.alpha, **chosen), fed, local)
            found[way] = distances(comparison.measure(pairs), fed.clients)
            seconds[way] = time.perf_counter() - begun
        clients, q = fed.clients, quantile(options.alpha, len(fed.clients))
    drawn = found["drawn"]
    interval = margins(np.where(np.isnan(drawn.W), -np.inf, drawn.W), truth)["interval"]
    line = {
        **described(name, scenario, options, per_group, seed),
        "clients": len(clients),
        "groups": len(order),
        "validation": max(comparison.sizes.values()),
        "W": extremes(drawn.W, truth),
        "fixed_interval": None if interval is None else [None if not np.isfinite(x) else round(float(x), 4) for x in interval],
        "ari_at_0.025": _ari(drawn.W, 0.025, truth),
        "q": round(q, 2),
        "tau": round(float(drawn.tau.mean()), 4),
        "auto": {way: judged(one, truth, clients, q) for way, one in found.items()},
        "seconds": {what: round(value, 1) for what, value in seconds.items()},
        "commit": commit(),
        "hardware": hardware(options.device),
    }
    names = {k: line[k] for k in ("scenario", "scale", "per_group", "seed", "q")}
    arrays = {way: {"W": one.W.round(6).tolist(), "epsilon": one.epsilon.round(6).tolist()} for way, one in found.items()}
    return line, {**names, "truth": truth, "tau": drawn.tau.round(6).tolist(), **arrays}


def judged(one: Distances, truth: list[int], clients: tuple[str, ...], q: float) -> dict[str, Any]:
    """What one way of calibrating gives: standard errors inside and between groups, clusters, and what a run would warn of."""
    z = one.W / one.epsilon * q
    inside = z[np.equal.outer(truth, truth) & ~np.eye(len(truth), dtype=bool)]
    labels = neighbourhoods(links(one.W, one.epsilon))[0].tolist()
    return {
        "standard_errors": extremes(z, truth),
        "together": extremes((z + z.T) / np.sqrt(2), truth),
        "inside": {"mean": round(float(inside.mean()), 2), "sd": round(float(inside.std()), 2)} if inside.size else None,
        "epsilon": [round(float(f(one.epsilon)), 4) for f in (np.nanmin, np.nanmax)],
        "epsilon_over_tau": round(float(np.nanmedian(one.epsilon / one.tau[:, None])), 2),
        "clusters": max(labels) + 1,
        "ari": _ari(one.W, one.epsilon, truth),
        "doubts": doubts(one, clients, labels),
    }


def _ari(w: Any, epsilon: Any, truth: list[int]) -> float:
    return round(adjusted_rand(truth, neighbourhoods(links(w, epsilon))[0]), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scenarios", default=CPU)
    parser.add_argument("--per-group", default="2", help="clients per rotation of rotated-digits")
    parser.add_argument("--seeds", default="0", help="run and data seeds")
    parser.add_argument("--scale", default="small", help="smoke, small or paper; not for rotated-digits")
    parser.add_argument("--model", help="another network than the scenario's, such as small_cnn")
    parser.add_argument("--epochs", type=int, help="local epochs, default the scale's")
    parser.add_argument("--alpha", type=float, default=EMDCFL().alpha)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--engine", default="sequential")
    parser.add_argument("--compile", default="auto", help="of the cuda engine: auto, yes or no")
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    done, failed = {key(line, KEY) for line in read(options.out)}, 0
    for name in options.scenarios.split(","):
        sizes: list[int | None] = [int(x) for x in options.per_group.split(",")] if name == "rotated-digits" else [None]
        for per_group in sizes:
            for seed in map(int, options.seeds.split(",")):
                scenario = build(name, options, per_group, seed)
                if key(described(name, scenario, options, per_group, seed), KEY) in done:
                    continue
                try:
                    with refusing_fallbacks():
                        found, arrays = row(name, scenario, options, per_group, seed)
                except FallbackError as error:  # ten times the time, and another scenario may do better
                    print(json.dumps({"scenario": name, "seed": seed, "failed": str(error)}), flush=True)
                    failed += 1
                    continue
                append(options.out.with_suffix(".arrays.jsonl"), arrays)
                append(options.out, found)
                short = {k: found[k] for k in ("scenario", "per_group", "seed", "fixed_interval", "ari_at_0.025", "seconds")}
                print(json.dumps({**short, "auto_ari": {way: one["ari"] for way, one in found["auto"].items()}}), flush=True)
    sys.exit(int(failed > 0))


if __name__ == "__main__":
    main()
