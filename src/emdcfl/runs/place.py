r"""Which group does a new site belong to, and how clearly?

The site trains once from θ⁰, as any first-time client does, and is compared with every client of the finished run in both directions:
its own model judges their validation samples, and each cluster's model judges its. It belongs to a cluster if it is linked with all
members that can be compared, exactly as if it had joined.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import inf, isfinite
from pathlib import Path
from typing import Any

import torch

from emdcfl.core import tasks
from emdcfl.core.errors import ConfigError, DataError
from emdcfl.data.own import encoding_of, load_site
from emdcfl.methods.base import Serving
from emdcfl.methods.emdcfl import EMDCFL
from emdcfl.methods.emdcfl.comparison import Measured, PairDistance, comparable, measure
from emdcfl.runs.runner import RunPlan, plan
from emdcfl.runs.store import RunStore


@dataclass(frozen=True)
class Candidate:
    """One cluster seen from the new site.

    Attributes
    ----------
    ratio : float
        Largest distance over tolerance, both ways, over the cluster's members that could be compared; below 1 the site is linked with all
        of them. Infinite where nobody could.
    linked : int
        Members the site is linked with.
    accuracy : float
        Of the cluster's model on the site's test samples.
    """

    cluster: int
    members: list[str]
    ratio: float
    linked: int
    accuracy: float


@dataclass(frozen=True)
class Placement:
    """Where a new site belongs; ``cluster`` is ``None`` where it would found a group of its own."""

    site: str
    cluster: int | None
    candidates: list[Candidate]
    notes: tuple[str, ...]

    def verdict(self) -> str:
        """Say it in words."""
        best, *others = self.candidates
        if self.cluster is None and not isfinite(best.ratio):
            return f"{self.site} belongs to none of the {len(self.candidates)} groups, as far as their members could be compared"
        if self.cluster is None:
            return (
                f"{self.site} belongs to none of the {len(self.candidates)} groups: the nearest, cluster {best.cluster}, is at "
                f"{best.ratio:.1f} times the tolerance"
            )
        near = [c for c in others if isfinite(c.ratio)]
        clear = f"; the next, cluster {near[0].cluster}, is at {near[0].ratio:.1f} times" if near else ""
        return f"{self.site} belongs to cluster {self.cluster}: at {best.ratio:.2f} times the tolerance{clear}"


def place(run: Path, folder: Path, *, name: str | None = None, label: str | None = None) -> Placement:
    """Place a new site's folder (or table) among the clusters of a finished run."""
    store = RunStore.read(run)
    found = plan(store.config())
    loaded: tuple[int, Any, dict[str, Any]] | None = store.load_state(found.method.State)
    if loaded is None:
        raise DataError(f"{run} has not finished a round yet; resume it first")
    serving = found.method.serve(loaded[1])
    if serving.clusters is None:
        raise ConfigError(f"{run} is a run of {found.method.name}, which has no clusters to place a site in; use a run of emdcfl")
    seed = found.config.run.seed
    site, notes = load_site(
        folder,
        encoding=encoding_of(found.scenario),
        classes=found.scenario.classes,
        name=name or f"new:{folder.stem}",
        label=label,
        seed=seed,
    )
    if site.name in {s.name for s in found.scenario.sites}:
        raise DataError(f"the run has a client called {site.name!r} already; give the new site another name with --name")
    return _compare(replace(found, scenario=replace(found.scenario, sites=(*found.scenario.sites, site), groups=None)), serving, notes)


def _compare(found: RunPlan, serving: Serving, notes: tuple[str, ...]) -> Placement:
    config = found.config
    found = replace(found, config=replace(config, run=replace(config.run, participants=None)))
    judge = found.method if isinstance(found.method, EMDCFL) else EMDCFL()
    judge = replace(judge, distances="all", force_diagonal=True)
    assert serving.clusters is not None
    with found.federation() as fed:
        *known, new = fed.clients
        fed.begin(1)
        theta = fed.train({new: fed.initial()})[new]["theta"]
        served = {c: serving.models[int(serving.weights[i].argmax())] for i, c in enumerate(known)}
        pairs = [pair for c in known for pair in ((new, c), (c, new))]
        if new not in comparable(judge, fed, [new]):
            raise DataError(f"{new} has too few validation samples to be placed; give it more, or let a run with a fixed tolerance judge")
        measured = measure(judge, fed, pairs, {**served, new: theta})
        candidates = []
        for k in sorted(set(serving.clusters.tolist())):
            members = [c for c, label in zip(known, serving.clusters.tolist(), strict=True) if label == k]
            tested = fed.run(tasks.test, {new: {"models": served[members[0]][None], "weights": torch.ones(1)}})
            accuracy = next(iter(tested[new]["accuracy"].values()))
            candidates.append(_candidate(k, members, new, measured, accuracy))
    candidates.sort(key=lambda c: c.ratio)
    joined = candidates[0].cluster if candidates[0].ratio < 1 else None
    return Placement(new, joined, candidates, notes)


def _candidate(cluster: int, members: list[str], new: str, measured: Measured, accuracy: float) -> Candidate:
    ways = [(measured.entries[new, c], measured.entries[c, new]) for c in members if (new, c) in measured.entries]
    ratios = [max(_ratio(there), _ratio(back)) for there, back in ways]
    return Candidate(cluster, members, max(ratios, default=inf), sum(r < 1 for r in ratios), accuracy)


def _ratio(way: PairDistance) -> float:
    """W in units of its tolerance; all or nothing where that is zero, as a calibrated one may be."""
    return way.W / way.epsilon if way.epsilon > 0 else 0.0 if way.epsilon > way.W else inf


def as_dict(placement: Placement) -> dict[str, Any]:
    """JSON values."""
    candidates = [{f.name: getattr(c, f.name) for f in fields(c)} for c in placement.candidates]
    candidates = [{**c, "ratio": c["ratio"] if isfinite(c["ratio"]) else None} for c in candidates]
    return {"site": placement.site, "cluster": placement.cluster, "verdict": placement.verdict(), "candidates": candidates}
