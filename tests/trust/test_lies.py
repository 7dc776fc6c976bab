"""Lies that pass validation: what they buy, and what they do not. Two groups of five, the first client lies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.methods.toy import TRAINING, toy
from tests.methods.toy import play as rounds_of
from tests.tiny import score
from tests.trust import liars
from tests.trust.liars import LyingFederation, flipped, without

from emdcfl.core.errors import ClientError, ConfigError
from emdcfl.core.tasks import Training
from emdcfl.data.scenarios import build
from emdcfl.data.types import Scenario
from emdcfl.engines.local import SequentialFederation
from emdcfl.methods import METHODS, make
from emdcfl.runs.config import from_dict
from emdcfl.runs.plan import plan
from emdcfl.trust import Trust
from emdcfl.trust.bounds import UPDATE_FACTOR

TOLERANCE = 0.08
"""Inside groups W stays below 0.03, between them above 0.15."""

SHORT = replace(TRAINING, local_epochs=1)
LIAR, FIRST, SECOND = "site-0", [f"site-{i}" for i in range(1, 5)], [f"site-{i}" for i in range(5, 10)]


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    return toy(groups=2, per_group=5, noise=0.25, offset=2.5)


def together(state: Any, client: str = LIAR) -> list[str]:
    """Whose models a client's state is averaged into."""
    return [c for c in state.clients if c != client and client in state.sets[state.labels[c]]]


def linked(state: Any, client: str = LIAR) -> set[str]:
    """With whom a client is linked: both directions are below their tolerance."""
    i = state.clients.index(client)
    near = (state.epsilon > state.W) & (state.epsilon > state.W).T
    return {c for j, c in enumerate(state.clients) if j != i and bool(near[i, j])}


def accuracy_of(fed: SequentialFederation, serving: Any) -> np.ndarray[Any, Any]:
    """Accuracy by client, NaN of those who are not asked."""
    fed.begin(fed.index + 1)  # whoever is quarantined for a round is tested all the same
    return np.array([np.nan if row["accuracy"] is None else row["accuracy"]["test"] for row in score(fed, serving)])


def lying(scenario: Scenario, lie: liars.Change = liars.honest, rounds: int = 2, trust: Trust | None = None, **options: Any) -> Any:
    disguise = options.pop("disguise", None)
    fed = LyingFederation(scenario, liar=LIAR, lie=lie, disguise=disguise, training=TRAINING, trust=trust)
    method = make("emdcfl", **{"tolerance": TOLERANCE, **options})
    state, serving = rounds_of(fed, method, rounds)
    return fed, state, accuracy_of(fed, serving)[1:]


@pytest.fixture(scope="module")
def truthful(scenario: Scenario) -> Any:
    return lying(scenario)


def test_honest_clients_are_found_together_and_nothing_is_flagged(scenario: Scenario, truthful: Any) -> None:
    fed, state, _ = truthful
    assert together(state) == FIRST and together(state, "site-5") == SECOND[1:]
    assert fed.guard.ledger.flagged() == [] and fed.guard.ledger.quarantined() == []


@pytest.mark.slow
@pytest.mark.parametrize("tolerance", ["auto", TOLERANCE])
@pytest.mark.parametrize("lie", ["more_samples", "large_tau", "modest_tau", "large_variance", "fake_row"])
def test_no_lie_about_n_tau_variance_or_its_own_row_buys_a_link(scenario: Scenario, lie: str, tolerance: Any) -> None:
    """A link needs both directions, and the partner's is computed from the partner's own row."""
    _, state, _ = lying(scenario, getattr(liars, lie), rounds=1, tolerance=tolerance, match_classes=False)
    assert not linked(state) & set(SECOND)


def test_even_where_nothing_is_cut_back_the_partners_row_decides(scenario: Scenario) -> None:
    fed, state, _ = lying(scenario, liars.large_tau, rounds=1, trust=Trust(flag=0.0), distances="all")
    assert (state.W[0, 5:] < state.epsilon[0, 5:]).all()  # in its own row everybody is near
    assert (state.W[5:, 0] > state.epsilon[5:, 0]).all()
    assert together(state) == FIRST and fed.guard.ledger.flagged() == []


@pytest.mark.slow
@pytest.mark.parametrize(("lie", "what"), [("large_tau", "reference distance"), ("large_variance", "variance")])
def test_far_values_are_flagged_and_cut_back_to_the_largest_that_is_not(lie: str, what: str) -> None:
    digits, options = (
        build("rotated-digits", groups=2, clients_per_group=2),
        {"tolerance": "auto", "match_classes": False, "distances": "all"},
    )
    found = []
    for change in (liars.honest, getattr(liars, lie)):
        fed = LyingFederation(digits, liar="rot0-1", lie=change, training=Training(local_epochs=2, batch_size=32, lr=0.02))
        state, _ = rounds_of(fed, make("emdcfl", **options), 1)
        found.append((state, fed.guard.ledger.flagged()))
    (honest, nothing), (state, (flag,)) = found
    assert nothing == [] and (flag["client"], flag["what"], flag["first"]) == ("rot0-1", what, 1)
    values = state.tau if what == "reference distance" else state.epsilon.nan_to_num().max(1).values
    assert float(values[0]) == pytest.approx(float(values[1:].max()), rel=1e-6)
    assert torch.equal(honest.tau[1:], state.tau[1:]) and torch.equal(honest.epsilon[1:].nan_to_num(), state.epsilon[1:].nan_to_num())


