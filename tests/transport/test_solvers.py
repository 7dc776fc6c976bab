from __future__ import annotations

import subprocess
import sys

import numpy as np
import ot
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emdcfl.core.errors import ConfigError, EmdcflError
from emdcfl.transport import cost_matrix, exact, sinkhorn, solve, solvers


def relu(seed: int, n: int, d: int = 16, shift: float = 0.0) -> np.ndarray:
    return np.maximum(np.random.default_rng(seed).standard_normal((n, d)) + shift, 0.0)


def pot(c: np.ndarray) -> float:
    return float(ot.emd2([], [], np.asarray(c, dtype=np.float64), numItermax=10**7))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 20), st.integers(1, 20), st.booleans())
def test_exact_equals_pot(seed: int, n: int, m: int, equal: bool) -> None:
    c = cost_matrix(relu(seed, n), relu(seed + 1, n if equal else m, shift=0.3))
    assert exact(c).value == pytest.approx(pot(c), abs=1e-9)


def test_reduced_costs_change_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    z = relu(0, 60)
    cases = [cost_matrix(z, relu(1, 60, shift=shift)) for shift in (0.0, 0.5, 3.0)]
    cases += [cost_matrix(z, z), np.zeros((9, 9)), cases[1] - 2.0, 1e200 * cases[1].astype(np.float64)]
    for c in cases:
        values = []
        for least in (1, 1000):
            monkeypatch.setattr(solvers, "REDUCED_FROM", least)
            values.append(exact(c).value)
        assert values[0] == pytest.approx(values[1], rel=1e-12, abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 20), st.integers(1, 20))
def test_duals_are_feasible_and_reach_the_value(seed: int, n: int, m: int) -> None:
    c = cost_matrix(relu(seed, n, d=3), relu(seed + 1, m, d=3)).astype(np.float64)
    plan = exact(c, duals=True)
    assert plan.f is not None
    assert plan.g is not None
    assert plan.f.shape == (n,)
    assert plan.g.shape == (m,)
    assert (plan.f[:, None] + plan.g[None, :] <= c + 1e-12).all()
    assert plan.f.mean() + plan.g.mean() == pytest.approx(plan.value, abs=1e-6)
    assert plan.value == pytest.approx(exact(c).value, abs=1e-9)


def test_a_sample_is_at_distance_zero_from_itself_with_duplicates_and_zeros() -> None:
    z = np.vstack([relu(0, 40), relu(0, 10), np.zeros((6, 16))])
    for cost in ("cosine", "euclidean"):
        assert exact(cost_matrix(z, z, cost=cost)).value == pytest.approx(0.0, abs=1e-6)
    assert exact(cost_matrix(np.zeros((4, 3)), np.zeros((5, 3)))).value == 0.0
    assert exact(cost_matrix(np.zeros((4, 3)), np.ones((5, 3)))).value == pytest.approx(1.0)


@pytest.mark.parametrize("solver", ["exact", "sinkhorn"])
@pytest.mark.parametrize(("n", "m"), [(30, 30), (30, 21)])
def test_symmetric_and_blind_to_order_and_common_rotation(solver: str, n: int, m: int) -> None:
    rng = np.random.default_rng(0)
    a, b = relu(0, n), relu(1, m, shift=0.5)
    value = solve(cost_matrix(a, b), solver=solver).value
    q, _ = np.linalg.qr(rng.standard_normal((16, 16)))
    assert value > 0
    assert solve(cost_matrix(b, a), solver=solver).value == pytest.approx(value, abs=1e-5)
    assert solve(cost_matrix(a[rng.permutation(n)], b[rng.permutation(m)]), solver=solver).value == pytest.approx(value, abs=1e-5)
    assert solve(cost_matrix(a @ q, b @ q), solver=solver).value == pytest.approx(value, abs=1e-5)


def test_the_rule_for_large_equal_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    c = cost_matrix(relu(0, 33), relu(1, 33))
    by_assignment = exact(c).value
    monkeypatch.setattr(solvers, "ASSIGNMENT_LIMIT", 32)
    monkeypatch.setattr(solvers, "_assignment", lambda c: pytest.fail("the simplex should have been used"))
    assert exact(c).value == pytest.approx(by_assignment, abs=1e-12)


def test_non_convergence_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solvers, "MAX_ITERATIONS", 3)
    with pytest.raises(EmdcflError, match=r"64 x 63.*did not converge"):
        exact(cost_matrix(relu(0, 64), relu(1, 63, shift=1.0)))
    with pytest.raises(EmdcflError, match="did not reach"):
        sinkhorn(cost_matrix(relu(0, 30), relu(1, 30, shift=1.0)), reg=0.001, max_iter=5)


