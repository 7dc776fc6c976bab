from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.methods.toy import history
from tests.tiny import federation, tiny

from emdcfl.clustering import neighbourhoods
from emdcfl.core.errors import ConfigError
from emdcfl.methods import make
from emdcfl.methods.base import INFERRED
from emdcfl.methods.emdcfl.representatives import Found, Pair, by_representatives


class Graph:
    """A fixed graph of links that counts what it is asked."""

    def __init__(self, groups: Sequence[int], missing: Sequence[Pair] = (), extra: Sequence[Pair] = (), silent: Sequence[str] = ()) -> None:
        self.names = [f"c{i:03d}" for i in range(len(groups))]
        self.links = {(a, b): groups[i] == groups[j] for (i, a), (j, b) in itertools.permutations(enumerate(self.names), 2)}
        for pairs, value in ((missing, False), (extra, True)):
            for a, b in pairs:
                self.links[a, b] = self.links[b, a] = value
        self.silent, self.asked, self.calls = set(silent), set[Pair](), 0

    def __call__(self, pairs: Sequence[Pair]) -> dict[Pair, bool | None]:
        self.calls += 1
        for a, b in pairs:
            assert (a, b) not in self.asked and (b, a) not in self.asked and a != b
            self.asked.add((a, b))
        return {pair: None if self.silent & set(pair) else self.links[pair] for pair in pairs}

    def clusters(self, found: Found) -> list[int]:
        m = found.inferred(self.names) == 1
        np.fill_diagonal(m, True)
        for (a, b), linked in found.links.items():
            m[self.names.index(a), self.names.index(b)] = linked
        labels: list[int] = neighbourhoods(m)[0].tolist()
        return labels

    def truth(self) -> list[int]:
        labels: list[int] = neighbourhoods([[a == b or self.links[a, b] for b in self.names] for a in self.names])[0].tolist()
        return labels


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=40), st.integers(0, 1000))
def test_a_union_of_cliques_is_found_and_nothing_falls_back(groups: list[int], seed: int) -> None:
    graph = Graph(groups)
    found = by_representatives(graph.names, [], graph, np.random.default_rng(seed))
    assert graph.clusters(found) == graph.truth()
    assert not found.concerned and not found.unknown
    k = len(set(groups))
    assert len(graph.asked) <= len(groups) * (1.5 * k + 12)
    assert graph.calls <= k + 1
    assert found.contradictions == 0 and found.checks <= (k / 2 + 12) * len(groups)


def test_exchanges_grow_linearly() -> None:
    counts = []
    for clients in (40, 80, 160, 320, 640):
        graph = Graph([i % 4 for i in range(clients)])
        by_representatives(graph.names, [], graph, np.random.default_rng(0))
        counts.append(2 * len(graph.asked))
        assert counts[-1] <= (7 if clients < 160 else 6) * clients * 4  # small groups are checked completely
    slope = np.polyfit(np.log([40, 80, 160, 320, 640]), np.log(counts), 1)[0]
    assert slope <= 1.1


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=6, max_size=24), st.integers(0, 1000), st.data())
def test_a_contradiction_that_is_seen_is_followed_up(groups: list[int], seed: int, data: st.DataObject) -> None:
    """Whatever contradicts among the pairs compared: one of the two at least has been compared with the whole group of the other."""
    graph = Graph(groups)
    some = data.draw(st.lists(st.sampled_from(list(graph.links)), max_size=3))
    for a, b in some:
        graph.links[a, b] = graph.links[b, a] = not graph.links[a, b]
    found = by_representatives(graph.names, [], graph, np.random.default_rng(seed))
    label = {c: i for i, members in enumerate(found.groups) for c in members}
    for (a, b), linked in found.links.items():
        if linked != (label[a] == label[b]):
            known = [all(c == d or (c, d) in found.links for d in found.groups[label[x]]) for c, x in ((a, b), (b, a))]
            assert any(known) and {a, b} & found.concerned
    for a in found.concerned:
        assert all(a == b or (a, b) in found.links for b in found.groups[label[a]])


def test_a_pair_that_refuses_inside_a_cluster_gives_the_clusters_of_all_pairs_once_it_is_noticed() -> None:
    noticed = 0
    for seed in range(40):
        graph = Graph([0] * 60 + [1] * 60, missing=[("c001", "c002")])
        found = by_representatives(graph.names, [], graph, np.random.default_rng(seed))
        if found.concerned:
            noticed += 1
            assert graph.clusters(found) == graph.truth()
            assert found.concerned == {"c001", "c002"}  # and nobody else
            assert found.contradictions <= 1
    assert noticed >= 2


