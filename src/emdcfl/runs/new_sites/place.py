r"""Which group does a new site belong to, and how clearly?

The site trains once from θ⁰, as any first-time client does, and is compared with every client of the finished run in both directions:
its own model judges their validation samples, and each cluster's model judges its. It belongs to a cluster if it is linked with all
members that can be compared, exactly as if it had joined. Where validation losses made the groups (``grouping="benefit"``), links did not:
then a site that is not linked belongs to the group whose model is best at it. In such a run it belongs to no group if it does clearly
better alone, with a model that it trains for as many rounds as the run had; of a group that it is linked with, the intervals of both must
be apart for that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from emdcfl.clustering.pairs import over_tolerance
from emdcfl.core import tasks
from emdcfl.core.errors import DataError
from emdcfl.core.federation import Federation
from emdcfl.core.learning.objective import is_regression
from emdcfl.core.metric import Metric, score_of
from emdcfl.core.units import percent
from emdcfl.data.own import encoding_of, frames, load_site, site_from_arrays
from emdcfl.data.own.cleaning import Cleaning
from emdcfl.data.own.splitting import SplitRule
from emdcfl.data.types import Site
from emdcfl.methods.base import Serving
from emdcfl.methods.emdcfl import EMDCFL
from emdcfl.methods.emdcfl.comparison import Measured, comparable, measure
from emdcfl.runs.config import OWN_FILES
from emdcfl.runs.new_sites.nearest import groups_of, plan_again, with_site
from emdcfl.runs.plan import RunPlan
from emdcfl.runs.result import Result
from emdcfl.runs.verdict.intervals import wilson

AGAIN = "run again with its files among the others to decide it"


@dataclass(frozen=True)
class Candidate:
    """One cluster seen from the new site."""

    cluster: int
    members: list[str]
    ratio: float
    """Largest distance over tolerance, both ways, over the cluster's members that could be compared; below 1 the site is linked with all
    of them. Infinite where nobody could."""
    linked: int
    """Members the site is linked with."""
    score: float
    """Accuracy (or R²) of the cluster's model on the site's test samples."""


@dataclass(frozen=True)
class Guess:
    """What a model must beat at the new site: always answering the most frequent of its labels, or the mean of its numbers."""

    share: float
    """Of the most frequent class among the site's test labels; of numbers 0, the R² of their mean."""
    classes: int
    """Classes among them; none where they are numbers."""
    samples: int

    @classmethod
    def of(cls, labels: Tensor) -> Guess | None:
        """Count labels; None where there are none."""
        if is_regression(labels):
            return cls(0.0, 0, len(labels)) if len(labels) else None
        _, counts = labels.unique(return_counts=True)
        return cls(float(counts.max()) / len(labels), len(counts), len(labels)) if len(labels) else None

    def beats(self, score: float) -> bool:
        """Whether a model fails here: clearly less often right than guessing, or no better than chance among the site's classes."""
        if self.classes == 0:
            return score <= self.share
        by_chance = score <= 1 / max(self.classes, 2)
        return by_chance or (self.classes > 1 and self.at_most(score) < self.share)

    def at_most(self, score: float) -> float:
        """The upper end of the accuracy's 95% interval; of numbers, the R² itself."""
        return wilson(score, self.samples).high if self.classes else score

    def at_least(self, score: float) -> float:
        """The lower end of the accuracy's 95% interval; an R² may be as low as can be."""
        return wilson(score, self.samples).low if self.classes else -inf

    def right(self, score: float) -> str:
        """Say how well a model does here."""
        if self.classes == 0:
            return f"has an R² of {Metric.R2.text(score)} on its {self.samples} test samples"
        return f"is right for {percent(score)} of its {self.samples} test samples"


