r"""Reading a clustering: how far the distances are from another answer, in numbers and in words.

Everything is in units of W where one tolerance holds for all, else in multiples of the calibrated tolerance. Entries that were only
bounded count with their bound, which errs on the safe side: what is said to be inside is at most that far, what is said to be outside at
least, and the interval of tolerances is contained in the true one.

Imports clustering and the types of ``base``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from emdcfl.clustering import Margins, links, margins
from emdcfl.methods.base import Distances

LOW_POWER = 0.75
"""Share of a client's own train-to-validation distance above which its calibrated tolerance is too wide to tell groups apart."""

LOUD = 2.0
"""How many times privacy noise shrinks distances where it is as long as the embeddings: from there on groups may go unseen."""

CLEAR = 2.0
"""Multiple of the tolerance from which clusters are apart whatever the power is."""

MARKS = {2: "≥ ", 3: "≤ "}
MOST_NAMES = 4


@dataclass(frozen=True)
class Reading:
    """What the distances say about the clusters.

    Attributes
    ----------
    calibrated : bool
        Whether clients have tolerances of their own; all numbers are then multiples of them.
    margins : Margins
        See :func:`emdcfl.clustering.margins`.
    sentences : list of str
        The interval, and the weakest link and the nearest outsider of each cluster.
    doubts : list of str
        Why the clusters should not be called certain; empty where there is no reason.
    """

    calibrated: bool
    margins: Margins
    sentences: list[str]
    doubts: list[str]

    def as_dict(self) -> dict[str, Any]:
        """Return JSON values; an open end of the interval is None."""
        interval = self.margins["interval"]
        ends = None if interval is None else [x if math.isfinite(x) else None for x in interval]
        return {
            "unit": "tolerances" if self.calibrated else "W",
            "interval": ends,
            "inside": self.margins["inside"],
            "outside": self.margins["outside"],
            "sentences": self.sentences,
            "doubts": self.doubts,
        }


def read(distances: Distances, clients: Sequence[str], clusters: Sequence[int]) -> Reading:
    """Read a clustering.

    Examples
    --------
    >>> W = np.array([[np.nan, 0.01, 0.3], [0.02, np.nan, 0.4], [0.1, 0.2, np.nan]])
    >>> found = read(Distances(W, np.full(3, 0.1), np.full((3, 3), 0.025), np.ones((3, 3), np.int8)), ["a", "b", "c"], [0, 0, 1])
    >>> for sentence in found.sentences:
    ...     print(sentence)
    the same clusters come out for every tolerance above 0.02 up to 0.3 (used: 0.025)
    cluster 0 (a, b): weakest link a – b at 0.02; nearest outsider c at 0.3, seen with a
    cluster 1 (c): one client; nearest outsider a at 0.3, seen with c
    """
    epsilon = distances.epsilon[np.isfinite(distances.epsilon)]
    calibrated = bool(epsilon.size and epsilon.max() > epsilon.min())
    values = distances.W / distances.epsilon if calibrated else distances.W
    used = 1.0 if calibrated else float(epsilon[0]) if epsilon.size else None
    found = margins(values, clusters, used=used)
    bounded = bool(np.isin(distances.kind, (2, 3)).any())
    sentences = [_interval(found, epsilon, calibrated) + ("; at least, as some pairs were only bounded" if bounded else "")]
    for k in dict.fromkeys(int(c) for c in clusters):
        sentences.append(_cluster(k, found, distances, values, clients, clusters, "times the tolerance" if calibrated else ""))
    return Reading(calibrated, found, [s for s in sentences if s], doubts(distances, clients, clusters))