def test_embeddings_like_the_targets_do_buy_a_link(scenario: Scenario) -> None:
    """The limit of the method: who shows samples of a group's law belongs to it, whatever it trains on."""
    _, state, _ = lying(scenario, rounds=1, disguise="site-6")
    assert set(together(state)) == set(SECOND)


@pytest.mark.slow
def test_a_tiny_validation_set_buys_no_links_unless_so_few_samples_are_asked_to_count(scenario: Scenario) -> None:
    """Two samples prove nothing, and what is not refuted is linked: so nobody is compared with them."""
    _, calibrated, _ = lying(scenario, liars.tiny_validation, rounds=1, tolerance="auto")
    assert linked(calibrated) == set() and together(calibrated) == []
    assert together(calibrated, "site-1") == [LIAR, *FIRST[1:]] and together(calibrated, "site-5") == SECOND[1:]  # served, not averaged
    _, lowered, _ = lying(scenario, liars.tiny_validation, rounds=1, tolerance="auto", min_validation=2)
    assert linked(lowered) & set(SECOND)
    _, strict, _ = lying(scenario, liars.tiny_validation, rounds=1, require_validation=32)
    assert linked(strict) == set() and together(strict) == []
    _, fixed, _ = lying(scenario, liars.tiny_validation, rounds=1)
    assert not linked(fixed) & set(SECOND)


GUARDED = Trust(max_share=0.25, clip=1.5)
TRIMMED = Trust(aggregate="trimmed-mean", clip=1.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "lies"),
    [(GUARDED, ["scaled", "more_samples"]), (TRIMMED, ["garbage"]), (Trust(aggregate="median"), ["garbage"])],
    ids=["share and clip", "trimmed mean", "median"],
)
def test_a_policy_keeps_the_others_accuracy(scenario: Scenario, policy: Trust, lies: list[str]) -> None:
    fed = SequentialFederation(without(scenario, LIAR), training=TRAINING, device="cpu", on_failure="continue", trust=policy)
    _, serving = rounds_of(fed, make("emdcfl", tolerance=TOLERANCE), 3)
    alone = accuracy_of(fed, serving).mean()
    for lie in lies:
        assert alone - lying(scenario, getattr(liars, lie), rounds=3, trust=policy)[2].mean() < 0.01


def test_without_one_the_same_lies_cost_it(scenario: Scenario, truthful: Any) -> None:
    fed, _, harmed = lying(scenario, liars.garbage, rounds=2)
    assert truthful[2][:4].mean() - harmed[:4].mean() > 0.1
    assert harmed[4:].mean() == truthful[2][4:].mean()  # the other group never meets it
    assert {(f["client"], f["what"]) for f in fed.guard.ledger.flagged()} == {(LIAR, "update norm")}


def test_a_thousand_times_the_samples_weigh_no_more_than_the_share(scenario: Scenario) -> None:
    free, capped = (lying(flipped(scenario, LIAR), liars.more_samples, rounds=3, trust=t)[2][:4].mean() for t in (None, GUARDED))
    assert capped - free > 0.1


def test_more_than_anybody_may_claim_is_rejected(scenario: Scenario) -> None:
    fed, state, _ = lying(scenario, liars.too_many_samples, rounds=1)
    (entry,) = fed.guard.ledger.quarantined()
    assert entry["client"] == LIAR and "expected n <= 1e+08, got 1000000000" in entry["reason"]
    assert together(state) == []


def test_a_reference_distance_beyond_the_cost_is_rejected(scenario: Scenario) -> None:
    fed, state, _ = lying(scenario, liars.impossible_tau, rounds=1)
    (entry,) = fed.guard.ledger.quarantined()
    assert (entry["client"], entry["task"]) == (LIAR, "reference") and "expected tau <= 2 with the cosine cost, got 50" in entry["reason"]
    assert together(state) == [] and together(state, "site-1") == FIRST[1:]


AVERAGING = ("fedavg", "fedprox", "oracle", "ifca", "fesem", "fedem", "cfl", "flexcfl", "fedsoft", "fedce", "fedclust", "cflgp", "pacfl")


