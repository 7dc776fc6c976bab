"""How fast links are decided: a plain loop over all pairs against ours, and how both ways of pairing grow with the number of clients.

    python -m benchmarks.transport --json                # digits; with EMDCFL_DATA also MNIST
    python -m benchmarks.transport --json --growth       # C = 40 … 640, all pairs and representatives

The baseline is one thread over ``ot.dist`` (cosine) and ``ot.emd2`` for every ordered pair, with BLAS held at one thread too: left to
itself on a small machine it more than doubles the loop's time. Both sides get the same samples and reference distances, are run in turn
(median of three), and their adjacency is compared. ``speedup`` is wall time with all cores on our side; ``cpu_speedup`` is CPU time, which
other processes on the machine do not change much, and shows what is saved rather than spread. ``all`` solves every pair, as grouping by
benefit does: CPU seconds by reduced costs (ours) and without them, and whether every value is the same.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import ot
import torch
from benchmarks.embeddings import Case, digits, mnist

from emdcfl.clustering import adjusted_rand, links, neighbourhoods
from emdcfl.methods.emdcfl import EMDCFL
from emdcfl.methods.emdcfl.representatives import Pair, by_representatives
from emdcfl.methods.emdcfl.tolerance import within_classes
from emdcfl.transport import Decision, QueueFactory, Screen, SolverPool, Source, cost_matrix, exact, quantile, solvers, tolerance
from emdcfl.transport.pool import one_blas_thread

EPSILON = 0.025
ALPHA = EMDCFL().alpha
REPEATS = 3
BATCH = 4096
OMEGA = 3_285_888
"""Numbers in the embedding part of the paper's CNN: what one exchange of a model costs on the wire."""


def plain(case: Case) -> np.ndarray[Any, Any]:
    """The loop everybody writes first; zero vectors are given the cost the paper's rule gives them."""
    w = np.zeros((len(case.rows), len(case.rows)))
    for (r, c), b in case.columns.items():
        a = case.rows[r]
        with np.errstate(all="ignore"):
            cost = ot.dist(a, b, metric="cosine")
        if np.isnan(cost).any():
            zero_a, zero_b = ~a.any(axis=1), ~b.any(axis=1)
            cost[zero_a, :], cost[:, zero_b] = 1.0, 1.0
            cost[np.ix_(zero_a, zero_b)] = 0.0
        w[r, c] = ot.emd2([], [], cost, numItermax=10**6) - case.tau[r]
    return w


def ours(case: Case, epsilon: float | dict[int, float], pool: SolverPool, device: str | None = None, distances: str = "needed") -> Decision:
    screen = Screen(pool, distances=distances, queue=None if device is None else on_device(device))
    sources = {client: Source(a) for client, a in case.rows.items()}
    for (row, column), b in case.columns.items():
        screen.add(row, column, sources[row], b, tau=case.tau[row], epsilon=epsilon[row] if isinstance(epsilon, dict) else epsilon)
    return screen.finish(tuple(case.rows))


def on_device(device: str) -> QueueFactory:
    from emdcfl.engines.cuda.transport_queue import DeviceQueue

    return partial(DeviceQueue, device=device)


def timed(function: Any, *args: Any) -> tuple[tuple[float, float], Any]:
    """Wall and CPU seconds, and the value."""
    wall, cpu = time.perf_counter(), time.process_time()
    value = function(*args)
    return (time.perf_counter() - wall, time.process_time() - cpu), value


