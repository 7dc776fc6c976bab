"""Compare with representatives first: O(C·K) exchanges instead of O(C²).

If the graph of links is a union of cliques, a client linked with one member of a cluster is linked with all of them, so comparing it with
one representative per cluster is enough. Whether the graph is one is checked on a sample of the pairs that were not compared: inside every
cluster along a random ring, and every client with a random member of another cluster. Where a check contradicts, all pairs of the
clusters concerned are compared, and their clients with the representatives of all other clusters; what is found there may concern further
clusters, until nothing contradicts.

Counting unordered pairs for C new clients in K cliques of equal size: C(K+1)/2 with representatives, at most C on rings and C across.

Pure functions: the comparison itself is a callback.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

Pair = tuple[str, str]
Compare = Callable[[Sequence[Pair]], Mapping[Pair, bool | None]]
"""Measures unordered pairs, each once, and says which are linked; ``None`` where somebody did not answer."""


@dataclass
class Found:
    """What was compared and what follows from it.

    Attributes
    ----------
    groups : list of lists
        Clients by representative.
    links : dict
        The pairs that were compared, in both orders.
    concerned : set
        Clients of groups in which a check failed; their pairs were compared, not inferred.
    unknown : set
        Clients that did not answer when they were compared; nothing is inferred about them.
    """

    groups: list[list[str]]
    links: dict[Pair, bool] = field(default_factory=dict)
    concerned: set[str] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)

    def inferred(self) -> dict[Pair, bool]:
        """Return the links that follow for pairs (in both orders) that were not compared."""
        label = {c: i for i, members in enumerate(self.groups) for c in members if c not in self.unknown}
        inferred = {}
        for c, own in label.items():
            for d, other in label.items():
                if c != d and (c, d) not in self.links and not (c in self.concerned and d in self.concerned):
                    inferred[c, d] = own == other
        return inferred


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
    _compare(found, _checks(found, set(new) - found.unknown, rng), compare)
    _fall_back(found, heads, compare)
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


def _checks(found: Found, fresh: set[str], rng: np.random.Generator) -> list[Pair]:
    """Random pairs that were not compared and involve a new client: a ring inside each group, one outsider for each client."""
    pairs: list[Pair] = []
    for i, group in enumerate(found.groups):
        ring = [group[int(j)] for j in rng.permutation(len(group))]
        pairs += [pair for pair in zip(ring, ring[1:] + ring[:1], strict=True) if fresh & set(pair)]
        others = [c for j, other in enumerate(found.groups) if j != i for c in other]
        pairs += [(c, _pick(others, rng)) for c in group if others and c in fresh]
    return pairs


def _fall_back(found: Found, heads: list[str], compare: Compare) -> None:
    """Compare everything among groups of which a pair contradicts the grouping, until none does."""
    bad: set[int] = set()
    while True:
        label = {c: i for i, members in enumerate(found.groups) for c in members}
        wrong = [(c, d) for (c, d), linked in found.links.items() if c in label and d in label and linked != (label[c] == label[d])]
        now = bad | {label[c] for pair in wrong for c in pair}
        if now == bad:
            return
        bad = now
        members = [c for i in sorted(bad) for c in found.groups[i]]
        found.concerned = set(members)
        pairs = [(c, d) for k, c in enumerate(members) for d in members[k + 1 :]]
        pairs += [(c, heads[j]) for c in members for j in range(len(heads)) if j not in bad]
        _compare(found, pairs, compare)


def _pick(names: Sequence[str], rng: np.random.Generator) -> str:
    return names[int(rng.integers(len(names)))]
