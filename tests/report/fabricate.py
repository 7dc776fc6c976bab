"""Run directories and comparisons made up for tests of the report: any number of clients, any names, no training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from emdcfl.methods.base import Distances
from emdcfl.methods.emdcfl.interpret import read
from emdcfl.runs.scoring import site_scores as score_of
from emdcfl.runs.store.files import json_text, read_arrays, sealed, write_arrays


def make_run(
    folder: Path,
    *,
    clients: int = 8,
    groups: int = 4,
    names: Sequence[str] | None = None,
    epsilon: float = 0.025,
    bounded: bool = False,
    unset: float = 0.0,
    variants: Sequence[str] = ("test",),
    rounds: int = 5,
    method: str = "emdcfl",
    accuracy: float = 0.95,
    **changes: Any,
) -> Path:
    """Write what a finished run leaves: groups of equal size, found exactly, on points of a line of random places."""
    generator = np.random.Generator(np.random.Philox(7))
    truth = [i * groups // clients for i in range(clients)]
    names = list(names or [f"group{g}-site{i}" for i, g in enumerate(truth)])
    places = generator.uniform(0, 0.4, size=(groups, 2)) + 0.2 * np.arange(groups)[:, None] * np.array([1.0, 0.3])
    points = places[truth] + generator.normal(0, 0.003, size=(clients, 2))
    w = np.linalg.norm(points[:, None] - points[None], axis=2) + generator.normal(0, 0.002, size=(clients, clients)) - 0.004
    kind = np.ones((clients, clients), dtype=np.int8)
    if bounded:
        kind = np.where(w < epsilon, 3, 2).astype(np.int8)
    gone = generator.uniform(size=w.shape) < unset
    w[gone], kind[gone] = np.nan, 0
    np.fill_diagonal(w, np.nan)
    np.fill_diagonal(kind, 0)
    tolerance = np.where(np.eye(clients, dtype=bool), np.nan, epsilon)
    folder.mkdir(parents=True, exist_ok=True)
    write_arrays(folder / "distances.npz", {"W": w, "tau": np.full(clients, 0.04), "epsilon": tolerance, "kind": kind})
    rows = []
    for t in range(1, rounds + 1):
        for i, name in enumerate(names):
            score = {v: float(np.clip(accuracy - 0.1 / t + generator.normal(0, 0.02), 0, 1)) for v in variants}
            tested = {"accuracy": score, "test_loss": dict.fromkeys(variants, 0.5), "test_samples": dict.fromkeys(variants, 180)}
            rows.append({"round": t, "client": name, "cluster": truth[i], "train_loss": 0.5 / t, **tested})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    last = rows[-clients:]
    scores = {v: score_of(last, v) for v in variants}
    summary: dict[str, Any] = {
        "method": method, "scenario": "made-up", "seed": 0, "rounds": rounds, "finished": True, "k": groups, "ari": 1.0, "clients": names,
        "groups": [f"g{g}" for g in truth], "clusters": truth,
        "accuracy": {**scores[variants[0]], "samples": 180 * clients, "variants": scores},
        "scored": None,
        "seconds": {"train": 58.6, "embed": 4.9, "transport": 0.3, "evaluate": 1.0, "total": 74.2},
        "failures": [], "notes": [],
        "config": "0" * 64, "versions": {"emdcfl": "0.1.0"},
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps({**summary, **changes}), encoding="utf-8")
    interpret(folder)
    (folder / "config.toml").write_text('[run]\nseed = 0\nrounds = 5\n\n[method]\nname = "emdcfl"\ntolerance = 0.025\n', encoding="utf-8")
    return folder


def interpret(folder: Path) -> None:
    """Write ``reading.json`` from the distances and the summary, as a run does."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    if summary["clusters"] is not None:
        found = read(Distances(**read_arrays(folder / "distances.npz")), summary["clients"], summary["clusters"]).as_dict()
        (folder / "reading.json").write_text(json_text(sealed(found, "reading.json"), "reading.json"), encoding="utf-8")


def change_distances(folder: Path, **arrays: Any) -> None:
    """Replace arrays of a made-up run, and interpret them again."""
    write_arrays(folder / "distances.npz", {**read_arrays(folder / "distances.npz"), **arrays})
    interpret(folder)


def make_baselines(folder: Path, **options: Any) -> None:
    """Put one model for all, and every site alone, beside a made-up run."""
    make_run(folder / "baselines" / "fedavg", method="fedavg", accuracy=0.80, clusters=None, ari=None, k=1, **options)
    make_run(folder / "baselines" / "local", method="local", accuracy=0.90, clusters=None, ari=None, k=options.get("clients", 8), **options)


def result(method: str, seed: int, mean: float, ari: float | None, *, scenario: str = "rotated-mnist") -> dict[str, Any]:
    """Return a line of ``results.jsonl``."""
    score, config = {"mean": mean, "worst": mean - 0.06}, sha256(f"{scenario}-{method}-{seed}".encode()).hexdigest()
    return {
        "config": config, "scenario": scenario, "method": method, "seed": seed, "rounds": 10, "k": 4, "ari": ari,
        "accuracy": {**score, "samples": 1000, "variants": {"test": score}}, "seconds": {"train": 10.0, "total": 12.5 + seed}, "notes": [],
        "versions": {"emdcfl": "0.1.0"}, "failures": 0, "history": [], "commit": "abc", "hardware": "a machine",
        "settings": {
            "run": {"seed": seed, "rounds": 10}, "scenario": {"name": scenario}, "method": {"name": method}, "training": {"lr": 0.1},
            "engine": {"device": "cpu"},
        },
    }  # fmt: skip


def make_comparison(folder: Path, lines: Sequence[str] = ()) -> Path:
    """Write a comparison of four methods over three seeds, and any further lines."""
    folder.mkdir(parents=True, exist_ok=True)
    means = {"oracle": (0.981, 1.0), "emdcfl": (0.979, 1.0), "ifca": (0.951, 0.72), "fedavg": (0.892, None)}
    rows = [result(m, s, mean + 0.002 * s, ari) for s in range(3) for m, (mean, ari) in means.items()]
    (folder / "results.jsonl").write_text("".join(f"{line}\n" for line in [*map(json.dumps, rows), *lines]), encoding="utf-8")
    return folder
