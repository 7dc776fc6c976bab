"""Worker threads for transport problems, each with one BLAS thread and scratch memory of its own.

Both exact solvers and NumPy's matrix kernels release Python's interpreter lock, so that processes are no faster. BLAS is held at one
thread, because a product split over several rounds differently, and because workers with several BLAS threads each compete for the cores.
A value therefore does not depend on the number of workers.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import numpy as np  # its BLAS must be loaded before threadpoolctl looks for it
import threadpoolctl
from numpy.typing import NDArray

from emdcfl.core.errors import ConfigError

Array = NDArray[Any]
P = ParamSpec("P")
R = TypeVar("R")

_lock = threading.Lock()
_inside = 0
_limiter: Any = None
_controller: Any = None


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Hold NumPy's BLAS at one thread; when the last block ends, the former limit is restored.

    Blocks are counted, because those of several worker threads overlap in any order.
    """
    global _inside, _limiter, _controller
    with _lock:
        if _inside == 0:
            if _controller is None:
                _controller = threadpoolctl.ThreadpoolController().select(user_api="blas")
            _take_control()
            _limiter = _controller.limit(limits=1)
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                _take_control()
                _limiter.restore_original_limits()
                _take_control()
                _limiter = None


def _take_control() -> None:
    """Let the current thread set the limit: recent versions of threadpoolctl obey only the thread that set it first."""
    openblas: Any = getattr(threadpoolctl, "OpenBLASController", None)
    if hasattr(openblas, "clear_controlling_thread"):
        openblas.clear_controlling_thread(force=True)


_held = threading.local()


def scratch(name: str, shape: tuple[int, ...]) -> Array:
    """Return this thread's float32 array of a name, uninitialised; valid until the thread asks for the same name again.

    A bound takes a dozen passes over matrices of a megabyte, and allocating each of them would take longer than the arithmetic.

    Examples
    --------
    >>> scratch("example", (2, 3)).shape, np.shares_memory(scratch("example", (2, 3)), scratch("example", (3, 1)))
    ((2, 3), True)
    """
    size = int(np.prod(shape))
    memory: dict[str, Array] = _held.__dict__
    if name not in memory or memory[name].size < size:
        memory[name] = np.empty(size, dtype=np.float32)
    return memory[name][:size].reshape(shape)


def cores() -> int:
    """Cores this process may use (which in a container may be fewer than the machine has)."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


class SolverPool:
    """Workers for transport problems, started when first used; as many as there are usable cores by default.

    With one worker everything runs in the calling thread.

    Examples
    --------
    >>> with SolverPool(workers=2) as pool:
    ...     pool.map(len, ["one", "three"])
    [3, 5]
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
        job = one_blas_thread()(fn)
        if self.workers == 1:
            future: Future[R] = Future()
            try:
                future.set_result(job(*args, **kwargs))
            except Exception as error:
                future.set_exception(error)
            return future
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self.workers, thread_name_prefix="emdcfl-transport")
        return self._threads.submit(job, *args, **kwargs)

    def map(self, fn: Callable[[Any], R], items: Iterable[Any]) -> list[R]:
        """``[fn(item) for item in items]`` over the workers, in order; the first failure is raised and the rest dropped."""
        if self.workers == 1:
            return list(map(one_blas_thread()(fn), items))
        futures = [self.submit(fn, item) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            for future in futures:
                future.cancel()
            raise