@dataclass(frozen=True)
class Placement:
    """Where a new site belongs; ``cluster`` is ``None`` where it would found a group of its own.

    ``refused`` is a cluster whose data look like the site's, but whose model fails on the site's own labels: never recommended. ``alone``
    is the score of the model that the site trained alone, where that decided.
    """

    site: str
    cluster: int | None
    candidates: list[Candidate]
    notes: tuple[str, ...]
    guess: Guess | None = None
    refused: int | None = None
    alone: float | None = None

    @property
    def metric(self) -> Metric:
        """What ``score`` of a candidate is."""
        return Metric.R2 if self.guess is not None and self.guess.classes == 0 else Metric.ACCURACY

    def verdict(self) -> str:
        if self.cluster is None and self.refused is not None and self.guess is not None:
            alike = next(c for c in self.candidates if c.cluster == self.refused)
            numbers = self.metric is Metric.R2
            usual = "the mean: 0" if numbers else f"the most frequent class: {percent(self.guess.share)}"
            check = "the units and the meaning of what is predicted" if numbers else "how the site spells and codes its labels"
            return (
                f"{self.site} looks like cluster {self.refused}, but its model {self.guess.right(alike.score)} "
                f"(always answering {usual}): do not use it; check {check}, or train it alone"
            )
        best, *others = self.candidates if self.cluster is None else sorted(self.candidates, key=lambda c: c.cluster != self.cluster)
        if self.cluster is None and self.alone is not None and self.guess is not None:
            most = max(self.candidates, key=lambda c: c.score)
            own = f"the model that it trains alone {self.guess.right(self.alone)}"
            best_of = f"the best of the groups', cluster {most.cluster}'s: {self.metric.text(most.score)}"
            return f"{self.site} belongs to no group: {own} ({best_of}); train it alone, or {AGAIN}"
        if self.cluster is None:
            how = f"the farthest member of the nearest, cluster {best.cluster}, is at {best.ratio:.1f} times the tolerance"
            return f"{self.site} belongs to no group: {how if isfinite(best.ratio) else 'no member could be compared'}; {self._meanwhile()}"
        if best.ratio >= 1 and self.guess is not None:
            far = f"; its farthest member is at {best.ratio:.1f} times the tolerance" if isfinite(best.ratio) else ""
            alone = "" if self.alone is None else f", and alone it reaches {self.metric.text(self.alone)}"
            return f"{self.site} fits cluster {self.cluster}: its model {self.guess.right(best.score)}{alone}{far}"
        near = [c for c in others if isfinite(c.ratio)]
        clear = f"; the next, cluster {near[0].cluster}, is at {near[0].ratio:.1f} times" if near else ""
        return f"{self.site} belongs to cluster {self.cluster}: at {best.ratio:.2f} times the tolerance{clear}"

    def _meanwhile(self) -> str:
        """Say what to do with a site in no group: the model that its own labels speak for, if there is one."""
        best = max(self.candidates, key=lambda c: c.score)
        if self.guess is None or self.guess.beats(best.score):
            return f"train it alone, or {AGAIN}"
        return f"cluster {best.cluster}'s model {self.guess.right(best.score)}: use that for now, and {AGAIN}"

    def as_dict(self) -> dict[str, Any]:
        """JSON values; an infinite ratio is null."""
        candidates = [
            {"cluster": c.cluster, "members": c.members, "ratio": c.ratio if isfinite(c.ratio) else None, "linked": c.linked}
            | {self.metric.value: c.score}
            for c in self.candidates
        ]
        return {
            "site": self.site,
            "cluster": self.cluster,
            "refused": self.refused,
            "guess": None if self.guess is None else self.guess.share,
            "alone": self.alone,
            "verdict": self.verdict(),
            "notes": list(self.notes),
            "candidates": candidates,
        }


def place(result: Result, site: Any, *, name: str | None = None, label: str | None = None) -> Placement:
    """Place a new site among the clusters of a finished run.

    The site is a folder of images or a table, read as the run's own files were; a frame, where it was given tables; or ``(X, y)``, if these
    were arrays. Its name is by default ``new:`` and the folder's, and ``label``, the label column of a table, the run's.
    """
    found = plan_again(result)
    scenario, seed = found.scenario, found.config.scenario.options.get("data_seed", 0)
    about: dict[str, Any] = {"encoding": encoding_of(scenario), "classes": scenario.classes, "target": scenario.target, "seed": seed}
    if isinstance(site, (str, Path)):
        path = Path(site)
        chosen = name or f"new:{path.stem}"
        options = found.config.scenario.options if found.config.scenario.name == OWN_FILES else {}
        as_the_run: dict[str, Any] = {"rule": SplitRule.of(**options), "cleaning": Cleaning.of(**options)}
        new, notes = load_site(path, name=chosen, label=label, **about, **as_the_run)
    elif frames.is_table(site):
        new, notes = frames.site_from_table(name or "new", site, found.config.scenario.options, **about)
    else:
        new, notes = site_from_arrays(name or "new", site, like=scenario, seed=seed)
    return place_site(found, new, result.serving, notes)


