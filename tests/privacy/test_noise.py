from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

from emdcfl.core.errors import ConfigError
from emdcfl.core.keys import NodeSecret, generator
from emdcfl.privacy.noise import SENSITIVITY, gaussian_delta, gaussian_epsilon, gaussian_mu, gaussian_sigma, released, total_epsilon, unit

SECRET = NodeSecret(bytes(range(32)))
RECORDS = [f"val {i}".encode() for i in range(40)]


def noise(
    z: np.ndarray, *, secret: NodeSecret = SECRET, query: bytes = b"q", sigma: float = 1.0, records: list[bytes] | None = None
) -> np.ndarray:
    return released(z, RECORDS[: len(z)] if records is None else records, sigma=sigma, secret=secret, query=query) - unit(z)


@pytest.fixture
def z() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((40, 12))


def test_the_value_everybody_quotes() -> None:
    assert gaussian_sigma(1.0, 1e-5) / SENSITIVITY == pytest.approx(3.730632, abs=1e-6)
    assert gaussian_sigma(1.0, 1e-5) == pytest.approx(2 * 3.730632, abs=2e-6)


@pytest.mark.parametrize(("epsilon", "delta"), [(0.3, 1e-4), (1.0, 1e-5), (4.0, 1e-6), (20.0, 1e-5)])
def test_the_trade_off_is_the_divergence_of_two_gaussians(epsilon: float, delta: float) -> None:
    """δ(ε) = ∫ (p − e^ε q)⁺ for p, q the releases of two records as far apart as the sensitivity allows, integrated by brute force."""
    sigma = gaussian_sigma(epsilon, delta)
    p, q = stats.norm(SENSITIVITY, sigma), stats.norm(0.0, sigma)
    start = epsilon * sigma**2 / SENSITIVITY + SENSITIVITY / 2  # where p = e^ε q
    found, _ = integrate.quad(lambda x: p.pdf(x) - math.exp(epsilon + q.logpdf(x)), start, start + 40 * sigma, epsabs=1e-13, limit=400)
    assert found == pytest.approx(delta, rel=1e-4)


@pytest.mark.parametrize("epsilon", [0.05, 0.2, 0.5, 0.9])
@pytest.mark.parametrize("delta", [1e-8, 1e-5, 1e-3])
def test_never_more_noise_than_the_classic_bound_asks_for(epsilon: float, delta: float) -> None:
    classic = math.sqrt(2 * math.log(1.25 / delta)) * SENSITIVITY / epsilon  # proven for ε < 1
    assert classic / 3 < gaussian_sigma(epsilon, delta) < classic


@given(st.floats(0.01, 2000), st.floats(1e-10, 0.2))
def test_calibration_errs_on_the_safe_side_by_next_to_nothing(epsilon: float, delta: float) -> None:
    mu = gaussian_mu(epsilon, delta)
    assert gaussian_delta(epsilon, mu) <= delta < gaussian_delta(epsilon, mu * (1 + 1e-6))
    assert gaussian_epsilon(mu, delta) == pytest.approx(epsilon, rel=1e-5)


def test_releases_compose_as_one_with_less_noise() -> None:
    assert total_epsilon(2.0, 1e-5, 1) == pytest.approx(2.0)
    half = SENSITIVITY / gaussian_sigma(2.0, 1e-5) * math.sqrt(4)
    assert gaussian_delta(total_epsilon(2.0, 1e-5, 4), half) == pytest.approx(1e-5)
    totals = [total_epsilon(2.0, 1e-5, k) for k in (1, 2, 8, 40)]
    assert totals == sorted(totals) and totals[-1] < 40 * 2.0  # better than adding the ε up
    with pytest.raises(ConfigError, match="at least one release"):
        total_epsilon(1.0, 1e-5, 0)


