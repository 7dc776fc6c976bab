r"""What the distances say about the clusters, in numbers and in sentences. The terminal and the report show these sentences.

Numbers are in units of W where all clients share one tolerance, else in multiples of the calibrated tolerance. A distance that is only
bounded counts with its bound. This is conservative: the interval of tolerances given is contained in the true one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from emdcfl.clustering import Margins, PairRatios, links, margins, members_of
from emdcfl.clustering.pairs import BAND, EXACT, LOWER, SIGNS, UPPER
from emdcfl.core.units import names
from emdcfl.methods.base import NOT_COMPARABLE, Distances

LOW_POWER = 0.75
"""Share of a client's train-to-validation distance above which its calibrated tolerance is too wide to separate groups."""

LOUD = 2.0
"""Factor by which privacy noise shrinks distances, from which on groups may stay hidden."""

CLEAR = 2.0
"""Multiple of the tolerance from which clusters are separated whatever the power is."""

NEARLY = 0.75
"""Share of the evidence asked for from which a decision about a split is near."""

MAX_PAIRS = 4
"""Pairs named in a sentence."""


@dataclass(frozen=True)
class Interpretation:
    """What the distances say about the clusters."""

    calibrated: bool
    """Whether each client has its own tolerance; all numbers are then multiples of it."""
    margins: Margins
    """See :func:`emdcfl.clustering.margins`."""
    borderline: list[str]
    """Clients with a deciding distance near the tolerance."""
    not_compared: list[str]
    """Clients that were compared with no other."""
    near_bounds: int
    """Pairs near the tolerance that are known as bounds only."""
    sentences: list[str]
    """The interval of tolerances, the borderline clients, the clients that were not compared."""
    clusters: dict[int, str]
    """The weakest link and the nearest outsider of each cluster."""
    doubts: list[str]
    """Why the clusters are uncertain; empty where there is no reason."""
    splits: list[dict[str, Any]] | None = None
    """Where validation losses decided: what each split gains (``benefit.py``)."""

    def as_dict(self) -> dict[str, Any]:
        """Return JSON values; an open end of the interval is None."""
        interval = self.margins["interval"]
        ends = None if interval is None else [x if math.isfinite(x) else None for x in interval]
        return {
            "unit": "tolerances" if self.calibrated else "W",
            "interval": ends,
            "inside": self.margins["inside"],
            "outside": self.margins["outside"],
            "borderline": self.borderline,
            "not_compared": self.not_compared,
            "near_bounds": self.near_bounds,
            "sentences": self.sentences,
            "clusters": {str(k): sentence for k, sentence in self.clusters.items()},
            "doubts": self.doubts,
            **({} if self.splits is None else {"splits": self.splits}),
        }


def read(distances: Distances, clients: Sequence[str], clusters: Sequence[int]) -> Interpretation:
    """Interpret the distances behind a clustering.

    Examples
    --------
    >>> W = np.array([[np.nan, 0.01, 0.3], [0.02, np.nan, 0.4], [0.1, 0.2, np.nan]])
    >>> found = read(Distances(W, np.full(3, 0.1), np.full((3, 3), 0.025), np.ones((3, 3), np.int8)), ["a", "b", "c"], [0, 0, 1])
    >>> for sentence in (*found.sentences, *found.clusters.values()):
    ...     print(sentence)
    every tolerance above 0.02 and up to 0.3 gives the same clusters (used: 0.025)
    weakest link a – b at 0.02; nearest outsider c at 0.3 from a
    nearest outsider a at 0.3 from c
    """
    if distances.splits is not None:
        return _read_splits(distances, distances.splits, clients, clusters)
    epsilon = distances.epsilon[np.isfinite(distances.epsilon)]
    calibrated = bool(epsilon.size and epsilon.max() > epsilon.min())
    pairs = PairRatios(distances.W, distances.epsilon, distances.kind, [int(c) for c in clusters])
    values = pairs.ratio if calibrated else distances.W
    used = 1.0 if calibrated else float(epsilon[0]) if epsilon.size else None
    found = margins(values, clusters, used=used)
    bounded = found["interval"] is not None and bool(np.isin(distances.kind, (LOWER, UPPER)).any())
    sentences = [_interval(found, epsilon, calibrated) + (" (conservative: some distances are bounds)" if bounded else "")]
    borderline, near_bounds = [clients[i] for i in pairs.borderline()], pairs.near_bounds()
    alone = [clients[i] for i in pairs.uncompared()] if len(clients) > 1 else []
    if borderline:
        sentences.append(f"borderline: {names(borderline)} (a deciding distance within a factor {BAND:g} of the tolerance)")
    if near_bounds:
        what = "1 pair near the tolerance is" if near_bounds == 1 else f"{near_bounds} pairs near the tolerance are"
        sentences.append(f'{what} known as bounds only; method.distances = "all" measures every pair')
    served = [c for c, k in zip(clients, clusters, strict=True) if c in alone and list(clusters).count(k) > 1]
    if served and epsilon.size:
        sentences.append(f"not compared: {names(served)}; served by the model that fits its validation data best")
    if len(alone) > len(served) and epsilon.size:
        left = [c for c in alone if c not in served]
        own = "a cluster of its own" if len(left) == 1 else "clusters of their own"
        sentences.append(f"not compared: {names(left)}; kept as {own}; more validation samples may help")
    unit = "×" if calibrated else ""
    about = {k: _cluster(k, found, distances, values, clients, clusters, unit) for k in dict.fromkeys(int(c) for c in clusters)}
    return Interpretation(calibrated, found, borderline, alone, near_bounds, sentences, about, doubts(distances, clients, clusters))