def race(case: Case, repeats: int = REPEATS, device: str | None = None) -> dict[str, Any]:
    """Run baseline and ours in turn; ours also with calibrated tolerances, whose adjacency is compared with the same plain loop.

    With a device ours bounds there, and once more on threads alone, for comparison.
    """
    clients, m = len(case.rows), len(case.columns[0, 1])
    q = quantile(ALPHA, clients)
    calibrated = {c: tolerance(case.variance[c], m, m, q) for c in case.rows}
    seconds: dict[str, list[tuple[float, float]]] = {"baseline": [], "ours": [], "calibrated": [], "threads": []}
    with SolverPool() as pool:
        ours(case, EPSILON, pool, device)  # loads what is loaded once
        for _ in range(repeats):
            with one_blas_thread():
                t, w = timed(plain, case)
            seconds["baseline"].append(t)
            t, found = timed(ours, case, EPSILON, pool, device)
            seconds["ours"].append(t)
            t, auto = timed(ours, case, calibrated, pool, device)
            seconds["calibrated"].append(t)
            if device:
                seconds["threads"].append(timed(ours, case, EPSILON, pool)[0])
        (_, reduced), every = timed(ours, case, EPSILON, pool, None, "all")
        with mock.patch.object(solvers, "REDUCED_FROM", np.inf):
            (_, unreduced), same = timed(ours, case, EPSILON, pool, None, "all")
    middle = {name: statistics.median(wall for wall, _ in values) for name, values in seconds.items() if values}
    cpu = {name: statistics.median(used for _, used in values) for name, values in seconds.items() if values}
    epsilon = np.array([calibrated[c] for c in range(clients)])
    linked, auto_linked = links(found.w, EPSILON), links(auto.w, epsilon)
    return {
        "case": f"{case.name}: {clients} clients, {len(case.rows[0])} x {m} samples of width {case.rows[0].shape[1]}",
        "baseline_s": round(middle["baseline"], 3),
        "ours_s": round(middle["ours"], 3),
        "speedup": round(middle["baseline"] / middle["ours"], 1),
        "baseline_cpu_s": round(cpu["baseline"], 3),
        "ours_cpu_s": round(cpu["ours"], 3),
        "cpu_speedup": round(cpu["baseline"] / cpu["ours"], 1),
        "exact_solves": found.exact_solves,
        "pairs": found.pairs,
        "same_adjacency": bool(np.array_equal(linked, links(w, EPSILON))),
        "ari": adjusted_rand(case.truth, neighbourhoods(linked)[0]),
        "calibrated": {
            "ours_s": round(middle["calibrated"], 3),
            "speedup": round(middle["baseline"] / middle["calibrated"], 1),
            "cpu_speedup": round(cpu["baseline"] / cpu["calibrated"], 1),
            "exact_solves": auto.exact_solves,
            "same_adjacency": bool(np.array_equal(auto_linked, links(w, epsilon))),
            "ari": adjusted_rand(case.truth, neighbourhoods(auto_linked)[0]),
        },
        "all": {
            "cpu_s": round(reduced, 1),
            "unreduced_cpu_s": round(unreduced, 1),
            "same": bool(np.array_equal(every.w, same.w, equal_nan=True)),
        },
        **({"device": device, "threads_s": round(middle["threads"], 3)} if device else {}),
        "workers": pool.workers,
        "load": round(os.getloadavg()[0], 1),
    }