def test_no_distinguisher_beats_the_stated_trade_off() -> None:
    """The best test between the releases of two opposite vectors, tried on a hundred thousand draws through the code that releases."""
    epsilon, delta, draws = 1.0, 0.05, 50_000
    sigma = gaussian_sigma(epsilon, delta)
    z = np.repeat([[1.0], [-1.0]], draws, axis=0)
    x = released(z, [str(i).encode() for i in range(2 * draws)], sigma=sigma, secret=SECRET, query=b"q")[:, 0]
    hit, false_alarm = (float((side > epsilon * sigma**2 / 2).mean()) for side in (x[:draws], x[draws:]))
    assert hit - math.exp(epsilon) * false_alarm == pytest.approx(delta, abs=0.012)


@pytest.mark.parametrize(
    ("epsilon", "delta", "message"), [(0.0, 1e-5, "above 0"), (math.inf, 1e-5, "above 0"), (1.0, 0.0, "between 0 and 1")]
)
def test_budgets_that_are_none_are_refused(epsilon: float, delta: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gaussian_sigma(epsilon, delta)


def test_vectors_have_at_most_unit_length_whatever_a_model_makes_of_a_record() -> None:
    z = np.array([[3e30, 4e30], [1e-30, 0.0], [0.0, 0.0], [np.nan, 1.0], [np.inf, 0.0]])
    lengths = np.linalg.norm(unit(z), axis=1)
    assert np.allclose(lengths, [1, 1, 0, 0, 0], atol=1e-15)
    assert np.isfinite(released(z, RECORDS[:5], sigma=0.5, secret=SECRET, query=b"q")).all()


def test_noise_is_standard_normal_times_sigma() -> None:
    found = noise(np.zeros((2000, 30)), sigma=0.7, records=[str(i).encode() for i in range(2000)]) / 0.7
    assert stats.kstest(found.ravel(), "norm").pvalue > 1e-3
    assert found.std() == pytest.approx(1.0, abs=0.02)
    assert abs(np.corrcoef(found[:, 0], found[:, 1])[0, 1]) < 0.1  # entries of one vector
    assert abs(np.corrcoef(found[:-1].ravel(), found[1:].ravel())[0, 1]) < 0.02  # vectors of two records


def test_the_same_question_gets_the_same_noise(z: np.ndarray) -> None:
    again = NodeSecret(bytes(range(32)))  # another process of the node
    assert np.array_equal(noise(z), noise(z, secret=again))
    part = [3, 17, 5]
    assert np.array_equal(noise(z)[part], noise(z[part], records=[RECORDS[i] for i in part]))  # a smaller sample tells nothing new


@pytest.mark.parametrize("change", ["secret", "query", "sigma", "record"])
def test_another_question_gets_other_noise(z: np.ndarray, change: str) -> None:
    before = noise(z)
    other = {
        "secret": lambda: noise(z, secret=NodeSecret(bytes(32))),
        "query": lambda: noise(z, query=b"p"),
        "sigma": lambda: noise(z, sigma=1.5) / 1.5,
        "record": lambda: noise(z, records=[f"train {i}".encode() for i in range(40)]),
    }[change]()
    assert np.mean(np.abs(before - other) < 0.01) < 0.03
    assert abs(np.corrcoef(before.ravel(), other.ravel())[0, 1]) < 0.2


def test_equal_records_have_noise_of_their_own() -> None:
    found = released(np.ones((2, 8)), RECORDS[:2], sigma=1.0, secret=SECRET, query=b"q")
    assert not np.array_equal(found[0], found[1])


def test_the_last_bits_are_cut_off(z: np.ndarray) -> None:
    found = released(z, RECORDS, sigma=0.25, secret=SECRET, query=b"q").astype(np.float64)
    grid = 0.25 / 1024
    assert np.array_equal(found, np.rint(found / grid) * grid)


def test_the_seed_that_everybody_knows_makes_none_of_it(z: np.ndarray) -> None:
    found = noise(z)
    for purpose in ("privacy noise", "noise", "sample val"):
        public = generator(0, "site-0", 0, purpose).standard_normal(z.shape)
        assert abs(np.corrcoef(found.ravel(), public.ravel())[0, 1]) < 0.2


def test_one_record_per_vector(z: np.ndarray) -> None:
    with pytest.raises(ValueError, match="one record per vector"):
        noise(z, records=RECORDS[:3])
