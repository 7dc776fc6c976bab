"""EMD-CFL with privacy noise: what is released, what it costs, and that distances stay calibrated."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tests.tiny import client, federation, tiny
from torch import Tensor

from emdcfl.core.client import Client
from emdcfl.core.errors import ClientError, ConfigError
from emdcfl.core.keys import NodeSecret
from emdcfl.methods.emdcfl import EMDCFL
from emdcfl.methods.emdcfl.client.sampling import records
from emdcfl.methods.emdcfl.client.tasks import ROW, deposit, project, reference
from emdcfl.methods.emdcfl.comparison import Comparison
from emdcfl.methods.emdcfl.interpret import doubts
from emdcfl.methods.emdcfl.privacy_budget import ReleasesPerRecord, releases
from emdcfl.methods.emdcfl.settings import CompareSettings
from emdcfl.privacy.exchange import public_key
from emdcfl.privacy.noise import gaussian_sigma, released, unit
from emdcfl.transport import cost_matrix, dual_variance, exact

EPSILON = 30.0
SIGMA = gaussian_sigma(EPSILON, 1e-5)


def pair() -> tuple[Client, Client, dict[str, Tensor]]:
    """Two clients of one group with two different models."""
    a, b = client(index=0), client(index=1)
    omega = a.network.theta[a.network.layout.embedding].clone()
    return a, b, {"site-0": omega, "site-1": omega * 1.1 + 0.01}


def sent(**options: Any) -> dict[str, Any]:
    """Settings as a server sends them."""
    return CompareSettings.of(EMDCFL(**options)).as_dict()


def rows_of(a: Client, omega: Tensor, *, partner: Client | None = None, **options: Any) -> dict[str, Any]:
    settings = sent(**{"privacy_epsilon": EPSILON, **options})
    partners = {} if partner is None else {partner.name: public_key(partner.secret)}
    return reference(a, omega=omega, partners=partners, sizes=[70], settings=settings)


def column(a: Client, b: Client, omega: Tensor, *, size: int = 70, **options: Any) -> Tensor:
    """What b sends for a's row."""
    settings = sent(**{"privacy_epsilon": EPSILON, **options})
    boxes = rows_of(a, omega, partner=b, privacy_epsilon=None)["boxes"]
    inputs = {"boxes": {a.name: boxes[b.name]}, "omegas": {a.name: omega}, "keys": {a.name: public_key(a.secret)}}
    found: Tensor = project(b, rows=[a.name], size=size, held_out=True, settings=settings, **inputs)["samples"][a.name]
    return found


def residual(noisy: Tensor, clean: Tensor) -> np.ndarray:
    return noisy.numpy() - unit(clean.numpy())


def related(x: np.ndarray, y: np.ndarray) -> float:
    n = min(len(x), len(y))
    return abs(float(np.corrcoef(x[:n].ravel(), y[:n].ravel())[0, 1]))


def test_noise_lies_on_unit_vectors_and_has_the_calibrated_size() -> None:
    a, b, omega = pair()
    clean, noisy = rows_of(a, omega["site-0"], privacy_epsilon=None), rows_of(a, omega["site-0"])
    assert residual(noisy["samples"][ROW], clean["samples"][ROW]).std() == pytest.approx(SIGMA, rel=0.15)
    nearly_none = column(a, b, omega["site-0"], privacy_epsilon=1e12)
    lengths = nearly_none.norm(dim=1)
    assert torch.allclose(lengths[lengths > 0.5], torch.ones(1), atol=1e-4) and (lengths > 0.5).any()


def test_a_repeated_request_gets_the_same_bits_from_another_process_too() -> None:
    a, b, omega = pair()
    first, again = rows_of(a, omega["site-0"]), rows_of(client(index=0), omega["site-0"])
    for name in ("samples", "tau", "variance"):
        assert torch.equal(first[name][ROW], again[name][ROW])
    assert torch.equal(column(a, b, omega["site-0"]), column(a, client(index=1), omega["site-0"]))
    whole, part = column(a, b, omega["site-0"]), column(a, b, omega["site-0"], size=20)
    assert torch.cdist(part, whole).min(dim=1).values.max() < 0.01 * SIGMA  # asking for fewer samples tells nothing new


