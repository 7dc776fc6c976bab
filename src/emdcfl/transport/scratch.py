"""Memory that every thread keeps for its matrices. Imports numpy only.

A bound takes a dozen passes over matrices of a megabyte. Fresh memory for each of them costs more in page faults than the arithmetic does.
"""

from __future__ import annotations

import threading

import numpy as np

from emdcfl.transport.plan import Array

_held = threading.local()


def scratch(name: str, shape: tuple[int, ...]) -> Array:
    """Return this thread's float32 array of a name, with anything in it; valid until the thread asks for the same name again.

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
