"""Samples with a partner's class counts: drawn right, kept from the server, and a test with far less noise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.methods.emdcfl.test_tolerance import every_pair, trained
from tests.methods.toy import history
from tests.tiny import federation, tamper, tiny

from emdcfl.clustering import completed
from emdcfl.core.errors import ClientError
from emdcfl.data.types import Scenario, Site, Split
from emdcfl.methods import make
from emdcfl.methods.emdcfl import EMDCFL
from emdcfl.methods.emdcfl.client import tasks as emdcfl_client
from emdcfl.methods.emdcfl.client.sampling import all_labels, draw, matched, offered, packed_counts, pools, unpacked_counts
from emdcfl.methods.emdcfl.comparison import Comparison
from emdcfl.methods.emdcfl.tolerance import within_classes
from emdcfl.privacy.exchange import BOX
from emdcfl.transport import dual_variance, quantile


def test_blocks_have_the_counts_and_share_no_sample() -> None:
    fed = federation(tiny(n=(210,), val=(70,)))
    client = fed._clients["site-0"]
    counts = unpacked_counts(packed_counts(fed._clients["site-1"], [70, 30]), 2)
    assert counts.sum(axis=1).tolist() == [70, 30]
    for wanted in counts:
        found = matched(wanted, 3, pools(client))
        assert found is not None
        column, blocks = found
        y = all_labels(client)[column].numpy()
        size = int(wanted.sum())
        assert blocks >= 2 and len(y) == blocks * size
        for b in range(blocks):
            assert np.bincount(y[b * size : (b + 1) * size], minlength=len(wanted)).tolist() == wanted.tolist()
            assert np.abs(np.diff(y[b * size : (b + 1) * size])).sum() > len(wanted)  # not class by class: the order says nothing
        assert len(set(column.tolist())) == len(column) and int(column.max()) < 280
    few, more = (matched(wanted, 1, pools(client)) for wanted in (counts[0] // 2, counts[0]))
    assert few is not None and more is not None
    assert set(few[0].tolist()) < set(more[0].tolist())  # what one partner is shown, others are shown too


def test_every_sample_of_a_class_is_drawn_as_often() -> None:
    client = federation(tiny(n=(40,), val=(20,)))._clients["site-0"]
    y = all_labels(client).numpy()
    counts = np.bincount(y) // 2
    drawn = np.zeros(len(y))
    for client.seed in range(600):
        found = matched(counts, 1, pools(client))
        assert found is not None
        drawn[found[0].numpy()] += 1
    for k in range(len(counts)):
        expected = 600 * counts[k] / (y == k).sum()
        assert np.abs(drawn[y == k] - expected).max() < 6 * np.sqrt(expected)


def test_a_class_that_is_short_gives_no_block() -> None:
    client = federation(tiny(n=(40,), val=(20,)))._clients["site-0"]
    y = torch.cat([client.split(name).y for name in ("train", "val")])
    counts = np.bincount(y.numpy())
    assert matched(counts, 5, pools(client))[1] == 1  # type: ignore[index]
    assert matched(counts + np.eye(len(counts), dtype=int)[0], 5, pools(client)) is None
    assert matched(np.append(counts, 1), 5, pools(client)) is None  # a class this client has never seen
    assert matched(0 * counts, 5, pools(client)) is None


def test_unusable_counts_are_refused() -> None:
    for message in (b"", b"abc", np.array([2, 1], "<u4").tobytes(), np.array([0], "<u4").tobytes(), np.array([2**30], "<u4").tobytes()):
        with pytest.raises(ClientError, match="class counts"):
            unpacked_counts(message, 1)


def test_variance_inside_classes() -> None:
    g = np.array([1.0, 3.0, 10.0, 14.0, 50.0])
    assert within_classes(g, torch.tensor([0, 0, 1, 1, 2])) == pytest.approx((2 + 8) / 2)
    assert within_classes(g, torch.tensor([0, 0, 0, 0, 0])) == pytest.approx(dual_variance(g))
    assert within_classes(g, torch.arange(5)) == 0.0


def test_the_server_sees_longer_boxes_and_no_counts() -> None:
    fed, local = trained(tiny(n=(210,), val=(70,)))
    seen: dict[str, list[Any]] = {"reference": [], "project": []}
    fed.observer = lambda task, client, reply: seen[task].append(reply) if task in seen else None
    found = Comparison(EMDCFL(tolerance="auto"), fed, local).measure(every_pair(fed))
    assert {len(box) for reply in seen["reference"] for box in reply["boxes"].values()} == {BOX + 4 * (1 + len("abcd"))}
    assert all(set(reply) <= {"samples", "tau", "variance", "within", "freedom", "boxes", "refused"} for reply in seen["reference"])
    assert all(set(reply) == {"samples", "matched", "offers", "refused"} and not reply["offers"] for reply in seen["project"])
    assert min(min(reply["matched"].values()) for reply in seen["project"]) >= 1
    assert len(found.entries) == len(every_pair(fed))


def test_tolerances_use_the_variance_inside_classes_and_the_blocks() -> None:
    fed, local = trained(tiny(n=(210,), val=(70,)))
    fed_replies: dict[str, Any] = {}
    fed.observer = lambda task, client, reply: fed_replies.setdefault(f"{task} {client}", reply)
    found = Comparison(EMDCFL(tolerance="auto", distances="all"), fed, local).measure(every_pair(fed))
    q = quantile(EMDCFL().alpha, len(fed.clients), 70 - len("abcd"))
    for (row, column), entry in found.entries.items():
        own, theirs = fed_replies[f"reference {row}"], fed_replies[f"project {column}"]
        variance = min(float(own["within"]["*"]), float(own["variance"]["*"]))
        blocks = theirs["matched"][row]
        assert entry.epsilon == pytest.approx(q * np.sqrt(variance * (1 + 1 / blocks) / 70))


def lacking(scenario: Scenario, *classes: int, site: int = 0) -> Scenario:
    """Return the scenario with one site that has no samples of some classes."""
    sites = list(scenario.sites)
    old = sites[site]
    some = [Split(part.x[keep], part.y[keep]) for part in (old.train, old.val) for keep in [~torch.isin(part.y, torch.tensor(classes))]]
    sites[site] = Site(old.name, *some, old.tests)
    return replace(scenario, sites=tuple(sites))


def test_a_partner_that_lacks_a_class_is_compared_at_the_common_counts() -> None:
    """One group, one site without a class: all pairs are linked, and τ and ε are those of the samples in common."""
    fed, local = trained(lacking(tiny(groups=1, clients_per_group=3, n=(160,), val=(100,)), 0))
    seen: dict[str, list[Any]] = {}
    fed.observer = lambda task, client, reply: seen.setdefault(f"{task} {client}", []).append(reply)
    comparison = Comparison(EMDCFL(distances="all"), fed, local)
    found = comparison.measure(every_pair(fed))
    assert set(found.entries) == set(every_pair(fed)) and not found.undecided
    assert all(entry.epsilon > entry.W for entry in found.entries.values())
    first, second = seen["project site-0"]
    assert set(first["matched"].values()) == {0} and not first["samples"] and set(first["offers"]) == {"site-1", "site-2"}
    assert min(second["matched"].values()) >= 1 and not second["offers"]
    assert set(seen["recalibrate site-1"][0]["size"]) == {"site-0"} and "recalibrate site-0" not in seen
    for row in ("site-1", "site-2"):
        size = comparison.problems.common[row, "site-0"]["size"]
        own, held_out = fed._clients[row], comparison.problems.size(row, "site-0")
        assert size == int((own.site.val.y[draw(own, "val", max(comparison.problems.distinct))][:held_out] > 0).sum())
        assert len(second["samples"][row]) == second["matched"][row] * size


def test_clients_without_a_common_class_are_not_comparable_and_follow_the_others() -> None:
    """Two groups; in the first, one site has classes 0 and 1 and another 2 and 3. Both are linked with the third, so with each other."""
    scenario = tiny(groups=2, clients_per_group=3, n=(160,), val=(100,))
    fed = federation(lacking(lacking(scenario, 0, 1, site=0), 2, 3, site=1))
    method = EMDCFL()
    state = method.step(fed, method.init(fed, fed.begin(0)), fed.begin(1))
    assert state.kind[0, 1] == state.kind[1, 0] == 5 and int((state.kind == 5).sum()) == 2
    assert method.serve(state).clusters.tolist() == [0, 0, 0, 1, 1, 1]  # type: ignore[union-attr]
    again = method.step(fed, state, fed.begin(2))
    assert torch.equal(again.W.nan_to_num(), state.W.nan_to_num())  # a pair that cannot be compared is not tried again


def test_open_pairs_stay_apart_where_nobody_links_them() -> None:
    x = np.nan
    assert completed([[1, x], [x, 1]]).tolist() == [[True, False], [False, True]]
    assert completed([[1, x, 1, 0], [x, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1]]).tolist()[0] == [True, False, True, False]
    chain = completed([[1, 1, x, x], [1, 1, 1, x], [x, 1, 1, 1], [x, x, 1, 1]])
    assert chain.all()


@pytest.mark.parametrize("message", [b"", b"abc", np.array([2, 2], "<u4").tobytes(), np.array([90, 0, 0, 0], "<u4").tobytes()])
def test_offers_that_no_sample_can_have_are_refused(message: bytes) -> None:
    labels = np.arange(80) % 4
    with pytest.raises(ClientError, match="class counts in common"):
        offered(message, labels)
    taken = offered(np.array([20, 5, 0, 0], "<u4").tobytes(), labels)
    assert np.bincount(labels[taken.numpy()]).tolist() == [20, 5]


@pytest.mark.parametrize("changed", [{"size": 100}, {"tau": 9.0}, {"freedom": 99}, {"variance": 99.0}], ids=str)
def test_a_row_that_recalibrates_out_of_range_is_refused(changed: dict[str, Any]) -> None:
    fed, local = trained(lacking(tiny(groups=1, clients_per_group=2, n=(160,), val=(100,)), 0))

    def lie(task: str, client: str, reply: dict[str, Any]) -> dict[str, Any]:
        return reply | {field: dict.fromkeys(reply[field], value) for field, value in changed.items() if task == "recalibrate"}

    tamper(fed, lie)
    with pytest.raises(ClientError, match="in common with 'site-0'"):
        Comparison(EMDCFL(), fed, local).measure(every_pair(fed))


@pytest.mark.parametrize("lie", [b"\x01" * 20, np.array([4, 18, 18, 18, 17], "<u4").tobytes()], ids=["none", "of another size"])
def test_a_partner_that_seals_unusable_counts_costs_only_its_own_pairs(lie: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts that do not add up would make its partners answer with another number of samples, and be blamed for it."""
    fed, local = trained(tiny(n=(210,), val=(70,)))
    honest = emdcfl_client.packed_counts
    monkeypatch.setattr(emdcfl_client, "packed_counts", lambda client, sizes: lie if client.name == "site-0" else honest(client, sizes))
    fed.on_failure = "continue"
    found = Comparison(EMDCFL(tolerance="auto"), fed, local).measure(every_pair(fed))
    assert not any("site-0" in pair for pair in found.entries)
    assert {pair for pair in every_pair(fed) if "site-0" not in pair} == set(found.entries)
    assert [c for c in fed.clients if fed.exclusion_reason(c) is not None] == ["site-0"]


