"""Solves spread over the cores. Imports numpy only.

Both exact solvers and numpy's matrix kernels release Python's interpreter lock (measured on two free cores: 1.9 times the throughput
with two threads for the network simplex, 1.7 for the assignment solver, no better with processes), so the workers are threads:
nothing is copied or forked, and scripts need no ``__main__`` guard. BLAS is held at one thread meanwhile, so there is one busy
thread per worker and a value does not depend on the number of workers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import numpy as np

from emdcfl.core.errors import ConfigError
from emdcfl.transport.cost import cost_matrix
from emdcfl.transport.plan import Array
from emdcfl.transport.solve import solve
from emdcfl.transport.threads import one_blas_thread

P = ParamSpec("P")
R = TypeVar("R")


def cores() -> int:
    """Cores this process may use (which in a container may be fewer than the machine has)."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


class SolverPool:
    """Workers for transport problems, started when first used.

    Parameters
    ----------
    workers : int, optional
        Number of workers; all usable cores by default. With one worker everything runs in the calling thread.

    Examples
    --------
    >>> a, b = np.eye(3), np.eye(3)[:2]
    >>> with SolverPool(workers=2) as pool:
    ...     pool.distances([(a, a), (a, b)]).round(4)
    array([0.    , 0.3333])
    """

    def __init__(self, workers: int | None = None) -> None:
        if workers is not None and workers < 1:
            raise ConfigError(f"expected at least one transport worker, got {workers}")
        self.workers = cores() if workers is None else workers
        self._threads: ThreadPoolExecutor | None = None

    def __enter__(self) -> SolverPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(cancel=kind is not None)

    def close(self, *, cancel: bool = False) -> None:
        """Wait for what was submitted (or, with `cancel`, drop what has not begun) and stop the workers."""
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=True, cancel_futures=cancel)

    def submit(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Run ``fn(*args, **kwargs)`` on a worker (in the calling thread, at once, when there is only one)."""
        if self.workers == 1:
            future: Future[R] = Future()
            try:
                future.set_result(_alone(fn, *args, **kwargs))
            except Exception as error:
                future.set_exception(error)
            return future
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self.workers, thread_name_prefix="emdcfl-transport")
        return self._threads.submit(lambda: _alone(fn, *args, **kwargs))

    def map(self, fn: Callable[[Any], R], items: Iterable[Any]) -> list[R]:
        """``[fn(item) for item in items]`` over the workers, in order; the first failure is raised and the rest dropped."""
        if self.workers == 1:
            return [_alone(fn, item) for item in items]
        futures = [self.submit(fn, item) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            for future in futures:
                future.cancel()
            raise

    def distances(self, pairs: Sequence[tuple[Any, Any]], *, cost: str = "cosine", solver: str = "exact", reg: float = 0.1) -> Array:
        """Transport distances of pairs of samples.

        Parameters
        ----------
        pairs : sequence of ((n, d) array_like, (m, d) array_like)
            Source and target sample of each problem. The label-aware cost takes
            ``((a, labels_a), (b, labels_b))``.
        cost, solver, reg
            See :func:`emdcfl.transport.cost.cost_matrix` and :func:`emdcfl.transport.solve.solve`.

        Returns
        -------
        (len(pairs),) float64 array, in the order of the pairs
        """

        def value(pair: tuple[Any, Any]) -> float:
            (a, labels_a), (b, labels_b) = (side if cost == "label-aware" else (side, None) for side in pair)
            return solve(cost_matrix(a, b, cost=cost, labels_a=labels_a, labels_b=labels_b), solver=solver, reg=reg).value

        return np.array(self.map(value, pairs), dtype=np.float64)


def _alone(fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    with one_blas_thread():
        return fn(*args, **kwargs)
