from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.methods.toy import history
from tests.tiny import federation, tamper, tiny

from emdcfl.core.errors import ClientError, ConfigError
from emdcfl.core.federation import Failure
from emdcfl.core.tasks import Training
from emdcfl.data import scenarios
from emdcfl.data.types import Scenario, Split
from emdcfl.engines.local import SequentialFederation
from emdcfl.methods import make
from emdcfl.methods.emdcfl import EMDCFL
from emdcfl.methods.emdcfl.comparison import Comparison
from emdcfl.methods.emdcfl.problems import validation_sizes
from emdcfl.methods.emdcfl.tolerance import log_once, other_mixes, stratified
from emdcfl.transport import EXACT, LOWER, UPPER, Screen, SolverPool, Source, cost_matrix, exact, min_samples


def trained(scenario: Scenario, training: Training | None = None, seed: int = 0) -> tuple[SequentialFederation, dict[str, Any]]:
    fed = federation(scenario, seed=seed, **({"training": training} if training else {}))
    fed.begin(1)
    return fed, fed.train(dict.fromkeys(fed.clients, fed.initial())).column("theta")


def every_pair(fed: SequentialFederation) -> list[tuple[str, str]]:
    return [(c, d) for c in fed.clients for d in fed.clients if c != d]


@pytest.mark.parametrize("distances", ["all", "needed"])
def test_w_is_the_mean_over_blocks_and_bounds_enclose_it(distances: str) -> None:
    rng = np.random.default_rng(0)
    rows = [np.maximum(rng.standard_normal((40, 6)), 0) for _ in range(2)]
    columns = [np.maximum(rng.standard_normal((60, 6)) + shift, 0) for shift in (0.0, 0.2)]
    with SolverPool(1) as pool:
        screen = Screen(pool, distances=distances)
        for r, c in ((0, 1), (1, 0)):
            screen.add(r, c, Source(rows[r]), columns[c], tau=0.0, epsilon=0.2, blocks=3)
        found = screen.finish()
    for r, c in ((0, 1), (1, 0)):
        value = np.mean([exact(cost_matrix(rows[r], columns[c][20 * b : 20 * b + 20])).value for b in range(3)])
        got, kind = found.w[r, c], found.kind[r, c]
        assert kind != EXACT or got == pytest.approx(value, abs=1e-9)
        assert kind != LOWER or got <= value
        assert kind != UPPER or got >= value
    if distances == "all":
        assert found.exact_solves == 6 and (found.kind[[0, 1], [1, 0]] == EXACT).all()


def test_blocks_must_be_equal() -> None:
    with SolverPool(1) as pool, pytest.raises(Exception, match="3 equal blocks"):  # noqa: PT012
        screen = Screen(pool)
        screen.add(0, 1, Source(np.ones((3, 2))), np.ones((4, 2)), tau=0.0, epsilon=0.1, blocks=3)
        screen.finish()


def test_small_partners_are_asked_for_blocks_of_both_splits_and_the_tolerance_shrinks_as_it_should() -> None:
    fed, local = trained(tiny(n=(210,), val=(70,)))
    several = Comparison(EMDCFL(tolerance="auto", match_classes=False, distances="all", average_blocks=True), fed, local)
    assert several._wanted("site-0") == 4 * 70
    one = Comparison(EMDCFL(tolerance="auto", match_classes=False, distances="all"), fed, local)
    assert one._wanted("site-0") == 70
    pair = ("site-0", "site-1")
    a, b = (c.measure(every_pair(fed)).entries[pair] for c in (several, one))
    assert a.epsilon / b.epsilon == pytest.approx(np.sqrt((1 + 1 / 4) / 2))
    capped = Comparison(EMDCFL(tolerance="auto", match_classes=False, max_samples=160, average_blocks=True), fed, local)
    assert capped._wanted("site-0") == 2 * 70
    fixed = Comparison(EMDCFL(tolerance=0.025, average_blocks=True), fed, local)
    assert fixed._wanted("site-0") == 70
    again = Comparison(EMDCFL(tolerance="auto", match_classes=False, recompute="every-round", average_blocks=True), fed, local)
    assert again._wanted("site-0") == 70  # by then the models may have seen the partners' train data


def test_the_first_samples_of_a_sorted_split_are_a_sample() -> None:
    """A row with few validation samples takes the first of a partner's; they must not all be of one class."""
    fed, local = trained(tiny(val=(70, 12, 70, 70), sort=True))
    method = EMDCFL(cost="label-aware", min_validation=64)
    seen: list[Any] = []
    fed.observer = lambda task, client, reply: seen.append(reply["labels"]) if task == "project" else None
    Comparison(method, fed, local).measure(every_pair(fed))
    assert all(len(set(labels[:12].tolist())) > 1 for labels in seen if len(labels) > 12)
    assert any(len(labels) > 12 for labels in seen)


