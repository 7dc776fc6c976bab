"""What merging two clusters of a finished simulated run could cost at most, and what it would have cost: the paper's bound, evaluated.

The common embedding is that of the average of the two clusters' models; heads are fitted to validation samples of their members. A
simulation only: it looks at unprojected embeddings and labels of all clients.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from emdcfl.core.client import Client
from emdcfl.core.errors import EmdcflError, StoreError
from emdcfl.core.params import average
from emdcfl.engines.local.sequential import intra_op_threads, simulated_clients
from emdcfl.paper import theory
from emdcfl.runs.new_sites.nearest import groups_of
from emdcfl.runs.plan import build_scenario
from emdcfl.runs.result import Result
from emdcfl.runs.store.files import read_json, unsealed, write_json

log = logging.getLogger("emdcfl")

FILE = "merging.json"
QUICK_CLUSTERS, QUICK_BYTES = 4, 8 << 20
"""Up to so many clusters, with models of so many bytes, the bounds are evaluated without being asked for: seconds."""

SAMPLES = 256
"""Most samples per cluster: exact transport grows with their square."""


@dataclass(frozen=True)
class Pair:
    """Two clusters and what merging them costs."""

    clusters: tuple[int, int]
    cost: theory.Merging

    def sentence(self) -> str:
        first, second = self.clusters
        return self.cost.sentence(f"cluster {first}", f"cluster {second}")

    def as_dict(self) -> dict[str, Any]:
        return {
            "clusters": list(self.clusters),
            "at_most": self.cost.at_most,
            "did": self.cost.did,
            "alone": self.cost.alone,
            "w1": self.cost.distance,
            "lambda": self.cost.merged.terms["lambda"],
            "sentence": self.sentence(),
        }


def merging_costs(result: Result) -> list[Pair]:
    """Evaluate all pairs of clusters of a finished run, nearest first; none where there is one cluster.

    Returns nothing for methods without clusters, and for data that are not simulated (no true groups).
    """
    if result.summary["clusters"] is None or result.summary["groups"] is None:
        return []
    scenario, names = result.scenario or build_scenario(result.config, result.folder), list(result.clients)
    groups, classes = groups_of(result.serving, names), len(result.about.classes)
    clients = simulated_clients(scenario, names, result.about.network, seed=result.config.run.seed, run="merging", precision="fp32")
    import scipy.optimize  # noqa: F401  its BLAS must be loaded before it is held at one thread

    costs = []
    for a, b in combinations(groups, 2):
        both = (groups[a], groups[b])
        merged = average([model for model, _ in both], [float(sum(len(clients[c].site.train) for c in members)) for _, members in both])
        one, two = (_sample([clients[c] for c in members], merged) for _, members in both)
        with threadpool_limits(1, user_api="blas"):  # on busy cores, several threads wait for each other: 18 s instead of 3
            costs.append(Pair((a, b), theory.merging(one, two, classes)))
    return sorted(costs, key=lambda pair: pair.cost.distance)


def _sample(members: Sequence[Client], theta: Tensor) -> theory.Sample:
    """Embed validation samples of a cluster's members, as many of each."""
    each = max(1, SAMPLES // len(members))
    chosen = [client.sample("val", each) for client in members]
    with intra_op_threads(1):
        z = torch.cat([client.embeddings(theta, "val", index) for client, index in zip(members, chosen, strict=True)])
    y = torch.cat([client.site.val.y[index] for client, index in zip(members, chosen, strict=True)])
    return theory.Sample(z.numpy().astype(np.float64), y.numpy())


def write_merging(result: Result) -> None:
    """Evaluate all pairs of clusters and keep them in ``merging.json`` of the run directory, where the report finds them."""
    assert result.folder is not None
    write_json(result.folder / FILE, {"pairs": [pair.as_dict() for pair in merging_costs(result)]})


def write_quick_merging(result: Result) -> None:
    """Evaluate the pairs where that takes seconds and was not done since the last round; if it cannot be, a report goes on without."""
    if result.folder is None:
        return
    try:
        clusters = set(result.summary["clusters"] or ())
        simulated = result.summary["finished"] and result.summary["groups"] is not None
        quick = 2 <= len(clusters) <= QUICK_CLUSTERS and 4 * result.about.network.layout.size <= QUICK_BYTES
        file, summary = result.folder / FILE, result.folder / "summary.json"
        done = file.exists() and file.stat().st_mtime_ns >= summary.stat().st_mtime_ns
        if simulated and quick and not done:
            write_merging(result)
    except EmdcflError as error:
        log.info("what merging clusters could cost is left out: %s", error)


def merging_line(run: Path) -> str | None:
    """Return the sentence on the pair of clusters nearest to each other, for the report; ``None`` where nothing was evaluated."""
    if not (run / FILE).exists():
        return None
    try:
        pairs = unsealed(read_json(run / FILE), FILE)["pairs"]
        return str(pairs[0]["sentence"]) if pairs else None
    except (StoreError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise StoreError(f"{run / FILE}: truncated or damaged; 'emdcfl report --theory {run}' writes it again") from error