def test_noise_differs_between_rows_and_between_versions_of_a_model() -> None:
    a, b, omega = pair()
    for other_row, other in ((b, omega["site-1"]), (a, omega["site-0"] * (1 + 1e-7) + 1e-9)):
        x = residual(column(a, b, omega["site-0"]), column(a, b, omega["site-0"], privacy_epsilon=None))
        if other_row is b:  # b's own row: its train sample
            y = residual(rows_of(b, other)["samples"][ROW], rows_of(b, other, privacy_epsilon=None)["samples"][ROW])
        else:
            y = residual(column(a, b, other), column(a, b, other, privacy_epsilon=None))
        assert x.std() > SIGMA / 2 and related(x, y) < 0.25
        assert not np.isclose(x[: len(y)], y[: len(x)], atol=SIGMA * 1e-3).mean() > 0.02


def test_noise_comes_from_the_node_secret_and_not_from_the_seed() -> None:
    a, _, omega = pair()

    def by_record(seed: int, secret: NodeSecret) -> np.ndarray:
        with_seed = Client(a.site, a.network, a.preprocess, seed=seed, secret=secret)
        samples = rows_of(with_seed, omega["site-0"])["samples"][ROW].numpy()
        return samples[np.argsort(with_seed.sample("train", 512).numpy())]

    mine, theirs = NodeSecret(b"m" * 32), NodeSecret(b"t" * 32)
    assert np.allclose(by_record(0, mine), by_record(1, mine), atol=0.01 * SIGMA)
    assert not np.allclose(by_record(0, mine), by_record(0, theirs), atol=SIGMA)


def test_tau_is_computed_from_released_vectors_alone() -> None:
    """The client's own row, asked of itself as a column, is the validation sample that τ was computed from: no further release."""
    a, _, omega = pair()
    reply = rows_of(a, omega["site-0"], partner=a, tolerance=0.025)
    own = column(a, a, omega["site-0"])
    plan = exact(cost_matrix(reply["samples"][ROW].numpy(), own.numpy()), duals=True)
    assert float(reply["tau"][ROW][0]) == pytest.approx(plan.value, abs=1e-3)
    assert float(reply["variance"][ROW][0]) == pytest.approx(dual_variance(plan.g), rel=0.2)


@pytest.mark.parametrize("projection", ["row", "pair", "fresh"])
def test_infinite_epsilon_is_bit_for_bit_no_noise_and_every_projection_takes_noise(projection: Any) -> None:
    def w(**options: Any) -> Tensor:
        fed, method = federation(tiny(n=(40,))), EMDCFL(projection=projection, tolerance=0.08, distances="all", **options)
        state = method.step(fed, method.init(fed, fed.begin(0)), fed.begin(1))
        return state.W

    plain, infinite, noisy = w(), w(privacy_epsilon=math.inf), w(privacy_epsilon=EPSILON)
    off = ~torch.eye(4, dtype=torch.bool)
    assert torch.equal(plain[off], infinite[off])
    assert torch.isfinite(noisy[off]).all() and not torch.isclose(plain[off], noisy[off]).any()
    assert torch.equal(noisy[off], w(privacy_epsilon=EPSILON)[off])


def test_groups_survive_weak_noise_with_a_calibrated_tolerance() -> None:
    fed = federation(tiny(n=(200,), val=(200,)))
    method = EMDCFL(tolerance="auto", privacy_epsilon=2000.0)
    state = method.step(fed, method.init(fed, fed.begin(0)), fed.begin(1))
    assert list(state.labels.values()) == [0, 0, 1, 1]


