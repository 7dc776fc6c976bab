"""What a run found, in sentences, from its summary and its interpretation. The terminal and the report show the same ones."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from emdcfl.core.units import names, plural
from emdcfl.methods import METHODS

BASELINES = {"fedavg": "one model for all", "local": "every site alone"}
"""Method → what a comparison calls it."""

Summary = Mapping[str, Any]


def headline(summary: Summary, reading: Summary | None) -> str:
    """Say in one line how many groups there are and how clearly they are separated.

    Parameters
    ----------
    summary, reading : mapping
        Contents of ``summary.json`` and ``reading.json``; ``None`` where the method has no distances.
    """
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
    unknown = 0 if reading is None else len(reading["not_compared"])
    compared, found = n - unknown, len(set(clusters)) - unknown  # a client that was not compared is a cluster of its own
    if compared == 0:
        return f"None of the {n} clients could be compared"
    if found == 1:
        text = f"All {compared} clients belong together"
    elif found == compared:
        text = f"No two of the {compared} clients belong together"
    else:
        text = f"{plural(found, 'group')} among {compared} clients"
    clarity = None if reading is None else _clarity(reading, found)
    return text + (f", {clarity}" if clarity else "") + (f"; {plural(unknown, 'client')} not compared" if unknown else "")


def _clarity(reading: Summary, clusters: int) -> str | None:
    if reading["borderline"]:
        return f"with {plural(len(reading['borderline']), 'borderline client')}"
    if reading["doubts"]:
        return "but uncertain"
    if reading["near_bounds"]:
        return None
    return "clearly separated" if clusters > 1 else "without doubt"


def sentences(summary: Summary, reading: Summary | None, baselines: Mapping[str, Summary]) -> list[tuple[str, str]]:
    """Return the findings as (topic, sentence)."""
    found: list[tuple[str, str]] = []
    if reading is not None and len(summary["clients"]) > 1:
        found += [("Distances", sentence) for sentence in reading["sentences"]]
        found += [("Doubt", doubt) for doubt in reading["doubts"]]
    if (alone := _alone(summary, reading)) is not None:
        found.append(("Alone", alone))
    if (true := _truth(summary)) is not None:
        found.append(("Truth", true))
    if baselines:
        found.append(("Worth it", worth(summary, baselines)))
    return [(topic, f"{sentence[:1].upper()}{sentence[1:]}.") for topic, sentence in found]


def _alone(summary: Summary, reading: Summary | None) -> str | None:
    clients, clusters = summary["clients"], summary.get("clusters") or []
    sizes, unknown = Counter(clusters), [] if reading is None else reading["not_compared"]
    alone = [c for c, k in zip(clients, clusters, strict=False) if sizes[k] == 1 and c not in unknown]
    if not alone or len(alone) == len(clients):
        return None
    return f"no group fits {names(alone)}"


def _truth(summary: Summary) -> str | None:
    if summary.get("ari") is None or summary.get("clusters") is None:
        return None
    if summary["ari"] >= 1 - 1e-12:
        return "the groups found are exactly the true ones (ARI 1.00)"
    pairs = set(zip(summary.get("groups") or [], summary["clusters"], strict=False))
    mixed = [k for k, times in Counter(k for _, k in pairs).items() if times > 1]
    split = [str(g) for g, times in Counter(g for g, _ in pairs).items() if times > 1]
    parts = [f"agreement with the true groups: ARI {summary['ari']:.2f}"]
    if mixed:
        parts.append(f"{plural(len(mixed), 'cluster')} {'mixes' if len(mixed) == 1 else 'mix'} true groups")
    if split:
        parts.append(f"{plural(len(split), 'true group')} {'is' if len(split) == 1 else 'are'} split ({_few(split)})")
    return "; ".join(parts)


def _few(words: Sequence[str], most: int = 4) -> str:
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


def worth(clustered: Summary, baselines: Mapping[str, Summary]) -> str:
    """Say what grouping gained over each baseline, in points of mean accuracy.

    A difference counts if it exceeds two standard errors of the accuracy on as many test samples as there are, or half a point.
    """
    own = clustered["accuracy"].get("mean")
    others = {BASELINES[n]: s["accuracy"]["mean"] for n, s in baselines.items() if n in BASELINES and s["accuracy"].get("mean") is not None}
    if own is None or not others:
        return "no accuracy to compare"
    samples = max(clustered["accuracy"]["samples"], 1)
    least = max(0.5, 200 * math.sqrt(own * (1 - own) / samples))
    gains = {what: 100 * (own - mean) for what, mean in others.items()}
    told = ", ".join(f"{gain:+.1f} points against {what}" for what, gain in gains.items())
    if clustered["k"] == 1:
        return f"all sites belong together, so grouping is one model for all: {told}"
    if all(gain > least for gain in gains.values()):
        return f"grouping pays: {told}"
    if any(gain < -least for gain in gains.values()):
        return f"grouping does not pay here: {told}"
    better = [what for what, gain in gains.items() if gain > least]
    if better:
        level = [what for what in gains if what not in better]
        return f"grouping is better than {' and '.join(better)}, level with {' and '.join(level)} on {samples} test samples: {told}"
    return f"grouping makes little difference on {samples} test samples: {told}"