def test_low_power_is_a_warning_and_not_a_guess(caplog: pytest.LogCaptureFixture) -> None:
    """Twelve validation samples: tolerances as wide as the reference distance."""
    with caplog.at_level(logging.WARNING, logger="emdcfl"):
        for val in (12, 200):
            fed = federation(tiny(n=(200,), val=(val,)))
            method = make("emdcfl", tolerance="auto", match_classes=False, min_validation=2, distances="all")
            method.step(fed, method.init(fed, fed.begin(0)), fed.begin(1))
            assert ("low power" in caplog.text) is (val == 12)
            caplog.clear()


@pytest.mark.slow
def test_concept_shift_is_seen_by_the_label_aware_cost_alone() -> None:
    """Two groups with the same images and permuted labels."""
    options = {"source": "digits", "clients": 2, "partition": [{"kind": "permutation", "count": 2}]}
    fed, local = trained(scenarios.build("custom", **options), Training(6, 32, 0.02))
    found = {}
    for cost in ("cosine", "label-aware"):
        entries = Comparison(EMDCFL(tolerance="auto", cost=cost), fed, local).measure(every_pair(fed)).entries  # type: ignore[arg-type]
        found[cost] = {frozenset((c, d)) for c, d in entries if all(entries[p].epsilon > entries[p].W for p in ((c, d), (d, c)))}
    truth = fed.truth
    assert truth is not None
    same = {frozenset((c, d)) for c, d in every_pair(fed) if truth[c] == truth[d]}
    assert found["label-aware"] == same
    assert found["cosine"] == {frozenset(pair) for pair in every_pair(fed)}


@pytest.mark.parametrize("options", [{}, {"tolerance": 0.025}, {"cost": "label-aware"}, {"cost": "label-aware", "tolerance": 0.1}])
def test_server_samples_find_the_same_groups_and_no_model_travels(options: dict[str, Any]) -> None:
    fed, asked = federation(), []
    method = make("emdcfl", exchange="server-samples", **options)
    state = method.init(fed, fed.begin(0))
    fed.observer = lambda task, client, reply: asked.append(task)
    state = method.step(fed, state, fed.begin(1))
    assert method.serve(state).clusters.tolist() == [0, 0, 1, 1]  # type: ignore[union-attr]
    assert "project" not in asked and asked.count("deposit") == 4


@pytest.mark.slow
def test_server_samples_need_fewer_bytes_and_are_checked() -> None:
    fed, local = trained(tiny(clients_per_group=6))
    moved = []
    for method in (EMDCFL(exchange="server-samples"), EMDCFL()):
        before = sum(fed.traffic.bytes.get("embed", {}).values())
        Comparison(method, fed, local).measure(every_pair(fed))
        moved.append(sum(fed.traffic.bytes["embed"].values()) - before)
    assert moved[0] < moved[1]
    tamper(fed, lambda task, _, reply: {**reply, "shape": torch.tensor([9])} if task == "deposit" else reply)
    with pytest.raises(ClientError, match=r"site-0.*expected inputs of 70 samples of shape"):
        Comparison(EMDCFL(exchange="server-samples"), fed, local).measure(every_pair(fed))
    with pytest.raises(ConfigError, match="embedding_mode.*server-samples"):
        make("emdcfl", exchange="server-samples", embedding_mode="train").init(fed, fed.begin(0))


def played(fed: SequentialFederation, rounds: int = 1, **options: Any) -> list[int]:
    method = make("emdcfl", **options)
    state = history(fed, method, rounds)[-1]
    clusters = method.serve(state).clusters
    assert clusters is not None
    return clusters.tolist()


def test_the_default_is_calibrated_and_the_papers_number_is_the_authors_codes() -> None:
    assert make("emdcfl").tolerance == "auto"
    assert make("emdcfl", preset="reference").tolerance == 0.025


