"""How many groups a run found and how clearly, and in one line what to do; without baselines, as distances or validation losses say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from emdcfl.core.metric import Metric, metric_of
from emdcfl.core.units import plural
from emdcfl.methods import METHODS
from emdcfl.runs.verdict.advice import Summary, advice, lower_first, no_model, used, what_to_do
from emdcfl.runs.verdict.chance import guessing
from emdcfl.runs.verdict.trained_with import untrained


def headline(summary: Summary, reading: Summary | None, baselines: Mapping[str, Summary] | None = None) -> str:
    """Say in one line what to do; without baselines, how many groups there are and how clearly they are separated.

    ``summary`` and ``reading`` are contents of ``summary.json`` and ``reading.json``, ``None`` where the method has no distances.
    """
    found = advice(summary, baselines or {})
    if found is not None:
        return found.headline
    nothing = guessing(used(summary))
    return no_model(summary, "this run", nothing) if nothing else _by_benefit(summary, reading) or _by_distances(summary, reading)


def _by_benefit(summary: Summary, reading: Summary | None) -> str | None:
    """Say what to do where only validation losses speak; None where links decided."""
    splits = None if reading is None else reading.get("splits")
    if not splits or summary.get("clusters") is None:
        return None
    if summary["k"] == 1:
        return f"{what_to_do(summary)}: dividing them does not pay by more than chance"
    return f"{what_to_do(summary)}: {_what_pays(summary, splits)}"


def _what_pays(summary: Summary, splits: Sequence[Summary]) -> str:
    """Say what groups gain that validation losses decided."""
    first = max((s for s in splits if s["pays"]), key=lambda s: len(s["members"]), default=None)
    if first is None:  # who could not be weighed, as no model of theirs came, is a cluster of its own
        return "no division pays among those whose validation losses were compared"
    some = len(first["members"]) < len(summary["clients"])
    none = some or round(float(first["points"]), 1) <= 0  # what some of the clients gain is not what all gain
    if none or metric_of(summary) is Metric.R2:
        return "their validation losses are lower than with fewer groups"
    return f"the split of round {first['round']} pays by {float(first['points']):.1f} points on validation data"


def _by_distances(summary: Summary, reading: Summary | None) -> str:
    """Say what to do where only distances speak: as they say where they are clear, else what would decide."""
    n, seen = len(summary["clients"]), structure(summary, reading)
    if summary.get("clusters") is None or n == 1:
        return seen
    unknown = len(not_compared(summary, reading))
    if reading is not None and (reading["doubts"] or reading["borderline"] or unknown):
        alone = f"the {metric_of(summary).label} of one model for all and of every site alone"
        more = "more validation samples" if unknown or reading["doubts"] else alone
        return f"Undecided: {lower_first(seen)}; {more} would decide"
    return f"{what_to_do(summary)}: {lower_first(seen)}" if summary["k"] in (1, n) else seen


def structure(summary: Summary, reading: Summary | None) -> str:
    """Say in one line how many groups there are and how clearly: by distances, or by what they gain where validation losses decided."""
    n, clusters = len(summary["clients"]), summary.get("clusters")
    if clusters is None:
        method = METHODS.get(str(summary["method"]))
        mixed = f"{plural(int(summary.get('k') or 0), 'model')}, mixed for each of {plural(n, 'client')}"
        return {
            "global": f"One model for all {plural(n, 'client')}",
            "alone": f"{plural(n, 'client')}, each trained alone",
            "personal": f"A model of its own for each of {plural(n, 'client')}",
        }.get("" if method is None else method.family, mixed)
    if n == 1:
        return "A single client"
    unknown = len(not_compared(summary, reading))
    compared, found = n - unknown, len(set(clusters)) - unknown  # a client that was not compared is a cluster of its own
    if compared == 0:
        return f"None of the {n} clients could be compared"
    by_benefit = reading is not None and bool(reading.get("splits"))  # none weighed yet: W finds them alike
    if found == 1:
        text = f"No division of the {compared} clients pays" if by_benefit else f"All {compared} clients look alike"
    elif found == compared:
        text = f"No two of the {compared} clients {'train better together' if by_benefit else 'look alike'}"
    else:
        text = f"{plural(found, 'group')} among {compared} clients"
    clarity = None if reading is None else _clarity(summary, reading, found)
    return text + (clarity or "") + (f"; {plural(unknown, 'client')} not compared" if unknown else "")


def not_compared(summary: Summary, reading: Summary | None) -> set[str]:
    """Return the clients of which no group is known: they were compared with no other, or never trained."""
    return {*untrained(summary), *(() if reading is None else reading["not_compared"])}


def one_group_by_benefit(summary: Summary, reading: Summary | None) -> bool:
    """Whether validation losses keep all clients together: the first sentence of the reading says it then, with numbers."""
    return reading is not None and "splits" in reading and summary["k"] == 1


def _clarity(summary: Summary, reading: Summary, clusters: int) -> str | None:
    if reading["borderline"]:
        return f", with {plural(len(reading['borderline']), 'borderline client')}"
    if reading["doubts"]:
        return ", but uncertain"
    if clusters > 1 and reading.get("splits"):  # losses were tested, not distances
        return f": {_what_pays(summary, reading['splits'])}"
    return ", clearly separated" if clusters > 1 and not reading["near_bounds"] else None
