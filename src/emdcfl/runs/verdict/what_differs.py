r"""What sets each group apart from the others, in plain words: from the sites' profiles (``learning.profile``), compared at the server.

Unit u (a group; a site where there is one group only) is compared with all others, feature by feature: with means m, numbers of samples n
and the standard deviation s inside sites,

.. math:: d = \frac{m_u - m_o}{s}, \qquad z = d \Big/ \sqrt{\tfrac1{n_u} + \tfrac1{n_o}}.

A feature is named if :math:`|d|` and :math:`|z|` are large; those with the largest :math:`|d|` first. Means say nothing about labels
that are named differently: groups that differ in this way only have nothing to be named for.
"""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emdcfl.core.errors import ClientError, EmdcflError
from emdcfl.core.federation import Federation
from emdcfl.core.learning.profile import IMAGE_FEATURES, profile
from emdcfl.core.metric import Metric, metric_of
from emdcfl.core.schema import Reply
from emdcfl.core.units import escaped, names
from emdcfl.data.types import Scenario

log = logging.getLogger("emdcfl")

MIN_EFFECT, MIN_Z = 0.3, 5.0
"""Difference in standard deviations, and in standard errors, from which a feature is named: there may be thousands of them."""

MAX_NAMED = 3
"""Features named of each unit."""

MAX_UNITS = 12
"""Units that are described, the most different first."""

STANDS_OUT = 0.75
"""Share of the largest difference from which on a single site is described."""

MAX_EFFECT = 99.0
PICTURE = 96
"""Least width in pixels of a mean image."""

IMAGE_WORDS = {
    "brightness": ("brighter", "darker"),
    "contrast": ("more contrast", "less contrast"),
    "upright": ("more upright edges", "fewer upright edges"),
    "right": ("what stands out lies further right", "what stands out lies further left"),
    "low": ("what stands out lies lower", "what stands out lies higher"),
    "colour": ("more colour", "less colour"),
    "red": ("more red", "less red"),
    "blue": ("more blue", "less blue"),
}
SHARES = ("brightness", "contrast", "upright", "colour")


@dataclass(frozen=True)
class Feature:
    """One number of a profile: how it is called where it is higher and where it is lower, and how its value is read."""

    name: str
    higher: str
    lower: str
    kind: str = "number"
    offset: float = 0.0
    scale: float = 1.0
    of: str = ""
    """What is named once only: a column of words, or the class mix."""


def features(scenario: Scenario) -> list[Feature]:
    """Return the meaning of every number of a profile; class shares come last."""
    shape = tuple(scenario.sites[0].train.x.shape[1:])
    found: list[Feature] = []
    if len(shape) == 3:
        found = [Feature(key, *IMAGE_WORDS[key], kind="share" if key in SHARES else "number") for key in IMAGE_FEATURES]
    elif scenario.encoding.get("columns"):
        for column in scenario.encoding["columns"]:
            found += _column(column)
    else:
        found = [_higher(f"column {i + 1}") for i in range(shape[0])]
    named = [f"class {escaped(c)!r}" for c in scenario.classes]
    return [*found, *(Feature(name, f"{name} is more frequent", f"{name} is rarer", "share", of="classes") for name in named)]


def _column(column: Mapping[str, Any]) -> list[Feature]:
    name = f"column {escaped(str(column['name']))!r}"
    if "words" in column:
        words = [f"{name}: {escaped(str(word))!r}" for word in column["words"]]
        return [Feature(word, f"{word} is more frequent", f"{word} is rarer", "share", of=name) for word in words]
    kind = "date" if column.get("date") else "number"
    gaps = Feature(name, f"{name} is missing more often", f"{name} is missing less often", "share")
    return [_higher(name, kind, float(column["mean"]), float(column["std"])), *([gaps] if column.get("gaps") else [])]


def _higher(name: str, kind: str = "number", offset: float = 0.0, scale: float = 1.0) -> Feature:
    words = ("later", "earlier") if kind == "date" else ("higher", "lower")
    return Feature(name, f"{name} is {words[0]}", f"{name} is {words[1]}", kind, offset, scale)


def what_differs(fed: Federation, scenario: Scenario, clusters: Sequence[int]) -> list[dict[str, Any]]:
    """Ask the clients for their profiles and compare; nothing where fewer than two units answer."""
    wanted = features(scenario)
    width = len(wanted) - len(scenario.classes)

    def verify(client: str, reply: Reply) -> None:
        shapes = [tuple(reply[name].shape) for name in ("mean", "sd", "classes")]
        if shapes != [(width,), (width,), (len(scenario.classes),)]:
            raise ClientError(f"expected a profile of {width} features and {len(scenario.classes)} classes, got shapes {shapes}")

    try:
        found: Mapping[str, Reply] = fed.run(profile, {c: {} for c in fed.clients}, verify=verify, classes=len(scenario.classes)).valid
    except EmdcflError as error:  # a run that is finished does not fail for want of words
        log.warning("what differs between groups is not said: %s", error)
        return []
    several = len(set(clusters)) > 1
    units: dict[str, list[str]] = {}
    for client, k in zip(fed.clients, clusters, strict=True):
        if client in found:
            units.setdefault(f"cluster {k}" if several else client, []).append(client)
    if len(units) < 2:
        return []
    named = {who: compare(found, members, wanted) for who, members in units.items()}
    effect = {who: max((abs(one["effect"]) for one in differences), default=0.0) for who, differences in named.items()}
    least = 0.0 if several else max(STANDS_OUT * max(effect.values()), MIN_EFFECT)  # one odd site makes all others differ from the rest
    chosen = sorted((who for who in units if effect[who] >= least), key=lambda who: -effect[who])[:MAX_UNITS]
    return [{"who": who, "members": members, "found": named[who]} for who, members in units.items() if who in chosen]