@pytest.mark.parametrize("bad", [np.zeros((0, 3)), np.zeros(3), np.full((2, 2), np.nan), [[np.inf]]])
def test_bad_costs_are_refused_by_both(bad: object) -> None:
    for solver in ("exact", "sinkhorn"):
        with pytest.raises(EmdcflError, match="expected"):
            solve(bad, solver=solver)


def test_unknown_solver_and_bad_regularisation() -> None:
    with pytest.raises(ConfigError, match="did you mean 'sinkhorn'"):
        solve([[0.0]], solver="sinkhorm")
    for reg in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="regularisation"):
            sinkhorn([[0.0]], reg=reg)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 24), st.integers(1, 24), st.sampled_from([1.0, 0.1, 0.05]))
def test_sinkhorn_equals_pot_and_brackets_the_exact_value(seed: int, n: int, m: int, reg: float) -> None:
    c = cost_matrix(relu(seed, n), relu(seed + 1, m, shift=0.3)).astype(np.float64)
    plan = sinkhorn(c, reg=reg)
    reference = ot.sinkhorn(np.full(n, 1 / n), np.full(m, 1 / m), c, reg, method="sinkhorn_log", stopThr=1e-8, numItermax=20_000)
    assert plan.value == pytest.approx(float((reference * c).sum()), abs=1e-5)
    assert plan.value >= exact(c).value - 1e-5


def test_sinkhorn_at_small_regularisation_approaches_the_exact_value() -> None:
    c = cost_matrix(relu(0, 60), relu(1, 50, shift=0.5))
    value, best = sinkhorn(c, reg=0.003).value, exact(c).value
    assert best <= value + 1e-6
    assert value == pytest.approx(best, abs=4e-3)


def test_sinkhorn_survives_costs_far_larger_than_the_regularisation() -> None:
    c = np.array([[0.0, 5000.0], [5000.0, 0.0]])
    assert sinkhorn(c, reg=0.1).value == pytest.approx(0.0, abs=1e-6)
    assert sinkhorn(c + 1e4, reg=0.1).value == pytest.approx(1e4, rel=1e-9)


def test_projection_ratio_moves_tau_and_w_together() -> None:
    """One projection for both sides keeps in-group W near zero (methods sheet, section 7)."""
    from emdcfl.transport import projection

    a, v, w = relu(0, 100, d=40), relu(1, 100, d=40), relu(2, 100, d=40)
    for p in (36, 20):
        r = projection(3, 40, p)
        tau = exact(cost_matrix(a @ r, v @ r)).value
        assert abs(exact(cost_matrix(a @ r, w @ r)).value - tau) < 0.02


def fresh(code: str) -> None:
    """Run a script in a process of its own."""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_solvers_can_be_imported_ahead_and_the_simplex_without_the_rest_of_pot() -> None:
    """In a fresh process: not there at first, there when the thread has ended; all of POT can be imported later and is then used."""
    fresh("""
import sys
import numpy as np
from emdcfl.transport import exact, solvers, warm_up
assert solvers._emd is None and "scipy.optimize" not in sys.modules
warm_up().join()
assert solvers._emd is not None and "scipy.optimize" in sys.modules
c = np.random.default_rng(0).random((7, 5))
value = exact(c).value
assert "sklearn" not in sys.modules and "ot" not in sys.modules
import ot
assert abs(ot.emd2(np.full(7, 1 / 7), np.full(5, 1 / 5), c) - value) < 1e-9
assert ot.dist(c, c).shape == (7, 7) and ot.lp.emd is ot.emd and ot.gromov.gromov_wasserstein
assert exact(c).value == value
solvers._emd = None
assert solvers.network_simplex() is ot.emd
""")


@pytest.mark.slow
def test_whoever_imports_pot_meanwhile_gets_all_of_it() -> None:
    fresh("""
import importlib
import numpy as np
from emdcfl.transport import exact, solvers
plain, seen = importlib.import_module, []
def meanwhile(name):
    importlib.import_module = plain
    found = plain(name)
    seen.append(hasattr(plain("ot"), "emd2"))
    return found
importlib.import_module = meanwhile
assert abs(exact(np.eye(3)[:2]).value) < 1e-9
assert seen == [True]
import ot
assert hasattr(ot, "emd2")
""")


@pytest.mark.slow
def test_where_pot_is_laid_out_in_another_way_all_of_it_is_taken() -> None:
    fresh("""
import sys
import numpy as np
from emdcfl.transport import exact, solvers
solvers._import_simplex = lambda: 1 / 0
assert abs(exact(np.eye(3)[:2]).value - 0.0) < 1e-9
assert solvers._emd is sys.modules["ot"].emd
""")
