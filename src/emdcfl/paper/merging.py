"""What merging two clusters of a finished simulated run could cost at most, and what it would have cost: the paper's bound, evaluated.

The common embedding is that of the average of the two clusters' models; heads are fitted to validation samples of their members. A
simulation only: it looks at unprojected embeddings and labels of all clients.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emdcfl.core import tasks
from emdcfl.core.client import Client
from emdcfl.core.errors import EmdcflError, StoreError
from emdcfl.core.federation import Federation
from emdcfl.core.params import average
from emdcfl.engines.local.sequential import simulated_clients
from emdcfl.paper import theory
from emdcfl.runs.outputs import read_summary
from emdcfl.runs.runner import plan
from emdcfl.runs.store import RunStore
from emdcfl.runs.store.files import json_text, read_json, write_file

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
        """Say it in words."""
        first, second = self.clusters
        return self.cost.sentence(f"cluster {first}", f"cluster {second}")

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "clusters": list(self.clusters),
            "at_most": self.cost.at_most,
            "did": self.cost.did,
            "alone": self.cost.alone,
            "w1": self.cost.distance,
            "lambda": self.cost.merged.terms["lambda"],
            "sentence": self.sentence(),
        }


def merging_costs(run: Path, *, samples: int = SAMPLES, pairs: Sequence[tuple[int, int]] | None = None) -> list[Pair]:
    """Evaluate pairs of clusters of a finished run (all of them, or those named), nearest first; none where there is one cluster.

    Returns nothing for methods without clusters, and for data that are not simulated (no true groups).
    """
    store = RunStore.read(run)
    config = store.config()
    found = plan(replace(config, engine=replace(config.engine, name="sequential", workers=1)))  # here, however the run was made
    loaded: tuple[int, Any, dict[str, Any]] | None = store.load_state(found.method.State)
    if loaded is None or found.scenario.groups is None:
        return []
    serving = found.method.serve(loaded[1])
    if serving.clusters is None:
        return []
    labels = serving.clusters.tolist()
    classes = len(found.scenario.classes)
    costs = []
    with found.federation() as fed:
        fed.begin(loaded[0])
        seed = found.config.run.seed
        clients = simulated_clients(found.scenario, list(fed.clients), fed.network(), seed=seed, run="merging", precision="fp32")
        members = {k: [c for c, label in zip(fed.clients, labels, strict=True) if label == k] for k in sorted(set(labels))}
        models = {k: serving.models[int(serving.weights[labels.index(k)].argmax())] for k in members}
        for a, b in pairs if pairs is not None else combinations(members, 2):
            sizes = [float(sum(len(clients[c].site.train) for c in members[k])) for k in (a, b)]
            merged = average([models[a], models[b]], sizes)
            one, two = (_sample(fed, clients, members[k], merged, samples) for k in (a, b))
            costs.append(Pair((a, b), theory.merging(one, two, classes)))
    return sorted(costs, key=lambda pair: pair.cost.distance)


def _sample(fed: Federation, clients: dict[str, Client], members: Sequence[str], theta: Tensor, samples: int) -> theory.Sample:
    """Embed validation samples of a cluster's members, as many of each."""
    each = max(1, samples // len(members))
    replies = fed.run(tasks.embed, {c: {} for c in members}, theta=theta, split="val", cap=each)
    z = torch.cat([replies[c]["embeddings"] for c in members]).numpy().astype(np.float64)
    y = torch.cat([clients[c].site.val.y[clients[c].sample("val", each)] for c in members]).numpy()
    return theory.Sample(z, y)


def write_merging(run: Path) -> None:
    """Evaluate all pairs of clusters and keep them in ``merging.json`` of the run directory, where the report finds them."""
    found = [pair.as_dict() for pair in merging_costs(run)]
    write_file(run / FILE, [json_text(found, FILE, indent=2).encode() + b"\n"])


def write_quick_merging(run: Path) -> None:
    """Evaluate the pairs where that takes seconds and was not done since the last round; if it cannot be, a report goes on without."""
    try:
        summary = read_summary(run)
        clusters = set(summary.get("clusters") or ())
        sizes = [p.stat().st_size for p in (run / "models").glob("*.safetensors")]
        simulated = summary.get("finished") and summary.get("groups") is not None
        quick = 2 <= len(clusters) <= QUICK_CLUSTERS and sizes and max(sizes) <= QUICK_BYTES
        if simulated and quick and not _is_newer(run / FILE, run / "summary.json"):
            write_merging(run)
    except EmdcflError as error:
        log.info("what merging clusters could cost is left out: %s", error)


def _is_newer(path: Path, than: Path) -> bool:
    return path.exists() and path.stat().st_mtime_ns >= than.stat().st_mtime_ns


def merging_line(run: Path) -> str | None:
    """Return the sentence on the pair of clusters nearest to each other, for the report; ``None`` where nothing was evaluated."""
    if not (run / FILE).exists():
        return None
    try:
        pairs = read_json(run / FILE)
        return str(pairs[0]["sentence"]) if pairs else None
    except (StoreError, KeyError, TypeError, IndexError) as error:
        raise StoreError(f"{run / FILE}: truncated or damaged; 'emdcfl report --theory {run}' writes it again") from error