def _read_splits(distances: Distances, splits: list[dict[str, Any]], clients: Sequence[str], clusters: Sequence[int]) -> Interpretation:
    """Interpret clusters that validation losses decided: what the splits gain, and what one more would."""
    tops = [s for s in splits if not any(s["round"] == t["round"] and set(s["members"]) < set(t["members"]) for t in splits)]
    sentences = [
        f"round {s['round']}: {len(s['cells'])} groups{'' if any(len(cell) > 1 for cell in s['cells']) else ' of one site each'} "
        f"instead of one for {names(s['members'])} give {_gain(s)}"
        for s in tops
        if s["pays"]
    ]
    if not sentences:
        best = max(tops, key=lambda s: float(s["gain"]), default=None)
        sentences = ["no division of the clients was tried yet: as far as round 1 tells, their data do not differ"]
        if best is not None:
            despite = f", but {_why_not(best)}" if _beyond_chance(best) else ""
            sentences = [f"no division of the clients pays (the best one found: {_gain(best)}{despite})"]
    about, borderline = {}, []
    for k, members in members_of(clusters).items():
        own = [clients[i] for i in members]
        latest = [s for s in splits if not s["pays"] and set(s["members"]) <= set(own)]
        about[k] = f"dividing it would give {_gain(latest[-1])}: {_why_not(latest[-1])}" if latest else ""
    for s in tops:
        if s["error"] > 0 and NEARLY < s["gain"] / s["error"] / s["evidence"] < 1 / NEARLY:
            borderline += s["decided_by"]
    borderline = list(dict.fromkeys(borderline))
    if borderline:
        sentences.append(f"borderline: {names(borderline)} (a gain near {tops[0]['evidence']:g} standard errors decides)")
    return Interpretation(False, margins(distances.W, distances.shown(clusters)), borderline, [], 0, sentences, about, [], splits)


def _gain(split: Mapping[str, Any]) -> str:
    if split["points"] == split["points_error"] == 0:  # numbers are predicted, or no answer changed
        return f"a validation loss {'lower' if split['gain'] > 0 else 'higher'} by {abs(split['gain']):.2g} ± {2 * split['error']:.1g}"
    points = f"{split['points']:+.1f} ± {2 * split['points_error']:.1f} points on validation data"
    return f"{points} (loss {-split['gain']:+.2g} ± {2 * split['error']:.1g})"


def _why_not(split: Mapping[str, Any]) -> str:
    if split["gain"] <= 0:
        return "it does not pay"
    if not _beyond_chance(split):
        return "that may be chance"
    return "it rests on one client alone" if split.get("noticed", True) else "of so many clients, too little to be noticed"


def _beyond_chance(split: Mapping[str, Any]) -> bool:
    return bool(split["gain"] > split["evidence"] * split["error"])


