"""Grouping by benefit: validation losses decide where a split pays."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.methods.toy import FlakyFederation, history
from tests.tiny import TRAINING, federation, tiny
from tests.trust.liars import LyingFederation

from emdcfl.core.errors import ClientError
from emdcfl.core.schema import Reply
from emdcfl.core.tasks import sample_losses
from emdcfl.engines import make_federation
from emdcfl.engines.local.sequential import simulated_clients
from emdcfl.methods import make
from emdcfl.methods.base import Distances
from emdcfl.methods.emdcfl import pairing, proposals
from emdcfl.methods.emdcfl.benefit import _pruned, examine
from emdcfl.methods.emdcfl.client.losses import LOSS_CUT, loss_moments, moments_of
from emdcfl.methods.emdcfl.interpret import read
from emdcfl.methods.emdcfl.member_losses import MemberLosses, joined, moments_verifier, portions
from emdcfl.methods.emdcfl.proposals import Cell


def play(fed: Any, rounds: int, **options: Any) -> list[Any]:
    return history(fed, make("emdcfl", grouping="benefit", **options), rounds)


def groups(state: Any) -> set[frozenset[str]]:
    return {frozenset(members) for members in state.sets}


def true_groups(fed: Any) -> set[frozenset[str]]:
    truth = fed.truth
    return {frozenset(c for c in fed.clients if truth[c] == g) for g in set(truth.values())}


def voter(gains: dict[Cell, float], m: int = 50, spread: float = 1.0) -> tuple[Reply, list[Cell]]:
    """Somebody whose mean loss under each average is given; losses under two of them vary independently."""
    cells = list(gains)
    mean = torch.tensor([gains[cell] for cell in cells], dtype=torch.float64)
    covariance = torch.eye(len(cells), dtype=torch.float64) * m * spread**2
    return {"mean": mean, "covariance": covariance, "accuracy": 1 - mean / LOSS_CUT, "accuracy_covariance": covariance, "n": m}, cells


def votes(losses: dict[str, dict[Cell, float]], **options: Any) -> MemberLosses:
    made = {c: voter(own, **options) for c, own in losses.items()}
    return MemberLosses(
        {c: reply for c, (reply, _) in made.items()}, list(dict.fromkeys(cell for _, cells in made.values() for cell in cells))
    )


AB, CD, ALL = ("a", "b"), ("c", "d"), ("a", "b", "c", "d")


def test_gain_and_error_are_those_of_the_paired_losses() -> None:
    rng = np.random.default_rng(0)
    losses = {c: rng.gamma(1.0, 1.0, (2, 30)).clip(0, LOSS_CUT) for c in ALL}
    replies = {}
    for c, table in losses.items():
        centred = table - table.mean(1, keepdims=True)
        V = torch.from_numpy(centred @ centred.T * 30 / 29)
        mean = torch.from_numpy(table.mean(1))
        replies[c] = {"mean": mean, "covariance": V, "accuracy": torch.zeros(2, dtype=torch.float64), "accuracy_covariance": V, "n": 30}
    gain = MemberLosses(replies, [ALL, AB, CD]).gain([ALL], [AB, CD])
    differences = [table[0] - table[1] for table in losses.values()]
    assert gain.mean == pytest.approx(np.concatenate(differences).mean())
    assert gain.error == pytest.approx(math.sqrt(sum(30 * d.var(ddof=1) for d in differences)) / 120)


def test_a_split_must_pay_by_more_than_chance() -> None:
    def split_gaining(gain: float) -> bool:
        return votes({c: {ALL: 1.0 + gain, AB if c in AB else CD: 1.0} for c in ALL}).pays([ALL], [AB, CD], evidence=3.0)

    error = math.sqrt(2 / 200)
    assert split_gaining(3.6 * error) and not split_gaining(2.9 * error) and not split_gaining(-1.0)
    assert not split_gaining(3.3 * error)  # without one of the four the gain of the others is too little


@pytest.mark.parametrize(("clients", "gain", "pays"), [(60, 0.01, True), (70, 0.01, False), (70, 0.06, True)])
def test_of_many_clients_a_split_must_be_noticed(clients: int, gain: float, pays: bool) -> None:
    names = tuple(f"c{i:02d}" for i in range(clients))
    sides = [names[: clients // 2], names[clients // 2 :]]
    found = votes({c: {names: 1.0, side: 1.0 - gain} for side in sides for c in side}, spread=0.001)
    assert found.pays([names], sides, evidence=3.0) == pays
    splits = _pruned([(sides[0], sides[1])], found, {"round": 1, "evidence": 3.0}).splits
    distances = Distances(*np.full((4, clients, clients), np.nan), splits=splits)
    said = read(distances, names, [0] * clients)
    assert ("to be noticed" in said.sentences[0]) == ("to be noticed" in said.clusters[0]) == (not pays)


def test_one_member_alone_cannot_separate_the_others_but_may_leave() -> None:
    said: dict[str, dict[Cell, float]] = {c: {ALL: 1.0, AB if c in AB else CD: 1.05} for c in ALL}
    said["a"] = {ALL: LOSS_CUT, AB: 0.0}  # the largest gain the schema allows
    assert not votes(said, spread=0.1).pays([ALL], [AB, CD], evidence=3.0)
    rest = ("b", "c", "d")
    leaves: dict[str, dict[Cell, float]] = {c: {ALL: 1.0, rest: 1.0} for c in rest}
    leaves["a"] = {ALL: 3.0, ("a",): 1.0}
    assert votes(leaves).pays([ALL], [("a",), rest], evidence=3.0)
    others: dict[str, dict[Cell, float]] = {"b": {ALL: 1.0, ("b",): 1.05}, **{c: {ALL: 1.0, CD: 1.05} for c in CD}}
    others["a"] = {ALL: LOSS_CUT, ("a",): 0.0}
    assert not votes(others, spread=0.1).pays([ALL], [("a",), ("b",), CD], evidence=3.0)


def shuffled(layout: Any, theta: Any) -> Any:
    """The same function, its hidden units in another order."""
    theta, order = theta.clone(), torch.arange(7, -1, -1)
    for entry in layout.entries:
        part = theta[entry.slice].view(entry.shape)
        dim = 0 if entry.shape[0] == 8 else 1
        if 8 in entry.shape:
            theta[entry.slice] = part.index_select(dim, order).flatten()
    return theta


def test_a_client_whose_first_model_averages_badly_is_not_cut_off_in_round_1() -> None:
    fed = federation(tiny(groups=1, clients_per_group=4, n=(120,), val=(120,)), training=replace(TRAINING, local_epochs=20))
    method, state = make("emdcfl", grouping="benefit"), play(fed, 1)[-1]
    members = list(state.clients)
    local = {c: reply["theta"] for c, reply in fed.train({c: state.start(c) for c in members}).valid.items()}
    local["site-0"] = shuffled(fed.layout, local["site-0"])
    first, later = (examine(method, fed, state, members, local, fed.begin(index)) for index in (1, 2))
    assert first.cells == [tuple(members)] and not first.splits  # nobody scored a division
    assert ("site-0",) in later.cells


def test_covariances_are_those_of_sums_over_blocks_of_consecutive_samples() -> None:
    values = torch.randn(2, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    blocks = values.view(2, 5, 4).sum(2)
    torch.testing.assert_close(moments_of(values, values * 0)["covariance"], 5 * torch.cov(blocks))
    assert not torch.allclose(moments_of(values[:, torch.randperm(20)], values * 0)["covariance"], 5 * torch.cov(blocks))


def test_moments_are_those_of_the_losses_and_others_are_refused() -> None:
    fed = federation(tiny())
    client = simulated_clients(tiny(), ["site-0"], fed.network(), seed=0, run="r", precision="fp32")["site-0"]
    models = torch.stack([fed.initial(i) for i in range(3)])
    reply = loss_moments(client, models=models)
    m = len(client.site.val)
    losses = torch.stack([sample_losses(client, model, "val")[0] for model in models]).double()
    torch.testing.assert_close(reply["mean"], losses.clamp(0, LOSS_CUT).mean(1))
    moments_verifier({"c": 3}, {"c": m})("c", reply)
    with pytest.raises(ClientError, match="announced"):
        moments_verifier({"c": 3}, {"c": m + 1})("c", reply)
    with pytest.raises(ClientError, match="covariance"):
        moments_verifier({"c": 3}, {"c": m})("c", {**reply, "covariance": reply["covariance"].fill_diagonal_(0.0)})
    with pytest.raises(ClientError, match="shapes"):
        moments_verifier({"c": 2}, {"c": m})("c", reply)
    nowhere = loss_moments(client, models=torch.full_like(models[:1], torch.nan))
    assert float(nowhere["mean"]) == LOSS_CUT and float(nowhere["covariance"]) == 0


def test_long_paths_are_asked_in_parts_whose_covariance_is_left_out() -> None:
    paths: dict[str, Sequence[int]] = {"a": range(70), "b": [70]}
    parts = list(portions(paths, 4))
    assert [{c: len(cells) for c, cells in part.items()} for part in parts] == [{"a": 64, "b": 1}, {"a": 6}]
    assert all(len(part) == 1 for part in portions({"a": [0], "b": [1]}, 2**30))
    one, other = voter({AB: 1.0, ALL: 2.0})[0], voter({CD: 3.0})[0]
    both = joined([one, other])
    assert both["mean"].tolist() == [1, 2, 3] and both["covariance"].shape == (3, 3) and not both["covariance"][2, :2].any()


def test_true_groups_are_found_and_equal_sites_stay_together() -> None:
    fed = federation(tiny(clients_per_group=3))
    states = play(fed, 2)
    assert groups(states[-1]) == true_groups(fed)
    assert all(a.sets == b.sets or len(a.sets) <= len(b.sets) for a, b in itertools.pairwise(states))
    top = states[-1].splits[0]
    assert top["pays"] and set(top["members"]) == set(fed.clients) and top["gain"] > 3.5 * top["error"] and top["decided_by"]
    served = make("emdcfl", grouping="benefit").serve(states[-1])
    found = read(served.distances, list(fed.clients), served.clusters.tolist())
    assert found.splits and "instead of one" in found.sentences[0]
    alike = federation(tiny(groups=1, clients_per_group=6))
    together = play(alike, 2)[-1]
    assert groups(together) == {frozenset(alike.clients)}
    served = make("emdcfl", grouping="benefit").serve(together)
    assert "no division" in read(served.distances, list(alike.clients), served.clusters.tolist()).sentences[0]


def test_with_few_participants_newcomers_join_the_model_that_validates_best() -> None:
    fed = federation(tiny(clients_per_group=4), participants=4)
    states = play(fed, 8)
    assert len(states[-1].labels) > 4
    for members in states[-1].sets:
        assert len({fed.truth[c] for c in members}) == 1  # type: ignore[index]


def test_a_member_that_is_absent_goes_with_its_nearest() -> None:
    fed = FlakyFederation(tiny(clients_per_group=3), fails={"site-1": (2,)}, training=TRAINING, device="cpu", on_failure="continue")
    assert groups(play(fed, 2)[-1]) == true_groups(fed)


def test_a_liar_cannot_tear_equal_sites_apart() -> None:
    lies = []

    def lie(fed: LyingFederation, task: str, asked: Any, reply: Reply) -> Reply:
        """Every small group is perfect, every large one hopeless, and nothing varies."""
        if task != "loss_moments":
            return reply
        lies.append(fed.index)
        mean = torch.linspace(0.0, LOSS_CUT, len(reply["mean"]), dtype=torch.float64)
        return {**reply, "mean": mean, "covariance": torch.zeros_like(reply["covariance"])}

    fed = LyingFederation(tiny(groups=1, clients_per_group=6), liar="site-2", lie=lie)
    found = groups(play(fed, 2)[-1])
    assert lies and not fed.failures
    assert frozenset(set(fed.clients) - {"site-2"}) in {members - {"site-2"} for members in found}


def test_reading_says_why_a_cluster_stays_together() -> None:
    together = play(federation(tiny(groups=1)), 1)[-1]
    kept = {"round": 1, "members": list(together.clients), "cells": [["site-0"], list(together.clients[1:])], "decided_by": []}
    numbers = {"error": 0.1, "points": 1.0, "points_error": 1.0, "pays": False, "evidence": 3.0}
    for gain, why in ((-0.1, "it does not pay"), (0.2, "that may be chance"), (0.5, "it rests on one client alone")):
        distances = replace(together.distances(), splits=[{**kept, **numbers, "gain": gain}])
        reading = read(distances, together.clients, [0] * len(together.clients))
        assert reading.clusters[0].endswith(why)
        assert (why in reading.sentences[0]) == (gain == 0.5)  # else the numbers say it


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells of several clients around four representatives."""
    for name, value in (("SINGLE", 5), ("REPRESENTATIVES", 4), ("FIRST", 2), ("COVERED", 0.0)):
        monkeypatch.setattr(proposals, name, value)
    monkeypatch.setattr(pairing, "REPRESENTATIVES", 4)