def compare(profiles: Mapping[str, Reply], members: Sequence[str], wanted: Sequence[Feature]) -> list[dict[str, Any]]:
    """Return the features that set some clients apart from the others, the most different first."""
    inside = [profiles[c] for c in members]
    outside = [reply for c, reply in profiles.items() if c not in members]
    n, m = (sum(reply["n"] for reply in part) for part in (inside, outside))
    here, there = (_pooled(part, lambda reply: [reply["mean"], reply["classes"]]) for part in (inside, outside))
    sd = np.sqrt(_pooled([*inside, *outside], lambda reply: [reply["sd"] ** 2, reply["classes"] * (1 - reply["classes"])]))
    floor = 1e-6 * np.maximum(np.abs(here), np.abs(there)) + 1e-12
    d = np.clip((here - there) / np.maximum(sd, floor), -MAX_EFFECT, MAX_EFFECT)
    z = d / math.sqrt(1 / n + 1 / m)
    chosen = [i for i in np.argsort(-np.abs(d), kind="stable").tolist() if abs(d[i]) >= MIN_EFFECT and abs(z[i]) >= MIN_Z]
    if any(what.name == "colour" and 0.0 in (here[i], there[i]) for i, what in enumerate(wanted)):  # grey images have no tint
        chosen = [i for i in chosen if wanted[i].name not in ("red", "blue")]
    of: dict[str, int] = {}
    for i in chosen:
        of.setdefault(wanted[i].of or wanted[i].name, i)
    found = []
    for i in list(of.values())[:MAX_NAMED]:
        what = wanted[i]
        read = {key: float(what.offset + what.scale * value) for key, value in (("here", here[i]), ("there", there[i]))}
        about: dict[str, Any] = {"feature": what.name, "said": what.higher if d[i] > 0 else what.lower, "kind": what.kind}
        found.append({**about, **read, "sd": float(what.scale * sd[i]), "effect": float(d[i])})
    return found


def _pooled(profiles: Sequence[Reply], of: Callable[[Reply], list[Tensor]]) -> Any:
    """Mean of something over all samples, from its means at every site: of features, then of classes."""
    return sum(reply["n"] * torch.cat(of(reply)).numpy() for reply in profiles) / sum(reply["n"] for reply in profiles)


def in_words(summary: Mapping[str, Any]) -> list[str]:
    """Say what differs, a sentence for each unit."""
    told = []
    for one in summary.get("what_differs") or []:
        said = "; ".join(difference_in_words(found) for found in one["found"])
        who = f"site {one['who']}" if one["members"] == [one["who"]] else f"{one['who']} ({names(one['members'])})"
        told.append(f"{escaped(who)}: {said or nothing_differs(metric_of(summary))}")
    return told


def nothing_differs(metric: Metric) -> str:
    """Say that no feature sets a unit apart, and what may."""
    if metric is Metric.R2:
        return "no mean sets it apart; how its targets depend on the features may"
    return "no mean and no class share sets it apart; what its labels mean may"


def difference_in_words(found: Mapping[str, Any]) -> str:
    """Say one difference: "column 'age' is higher: 61 against 48"."""
    return f"{found['said']}: {value_in_words(found, 'here')} against {value_in_words(found, 'there')}"


def value_in_words(found: Mapping[str, Any], side: str) -> str:
    """Write one of the two values, with the digits that tell them apart.

    Examples
    --------
    >>> value_in_words({"kind": "number", "here": -0.02, "there": 1.2}, "here")
    '0.0'
    """
    value = float(found[side])
    if found["kind"] == "share":
        return f"{100 * value:.0f}%"
    if found["kind"] == "date":
        return str(np.datetime64(round(value), "D"))
    apart = abs(float(found["here"]) - float(found["there"]))
    digits = 0 if apart == 0 else max(0, 1 - math.floor(math.log10(apart)))
    return f"{value:z.{min(digits, 6)}f}" if abs(value) < 1e6 else f"{value:.3g}"


def pictures(scenario: Scenario, described: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Return the mean training image of each unit as a small PNG; nothing of tables. Needs the samples, so local runs only."""
    from PIL import Image

    sites = {site.name: site for site in scenario.sites}
    if scenario.sites[0].train.x.dim() != 4 or not all(len(sites[c].train) for one in described for c in one["members"]):
        return []
    found = []
    for one in described:
        n = sum(len(sites[c].train) for c in one["members"])
        total = torch.stack([sites[c].train.x.double().sum(0) for c in one["members"]]).sum(0)
        mean = (255 * scenario.preprocess.scale * total / n).clamp(0, 255).round().to(torch.uint8).numpy()
        image = Image.fromarray(mean[0] if len(mean) == 1 else np.moveaxis(mean, 0, -1))
        times = max(1, math.ceil(PICTURE / image.width))
        buffer = io.BytesIO()
        image.resize((times * image.width, times * image.height), Image.Resampling.NEAREST).save(buffer, format="PNG", optimize=True)
        found.append(buffer.getvalue())
    return found
