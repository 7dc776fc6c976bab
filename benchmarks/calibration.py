"""How often the calibrated tolerance splits sites of one law or merges different ones, on synthetic sites; one JSON line per case and seed.

    python -m benchmarks.calibration --out calibration.jsonl --seeds 5-9               # the cases with groups
    python -m benchmarks.calibration --out calibration.jsonl --cases equal --seeds 5-14  # twelve equal sites
    python -m benchmarks.calibration --out calibration.jsonl --grouping benefit --seeds 5-9   # validation losses decide, eight rounds

Sites are drawn here: Gaussian classes in 16 features, an MLP, one round. Lines that are in the file already are not computed again.
Each line says whether the clusters are the true ones, and counts pairs of one law that are refused and pairs of two laws that are linked.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.rows import append, key
from benchmarks.rows import read as read_rows

from emdcfl.clustering import adjusted_rand, links
from emdcfl.core.tasks import Training
from emdcfl.data.own import from_arrays
from emdcfl.data.types import Scenario
from emdcfl.engines import make_federation
from emdcfl.methods.emdcfl import EMDCFL
from emdcfl.methods.emdcfl.interpret import read
from emdcfl.studies.results import commit, hardware

FEATURES = 16
CENTRES = 0.5
"""Standard deviation of class centres in each feature, in units of the deviation inside classes: about 85 % can be classified right."""

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Case:
    """Sites of one experiment.

    Attributes
    ----------
    n : sequence of int
        Samples of each site.
    groups : sequence of int
        True group of each site.
    shift : float
        Length by which a group's data are moved, in standard deviations inside classes, each group in a direction of its own.
    rotate, permute : bool
        Each group but the first turns its features, or renames its classes.
    classes : int
    dirichlet : float, optional
        Class frequencies of each site are drawn with this concentration; else ``frequencies``, else all equal.
    absent : bool
        Sites of odd number lack the last class.
    repeats : "row" or "group", optional
        Every patient is measured 4 to 8 times with little noise, and the measurements are split one by one or patient by patient.
    """

    n: Sequence[int]
    groups: Sequence[int]
    shift: float = 0.0
    rotate: bool = False
    permute: bool = False
    classes: int = 4
    dirichlet: float | None = None
    frequencies: Sequence[float] | None = None
    absent: bool = False
    repeats: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


def pair(n: int, **options: Any) -> Case:
    return Case([n] * 6, [0, 0, 0, 1, 1, 1], **options)


def one(n: int, sites: int = 6, **options: Any) -> Case:
    return Case([n] * sites, [0] * sites, **options)


RARE = (0.32, 0.32, 0.31, 0.05)
GROUPED = {
    **{f"shift {s:g} sd, n = {n}": pair(n, shift=s) for s in (0.9, 1.8, 2.7) for n in (400, 600)},
    **{f"rotated features, n = {n}": pair(n, rotate=True) for n in (200, 400, 600)},
    **{f"one law, Dirichlet {a:g}": one(400, dirichlet=a) for a in (10.0, 3.0, 1.0, 0.5, 0.2)},
    **{f"shift 5.4 sd, Dirichlet {a:g}": pair(400, shift=5.4, dirichlet=a) for a in (3.0, 1.0, 0.5)},
    "one law, a class of 25 % absent at half of the sites": one(400, absent=True),
    "one law, a class of 5 % absent at half of the sites": one(400, absent=True, frequencies=RARE),
    "one law, 30, 100 and 3,000 samples": Case([30, 30, 100, 100, 3000, 3000], [0] * 6),
    "shift 2.7 sd, 30, 100 and 3,000 samples": Case([30, 30, 100, 100, 3000, 3000, 3000, 3000], [0, 1, 0, 1, 0, 0, 1, 1], shift=2.7),
    "four sites of 3,000 in two groups": Case([3000] * 4, [0, 0, 1, 1], shift=1.8),
    "four sites of 3,000 in two groups, two of 320": Case([3000] * 4 + [320] * 2, [0, 0, 1, 1, 0, 1], shift=1.8),
    "groups of 1 and 5": Case([400] * 6, [0, 1, 1, 1, 1, 1], rotate=True),
    "groups of 1, 3 and 12": Case([400] * 16, [0] + [1] * 3 + [2] * 12, rotate=True),
    "one law, 4 to 8 rows per patient, split by row": one(400, repeats="row"),
    "one law, 4 to 8 rows per patient, split by patient": one(400, repeats="group"),
    "two sites": Case([400] * 2, [0, 1], rotate=True),
    "permuted labels": pair(400, permute=True),
    "permuted labels, label-aware cost": pair(400, permute=True, options={"cost": "label-aware"}),
}
EQUAL = {
    **{f"4 classes, m = {n // 5}": one(n, 12) for n in (200, 400, 600)},
    **{f"{k} classes, m = 80": one(400, 12, classes=k) for k in (20, 40, 60)},
    "2 classes, 95:5, m = 80": one(400, 12, classes=2, frequencies=(0.95, 0.05)),
    "match_classes = false": one(400, 12, options={"match_classes": False}),
    'exchange = "server-samples"': one(400, 12, options={"exchange": "server-samples"}),
    'projection = "pair"': one(400, 12, options={"projection": "pair"}),
}
BENEFIT_ROUNDS = 8
"""Grouping by benefit examines its groups in rounds 1, 2, 4 and 8."""
REPEAT_NOISE = 0.1
"""Standard deviation between measurements of one patient, in units of that inside classes."""
CASES = {"grouped": GROUPED, "equal": EQUAL}
KEY = ("case", "seed", "options")


def sites(case: Case, seed: int) -> Scenario:
    """Draw the sites of a case."""
    rng = np.random.default_rng([seed, 2025])
    centres = CENTRES * rng.standard_normal((case.classes, FEATURES))
    laws = {g: _law(case, g, rng) for g in sorted(set(case.groups))}
    base = np.full(case.classes, 1 / case.classes) if case.frequencies is None else np.asarray(case.frequencies)
    drawn = {}
    for i, (n, group) in enumerate(zip(case.n, case.groups, strict=True)):
        p = base.copy()
        if case.absent and i % 2:
            p[-1] = 0
        if case.dirichlet is not None:
            p = rng.dirichlet(np.full(case.classes, case.dirichlet))
        patient = np.arange(n) if case.repeats is None else np.repeat(np.arange(n), rng.integers(4, 9, size=n))[:n]
        y = rng.choice(case.classes, size=n, p=p / p.sum())
        x = (centres[y] + rng.standard_normal((n, FEATURES)))[patient]
        y = y[patient]
        if case.repeats is not None:
            x += REPEAT_NOISE * rng.standard_normal(x.shape)
        moved, renamed = laws[group]
        entry = (moved(x).astype(np.float32), renamed[y])
        drawn[f"site-{i:02d}"] = (*entry, patient) if case.repeats == "group" else entry
    truth = {name: str(group) for name, group in zip(drawn, case.groups, strict=True)}
    return from_arrays(drawn, groups=truth, seed=seed, name="calibration")


def _law(case: Case, group: int, rng: np.random.Generator) -> tuple[Callable[[Array], Array], Array]:
    """Return how a group's data differ from those of the first group."""
    direction = rng.standard_normal(FEATURES)
    direction *= case.shift * (group > 0) / np.linalg.norm(direction)
    turn = np.linalg.qr(rng.standard_normal((FEATURES, FEATURES)))[0] if case.rotate and group else np.eye(FEATURES)
    names = np.roll(np.arange(case.classes), group if case.permute else 0)
    return (lambda x: x @ turn + direction), names