@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_a_tree_over_representatives_finds_the_groups_of_all_pairs(few: None, engine: str) -> None:
    scenario = tiny(groups=3, clients_per_group=4)
    fed = make_federation(scenario, engine=engine, device="cpu", training=TRAINING)
    state = play(fed, 2, pairing="representatives")[-1]
    assert groups(state) == true_groups(fed)
    assert len(state.rows) == 4 and state.W.shape == (4, 12) and torch.isfinite(state.W).all()


@pytest.mark.parametrize("seed", range(5))
def test_representatives_are_added_until_every_group_has_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    centres = np.repeat(rng.normal(size=(4, 6)) * 10, [120, 60, 17, 3], axis=0)
    points = centres + rng.normal(size=centres.shape)

    def measure(rows: Sequence[int]) -> Any:
        return np.linalg.norm(points[list(rows)][:, None] - points, axis=2)

    rows, F = proposals.choose(measure, len(points), rng)
    assert {tuple(centres[i]) for i in rows} == set(map(tuple, centres))
    assert len(rows) < proposals.REPRESENTATIVES and F.shape == (len(rows), len(points))


def test_distances_from_representatives_are_lower_bounds_of_all_pairs(few: None) -> None:
    scenario = tiny(groups=2, clients_per_group=4)
    (_, every), (_, some) = (play(federation(scenario), 1, pairing=how) for how in ("all", "representatives"))
    rows = [some.clients.index(c) for c in some.rows]
    full = every.W[rows].clone()
    full[range(len(rows)), rows] = 0.0
    gap = full - some.W
    assert gap.min() > -1e-5 and gap.max() < 0.05