def doubts(distances: Distances, clients: Sequence[str], clusters: Sequence[int]) -> list[str]:
    r"""Say why the clusters are uncertain.

    *Not transitive*: two clients are linked and yet in different clusters. *Both directions together*: each direction stays under its
    tolerance, but not their sum; under the null hypothesis :math:`(W/\epsilon + W^\top/\epsilon^\top)/\sqrt2` has at most the variance of
    one of them, so it is a test of the same level. *Not comparable*: clients in different clusters share too few classes. *Low power*:
    calibrated tolerances above ``LOW_POWER`` of τ for most clients, and no gap of ``CLEAR`` tolerances between the clusters that were
    found. *Privacy noise* longer than the embeddings: τ is then mostly noise, and its share says nothing about power.
    """
    k = np.asarray(clusters)
    m = links(distances.W, distances.epsilon)
    different = k[:, None] != k[None, :]
    reasons = []
    crossing = np.argwhere(np.triu(m & different, 1))
    if len(crossing):
        linked = _pairs(crossing, clients)
        reasons.append(f"links are not transitive: {linked} are linked but in different clusters; larger validation samples would help")
    if distances.noise_factor > LOUD:
        reasons.append(
            f"privacy noise shrinks distances about {distances.noise_factor:.0f} times: clients in one cluster may differ; a larger "
            "privacy.epsilon, a smaller projection_ratio or larger samples would tell"
        )
    apart = np.argwhere(np.triu((distances.kind == NOT_COMPARABLE) & different, 1))
    if len(apart):
        reasons.append(
            f"{_pairs(apart, clients)} share too few classes to be compared: they are apart because nothing says that they belong together"
        )
    epsilon = distances.epsilon[np.isfinite(distances.epsilon)]
    if not epsilon.size or epsilon.max() == epsilon.min():
        return reasons
    ratio = PairRatios(distances.W, distances.epsilon, distances.kind, [int(c) for c in clusters]).ratio
    exact = (distances.kind == EXACT) & (distances.kind.T == EXACT)
    together = np.argwhere(np.triu(m & exact & (ratio + ratio.T >= math.sqrt(2)), 1))
    if len(together):
        reasons.append(
            f"both directions together, {_pairs(together, clients)} exceed the tolerance although they are linked: this merge is uncertain"
        )
    finite = np.where(np.isfinite(distances.epsilon), distances.epsilon, np.nan)
    rows = [i for i in range(len(k)) if np.isfinite(finite[i]).any() and distances.tau[i] > 0]
    wide = [i for i in rows if np.nanmax(finite[i]) > LOW_POWER * distances.tau[i]]
    outside = margins(ratio, clusters)["outside"]
    if 2 * len(wide) > len(rows) and (outside is None or outside < CLEAR):
        worst = max(wide, key=lambda i: float(np.nanmax(finite[i]) / distances.tau[i]))
        share = float(np.nanmax(finite[worst]) / distances.tau[worst])
        reasons.append(
            f"low power: the tolerance of {names([clients[i] for i in wide])} is up to {share:.0%} of the distance between its own train "
            "and validation data, which hides smaller differences; give validation more data"
        )
    return reasons


def _interval(found: Margins, epsilon: Any, calibrated: bool) -> str:
    if not epsilon.size:
        return "no two clients were compared, so nothing is known about groups"
    if found["interval"] is None:
        return "no single tolerance gives these clusters"
    low, high = found["interval"]
    ends = [f" above {low:.3g}"] if low != -np.inf else []
    ends += [f" up to {high:.3g}"] if high != np.inf else []
    if calibrated:
        used = f"calibrated tolerances {epsilon.min():.3g} to {epsilon.max():.3g}"
        return f"{used}; any multiple{' and'.join(ends)} gives the same clusters"
    return f"every tolerance{' and'.join(ends)} gives the same clusters (used: {epsilon[0]:.3g})"


def _cluster(k: int, found: Margins, distances: Distances, values: Any, clients: Sequence[str], clusters: Sequence[int], unit: str) -> str:
    def at(a: int, b: int) -> str:
        i, j = (a, b) if values[a, b] >= values[b, a] else (b, a)
        return f"{SIGNS.get(int(distances.kind[i, j]), '')}{values[i, j]:.3g}{unit}"

    parts = []
    if k in found["weakest"]:
        link = found["weakest"][k]
        parts.append(f"weakest link {clients[link['a']]} – {clients[link['b']]} at {at(link['a'], link['b'])}")
    elif list(clusters).count(k) > 1:
        parts.append("no pair was compared")
    if k in found["nearest"]:
        link = found["nearest"][k]
        parts.append(f"nearest outsider {clients[link['b']]} at {at(link['a'], link['b'])} from {clients[link['a']]}")
    return "; ".join(parts)


def _pairs(pairs: Any, clients: Sequence[str]) -> str:
    named = [f"{clients[i]} – {clients[j]}" for i, j in pairs[:MAX_PAIRS]]
    return ", ".join(named) + (f" and {len(pairs) - MAX_PAIRS} more pairs" if len(pairs) > MAX_PAIRS else "")
