"""One answer to the survey that would ruin the standardisation of everybody else: a lie, or numbers in another unit.

Columns and pixels are standardised by the pooled mean and spread of all nodes, each weighted by the number of values that it claims. So one
node could make a column of all others constant, or huge. Where the others' standardisation would change by more than a factor of ``FACTOR``
for its sake, its numbers are limited. They are not dropped: a clinic of another kind, whose numbers are true, could not train on values
hundreds of spreads away. Two nodes cannot tell who is wrong, and two liars among more cover for each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

FACTOR = 30.0
"""Ratio of spreads, or shift of the mean in spreads, from which one node's numbers are limited."""

MIN_NODES = 3

Numbers = tuple[int, float, float]
"""Number of values, their mean, their sum of squared deviations from it."""


def limited(found: Sequence[Numbers]) -> tuple[int, Numbers] | None:
    """Return which node's numbers of a column would ruin the standardisation of all others, if one does, and what counts of them.

    It counts for at most as many values as all others together, with a mean and a spread within ``FACTOR`` of the others' spreads.

    Examples
    --------
    >>> limited([(100, 50.0, 900.0), (80, 52.0, 800.0), (100, 1e6, 900.0)])
    (2, (100, 147.7..., 900.0))
    >>> limited([(100, 50.0, 900.0), (80, 52.0, 800.0), (100, 70.0, 90_000.0)]) is None
    True
    """
    known = [i for i, (count, _, _) in enumerate(found) if count > 0]
    if len(known) < MIN_NODES:
        return None
    mean, spread = pooled([found[i] for i in known])
    changes, others = {}, {}
    for i in known:
        others[i] = own_mean, own_spread = pooled([found[j] for j in known if j != i])
        if own_spread > 1e-12 * max(1.0, abs(own_mean)):  # else the others' column says nothing
            ratio = max(spread, 1e-300) / own_spread
            changes[i] = max(ratio, 1 / ratio, abs(mean - own_mean) / own_spread)
    worst = max(changes, key=lambda i: changes[i], default=None)
    if worst is None or changes[worst] <= FACTOR:
        return None
    (count, told, deviation), (mean, spread) = found[worst], others[worst]
    least = min(count, sum(found[j][0] for j in known if j != worst))
    reach = FACTOR * spread
    return worst, (least, min(max(told, mean - reach), mean + reach), min(deviation * least / count, least * reach**2))


def pooled(found: Sequence[Numbers]) -> tuple[float, float]:
    """Return mean and spread of all values together."""
    count = sum(n for n, _, _ in found)
    mean = math.fsum(n * m for n, m, _ in found) / count
    variance = math.fsum(deviation + n * (m - mean) ** 2 for n, m, deviation in found) / count
    return mean, math.sqrt(variance)