def test_a_column_that_sends_more_than_it_says_is_refused() -> None:
    fed, local = trained(tiny(n=(210,), val=(70,)))
    tamper(fed, lambda task, _, reply: {**reply, "matched": dict.fromkeys(reply["matched"], 7)} if task == "project" else reply)
    with pytest.raises(ClientError, match="blocks of 70 samples"):
        Comparison(EMDCFL(tolerance="auto"), fed, local).measure(every_pair(fed))


@pytest.mark.parametrize(
    "options",
    [
        {"tolerance": 0.025},
        {"match_classes": False},
        {"projection": "pair"},
        {"cost": "label-aware"},
        {"exchange": "server-samples"},
        {"recompute": "every-round"},
        {"privacy_epsilon": 5.0},
    ],
)
def test_it_is_off_where_it_makes_no_sense(options: dict[str, Any]) -> None:
    assert EMDCFL(tolerance="auto").matched and EMDCFL(tolerance="auto").several_blocks
    method = EMDCFL(**{"tolerance": "auto", **options})
    assert not method.matched and not method.several_blocks


@pytest.mark.slow
def test_under_the_null_hypothesis_values_are_standardised_and_noise_is_small() -> None:
    """One group: matched values have mean near 0 and spread near 1 in units of tolerances that are smaller than the plain ones."""
    values, ratio = [], []
    for seed in range(3):
        fed, local = trained(tiny(groups=1, clients_per_group=6, n=(200,), val=(100,)), seed=seed)
        found, plain = (
            Comparison(EMDCFL(tolerance="auto", distances="all", match_classes=on), fed, local).measure(every_pair(fed)).entries
            for on in (True, False)
        )
        q = quantile(EMDCFL().alpha, 6)
        values += [q * e.W / e.epsilon for e in found.values()]
        ratio += [found[pair].epsilon / plain[pair].epsilon for pair in found]
        assert all(e.epsilon > e.W for e in found.values())
    assert abs(np.mean(values)) < 0.7
    assert 0.3 < np.std(values) < 1.2
    assert np.median(ratio) < 0.9


def test_clients_may_come_later() -> None:
    fed = federation(tiny(n=(210,), val=(70,)), number=2)
    method = make("emdcfl", tolerance="auto")
    state = history(fed, method, 5)[-1]
    assert method.serve(state).clusters.tolist() == [0, 0, 1, 1]  # type: ignore[union-attr]