def row(name: str, case: Case, seed: int, chosen: dict[str, Any]) -> dict[str, Any]:
    """Run a case, one round or as many as grouping by benefit examines, and judge the clusters."""
    scenario, started = sites(case, seed), time.perf_counter()
    training = Training(**{k: scenario.defaults[k] for k in ("local_epochs", "batch_size", "lr")})
    method = EMDCFL(**{"grouping": "neighbourhoods", **case.options, **chosen})
    with make_federation(scenario, training=training, seed=seed, device="cpu", engine="sequential") as fed:
        state = method.init(fed, fed.begin(0))
        for index in range(1, 1 + (BENEFIT_ROUNDS if chosen.get("grouping") == "benefit" else 1)):
            state = method.step(fed, state, fed.begin(index))
        clients, serving = fed.clients, method.serve(state)
    assert serving.clusters is not None
    assert serving.distances is not None
    clusters, truth = serving.clusters.numpy(), np.asarray(case.groups)
    for_all = [i for i, c in enumerate(clients) if _served_a_model_for_all(state, c)]
    judged = [i for i in range(len(truth)) if i not in for_all]
    upper = np.triu(np.ones((len(truth), len(truth)), bool), 1)
    upper[for_all], upper[:, for_all] = False, False
    same, together = np.equal.outer(truth, truth) & upper, np.equal.outer(clusters, clusters)
    linked = links(serving.distances.W, serving.distances.epsilon)
    compared = np.isfinite(serving.distances.W) & np.isfinite(serving.distances.W.T) & upper
    reading = read(serving.distances, clients, clusters.tolist())
    said = reading.doubts if reading.splits is None else [f"borderline {c}" for c in reading.borderline]
    said += ["near-duplicates: data check" for note in scenario.notes if "almost repeat a training row" in note]
    ari = adjusted_rand(truth[judged].tolist(), clusters[judged].tolist())
    return {
        "case": name,
        "seed": seed,
        "options": chosen,
        "clusters": int(clusters.max()) + 1,
        "groups": len(set(case.groups)),
        "ari": round(ari, 3),
        "right": bool(ari == 1.0),
        "false_split": bool((same & ~together).any()),
        "false_merge": bool((upper & ~same & together).any()),
        "silent": bool(ari < 1.0 and not said),
        "same_law": {"pairs": int((same & compared).sum()), "refused": int((same & compared & ~linked).sum())},
        "two_laws": {"pairs": int((upper & ~same & compared).sum()), "linked": int((upper & ~same & compared & linked).sum())},
        "not_compared": int((upper & ~compared).sum()),
        "for_all": len(for_all),
        "doubts": [text.split(":")[0] for text in said],
        "seconds": round(time.perf_counter() - started, 1),
        "commit": commit(),
        "hardware": hardware("cpu"),
    }