def test_a_site_with_too_few_samples_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Four clients: q² is 17.3 with 15 degrees of freedom and 16.7 with 16, so sixteen samples say nothing and seventeen do."""
    assert min_samples(EMDCFL().alpha, 4) == 17
    with caplog.at_level(logging.WARNING, logger="emdcfl"):
        assert played(federation(tiny(val=(10, 70, 70, 70))), rounds=3) == [0, 0, 1, 1]
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("site-0: fewer than 17 validation samples") and "not compared" in said and "give them more" in said
    assert played(federation(tiny(val=(17, 70, 70, 70)))) == [0, 0, 1, 1]
    assert played(federation(tiny(val=(10, 70, 70, 70))), min_validation=10) == [0, 0, 1, 1]
    assert played(federation(tiny(val=(10, 70, 70, 70))), tolerance=0.12) == [0, 0, 1, 1]


def test_a_site_with_too_few_samples_that_answers_later_is_told_of_too(caplog: pytest.LogCaptureFixture) -> None:
    fed = federation(tiny(val=(10, 70, 70, 70)))
    fed.on_failure, silent = "continue", ["site-0"]
    tamper(fed, lambda task, client, reply: Failure(client, task, 0, "away") if client in silent else reply)
    method = make("emdcfl")
    with caplog.at_level(logging.WARNING, logger="emdcfl"):
        state = method.init(fed, fed.begin(0))
        state = method.step(fed, state, fed.begin(1))
        assert not any("site-0: fewer than" in record.getMessage() for record in caplog.records)
        silent.clear()
        for t in (2, 3):
            state = method.step(fed, state, fed.begin(t))
    assert sum("site-0: fewer than 17 validation samples" in record.getMessage() for record in caplog.records) == 1


def test_samples_so_few_that_nobody_is_told_apart_are_refused() -> None:
    fed = federation()
    with pytest.raises(ConfigError, match=r"expected method\.max_samples of at least 17 with a calibrated tolerance and 4 clients, got 8"):
        make("emdcfl", max_samples=8).init(fed, fed.begin(0))
    make("emdcfl", max_samples=8, tolerance=0.025).init(fed, fed.begin(0))


@pytest.mark.parametrize("pairing", ["all", "representatives"])
def test_where_nobody_has_enough_everybody_is_alone(pairing: str) -> None:
    assert played(federation(tiny(val=(8,))), rounds=2, pairing=pairing) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "samples of equal class counts"),
        ({"projection": "pair"}, "with projection = 'pair' samples stay as drawn"),
        ({"cost": "label-aware", "exchange": "server-samples"}, "with cost = 'label-aware' and exchange = 'server-samples' samples"),
        ({"recompute": "every-round"}, "with recompute = 'every-round' samples stay as drawn"),
        ({"privacy_epsilon": 64.0}, "with privacy noise samples stay as drawn"),
        ({"match_classes": False}, None),
        ({"tolerance": 0.025, "projection": "pair"}, None),
    ],
    ids=str,
)
def test_a_process_says_once_what_it_compares(options: dict[str, Any], said: str | None, caplog: pytest.LogCaptureFixture) -> None:
    log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="emdcfl"):
        for _ in range(2):
            played(federation(), rounds=2 if "recompute" in options else 1, **options)
    found = [record for record in caplog.records if "tolerance auto" in record.getMessage()]
    assert len(found) == (said is not None)
    assert all(said in r.getMessage() and (r.levelno == logging.WARNING) is bool(options) for r in found if said)


def test_tolerances_do_not_depend_on_the_solver() -> None:
    """Sinkhorn's potentials vary less than exact ones, and tolerances from them would refuse partners of the same law."""
    fed, local = trained(tiny())
    of = {}
    for solver in ("exact", "sinkhorn"):
        entries = Comparison(EMDCFL(solver=solver, distances="all"), fed, local).measure(every_pair(fed)).entries  # type: ignore[arg-type]
        of[solver] = {pair: entry.epsilon for pair, entry in entries.items()}
    assert of["sinkhorn"] == pytest.approx(of["exact"], rel=1e-9)


def test_one_small_site_does_not_cost_other_pairs_their_samples() -> None:
    """Sizes are per pair, few, and never above what either client has; a fixed tolerance keeps one size for all."""
    m = {"a": 900, "b": 640, "c": 512, "d": 70, "e": 64, "f": 20}
    found = validation_sizes(m, cap=512, at_least=64, calibrated=True)
    assert found == {"a": 512, "b": 512, "c": 512, "d": 64, "e": 64, "f": 20}
    assert set(validation_sizes(m, cap=512, at_least=64).values()) == {64, 20}
    many = validation_sizes({str(size): size for size in range(16, 2000)}, cap=512, at_least=64, calibrated=True)
    assert len(set(many.values())) <= 12
    assert all(int(c) / 1.5 < size <= int(c) for c, size in many.items() if int(c) <= 512)


def test_a_pair_is_compared_at_the_smaller_size_of_its_two_clients() -> None:
    fed, local = trained(tiny(n=(210,), val=(140, 140, 70, 140)))
    comparison = Comparison(EMDCFL(distances="all", average_blocks=False), fed, local)
    sizes = {}
    fed.observer = lambda task, client, reply: sizes.update({(row, client): len(z) for row, z in reply["samples"].items()})
    comparison.measure(every_pair(fed))
    assert {size for pair, size in sizes.items() if "site-2" in pair and "*" not in pair} == {70}
    assert {size for pair, size in sizes.items() if "site-2" not in pair and "*" not in pair} == {140}


def test_without_matching_a_stratified_client_calibrates_at_other_class_mixes() -> None:
    """Train and validation samples of one mix lie nearer than a partner's of the same law; a fixed tolerance leaves τ as it is."""
    scenario = tiny(groups=1, clients_per_group=2, n=(240,), val=(80,))
    fed, local = trained(scenario)
    client = fed._clients["site-0"]
    labels = client.site.val.y.numpy()
    assert stratified(client)
    chosen = other_mixes(client, labels)
    assert {len(index) for index in chosen} == {80} and len({tuple(np.bincount(labels[index])) for index in chosen}) > 2
    fixed, as_drawn, matched = (
        Comparison(EMDCFL(distances="all", **options), fed, local).measure(every_pair(fed)).tau["site-0"]
        for options in ({"tolerance": 0.025}, {"match_classes": False}, {})
    )
    assert fixed == matched < as_drawn
    sites = [replace(site, val=Split(site.val.x, site.val.y * (site.val.y != 1))) for site in scenario.sites]
    assert not stratified(federation(replace(scenario, sites=tuple(sites)))._clients["site-0"])