class Crowd:
    """As many clients as one likes, made of the clients of a real case.

    Each has the model and part of the train sample of one real client, and validation images drawn without replacement from those of all
    real clients of its group, equally many of each class: images that no model has seen, from one law per group. So every sample has the
    class counts of every other, as with ``match_classes``, and tolerances are those of matched classes.

    Samples are taken when they are asked for, in batches, so that memory does not grow with the number of pairs.
    """

    def __init__(self, case: Case, clients: int, size: int, omega: int) -> None:
        self.case, self.size, self.omega = case, size, omega
        rng = np.random.default_rng(clients)
        base = rng.permutation(np.arange(clients) % len(case.rows))
        self.base = {f"c{i:04d}": int(b) for i, b in enumerate(base)}
        self.truth = [case.truth[b] for b in self.base.values()]
        images = len(case.own[0])
        groups = {g: np.flatnonzero(np.equal(case.truth, g)) for g in set(case.truth)}
        classes = np.unique(case.labels[0])
        counts = np.full(len(classes), size // len(classes))
        self.size = int(counts.sum())
        self.rows = {c: case.rows[b][: self.size] for c, b in self.base.items()}  # the first of a sample in random order
        self.labels = np.repeat(classes, counts)
        self.chosen = {}
        for c, b in self.base.items():
            owners = groups[case.truth[b]]
            y = np.concatenate([case.labels[int(owner)] for owner in owners])
            drawn = np.concatenate([rng.permutation(np.flatnonzero(y == k))[:n] for k, n in zip(classes, counts, strict=True)])
            parts = [(int(owner), np.flatnonzero(drawn // images == k)) for k, owner in enumerate(owners)]
            self.chosen[c] = [(owner, drawn[at] % images, at) for owner, at in parts]
        with SolverPool() as pool:
            plans = dict(zip(self.base, pool.map(lambda c: exact(cost_matrix(self.rows[c], self.column(c, c)), duals=True), self.base)))
        q = quantile(ALPHA, clients)
        self.tau = {c: plan.value for c, plan in plans.items()}
        within = {c: within_classes(plan.g, torch.from_numpy(self.labels)) for c, plan in plans.items()}
        self.epsilon = {c: tolerance(value, self.size, self.size, q) for c, value in within.items()}
        self.solves = self.pairs = self.bytes = 0

    def column(self, row: str, column: str) -> np.ndarray[Any, Any]:
        """The images of one client under the model of another."""
        r = self.base[row]
        sample = np.empty((self.size, self.rows[row].shape[1]), dtype=np.float32)
        for k, images, at in self.chosen[column]:
            sample[at] = (self.case.own[r] if r == k else self.case.columns[r, k])[images]
        return sample

    def compare(self, pairs: Sequence[Pair], pool: SolverPool) -> dict[Pair, bool | None]:
        """Both directions of each pair; counts exact solves and the bytes of models and samples that would travel."""
        linked: dict[Pair, bool | None] = {}
        for start in range(0, len(pairs), BATCH):
            part, screen = pairs[start : start + BATCH], Screen(pool)
            sources = {c: Source(self.rows[c]) for pair in part for c in pair}
            for r, c in (way for pair in part for way in (pair, pair[::-1])):
                screen.add(r, c, sources[r], self.column(r, c), tau=self.tau[r], epsilon=self.epsilon[r])
            found = screen.finish()
            at = {c: i for i, c in enumerate(found.clients)}
            adjacency = links(found.w, [self.epsilon[c] for c in found.clients])
            linked |= {(c, d): bool(adjacency[at[c], at[d]]) for c, d in part}
            self.solves += found.exact_solves
            self.pairs += found.pairs
            self.bytes += found.pairs * 4 * (self.omega + self.size * self.rows[part[0][0]].shape[1])
        return linked


def growth(case: Case, clients: int, pairing: str, size: int) -> dict[str, Any]:
    """Cluster a crowd with one way of pairing."""
    crowd = Crowd(case, clients, size, OMEGA)
    names, found = list(crowd.base), None
    with SolverPool() as pool:
        start = time.perf_counter()
        if pairing == "all":
            pairs = list(itertools.combinations(names, 2))
            links_ = crowd.compare(pairs, pool)
        else:
            found = by_representatives(names, [], lambda asked: crowd.compare(asked, pool), np.random.default_rng(0))
            links_ = found.links
        seconds = time.perf_counter() - start
    at = {c: i for i, c in enumerate(names)}
    m = np.eye(clients, dtype=bool) if found is None else found.inferred(names) == 1
    np.fill_diagonal(m, True)
    for (c, d), linked in links_.items():
        m[at[c], at[d]] = m[at[d], at[c]] = bool(linked)
    labels, _ = neighbourhoods(m)
    cliques = bool(np.array_equal(m, np.equal.outer(labels, labels)))
    return {
        "case": f"{case.name}, {crowd.size} x {crowd.size} samples, validation drawn from the group by class",
        "pairing": pairing,
        "clients": clients,
        "problems": crowd.pairs,
        "exact_solves": crowd.solves,
        "bytes": crowd.bytes,
        "seconds": round(seconds, 2),
        "clusters": int(labels.max()) + 1,
        "cliques": cliques,
        "ari": round(adjusted_rand(crowd.truth, labels), 3),
        "labels": labels.tolist(),
        **({"concerned": len(found.concerned), "checks": found.checks, "contradictions": found.contradictions} if found else {}),
        "load": round(os.getloadavg()[0], 1),
    }


def exponent(rows: Sequence[dict[str, Any]], of: str) -> float:
    """Slope of log(value) over log(C)."""
    x, y = np.log([r["clients"] for r in rows]), np.log([max(r[of], 1e-9) for r in rows])
    return round(float(np.polyfit(x, y, 1)[0]), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object per line (the default is the same, indented)")
    parser.add_argument("--cases", default="digits,mnist", help="mnist needs EMDCFL_DATA")
    parser.add_argument("--model", default="small_cnn", help="network of the MNIST clients; cnn is the paper's (slow on a CPU)")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--device", help="where ours bounds, such as cuda; default threads")
    parser.add_argument("--growth", action="store_true", help="only the growth with the number of clients")
    parser.add_argument("--sizes", default="40,80,160,320,640", help="numbers of clients for --growth")
    parser.add_argument("--all-pairs", default="40,80,160", help="numbers of clients for which --growth compares all pairs too")
    parser.add_argument("--samples", type=int, default=256, help="validation samples of a client for --growth")
    options = parser.parse_args()

    def show(row: dict[str, Any]) -> None:
        print(json.dumps(row, indent=None if options.json else 2), flush=True)

    wanted = options.cases.split(",")
    if not os.environ.get("EMDCFL_DATA") and "mnist" in wanted:
        print("EMDCFL_DATA is not set: digits only", file=sys.stderr)
        wanted = ["digits"]
    cases = {"digits": digits, "mnist": lambda: mnist(model=options.model)}
    if not options.growth:
        for name in wanted:
            show(race(cases[name](), options.repeats, options.device))
        return
    case = cases[wanted[-1]]()
    done: dict[tuple[str, int], list[int]] = {}
    for pairing, sizes in (("representatives", options.sizes), ("all", options.all_pairs)):
        rows = []
        for clients in map(int, filter(None, sizes.split(","))):
            row = growth(case, clients, pairing, options.samples)
            done[pairing, clients] = row.pop("labels")
            if pairing == "all" and ("representatives", clients) in done:
                row["same_clusters"] = done["representatives", clients] == done["all", clients]
            rows.append(row)
            show(row)
        if len(rows) > 1:
            show({"pairing": pairing, "exponents": {of: exponent(rows, of) for of in ("problems", "exact_solves", "bytes", "seconds")}})


if __name__ == "__main__":
    main()
