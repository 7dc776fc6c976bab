from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from tests.methods.toy import FlakyFederation, history
from tests.tiny import TRAINING, federation, same_bits, score, tamper, tiny
from torch import Tensor

from emdcfl.core.client import TaskInfo
from emdcfl.core.errors import ConfigError, DataError
from emdcfl.core.federation import Failure, Inputs
from emdcfl.core.keys import NodeSecret
from emdcfl.core.schema import Reply
from emdcfl.data.types import Scenario
from emdcfl.engines.local import SequentialFederation
from emdcfl.methods import make
from emdcfl.methods.emdcfl.client import projecting
from emdcfl.runs.scoring import agreement
from emdcfl.transport import projected_width, projection

GROUPS = [0, 0, 1, 1]


def play(fed: SequentialFederation, rounds: int = 1, name: str = "emdcfl", **options: Any) -> Any:
    return history(fed, make(name, **options), rounds)[-1]


def labels(state: Any) -> list[int]:
    return make("emdcfl").serve(state).clusters.tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"distances": "all"},
        {"projection": "pair"},
        {"projection": "fresh", "tolerance": 0.06},
        {"tolerance": "auto"},
        {"solver": "sinkhorn"},
        {"cost": "euclidean", "tolerance": 0.1},
        {"cost": "label-aware", "tolerance": 0.1},
        {"projection_ratio": 0.5, "max_samples": 60, "tolerance": 0.06},
        {"embedding_mode": "train"},
    ],
    ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()) or "defaults",
)
def test_the_groups_are_found(options: dict[str, Any]) -> None:
    state = play(federation(), **options)
    assert labels(state) == GROUPS
    W, epsilon = state.W.numpy(), state.epsilon.numpy()
    off = ~np.eye(4, dtype=bool)
    assert np.isfinite(W[off]).all() and np.isfinite(epsilon[off]).all() and (state.kind.numpy()[off] > 0).all()
    assert np.isfinite(state.tau.numpy()).all() and (state.tau.numpy() >= -1e-9).all()
    inside = np.equal.outer(GROUPS, GROUPS) & off
    assert (W[inside] < epsilon[inside]).all()


def test_reference_preset_finds_them_too() -> None:
    state = play(federation(), preset="reference", tolerance=0.08)
    assert labels(state) == GROUPS
    assert torch.isfinite(state.W.diagonal()).all()  # the diagonal is tested like any other pair


@pytest.mark.slow
def test_bounds_and_exact_solves_link_the_same_pairs() -> None:
    found = [play(federation(tiny(groups=3, clients_per_group=2)), distances=d) for d in ("needed", "all")]
    assert found[0].sets == found[1].sets == [["site-0", "site-1"], ["site-2", "site-3"], ["site-4", "site-5"]]
    assert same_bits(found[0].models, found[1].models)
    exact = found[0].kind == 1
    torch.testing.assert_close(found[0].W[exact], found[1].W[exact])


def test_cluster_models_are_the_oracles_byte_for_byte() -> None:
    scenario = tiny(n=(80, 49, 64, 33), model="tiny_bn")
    ours, oracle = play(federation(scenario), 3), play(federation(scenario), 3, "oracle")
    assert ours.sets == oracle.sets
    assert same_bits(ours.models, oracle.models)
    assert same_bits(make("emdcfl").serve(ours).weights, make("oracle").serve(oracle).weights)


def test_a_tolerance_nobody_meets_is_local_training_and_one_everybody_meets_is_fedavg() -> None:
    alone = play(federation(), 2, tolerance=-10.0)
    own = play(federation(), 2, "local")
    assert labels(alone) == [0, 1, 2, 3]
    assert all(same_bits(alone.models[i], own.own[c]) for i, c in enumerate(alone.clients))
    together = play(federation(), 2, tolerance=100.0)
    assert labels(together) == [0, 0, 0, 0]
    assert same_bits(together.models[0], play(federation(), 2, "fedavg").theta)


