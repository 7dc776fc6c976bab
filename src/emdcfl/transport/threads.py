"""One BLAS thread while a block runs, whoever else is inside such a block.

A matrix product split over several BLAS threads may round differently, and several workers with several BLAS threads each fight for the
cores. Both are avoided by holding numpy's BLAS at one thread. May import threadpoolctl (it comes with scikit-learn).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np  # noqa: F401  (its BLAS must be loaded before the controller looks for it)
import threadpoolctl

_lock = threading.Lock()
_inside = 0
_limiter: Any = None
_controller: Any = None


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Hold BLAS at one thread; the last one to leave restores what was before.

    Counted rather than nested, because blocks of several worker threads overlap in any order.
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