def _served_a_model_for_all(state: Any, client: str) -> bool:
    """Whether a site too small to be compared is served the average of several groups: it is in no group, so in no wrong one."""
    members = set(state.sets[state.labels[client]])
    return client not in members and len({state.labels[c] for c in members}) > 1


def numbers(text: str) -> list[int]:
    """Return the seeds of "0,3,5-9"."""
    ends = [[int(end) for end in part.split("-")] for part in text.split(",")]
    return [seed for first, *rest in ends for seed in range(first, (rest[0] if rest else first) + 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", default="grouped", choices=CASES)
    parser.add_argument("--only", default="", help="the case of this name, or cases whose name contains this")
    parser.add_argument("--seeds", default="5-9", help="such as 0,2,5-9; 0 to 4 chose the rule, 5 and above check it")
    parser.add_argument("--tolerance", help="a fixed one instead of the calibrated")
    parser.add_argument("--grouping", choices=["benefit"], help="let validation losses decide instead")
    options = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    chosen: dict[str, Any] = {"tolerance": float(options.tolerance)} if options.tolerance else {}
    chosen |= {"grouping": options.grouping} if options.grouping else {}
    done = {key(line, KEY) for line in read_rows(options.out)}
    cases = {name: case for name, case in CASES[options.cases].items() if options.only in name}
    cases = {options.only: cases[options.only]} if options.only in cases else cases
    for name, case in cases.items():
        for seed in numbers(options.seeds):
            if key({"case": name, "seed": seed, "options": chosen}, KEY) not in done:
                found = row(name, case, seed, chosen)
                append(options.out, found)
                keys = ("case", "seed", "clusters", "right", "silent", "same_law", "two_laws", "seconds")
                print(json.dumps({k: found[k] for k in keys}), flush=True)


if __name__ == "__main__":
    main()
