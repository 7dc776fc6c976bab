r"""What EMD-CFL's privacy noise promises in a run: how often a record is released, and what that comes to.

One release of a record is its projected embedding under one model and one projection, at unit length, with noise. Counted per record of the
train and of the validation split, for a federation of C clients in which everybody takes part in the comparison once:

============  =====================================  ==========================================
projection    train record                           validation record
============  =====================================  ==========================================
``row``       1                                      C − 1 partners' rows, and once for τ
``pair``      C − 1 rows, one per partner            C − 1 partners' rows, and C − 1 times for τ
``fresh``     C − 1 rows, and once for τ             C − 1 partners' rows, and once for τ
============  =====================================  ==========================================

``average_blocks`` adds C − 1 releases of train records. Under partial participation a client may be compared in several rounds, under a
newer model each time: at worst once per partner. ``recompute="every-round"`` releases all of it anew in every round.

Imports privacy and federation.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from emdcfl.core.errors import ConfigError
from emdcfl.core.federation import Federation
from emdcfl.privacy.noise import gaussian_sigma, total_epsilon
from emdcfl.transport import projected_width

if TYPE_CHECKING:
    from emdcfl.methods.emdcfl.algorithm import EMDCFL

log = logging.getLogger("emdcfl")


@dataclass(frozen=True)
class Releases:
    """How often, at most, a record of each split is released."""

    train: int
    val: int


def noise_epsilon(method: EMDCFL) -> float | None:
    """Return ε per record and release, or ``None`` where there is no noise (an infinite ε asks for none)."""
    chosen = method.privacy_epsilon
    return None if chosen is None or math.isinf(chosen) else chosen


def check_noise(method: EMDCFL) -> None:
    """Refuse what noise on embeddings does not cover, and budgets that are none."""
    if noise_epsilon(method) is None:
        return
    gaussian_sigma(noise_epsilon(method) or 0.0, method.privacy_delta)
    uncovered = {
        "cost": (method.cost == "label-aware", "labels travel without noise"),
        "exchange": (method.exchange == "server-samples", "the server sees raw samples"),
        "embedding_mode": (method.embedding_mode == "train", "a record changes the embeddings of its whole batch"),
    }
    for name, (refused, reason) in uncovered.items():
        if refused:
            got = getattr(method, name)
            raise ConfigError(f"expected privacy.epsilon without method.{name} = {got!r}, got both: {reason}; leave one of them out")


def releases(method: EMDCFL, clients: int, *, everyone: bool = True) -> Releases:
    """Count the releases of a record in one comparison of everybody with everybody (representatives: fewer).

    Parameters
    ----------
    clients : int
        C.
    everyone : bool
        Whether all clients are compared in one round.

    Examples
    --------
    >>> from emdcfl.methods.emdcfl.algorithm import EMDCFL
    >>> releases(EMDCFL(privacy_epsilon=8.0), 8), releases(EMDCFL(projection="pair", privacy_epsilon=8.0), 8)
    (Releases(train=1, val=8), Releases(train=7, val=14))
    """
    partners = max(1, clients - 1)
    times = 1 if everyone else partners
    train, tau = {"row": (times, times), "pair": (partners, partners), "fresh": (partners + times, times)}[method.projection]
    itself = 0 if method.force_diagonal or method.projection == "row" else 1  # with "row" it shows what τ was computed from
    blocks = partners if method.several_blocks else 0
    return Releases(train + itself + blocks, partners + tau + itself)


def say_budget(method: EMDCFL, fed: Federation) -> float:
    """Say what a run's noise promises; returns how many times it shrinks cosine distances, about."""
    epsilon, delta = noise_epsilon(method), method.privacy_delta
    if epsilon is None:
        return 1.0
    sigma, p = gaussian_sigma(epsilon, delta), projected_width(method.projection_ratio, fed.layout.embedding_width)
    found = releases(method, len(fed.clients), everyone=fed.everyone_answers)
    log.info(
        "privacy noise: (%g, %g) per record and release, σ = %.3g, %.2g times as long as an embedding; at that δ in total ε ≤ %.3g for a "
        "train record (%d releases) and %.3g for a validation record (%d)%s; models, sizes and test results are not covered",
        *(epsilon, delta, sigma, sigma * math.sqrt(p)),
        *(total_epsilon(epsilon, delta, found.train), found.train),
        *(total_epsilon(epsilon, delta, found.val), found.val),
        ", in every round anew" if method.recompute == "every-round" else "",
    )
    return 1 + p * sigma**2
