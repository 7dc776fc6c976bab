"""What ``summary.json`` and ``reading.json`` hold, checked where they are read: a run directory may come from elsewhere.

A key that a version of emdcfl did not write yet may be missing; whoever needs it says so. Other keys are taken as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NotRequired, TypedDict

from emdcfl.core.checks import describe, fits_json
from emdcfl.core.errors import StoreError
from emdcfl.core.metric import metric_of

AGAIN = "resume the run to write it again"

MAX_SCORE = 1e100
"""Scores beyond it are no result of a run; their squares would be no numbers."""

Numbers = float | None


class Ends(TypedDict):
    """An interval."""

    low: Numbers
    high: Numbers


class Rare(TypedDict):
    """Scores of sites with unbalanced classes."""

    mean: float
    low: float
    high: float
    sites: int


class Errors(TypedDict):
    """RMSE, overall and of every site."""

    mean: Numbers
    worst: NotRequired[Numbers]
    sites: NotRequired[list[Numbers]]


class Variant(TypedDict):
    """Scores of one test variant."""

    mean: NotRequired[Numbers]
    worst: NotRequired[Numbers]
    low: NotRequired[Numbers]
    high: NotRequired[Numbers]
    new_sites: NotRequired[Ends | None]
    sites: NotRequired[list[Numbers]]
    tested: NotRequired[list[int]]
    errors: NotRequired[list[Numbers]]
    rmse: NotRequired[Errors]
    samples: NotRequired[int]
    balanced: NotRequired[Rare]
    auc: NotRequired[Rare]


class Score(TypedDict):
    """Scores of a run."""

    mean: Numbers
    worst: Numbers
    low: NotRequired[Numbers]
    high: NotRequired[Numbers]
    new_sites: NotRequired[Ends | None]
    samples: NotRequired[int]
    variants: dict[str, Variant]
    rmse: NotRequired[Errors]
    balanced: NotRequired[Rare]
    auc: NotRequired[Rare]


class Personalized(TypedDict):
    """What fine-tuning at home gained."""

    kept: list[str]
    clients: dict[str, dict[str, Numbers] | None]
    mode: NotRequired[str]
    gain: NotRequired[Numbers]
    accuracy: NotRequired[Score]
    r2: NotRequired[Score]


class Origin(TypedDict):
    """Whose updates a model holds."""

    model: str
    serves: list[str]
    sites: list[str]
    shares: NotRequired[dict[str, float]]


class Found(TypedDict):
    """What sets a unit apart."""

    feature: str
    said: str
    kind: str
    here: float
    there: float
    sd: NotRequired[float]


class Difference(TypedDict):
    """What sets a unit apart, all of it."""

    who: str
    members: list[str]
    found: list[Found]


class Failure(TypedDict):
    """A reply that was missing or rejected."""

    round: int
    client: str
    task: str
    reason: str


class Flag(TypedDict):
    """An outlier."""

    client: str
    what: str
    first: int
    times: int
    value: float
    typical: float


class Split(TypedDict):
    """A split that validation losses decided."""

    round: int
    evidence: float
    members: list[str]
    cells: list[list[str]]
    gain: float
    error: float
    points: float
    points_error: float
    pays: bool
    noticed: NotRequired[bool]
    decided_by: list[str]


NEEDED: dict[str, Any] = {
    "method": str, "scenario": str, "seed": int, "rounds": int, "finished": bool, "k": int,
    "clients": list[str], "clusters": list[int] | None, "groups": list[str | float] | None, "ari": Numbers,
}  # fmt: skip
"""What every summary of a run with models holds beside its scores."""

SUMMARY: dict[str, Any] = {
    **NEEDED, "classes": int, "accuracy": Score, "r2": Score, "personalized": Personalized, "trained_with": list[Origin] | None,
    "scored": list[str] | None, "seconds": dict[str, float], "memory": dict[str, float],
    "failures": list[Failure], "quarantined": list[Failure], "flags": list[Flag], "notes": list[str], "config": str,
    "versions": dict[str, str], "what_differs": list[Difference] | None, "answers": dict[str, str], "most_frequent": Variant,
}  # fmt: skip

READING: dict[str, Any] = {
    "unit": Literal["W", "tolerances"], "interval": list[Numbers] | None, "borderline": list[str], "not_compared": list[str],
    "near_bounds": int, "sentences": list[str], "clusters": dict[str, str], "doubts": list[str],
}  # fmt: skip


def check(found: Mapping[str, Any], hints: Mapping[str, Any], where: str) -> None:
    """Raise ``StoreError`` unless every key of ``hints`` is there and fits."""
    for key, hint in hints.items():
        if key not in found:
            raise StoreError(f"{where}: no {key!r}; {AGAIN}")
        if not fits_json(found[key], hint):
            told = "a run writes it" if isinstance(found[key], (dict, list)) else f"{describe(hint)}, got {type(found[key]).__name__}"
            raise StoreError(f"{where}: expected {key} as {told}; {AGAIN}")


def check_summary(summary: Mapping[str, Any], where: str) -> None:
    """Raise unless what the summary holds is as a run writes it."""
    check(summary, {key: hint for key, hint in SUMMARY.items() if key in summary}, where)
    clients = summary.get("clients", [])
    if len(set(clients)) < len(clients):
        raise StoreError(f"{where}: expected each client once; {AGAIN}")
    for name in ("clusters", "groups"):
        if summary.get(name) is not None and len(summary[name]) != len(clients):
            raise StoreError(f"{where}: expected {len(clients)} {name}, one per client, got {len(summary[name])}; {AGAIN}")
    metric = metric_of(summary)
    for holder, place in ((summary, where), (summary.get("personalized", {}), f"{where}: personalized")):
        if metric in holder:
            _check_score(holder[metric], metric, len(clients), f"{place}: {metric}")
        elif holder is not summary and holder:
            raise StoreError(f"{place}: no {metric.value!r}; {AGAIN}")


def _check_score(score: Mapping[str, Any], metric: Any, n: int, where: str) -> None:
    if not score["variants"]:
        raise StoreError(f"{where}: expected a variant, got none; {AGAIN}")
    for one in (score, *score["variants"].values()):
        if (one.get("low") is None) != (one.get("high") is None) or ("balanced" in one) != ("auc" in one):
            raise StoreError(f"{where}: expected both ends of an interval, and balanced accuracy with AUC; {AGAIN}")
        lists = [one[name] for name in ("sites", "tested", "errors") if name in one]
        lists += [one["rmse"]["sites"]] if "sites" in one.get("rmse", {}) else []
        possible = all(value is None or abs(value) <= MAX_SCORE for each in lists for value in each)
        if not possible or any(len(each) != n for each in lists) or min(one.get("tested", ()), default=0) < 0:
            raise StoreError(f"{where}: expected numbers of {n} sites; {AGAIN}")