def test_newcomers_are_compared_with_the_representatives_there_are(few: None) -> None:
    fed = federation(tiny(groups=2, clients_per_group=4), number=4)
    states = play(fed, 4, pairing="representatives")
    for before, after in itertools.pairwise(states):
        assert after.rows[: len(before.rows)] == before.rows
        assert torch.isfinite(after.W[:, [i for i, c in enumerate(after.clients) if c in after.n]]).all()
    assert len(states[-1].rows) == 4


@pytest.mark.parametrize("shown", [7, 400])
def test_one_participant_of_many_is_a_round_with_nothing_compared(few: None, monkeypatch: pytest.MonkeyPatch, shown: int) -> None:
    monkeypatch.setattr(pairing, "SHOWN", shown)
    fed = federation(tiny(groups=2, clients_per_group=4), participants=1)
    state = play(fed, 1, pairing="representatives")[-1]
    found = state.distances()
    assert np.isnan(found.W).all() and found.W.shape == (len(found.shown(state.clients)),) * 2
    assert "no division of the clients was tried" in read(found, state.clients, list(range(8))).sentences[0]


@pytest.mark.parametrize("participants", [None, 3])
def test_where_nobody_can_be_compared_updates_alone_propose(few: None, participants: int | None) -> None:
    fed = federation(tiny(groups=2, clients_per_group=4), participants=participants)
    state = play(fed, 4, pairing="representatives", require_validation=1000)[-1]
    assert not state.rows and {split["proposal"] for split in state.splits} == {"updates"}


def test_representatives_with_a_projection_per_pair(few: None) -> None:
    fed = federation(tiny(groups=2, clients_per_group=4))
    state = play(fed, 2, pairing="representatives", projection="pair")[-1]
    assert state.rows and torch.isfinite(state.tau[[state.clients.index(c) for c in state.rows]]).all()
    assert groups(state) == true_groups(fed)


def test_of_many_clients_people_see_the_representatives(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairing, "SHOWN", 7)
    state = play(federation(tiny(groups=2, clients_per_group=4)), 1, pairing="representatives")[-1]
    shown = state.distances()
    assert shown.W.shape == (4, 4) and shown.shown(state.clients) == state.rows
    labels = [state.labels[c] for c in state.clients]
    assert "groups instead of one" in read(shown, state.clients, labels).sentences[0]


def test_auto_compares_all_pairs_while_they_are_few() -> None:
    by_benefit = make("emdcfl", grouping="benefit")
    assert by_benefit.all_pairs(64) and not by_benefit.all_pairs(65)
    assert make("emdcfl").all_pairs(256) and not make("emdcfl").all_pairs(257)
    assert make("emdcfl", preset="reference").all_pairs(1000)
