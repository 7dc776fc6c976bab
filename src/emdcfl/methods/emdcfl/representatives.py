"""Compare with representatives first: O(C·K) exchanges instead of O(C²).

If the graph of links is a union of cliques, a client linked with one member of a cluster is linked with all of them, so one representative
per cluster is enough. Whether it is one is checked on pairs that were not compared: along random rings inside every cluster, and of every
client with a member of each cluster larger than its own, because a client that only its representative refuses ends up in a small one.
The two clients of a pair that contradicts are *concerned*: they are compared with all members of both clusters and with all other
representatives, and their clusters are checked again until a check finds nothing new. ``docs/explanation/emdcfl.md`` has the numbers.

Pure functions: the comparison itself is a callback.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Pair = tuple[str, str]
Compare = Callable[[Sequence[Pair]], Mapping[Pair, bool | None]]
"""Measures unordered pairs, each once, and says which are linked; ``None`` where somebody did not answer."""

RINGS = 4
"""Random rings along which a large group is checked at a time: eight partners for every member."""

MODERATE, MANY = 48, 2
"""A group is compared completely if something inside contradicts: up to so many members always, else from so many separate pairs on."""

SMALL = 17
"""Up to this many members all pairs of a group are checked: eight partners for every member at most."""


@dataclass
class Found:
    """What was compared and what follows from it."""

    groups: list[list[str]]
    """Clients by representative."""
    links: dict[Pair, bool] = field(default_factory=dict)
    """The pairs that were compared, in both orders."""
    concerned: set[str] = field(default_factory=set)
    """Clients of a pair that contradicts the groups, compared with all members of the groups of both."""
    unknown: set[str] = field(default_factory=set)
    """Clients that did not answer when they were compared; nothing is inferred about them."""
    checks: int = 0
    """Pairs compared only to check."""
    contradictions: int = 0
    """How many of them contradicted."""

    def inferred(self, clients: Sequence[str]) -> NDArray[np.int8]:
        """Return what the groups say of each pair of clients: 1 linked, 0 separate, -1 nothing. A pair that was compared may differ."""
        group = {c: i for i, members in enumerate(self.groups) for c in members if c not in self.unknown}
        label = np.array([group.get(c, -1) for c in clients])
        found: NDArray[np.int8] = np.equal.outer(label, label).astype(np.int8)
        found[label < 0], found[:, label < 0] = -1, -1
        return found


def by_representatives(
    new: Sequence[str],
    known: Sequence[Sequence[str]],
    compare: Compare,
    rng: np.random.Generator,
    *,
    measured: Mapping[Pair, bool] | None = None,
) -> Found:
    """Group new clients, next to the known groups, with few comparisons.

    Parameters
    ----------
    new : sequence of str
        Clients that have not been compared with anybody.
    known : sequence of sequences of str
        Groups found before.
    compare : callable
    rng : numpy generator
        Draws representatives and checks.
    measured : mapping, optional
        Links of pairs that were compared before.

    Examples
    --------
    >>> same = lambda pairs: {(a, b): a[0] == b[0] for a, b in pairs}
    >>> found = by_representatives(["a1", "a2", "b1", "a3", "b2"], [], same, np.random.default_rng(0))
    >>> sorted(sorted(group) for group in found.groups), len(found.links) // 2 < 10
    ([['a1', 'a2', 'a3'], ['b1', 'b2']], True)
    """
    found = Found([list(group) for group in known if group])
    for (c, d), linked in (measured or {}).items():
        found.links[c, d] = found.links[d, c] = linked
    heads = [_pick(group, rng) for group in found.groups]
    left = _join(found, list(new), heads, compare)
    while left:
        head, *rest = left
        _compare(found, [(head, c) for c in rest], compare)
        if head not in found.unknown:
            found.groups.append([head, *(c for c in rest if found.links.get((head, c)))])
            heads.append(head)
        left = [c for c in rest if not found.links.get((head, c)) and c not in found.unknown]
    _verify(found, heads, set(new) - found.unknown, compare, rng)
    return found


def _join(found: Found, new: list[str], heads: list[str], compare: Compare) -> list[str]:
    """Let new clients join the first known group whose representative they are linked with; returns the others."""
    _compare(found, [(c, head) for c in new for head in heads], compare)
    left = []
    for c in new:
        groups = [i for i, head in enumerate(heads) if found.links.get((c, head))]
        if groups:
            found.groups[groups[0]].append(c)
        elif c not in found.unknown:
            left.append(c)
    return left


def _compare(found: Found, pairs: Iterable[Pair], compare: Compare) -> None:
    """Compare what has not been compared yet."""
    wanted: dict[Pair, None] = {}
    for c, d in pairs:
        if c != d and (c, d) not in found.links and (d, c) not in wanted and not {c, d} & found.unknown:
            wanted[c, d] = None
    if not wanted:
        return
    answers = compare(list(wanted))
    missing: list[Pair] = []
    for c, d in wanted:
        linked = answers.get((c, d))
        if linked is None:
            missing.append((c, d))
        else:
            found.links[c, d] = found.links[d, c] = linked
    found.unknown |= _silent(missing, wanted)


def _silent(missing: Sequence[Pair], wanted: Iterable[Pair]) -> set[str]:
    """Who did not answer: as few clients as explain the missing pairs, those with most of them first."""
    asked = Counter(c for pair in wanted for c in pair)
    lost = Counter(c for pair in missing for c in pair)
    silent: set[str] = set()
    for c, number in lost.most_common():
        if number == asked[c] and any(c in pair and not silent & set(pair) for pair in missing):
            silent.add(c)
    return silent


def _verify(found: Found, heads: list[str], fresh: set[str], compare: Compare, rng: np.random.Generator) -> None:
    """Check groups with new clients; complete the comparisons of those concerned; check their groups again until nothing is new."""
    groups = [i for i, members in enumerate(found.groups) if fresh & set(members)]
    complete: set[tuple[str, int]] = set()
    first = True
    while groups:
        pairs = [pair for pair in _checks(found, groups, rng) if pair not in found.links]
        if first:
            pairs = [pair for pair in pairs if fresh & set(pair)]
        _compare(found, pairs, compare)
        wrong = _contradictions(found, complete)
        asked = {frozenset(pair) for pair in pairs}
        found.checks += len(asked)
        found.contradictions += sum(frozenset(pair) in asked for pair in wrong)
        groups, first = _complete(found, heads, wrong, complete, compare), False


def _checks(found: Found, groups: Sequence[int], rng: np.random.Generator) -> list[Pair]:
    """Random pairs of clients of whom nothing is wrong so far: rings inside each group, and one member of every larger group."""
    pairs: list[Pair] = []
    for i in groups:
        group = [c for c in found.groups[i] if c not in found.concerned and c not in found.unknown]
        if len(found.groups[i]) <= SMALL:
            pairs += itertools.combinations(group, 2)
        else:
            rings = [[group[int(j)] for j in rng.permutation(len(group))] for _ in range(RINGS)]
            pairs += [pair for ring in rings for pair in zip(ring, ring[1:] + ring[:1], strict=True) if pair[0] != pair[1]]
        size = len(found.groups[i])
        for j, other in enumerate(found.groups):
            members = [c for c in other if c not in found.concerned]
            if members and (len(other), i) > (size, j):
                pairs += [(c, _pick(members, rng)) for c in group]
    return pairs


def _contradictions(found: Found, complete: set[tuple[str, int]]) -> list[Pair]:
    """Pairs that contradict the groups and of whom neither has been compared with the whole group of the other."""
    label = {c: i for i, members in enumerate(found.groups) for c in members}
    return [
        (c, d)
        for (c, d), linked in found.links.items()
        if c < d and c in label and d in label and linked != (label[c] == label[d])
        if (c, label[d]) not in complete and (d, label[c]) not in complete
    ]


def _complete(found: Found, heads: list[str], wrong: list[Pair], complete: set[tuple[str, int]], compare: Compare) -> list[int]:
    """Compare both clients of every contradiction with the groups of both and with all representatives; returns the groups touched.

    What turns up meanwhile (a link with another representative) is followed in the same way.
    """
    touched: set[int] = set()
    label = {c: i for i, members in enumerate(found.groups) for c in members}
    while wrong:
        new = {(c, label[x]) for pair in wrong for c in pair for x in pair}
        new |= {(c, i) for i in _no_cliques(found, wrong, label) for c in found.groups[i]}
        new -= complete
        found.concerned |= {c for c, _ in new}
        complete |= new
        touched |= {i for _, i in new}
        pairs = [(c, d) for c, i in sorted(new) for d in found.groups[i]]
        _compare(found, pairs + [(c, head) for c in sorted({c for c, _ in new}) for head in heads], compare)
        wrong = _contradictions(found, complete)
    return sorted(touched)


def _no_cliques(found: Found, wrong: list[Pair], label: Mapping[str, int]) -> set[int]:
    """Groups to compare completely: see ``MODERATE`` and ``MANY``."""
    used: set[str] = set()
    separate: Counter[int] = Counter()
    for c, d in wrong:
        if label[c] == label[d] and not used & {c, d}:
            used |= {c, d}
            separate[label[c]] += 1
    return {i for i, number in separate.items() if number >= (MANY if len(found.groups[i]) > MODERATE else 1)}


def _pick(names: Sequence[str], rng: np.random.Generator) -> str:
    return names[int(rng.integers(len(names)))]