def doubts(distances: Distances, clients: Sequence[str], clusters: Sequence[int]) -> list[str]:
    r"""Say why clusters should not be called certain.

    *Not transitive*: two clients are linked and yet in different clusters. *Both directions together*: each direction stays under its
    tolerance, but not their sum; under the null hypothesis :math:`(W/\epsilon + W^\top/\epsilon^\top)/\sqrt2` has at most the variance of
    one of them, so it is a test of the same level. *Low power*: calibrated tolerances above ``LOW_POWER`` of τ for most clients, and
    no gap of ``CLEAR`` tolerances between the clusters that were found. *Privacy noise* longer than the embeddings: τ is then mostly
    noise, and its share says nothing about power.
    """
    k = np.asarray(clusters)
    m = links(distances.W, distances.epsilon)
    different = k[:, None] != k[None, :]
    reasons = []
    crossing = np.argwhere(np.triu(m & different, 1))
    if len(crossing):
        names = _pairs(crossing, clients)
        reasons.append(f"links are not transitive: {names} are linked but in different clusters; larger validation samples would help")
    if distances.shrunk > LOUD:
        reasons.append(
            f"privacy noise shrinks distances about {distances.shrunk:.0f} times: clients in one cluster may differ; a larger "
            "privacy.epsilon, a smaller projection_ratio or larger samples would tell"
        )
    epsilon = distances.epsilon[np.isfinite(distances.epsilon)]
    if not epsilon.size or epsilon.max() == epsilon.min():
        return reasons
    with np.errstate(divide="ignore", invalid="ignore"):  # a calibrated tolerance may be 0: a client whose samples are all alike
        ratio = distances.W / distances.epsilon
    exact = (distances.kind == 1) & (distances.kind.T == 1)
    together = np.argwhere(np.triu(m & exact & (ratio + ratio.T >= math.sqrt(2)), 1))
    if len(together):
        reasons.append(
            f"{_pairs(together, clients)} are linked, but both directions together speak against it; do not call this merge certain"
        )
    finite = np.where(np.isfinite(distances.epsilon), distances.epsilon, np.nan)
    rows = [i for i in range(len(k)) if np.isfinite(finite[i]).any() and distances.tau[i] > 0]
    wide = [i for i in rows if np.nanmax(finite[i]) > LOW_POWER * distances.tau[i]]
    outside = margins(ratio, clusters)["outside"]
    if 2 * len(wide) > len(rows) and (outside is None or outside < CLEAR):
        worst = max(wide, key=lambda i: float(np.nanmax(finite[i]) / distances.tau[i]))
        share = float(np.nanmax(finite[worst]) / distances.tau[worst])
        reasons.append(
            f"low power: the tolerance of {_names([clients[i] for i in wide])} is up to {share:.0%} of the distance between its own train "
            "and validation data, so smaller differences than that go unseen; give validation more data"
        )
    return reasons


def _interval(found: Margins, epsilon: Any, calibrated: bool) -> str:
    if not epsilon.size:
        return "no two clients were compared, so nothing is known about groups"
    if found["interval"] is None:
        return "no single tolerance gives these clusters"
    low, high = found["interval"]
    above = "" if low == -np.inf else f" above {low:.3g}"
    up_to = "" if high == np.inf else f" up to {high:.3g}"
    if calibrated:
        used = f"(used: 1; tolerances {epsilon.min():.3g} to {epsilon.max():.3g})"
        return f"the same clusters come out for every multiple of the calibrated tolerances{above}{up_to} {used}"
    return f"the same clusters come out for every tolerance{above}{up_to} (used: {epsilon[0]:.3g})"


def _cluster(k: int, found: Margins, distances: Distances, values: Any, clients: Sequence[str], clusters: Sequence[int], unit: str) -> str:
    members = [c for c, label in zip(clients, clusters, strict=True) if label == k]

    def at(a: int, b: int) -> str:
        i, j = (a, b) if values[a, b] >= values[b, a] else (b, a)
        return f"{MARKS.get(int(distances.kind[i, j]), '')}{values[i, j]:.3g}{' ' if unit else ''}{unit}"

    parts = []
    if k in found["weakest"]:
        link = found["weakest"][k]
        parts.append(f"weakest link {clients[link['a']]} – {clients[link['b']]} at {at(link['a'], link['b'])}")
    else:
        parts.append("one client" if len(members) == 1 else "no pair was compared")
    if k in found["nearest"]:
        link = found["nearest"][k]
        parts.append(f"nearest outsider {clients[link['b']]} at {at(link['a'], link['b'])}, seen with {clients[link['a']]}")
    return f"cluster {k} ({_names(members)}): {'; '.join(parts)}"


def _names(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= MOST_NAMES else f"{', '.join(names[: MOST_NAMES - 1])} and {len(names) - MOST_NAMES + 1} more"


def _pairs(pairs: Any, clients: Sequence[str]) -> str:
    named = [f"{clients[i]} – {clients[j]}" for i, j in pairs[:MOST_NAMES]]
    return ", ".join(named) + (f" and {len(pairs) - MOST_NAMES} more pairs" if len(pairs) > MOST_NAMES else "")