def place_site(found: RunPlan, new: Site, serving: Serving, notes: tuple[str, ...] = ()) -> Placement:
    """Place a site whose samples are read already."""
    candidates, alone = _compare(with_site(found, new), serving)
    return choose(new.name, candidates, Guess.of(next(iter(new.tests.values())).y), notes, alone)


def choose(site: str, candidates: list[Candidate], guess: Guess | None, notes: tuple[str, ...], alone: float | None = None) -> Placement:
    """Join the nearest cluster that is linked and whose model does not fail on the site's labels; else, by benefit, the one that fits.

    ``alone`` is the score of a model that the site trained alone, where groups were made by benefit.
    """
    failing = [c for c in candidates if guess is not None and guess.beats(c.score)]
    linked = [c for c in candidates if c.ratio < 1]
    joined = next((c.cluster for c in linked if c not in failing), None)
    if alone is not None and guess is not None:
        all_right = 1 - 0.5 / guess.samples if guess.classes else inf  # the interval of no other score reaches 1
        limits = {True: guess.at_least(alone), False: min(alone, all_right)}
        fitting = [c for c in candidates if c not in failing and guess.at_most(c.score) >= limits[c in linked]]
        joined = next((c.cluster for c in fitting if c in linked), None)
        if joined is None and fitting:
            joined = max(fitting, key=lambda c: c.score).cluster
    return Placement(site, joined, candidates, notes, guess, next((c.cluster for c in linked if c in failing), None), alone)


def _compare(found: RunPlan, serving: Serving) -> tuple[list[Candidate], float | None]:
    """Measure the last site of the scenario against every cluster, the nearest first; by benefit, score it alone too."""
    judge = found.method if isinstance(found.method, EMDCFL) else EMDCFL()
    judge = replace(judge, distances="all", force_diagonal=True)
    with found.federation() as fed:
        *known, new = fed.clients
        fed.begin(1)
        theta = fed.train({new: fed.initial()})[new]["theta"]
        groups = groups_of(serving, known)
        served = {c: model for model, members in groups.values() for c in members}
        pairs = [pair for c in known for pair in ((new, c), (c, new))]
        if new not in comparable(judge, fed, [new]):
            raise DataError(f"{new} has too few validation samples to be placed; give it more, or let a run with a fixed tolerance judge")
        measured = measure(judge, fed, pairs, {**served, new: theta})
        candidates = [candidate_of(k, members, new, measured, _score(fed, new, model)) for k, (model, members) in groups.items()]
        if not judge.by_benefit:
            return sorted(candidates, key=lambda c: c.ratio), None
        for number in range(2, found.rounds + 1):
            fed.begin(number)
            theta = fed.train({new: theta})[new]["theta"]
        return sorted(candidates, key=lambda c: c.ratio), _score(fed, new, theta)


def _score(fed: Federation, site: str, model: Tensor) -> float:
    """Accuracy (or R²) of a model on a site's test samples."""
    tested = fed.run(tasks.test, {site: {"models": model[None], "weights": torch.ones(1)}})
    return float(next(iter(score_of(tested[site]).values())))


def candidate_of(cluster: int, members: list[str], new: str, measured: Measured, score: float) -> Candidate:
    ways = [(measured.entries[new, c], measured.entries[c, new]) for c in members if (new, c) in measured.entries]
    ratios = [max(float(over_tolerance(way.W, way.epsilon)) for way in both) for both in ways]
    return Candidate(cluster, members, max(ratios, default=inf), sum(r < 1 for r in ratios), score)
