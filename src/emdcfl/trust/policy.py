"""The ``[trust]`` table of a config: limits on what a single client can do.

The defaults do not change the results of honest clients: they quarantine, flag, and cap reference distances that no honest client sends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Aggregate = Literal["mean", "trimmed-mean", "median"]


@dataclass(frozen=True)
class Trust:
    """Limits on what a single client can do."""

    max_faults: int = 3
    """Rounds with a rejected reply after which a client is excluded from the rest of the run."""
    max_n: int = 100_000_000
    """Largest number of samples a client may report; validation rejects more."""
    max_share: float = 1.0
    """Largest share of an average that one client may have, whatever n it reports. 1 keeps the reported n; a share below 1/k means equal
    weights among k members."""
    aggregate: Aggregate = "mean"
    """How the states of a cluster are combined: mean weighted by n, or trimmed mean or median of each coordinate, which ignore n.
    Soft methods take the mean alone: each of their clusters averages all clients."""
    trim: float = 0.2
    """Share of the members that ``"trimmed-mean"`` drops at each end, rounded up; the middle always stays."""
    clip: float | None = None
    """Clip updates to this many times the median norm of their cluster."""
    flag: float = 6.0
    """Robust z-score (median and MAD of the logarithm) above which an update's norm, a reference distance or a variance is flagged, if it
    is also several times the median. 0 flags nothing."""

    @property
    def plain(self) -> bool:
        """Whether averages are the ordinary weighted means."""
        return self.aggregate == "mean" and self.clip is None and self.max_share >= 1


TRUST_RANGES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "trust.max_faults": (lambda v: v >= 1, "at least 1"),
    "trust.max_n": (lambda v: 1 <= v < 2**29, "from 1 to 2^29 - 1 (weights are exact up to there)"),
    "trust.max_share": (lambda v: 0 < v <= 1, "above 0 and at most 1"),
    "trust.trim": (lambda v: 0 <= v < 0.5, "at least 0 and below 0.5"),
    "trust.clip": (lambda v: v >= 1, "at least 1 (times the median norm)"),
    "trust.flag": (lambda v: v >= 0, "at least 0"),
}