@pytest.mark.parametrize("method", AVERAGING)
def test_every_method_that_averages_does_so_under_the_policy(method: str) -> None:
    """One update just below the longest that is not left out: a mean follows it, a median does not."""

    def huge(fed: LyingFederation, task: str, asked: Any, reply: Any) -> Any:
        changed = {k: reply[k].clone() for k in ("theta", "models") if k in reply}
        for k, state in changed.items():
            state[..., 0] += 0.9 * UPDATE_FACTOR * float((state - asked.get(k, asked.get("models"))).norm())
        return {**reply, **changed}

    options = {"k": 1} if hasattr(make(method), "k") else {}
    options |= {"threshold": 1e9} if method == "fedclust" else {"threshold": 180.0} if method == "pacfl" else {}
    largest = []
    for trust in (None, Trust(aggregate="median")):
        fed = LyingFederation(toy(groups=1, per_group=4, n=16), liar=LIAR, lie=huge, training=SHORT, trust=trust)
        chosen = make(method, **options)
        state = chosen.step(fed, chosen.init(fed, fed.begin(0)), fed.begin(1))
        found = state.models if hasattr(state, "models") else state.theta
        largest.append(float((found[..., 0] - fed.initial()[0]).abs().max()))
        assert any(f["client"] == LIAR for f in fed.guard.ledger.flagged())
    assert largest[0] > 3 * largest[1]


def test_methods_without_cluster_averages_refuse_a_policy_they_would_ignore() -> None:
    config = {"method": {"name": "pfedgraph"}, "trust": {"aggregate": "median"}}
    with pytest.raises(ConfigError, match="expected trust.max_share, clip and aggregate at their defaults with pfedgraph"):
        plan(from_dict(config))


@pytest.mark.parametrize("method", sorted(name for name, cls in METHODS.items() if cls.family == "soft"))
@pytest.mark.parametrize("aggregate", ["median", "trimmed-mean"])
def test_methods_whose_clusters_all_average_everybody_refuse_to_leave_out_who_differs(method: str, aggregate: str) -> None:
    """The middle of all clients' states is the same for every cluster: FedSoft's and FedCE's would be equal, bit for bit."""
    with pytest.raises(ConfigError, match=f'expected trust.aggregate = "mean" with {method}.*max_share'):
        plan(from_dict({"method": {"name": method}, "trust": {"aggregate": aggregate}}))
    plan(from_dict({"method": {"name": method}, "trust": {"max_share": 0.25, "clip": 1.5}}))


@pytest.mark.parametrize(("key", "value"), [("max_share", 0.0), ("trim", 0.5), ("clip", 0.5), ("aggregate", "mode"), ("max_faults", 0)])
def test_settings_out_of_range_are_refused(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"trust.{key} must be"):
        from_dict({"trust": {key: value}})


def test_clients_that_cannot_open_a_box_cost_one_pair_not_the_round(scenario: Scenario) -> None:
    """Everybody complains about the liar's boxes: it is quarantined, and all other pairs are measured."""
    fed, state, _ = lying(scenario, liars.bad_boxes, rounds=1)
    (entry,) = fed.guard.ledger.quarantined()
    assert entry["client"] == LIAR and "unusable for 9 of its partners" in entry["reason"]
    assert together(state) == [] and together(state, "site-1") == FIRST[1:] and together(state, "site-5") == SECOND[1:]


def test_a_box_of_the_wrong_size_is_provably_bad(scenario: Scenario) -> None:
    fed, _, _ = lying(scenario, liars.short_boxes, rounds=1)
    (entry,) = fed.guard.ledger.quarantined()
    assert entry["client"] == LIAR and "expected boxes of 60 bytes, got [0]" in entry["reason"]


def test_a_slanderer_harms_nobody_but_itself(scenario: Scenario) -> None:
    fed, state, _ = lying(scenario, liars.slander, rounds=1)
    assert fed.guard.ledger.quarantined() == []  # neither it nor those it accuses
    assert together(state) == [] and together(state, "site-1") == FIRST[1:] and together(state, "site-5") == SECOND[1:]
    named = [f for f in fed.failures if f.client == LIAR and "counts against neither" in f.reason]
    assert len(named) == 9 and any("'site-7'" in f.reason for f in named)


@pytest.mark.parametrize("projection", ["row", "pair"])
def test_a_key_nothing_can_be_sealed_for_costs_its_owner_alone(scenario: Scenario, projection: str) -> None:
    fed, state, _ = lying(scenario, liars.useless_key, rounds=1, projection=projection)
    assert {q["client"] for q in fed.guard.ledger.quarantined()} == {LIAR}
    assert together(state) == [] and together(state, "site-1") == FIRST[1:] and together(state, "site-5") == SECOND[1:]


@pytest.mark.parametrize("lie", ["bad_boxes", "slander", "useless_key"])
def test_where_failures_stop_a_run_a_complaint_does(scenario: Scenario, lie: str) -> None:
    fed = LyingFederation(scenario, liar=LIAR, lie=getattr(liars, lie), training=TRAINING, on_failure="stop")
    with pytest.raises(ClientError, match=r"failed in round 1 \(\w+\): it finds the key or box of client 'site-\d' unusable"):
        rounds_of(fed, make("emdcfl"), 1)


def test_a_client_that_claims_to_have_no_validation_data_stops_nobody(scenario: Scenario) -> None:
    _, state, _ = lying(scenario, liars.no_validation, rounds=1)
    assert together(state) == [] and together(state, "site-1") == FIRST[1:]
