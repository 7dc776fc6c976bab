from __future__ import annotations

import threading

import numpy as np
import pytest
from threadpoolctl import threadpool_info

from emdcfl.core.errors import ConfigError, EmdcflError
from emdcfl.transport import SolverPool, cost_matrix, solve
from emdcfl.transport.pool import one_blas_thread


def pairs(count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [(rng.standard_normal((int(n), 20)), rng.standard_normal((int(m), 20))) for n, m in rng.integers(20, 90, (count, 2))]


@pytest.mark.parametrize("solver", ["exact", "sinkhorn"])
def test_values_come_in_order_and_do_not_depend_on_the_number_of_workers(solver: str) -> None:
    problems = pairs(12)
    results = []
    for workers in (1, 2, 5):
        with SolverPool(workers) as pool:
            results.append(pool.map(lambda pair: solve(cost_matrix(*pair), solver=solver).value, problems))
    assert results[0] == results[1] == results[2]
    assert results[0][3] == solve(cost_matrix(*problems[3]), solver=solver).value


@pytest.mark.parametrize("workers", [1, 3])
def test_a_failure_is_raised_and_the_pool_survives(workers: int) -> None:
    bad = [*pairs(2), (np.ones((2, 3)), np.ones((2, 4))), *pairs(2)]
    with SolverPool(workers) as pool:
        with pytest.raises(EmdcflError, match="width"):
            pool.map(lambda pair: cost_matrix(*pair), bad)
        assert len(pool.map(lambda pair: cost_matrix(*pair), pairs(3))) == 3
        future = pool.submit(divmod, 1, 0)
        with pytest.raises(ZeroDivisionError):
            future.result()
        assert pool.submit(divmod, 7, 2).result() == (3, 1)


def test_one_worker_stays_in_the_calling_thread_and_more_do_not() -> None:
    with SolverPool(1) as pool:
        assert pool.submit(threading.get_ident).result() == threading.get_ident()
    with SolverPool(2) as pool:
        assert pool.submit(threading.get_ident).result() != threading.get_ident()
    with pytest.raises(ConfigError, match="worker"):
        SolverPool(0)
    assert SolverPool().workers >= 1


def test_blas_is_held_at_one_thread_and_restored() -> None:
    def threads() -> list[int]:
        return [lib["num_threads"] for lib in threadpool_info() if lib["user_api"] == "blas"]

    before = threads()
    with one_blas_thread(), one_blas_thread():
        assert set(threads()) <= {1}
    assert threads() == before
    with SolverPool(2) as pool:
        seen = pool.map(lambda _: threads(), range(4))
    assert all(set(s) <= {1} for s in seen)
    assert threads() == before
