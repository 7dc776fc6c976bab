"""One answer to the survey that would ruin the standardisation of everybody else: a lie, or numbers in another unit.

Columns and pixels are standardised by the pooled mean and spread of all nodes, each weighted by the number of values that it claims. So one
node could make a column of all others constant, or huge. Where the others' standardisation would change by more than a factor of ``FACTOR``
for its sake, its numbers are limited. They are not dropped: a clinic of another kind, whose numbers are true, could not train on values
hundreds of spreads away. Two nodes cannot tell who is wrong, and two liars among more cover for each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from itertools import accumulate

FACTOR = 30.0
"""Ratio of spreads, or shift of the mean in spreads, from which one node's numbers are limited."""

MIN_NODES = 3

Numbers = tuple[int, float, float]
"""Number of values, their mean, their sum of squared deviations from it."""

NOTHING = (0, 0.0, 0.0)


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
    given = [found[i] for i in known]
    before = [*accumulate(given, _together, initial=NOTHING)]
    after = [*accumulate(given[::-1], _together, initial=NOTHING)][::-1]
    mean, spread = pooled(given)
    others = [pooled(rest) for rest in zip(before, after[1:], strict=False)]
    changes = {}
    for at, (own_mean, own_spread) in enumerate(others):
        if own_spread > 1e-12 * max(1.0, abs(own_mean)):  # else the others' column says nothing
            ratio = max(spread, 1e-300) / own_spread
            changes[at] = max(ratio, 1 / ratio, abs(mean - own_mean) / own_spread)
    worst = max(changes, key=lambda at: changes[at], default=None)
    if worst is None or changes[worst] <= FACTOR:
        return None
    (count, told, deviation), (mean, spread) = given[worst], others[worst]
    least = min(count, before[-1][0] - count)
    reach = FACTOR * spread
    return known[worst], (least, min(max(told, mean - reach), mean + reach), min(deviation * least / count, least * reach**2))


def pooled(found: Sequence[Numbers]) -> tuple[float, float]:
    """Return mean and spread of all values together."""
    count, mean, deviation = reduce(_together, found)
    return mean, math.sqrt(deviation / count)


def _together(a: Numbers, b: Numbers) -> Numbers:
    count, shift = a[0] + b[0], b[1] - a[1]
    return count, a[1] + shift * (b[0] / count), a[2] + b[2] + shift**2 * a[0] * (b[0] / count)
