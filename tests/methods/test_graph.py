"""The projection on the simplex that pFedGraph and FedSaC share."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from emdcfl.core.errors import DataError
from emdcfl.methods.shared.graph import project_simplex


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 8), st.floats(0.05, 20.0))
def test_simplex_projection_equals_a_quadratic_program(seed: int, n: int, scale: float) -> None:
    v = scale * np.random.default_rng(seed).standard_normal(n)
    x = project_simplex(v)
    assert x.min() >= 0
    assert x.sum() == pytest.approx(1.0, abs=1e-9)
    qp = minimize(
        lambda y: ((y - v) ** 2).sum(),
        np.full(n, 1 / n),
        jac=lambda y: 2 * (y - v),
        bounds=[(0, None)] * n,
        constraints={"type": "eq", "fun": lambda y: y.sum() - 1, "jac": lambda y: np.ones(n)},
        method="SLSQP",
        options={"ftol": 1e-11, "maxiter": 500},
    )
    assert qp.status in (0, 8), qp.message  # 8: no further descent at machine precision
    np.testing.assert_allclose(x, qp.x, atol=1e-4)
    assert ((x - v) ** 2).sum() <= qp.fun + 1e-9 * max(1.0, qp.fun)


def test_already_on_the_simplex_and_far_away() -> None:
    np.testing.assert_allclose(project_simplex([0.2, 0.3, 0.5]), [0.2, 0.3, 0.5])
    np.testing.assert_allclose(project_simplex([1e9, 0.0]), [1.0, 0.0])
    with pytest.raises(DataError):
        project_simplex([np.inf, 0.0])