def test_distances_inside_a_group_stay_centred_only_if_tau_has_the_same_noise() -> None:
    """Many pairs of samples of one law: the mean of W in standard errors is 0, and far from it with a τ that saw no noise."""
    rng, sigma, m = np.random.default_rng(1), 0.4, 60
    right, wrong = [], []
    for trial in range(25):
        train, val, other = (np.abs(rng.standard_normal((n, 6))) for n in (80, m, m))

        def sent(x: np.ndarray, name: str, query: bytes = str(trial).encode()) -> np.ndarray:
            return released(x, [f"{name} {i}".encode() for i in range(len(x))], sigma=sigma, secret=NodeSecret(bytes(32)), query=query)

        row = sent(train, "train")
        tau = exact(cost_matrix(row, sent(val, "val")), duals=True)
        error = math.sqrt(dual_variance(tau.g) * 2 / m)
        distance = exact(cost_matrix(row, sent(other, "other"))).value
        right.append((distance - tau.value) / error)
        wrong.append((distance - exact(cost_matrix(train, val)).value) / error)
    assert abs(np.mean(right)) < 0.7 and np.std(right) < 1.6
    assert np.mean(wrong) > 3


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({}, ReleasesPerRecord(8, 8)),  # blocks of train samples too
        ({"privacy_epsilon": 8.0}, ReleasesPerRecord(1, 8)),  # under noise samples stay as drawn
        ({"tolerance": 0.025}, ReleasesPerRecord(1, 8)),
        ({"projection": "pair"}, ReleasesPerRecord(7, 14)),
        ({"projection": "fresh"}, ReleasesPerRecord(8, 8)),
        ({"projection": "fresh", "force_diagonal": False}, ReleasesPerRecord(9, 9)),
        ({"force_diagonal": False, "privacy_epsilon": 8.0}, ReleasesPerRecord(1, 8)),
        ({"average_blocks": True, "privacy_epsilon": 8.0}, ReleasesPerRecord(8, 8)),
    ],
)
def test_releases_are_counted(options: dict[str, Any], found: ReleasesPerRecord) -> None:
    assert releases(EMDCFL(**options), 8) == found