@pytest.mark.parametrize(("clients", "least"), [(40, 8), (80, 6), (160, 8)])
def test_clusters_are_those_of_all_pairs_where_many_links_are_missing(clients: int, least: int) -> None:
    """One missing link in thirty: far from cliques, so that groups are compared completely once that is seen, but not with each other."""
    same = 0
    for seed in range(10):
        rng = np.random.default_rng(seed)
        inside = [(f"c{i:03d}", f"c{j:03d}") for i, j in itertools.combinations(range(clients), 2) if i % 4 == j % 4]
        graph = Graph([i % 4 for i in range(clients)], missing=[pair for pair in inside if rng.random() < 1 / 30])
        found = by_representatives(graph.names, [], graph, rng)
        same += graph.clusters(found) == graph.truth()
        assert found.contradictions  # so that there is a warning in any case
        assert len(graph.asked) < 0.6 * clients * (clients - 1) / 2
    assert same >= least


def test_one_client_that_everybody_refuses_concerns_nobody_else() -> None:
    """Linked with its representative alone: completing it costs one group, not all of them."""
    groups = [i % 4 for i in range(240)]
    graph = Graph(groups)
    plain = len(by_representatives(graph.names, [], Graph(groups), np.random.default_rng(0)).links)
    odd = "c100"
    for other in graph.names:
        if other not in (odd, "c000"):
            graph.links[odd, other] = graph.links[other, odd] = False
    found = by_representatives(graph.names, [], graph, np.random.default_rng(0))
    assert graph.clusters(found) == graph.truth()
    assert odd in found.concerned and len(found.concerned) <= 12
    assert len(found.links) - plain <= 2 * 60 * (len(found.concerned) + 8)


def test_newcomers_meet_one_member_per_known_cluster() -> None:
    graph = Graph([0, 0, 0, 1, 1, 1, 0, 2, 2])
    known = [graph.names[:3], graph.names[3:6]]
    found = by_representatives(graph.names[6:], known, graph, np.random.default_rng(0))
    assert graph.clusters(found) == graph.truth()
    assert not any(set(pair) <= set(graph.names[:6]) for pair in graph.asked)


@pytest.mark.parametrize("silent", ["c000", "c004"])
def test_a_client_that_does_not_answer_is_left_out_and_nobody_else(silent: str) -> None:
    graph = Graph([0, 0, 0, 1, 1, 1], silent=[silent])
    found = by_representatives(graph.names, [], graph, np.random.default_rng(0))
    assert found.unknown == {silent}
    assert not any(silent in pair for pair in found.links)
    assert (found.inferred([silent, *graph.names]) == -1)[0].all()
    at = [i for i, c in enumerate(graph.names) if c != silent]
    labels = graph.clusters(found)
    assert [labels[i] for i in at].count(labels[at[0]]) in (2, 3)
    assert len({labels[i] for i in at}) == 2


def run(scenario: Any, rounds: int = 1, participants: int | None = None, **options: Any) -> Any:
    fed = federation(scenario, number=participants) if participants else federation(scenario)
    method = make("emdcfl", **options)
    state = history(fed, method, rounds)[-1]
    return method.serve(state), state


def test_the_method_finds_the_same_clusters_and_says_what_it_did_not_compare() -> None:
    scenario = tiny(groups=2, clients_per_group=4)
    every, _ = run(scenario)
    few, state = run(scenario, pairing="representatives")
    assert every.clusters.tolist() == few.clusters.tolist()
    assert torch.equal(every.models, few.models)
    assert few.distances is not None
    inferred = few.distances.kind == INFERRED
    assert inferred.any() and np.isnan(few.distances.W[inferred]).all() and torch.isinf(state.W[torch.from_numpy(inferred)]).all()
    compared = (few.distances.kind > 0) & ~inferred
    np.testing.assert_allclose(few.distances.W[compared], every.distances.W[compared], atol=0.02)


def test_representatives_under_partial_participation() -> None:
    scenario = tiny(groups=2, clients_per_group=4)
    every, full = run(scenario, rounds=4, participants=4)
    few, state = run(scenario, rounds=4, participants=4, pairing="representatives")
    assert every.clusters.tolist() == few.clusters.tolist()
    assert state.labels == full.labels


def test_it_is_refused_where_it_makes_no_sense() -> None:
    fed = federation()
    with pytest.raises(ConfigError, match="representatives"):
        make("emdcfl", preset="reference", pairing="representatives").init(fed, fed.begin(0))