class Recording(SequentialFederation):
    """Keeps every request and reply as the server sees them."""

    def __init__(self, scenario: Scenario, **options: Any) -> None:
        super().__init__(scenario, training=TRAINING, device="cpu", **options)
        self.seen: list[tuple[int, str, str, Mapping[str, Any], Reply]] = []

    def _dispatch(self, info: TaskInfo, inputs: Mapping[str, Inputs], common: Inputs) -> Iterator[tuple[str, Reply | Failure]]:
        for name, reply in super()._dispatch(info, inputs, common):
            assert not isinstance(reply, Failure), str(reply)
            self.seen.append((self.index, info.name, name, {**common, **inputs[name]}, reply))
            yield name, reply

    def tasks(self, round: int) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for index, task, client, _, _ in self.seen:
            if index == round:
                found.setdefault(task, []).append(client)
        return found


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)


def blobs(value: Any) -> Iterator[bytes]:
    if isinstance(value, bytes):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from blobs(item)


def contains_rows(matrix: Tensor, raw: Tensor) -> bool:
    """Whether any row of ``raw`` shows up among the rows of ``matrix``."""
    return matrix.dim() == 2 and matrix.shape[1] == raw.shape[1] and bool((torch.cdist(matrix, raw) < 1e-6).any())


@pytest.mark.parametrize("mode", ["row", "pair", "paper", "fresh"])
def test_the_server_never_holds_a_projection_its_seed_or_a_raw_embedding(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: dict[bytes, Tensor] = {}

    def drawn(seed: bytes, d: int, p: int) -> np.ndarray[Any, Any]:
        found = projection(seed, d, p)
        seeds[seed] = torch.from_numpy(found)
        return found

    projecting.matrix.cache_clear()
    monkeypatch.setattr(projecting, "projection", drawn)
    fed = Recording(tiny())
    play(fed, 1, projection=mode, projection_ratio=1.0)  # square R: shapes alone would not tell
    assert len(seeds) == {"row": 4, "pair": 6, "paper": 6, "fresh": 16}[mode]
    d = fed.layout.embedding_width
    locals_ = {client: reply["theta"] for _, task, client, _, reply in fed.seen if task == "train"}
    raw = []
    for model in locals_.values():
        for client in fed._clients.values():
            raw += [client.embeddings(model, split, torch.arange(len(client.split(split)))) for split in ("train", "val")]
    raw = [z[z.norm(dim=1) > 1e-3] for z in raw]

    replies = [reply for *_, reply in fed.seen]
    got = [t for reply in replies for t in tensors(reply)]
    assert any(t.dim() == 2 and t.shape[1] == d for t in got)
    assert not any(t.shape == R.shape and torch.allclose(t, R) for t in got for R in seeds.values())
    assert not any(contains_rows(t, z) for t in got for z in raw)
    sent = b"".join(blob for reply in replies for blob in blobs(reply))
    assert not any(seed in sent for seed in seeds)
    requests = b"".join(blob for *_, request, _ in fed.seen for blob in blobs(request))
    assert not any(seed in requests for seed in seeds)


def test_only_embedding_models_travel_between_clients() -> None:
    fed = Recording(tiny())
    play(fed, 1)
    width = fed.layout.embedding.stop
    asked = [request for _, task, _, request, _ in fed.seen if task == "project"]
    assert len(asked) == 4 and width < fed.layout.size
    assert all(omega.shape == (width,) for request in asked for omega in request["omegas"].values())


def test_what_travels_is_the_formula() -> None:
    """W by hand, from the seed the clients share: one R per row, train sample against validation sample, minus tau."""
    from emdcfl.transport import cost_matrix, solve

    fed = Recording(tiny(val=(70,)))
    state = play(fed, 1, distances="all", tolerance=0.06)
    d = fed.layout.embedding_width
    theta = {client: reply["theta"] for _, task, client, _, reply in fed.seen if task == "train"}
    for i, row in enumerate(fed.clients):
        R = torch.from_numpy(projection(NodeSecret.simulated(0, row).derive("projection", "run", row), d, projected_width(0.9, d)))
        train = fed._clients[row].embeddings(theta[row], "train", torch.arange(80)) @ R
        held_out = [fed._clients[c].embeddings(theta[row], "val", torch.arange(70)) @ R for c in fed.clients]
        value = [solve(cost_matrix(train, v)).value for v in held_out]
        assert state.tau[i].item() == pytest.approx(value[i], abs=1e-5)
        for j in range(4):
            if j != i:
                assert state.W[i, j].item() == pytest.approx(value[j] - value[i], abs=1e-5)


def test_full_participation_measures_once() -> None:
    fed = Recording(tiny())
    play(fed, 3)
    assert set(fed.tasks(1)) == {"train", "reference", "project"}
    assert set(fed.tasks(2)) == set(fed.tasks(3)) == {"train"}
    again = Recording(tiny())
    play(again, 2, recompute="every-round")
    assert sorted(again.tasks(2)["reference"]) == sorted(again.clients)
    public = Recording(tiny())
    play(public, 2, preset="reference")
    assert set(public.tasks(2)) == {"train"}
    partial = Recording(tiny(), number=3)
    play(partial, 2, preset="reference")
    assert "reference" in partial.tasks(2)


def test_the_papers_reference_distance_is_one_unprojected_number() -> None:
    from emdcfl.transport.cost import cost_matrix
    from emdcfl.transport.solvers import solve

    fed = Recording(tiny())
    state, row = play(fed, projection="paper", tolerance=0.06), fed.clients[0]
    theta = fed.train({row: fed.initial()})[row]["theta"]
    train, held_out = (fed._clients[row].embeddings(theta, split, torch.arange(n)) for split, n in (("train", 80), ("val", 70)))
    assert state.tau[0].item() == pytest.approx(solve(cost_matrix(train, held_out)).value, abs=1e-5)


def test_partial_participation_measures_pairs_once_and_keeps_the_unseen_alone() -> None:
    scenario = tiny(groups=2, clients_per_group=4)
    fed = Recording(scenario, number=4)
    method = make("emdcfl", tolerance=0.06)
    state = method.init(fed, fed.begin(0))
    seen: set[str] = set()
    measured: dict[tuple[str, str], float] = {}
    for index in range(1, 13):
        round = fed.begin(index)
        state = method.step(fed, state, round)
        seen |= set(round.participants)
        assert sorted(fed.tasks(index)["train"]) == sorted(round.participants)
        for i, a in enumerate(fed.clients):
            for j, b in enumerate(fed.clients):
                value = state.W[i, j].item()
                assert np.isnan(value) == (a == b or a not in seen or b not in seen)
                if not np.isnan(value):
                    assert measured.setdefault((a, b), value) == value  # never measured again
        serving = method.serve(state)
        unseen = [c for c in fed.clients if c not in seen]
        if index == 1:
            assert len(unseen) == 4
            for c in unseen:
                i = fed.clients.index(c)
                assert same_bits(serving.models[int(serving.weights[i].argmax())], state.theta0)
                assert serving.clusters.tolist().count(int(serving.clusters[i])) == 1  # type: ignore[union-attr]
            rows = score(fed, serving)
            assert [r["client"] for r in rows] == list(fed.clients) and all(r["accuracy"]["test"] is not None for r in rows)
            ari = agreement(serving.clusters, fed.clients, fed.truth)
            assert ari is not None and 0.0 < ari < 1.0
        if len(seen) == 8:
            break
    assert len(seen) == 8
    assert labels(state) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert set(fed.tasks(fed.index)["project"]) - set(round.participants), "known clients embed without training"


def test_first_timers_start_from_theta0_and_members_from_their_cluster() -> None:
    fed = Recording(tiny(groups=2, clients_per_group=4), number=4)
    method = make("emdcfl")
    state = method.init(fed, fed.begin(0))
    seen: set[str] = set()
    for index in (1, 2, 3):
        before, round = state, fed.begin(index)
        state = method.step(fed, state, round)
        for i, task, client, request, _ in fed.seen:
            if i == index and task == "train":
                start = before.models[before.labels[client]] if client in seen else before.theta0
                assert same_bits(request["theta"], start)
        seen |= set(round.participants)


def test_the_absent_count_with_their_latest_state_or_not_at_all() -> None:
    for aggregate in ("latest", "participants"):
        fed = Recording(tiny(groups=1, clients_per_group=3), number=2)
        state = play(fed, 4, aggregate=aggregate, tolerance=10.0)
        latest: dict[str, Tensor] = {}
        for _, task, client, _, reply in fed.seen:
            if task == "train":
                latest[client] = reply["theta"]
        present = fed.tasks(4)["train"]
        members = list(fed.clients) if aggregate == "latest" else present
        assert len(latest) == 3 and len(present) == 2
        expected = torch.stack([latest[c].double() for c in members]).mean(0).float()
        torch.testing.assert_close(state.models[0], expected)


def flaky(fails: Mapping[str, Any], scenario: Scenario | None = None, **options: Any) -> FlakyFederation:
    return FlakyFederation(scenario or tiny(), fails=fails, training=TRAINING, device="cpu", on_failure="continue", **options)


def test_a_client_missing_in_round_one_is_compared_later() -> None:
    fed = flaky({"site-1": 1})
    first = play(fed, 1)
    assert labels(first) == [0, 1, 2, 2] and torch.isnan(first.W[1]).all() and torch.isnan(first.W[:, 1]).all()
    second = play(flaky({"site-1": 1}), 2)
    assert labels(second) == GROUPS
    kept = ~torch.isnan(first.W)
    assert same_bits(second.W[kept], first.W[kept])


def silent(silent_task: str) -> SequentialFederation:
    """One client does not answer one task in round 1 and before."""
    fed = federation(on_failure="continue")

    def lost(task: str, client: str, reply: Any) -> Any:
        return Failure(client, task, fed.index, "silent") if (task, client) == (silent_task, "site-1") and fed.index <= 1 else reply

    return tamper(fed, lost)


@pytest.mark.parametrize("task", ["describe", "reference", "project"])
def test_a_partner_that_does_not_answer_leaves_its_pairs_unset_until_the_next_round(task: str) -> None:
    first = play(silent(task), 1)
    assert not torch.isfinite(first.W[1, 0]) or not torch.isfinite(first.W[0, 1])
    assert labels(first)[2:] == [2, 2] and torch.isfinite(first.W[2, 3])
    assert labels(first)[0] != labels(first)[1]
    assert labels(play(silent(task), 2)) == GROUPS


@pytest.mark.parametrize(
    ("task", "change", "message"),
    [
        ("reference", lambda r: r | {"samples": {}}, "samples"),
        ("reference", lambda r: r | {"tau": {}}, "tau"),
        ("reference", lambda r: r | {"boxes": dict(list(r["boxes"].items())[1:])}, "boxes"),
        ("reference", lambda r: r | {"tau": {k: -v - 1 for k, v in r["tau"].items()}}, "tau"),
        ("reference", lambda r: r | {"samples": {k: v[:0] for k, v in r["samples"].items()}}, "samples"),
        ("project", lambda r: r | {"samples": dict(list(r["samples"].items())[1:])}, "samples"),
        ("project", lambda r: r | {"samples": {k: v[:3] for k, v in r["samples"].items()}}, "samples"),
        ("project", lambda r: r | {"samples": {k: v[:, :-1] for k, v in r["samples"].items()}}, "samples"),
        ("project", lambda r: r | {"samples": {k: v * torch.nan for k, v in r["samples"].items()}}, "not finite"),
    ],
)
def test_a_reply_that_is_not_what_was_agreed_is_its_senders_failure(task: str, change: Any, message: str) -> None:
    fed = federation(on_failure="continue")
    state = play(tamper(fed, lambda asked, client, reply: change(reply) if (asked, client) == (task, "site-1") else reply), 1)
    assert labels(state) == [0, 1, 2, 2]  # everybody else is served
    assert {(f.client, f.task, f.round) for f in fed.failures} == {("site-1", task, 1)}
    assert all(re.search(message, f.reason) for f in fed.failures)


def test_a_small_site_is_compared_at_its_own_size_and_blinds_nobody(caplog: pytest.LogCaptureFixture) -> None:
    fed = Recording(tiny(val=(90, 12, 80, 80), sort=True))
    with caplog.at_level(logging.WARNING, logger="emdcfl"):
        state = play(fed, 1, tolerance=0.12)
    assert "site-1: fewer than 64 validation samples" in caplog.text
    sizes = {}
    for _, task, client, _, reply in fed.seen:
        if task == "project":
            sizes[client] = {len(z) for z in reply["samples"].values()}
    assert all(max(s) >= 80 for c, s in sizes.items() if c != "site-1") and max(sizes["site-1"]) >= 12
    assert labels(state) == GROUPS


def test_one_refused_link_gives_overlapping_clusters() -> None:
    """The paper's rule in a group of three: clusters are distinct neighbourhoods, which may share members."""
    scenario = tiny(groups=1, clients_per_group=3)
    exact = play(federation(scenario), 1, distances="all", tolerance=10.0)
    worst = torch.maximum(exact.W, exact.W.T)
    values = sorted(worst[i, j].item() for i, j in combinations(range(3), 2))
    assert values[1] < values[2]
    paper = play(federation(scenario), 1, distances="all", tolerance=(values[1] + values[2]) / 2)
    assert len(paper.sets) == 3 and sorted(map(len, paper.sets)) == [2, 2, 3]


def test_auto_tolerance_is_one_number_per_row_from_the_clients_own_problem() -> None:
    strict, loose = (play(federation(), 1, tolerance="auto", alpha=a).epsilon.numpy() for a in (0.2, 0.001))
    off = ~np.eye(4, dtype=bool)
    assert (strict[off] < loose[off]).all() and (strict[off] > 0).all()
    assert all(len(set(row[~np.isnan(row)])) == 1 for row in strict)


def test_the_distances_are_served_beside_the_models() -> None:
    state = play(federation(), 1)
    d = make("emdcfl").serve(state).distances
    assert d is not None
    assert np.array_equal(d.W, state.W.numpy(), equal_nan=True) and d.tau.shape == (4,) and d.kind.dtype == np.int8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tolerance": float("nan")}, "expected method.tolerance"),
        ({"tolerance": "often"}, "expected method.tolerance a number or 'auto', got often"),
        ({"alpha": 0.0}, "expected method.alpha between 0 and 1, got 0.0"),
        ({"projection_ratio": 1.5}, r"expected method.projection_ratio in \(0, 1\], got 1.5"),
        ({"max_samples": 1}, "expected method.max_samples at least 2"),
        ({"min_validation": 0}, "expected method.min_validation at least 1"),
        ({"sinkhorn_reg": 0.0}, "expected method.sinkhorn_reg above 0"),
    ],
)
def test_settings_out_of_range_are_refused_before_training(options: dict[str, Any], message: str) -> None:
    fed = federation()
    with pytest.raises(ConfigError, match=message):
        make("emdcfl", **options).init(fed, fed.begin(0))


def test_step_changes_nothing_so_that_a_round_can_be_repeated() -> None:
    fed = federation(tiny(clients_per_group=3), participants=3)
    method = make("emdcfl")
    state = play(fed, 2)
    before = {k: v.clone() if isinstance(v, Tensor) else repr(v) for k, v in vars(state).items()}
    results = [method.step(fed, state, fed.begin(3)) for _ in range(2)]
    for k, v in vars(state).items():
        assert same_bits(v, before[k]) if isinstance(v, Tensor) else repr(v) == before[k]
    assert same_bits(results[0].models, results[1].models) and same_bits(results[0].W.nan_to_num(), results[1].W.nan_to_num())


def test_a_site_without_validation_data_is_told_before_anybody_trains() -> None:
    fed = Recording(tiny(val=(70, 70, 0, 70)))
    with pytest.raises(DataError, match="client 'site-2' has no validation data") as caught:
        make("emdcfl").init(fed, fed.begin(0))
    assert "\n" not in str(caught.value) and set(fed.tasks(0)) == {"describe"}