@pytest.mark.slow
def test_the_count_is_what_leaves_the_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the distinct queries that a record is released for in a round of four clients."""
    from emdcfl.privacy import noise

    asked: dict[bytes, set[bytes]] = {}
    real = noise.released

    def counting(z: Any, whose: Sequence[bytes], **options: Any) -> Any:
        for record in whose:
            asked.setdefault(record, set()).add(options["query"])
        return real(z, whose, **options)

    monkeypatch.setattr(noise, "released", counting)
    for projection in ("row", "pair", "fresh"):
        for forced in (True, False):
            asked.clear()
            fed = federation()
            method = EMDCFL(projection=projection, force_diagonal=forced, privacy_epsilon=EPSILON)  # type: ignore[arg-type]
            method.step(fed, method.init(fed, fed.begin(0)), fed.begin(1))
            most = {}
            for split in ("train", "val"):
                every = [r for c in fed._clients.values() for r in records(c, split, torch.arange(len(c.split(split))))]
                most[split] = max(len(asked.get(record, ())) for record in every)
            assert ReleasesPerRecord(**most) == releases(method, 4), (projection, forced)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cost": "label-aware"}, "labels travel without noise"),
        ({"exchange": "server-samples"}, "raw samples"),
        ({"embedding_mode": "train"}, "whole batch"),
        ({"privacy_epsilon": -1.0}, "epsilon above 0"),
        ({"privacy_delta": 1.0}, "delta between 0 and 1"),
    ],
)
def test_what_noise_does_not_cover_is_refused(options: dict[str, Any], message: str) -> None:
    fed = federation()
    with pytest.raises(ConfigError, match=message):
        EMDCFL(**{"privacy_epsilon": 4.0, **options}).init(fed, fed.begin(0))
    without = {k: v for k, v in options.items() if not k.startswith("privacy")}
    EMDCFL(**without).init(fed, fed.begin(0))


def test_a_client_refuses_too_whatever_the_server_says() -> None:
    a, _, omega = pair()
    for name, value in (("cost", "label-aware"), ("embedding_mode", "train"), ("exchange", "server-samples"), ("match_classes", True)):
        settings = {**sent(privacy_epsilon=4.0), name: value}
        with pytest.raises(ClientError, match="privacy noise"):
            reference(a, omega=omega["site-0"], partners={}, sizes=[70], settings=settings)
        with pytest.raises(ClientError, match="privacy noise"):
            deposit(a, size=3, held_out=True, settings=settings)


@pytest.mark.parametrize("options", [{}, {"privacy_epsilon": 4.0}])
def test_raw_samples_leave_only_where_the_settings_say_so(options: dict[str, Any]) -> None:
    a, _, _ = pair()
    with pytest.raises(ClientError, match="server-samples"):
        deposit(a, size=3, held_out=True, settings=sent(**options))


def test_a_client_with_noise_lets_nobody_choose_its_sample_by_class() -> None:
    a, _, omega = pair()
    inputs = {"boxes": {}, "omegas": omega, "keys": {}, "matching": {"sizes": [70], "m": {}, "blocks": {}}}
    with pytest.raises(ClientError, match="match_classes"):
        project(a, rows=[], size=70, held_out=True, settings=sent(privacy_epsilon=4.0), **inputs)


def test_a_node_sends_no_embedding_with_less_noise_than_its_operator_wants() -> None:
    a, _, omega = pair()
    a.most_epsilon = 8.0
    for asked in ({"privacy_epsilon": None}, {"privacy_epsilon": 9.0}, {"privacy_epsilon": 8.0, "privacy_delta": 0.5}):
        with pytest.raises(ClientError, match="'site-0' sends embeddings only with privacy noise of epsilon 8 or less"):
            rows_of(a, omega["site-0"], **asked)
    for fine in ({"privacy_epsilon": 8.0}, {"privacy_epsilon": 1.0}, {"privacy_epsilon": 8.0, "privacy_delta": 1e-9}):
        assert ROW in rows_of(a, omega["site-0"], **fine)["samples"]


@pytest.mark.parametrize(
    ("recompute", "participants", "again"),
    [("once", 2, False), ("every-round", None, True), ("if-partial", None, False), ("if-partial", 2, True)],
)
def test_what_is_released_in_every_round_is_said(
    caplog: pytest.LogCaptureFixture, recompute: Any, participants: int | None, again: bool
) -> None:
    fed = federation(participants=participants)
    with caplog.at_level(logging.INFO, logger="emdcfl"):
        EMDCFL(privacy_epsilon=8.0, recompute=recompute).init(fed, fed.begin(0))
    assert any("again in every round" in text for text in caplog.messages) == again


def test_the_budget_is_said_per_release_and_in_total(caplog: pytest.LogCaptureFixture) -> None:
    fed = federation()
    with caplog.at_level(logging.INFO, logger="emdcfl"):
        EMDCFL(privacy_epsilon=4.0).init(fed, fed.begin(0))
    (said,) = [text for text in caplog.messages if text.startswith("privacy noise")]
    assert "(4, 1e-05) per record and release" in said and "ε ≤ 4 for a train record (1 release)" in said
    assert "9.08 for a validation record (4)" in said
    assert "5.7 times as long as an embedding" in said
    caplog.clear()
    EMDCFL().init(fed, fed.begin(0))
    assert not caplog.messages


def test_noise_that_drowns_the_embeddings_is_a_doubt_of_the_clustering() -> None:
    def reasons(epsilon: float | None) -> list[str]:
        fed, method = federation(), EMDCFL(tolerance=0.08, privacy_epsilon=epsilon)
        state = method.step(fed, method.init(fed, fed.begin(0)), fed.begin(1))
        found = method.serve(state)
        assert found.distances is not None and found.clusters is not None
        return doubts(found.distances, fed.clients, found.clusters.tolist())

    assert any("privacy noise shrinks distances about 34 times" in reason for reason in reasons(4.0))
    assert not any("privacy" in reason for epsilon in (None, 1000.0) for reason in reasons(epsilon))


def test_blocks_of_both_splits_take_noise() -> None:
    fed = federation(tiny(n=(210,), val=(70,)))
    fed.begin(1)
    local = fed.train(dict.fromkeys(fed.clients, fed.initial())).column("theta")
    comparison = Comparison(EMDCFL(tolerance="auto", average_blocks=True, privacy_epsilon=EPSILON), fed, local)
    assert math.isfinite(comparison.measure([("site-0", "site-1"), ("site-1", "site-0")]).entries["site-0", "site-1"].W)
