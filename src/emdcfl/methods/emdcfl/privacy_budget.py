"""What EMD-CFL's privacy noise promises in a run: how often a record is released, and the total ε of that.

One release of a record is its projected embedding under one model and one projection, at unit length, with noise.
``docs/explanation/noise.md`` has the counts for every projection, and what repeats them.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from emdcfl.core.federation import Federation
from emdcfl.core.units import plural
from emdcfl.methods.emdcfl.settings import Options
from emdcfl.privacy.noise import gaussian_sigma, total_epsilon
from emdcfl.transport import projected_width

log = logging.getLogger("emdcfl")


@dataclass(frozen=True)
class ReleasesPerRecord:
    """How often, at most, a record of each split is released."""

    train: int
    val: int


def releases(options: Options, clients: int, *, everyone: bool = True) -> ReleasesPerRecord:
    """Count the releases of a record in one comparison of all pairs (representatives: fewer).

    Parameters
    ----------
    clients : int
        C.
    everyone : bool
        Whether all clients are compared in one round.

    Examples
    --------
    >>> releases(Options(privacy_epsilon=8.0), 8), releases(Options(projection="pair", privacy_epsilon=8.0), 8)
    (ReleasesPerRecord(train=1, val=8), ReleasesPerRecord(train=7, val=14))
    """
    partners = max(1, clients - 1)
    times = 1 if everyone else partners
    train, tau = {"row": (times, times), "pair": (partners, partners), "fresh": (partners + times, times)}[options.projection]
    itself = 0 if options.force_diagonal or options.projection == "row" else 1  # with "row" it shows what τ was computed from
    blocks = partners if options.several_blocks else 0
    return ReleasesPerRecord(train + itself + blocks, partners + tau + itself)


def log_budget(options: Options, fed: Federation) -> float:
    """Log what a run's noise promises; returns how many times it shrinks cosine distances, about."""
    epsilon, delta = options.privacy_epsilon, options.privacy_delta
    if epsilon is None or not options.noisy:
        return 1.0
    sigma, p = gaussian_sigma(epsilon, delta), projected_width(options.projection_ratio, fed.layout.embedding_width)
    found = releases(options, len(fed.clients), everyone=fed.everyone_answers)
    log.info(
        "privacy noise: (%g, %g) per record and release, σ = %.3g, %.2g times as long as an embedding; at that δ in total ε ≤ %.3g for a "
        "train record (%s) and %.3g for a validation record (%d)%s; models, sizes, losses and test results are not covered",
        *(epsilon, delta, sigma, sigma * math.sqrt(p)),
        *(total_epsilon(epsilon, delta, found.train), plural(found.train, "release")),
        *(total_epsilon(epsilon, delta, found.val), found.val),
        ", again in every round" if options.repeated(partial=fed.number not in (None, len(fed.clients))) else "",
    )
    return 1 + p * sigma**2
