"""SIGTERM and Ctrl-C wait for a write that has begun: what is inside ``defer_signals`` is finished, then the program is interrupted.

Only the command line calls ``install``; a library must not take over its host program's signals.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Pending:
    depth = 0
    waiting = False
    received: int | None = None


def install() -> None:
    """Make SIGTERM and SIGINT raise ``KeyboardInterrupt``, but not in the middle of a write."""
    _Pending.received, _Pending.waiting = None, False
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)


def received() -> int | None:
    """Return the number of the last signal that asked to stop."""
    return _Pending.received


def _interrupt(number: int, frame: Any) -> None:
    _Pending.received = number
    if _Pending.depth:
        _Pending.waiting = True
    else:
        raise KeyboardInterrupt


@contextmanager
def defer_signals() -> Iterator[None]:
    """Finish what is inside before a signal is obeyed. Blocks may be nested: the outermost counts."""
    if threading.current_thread() is not threading.main_thread():  # Python runs signal handlers in the main thread only
        yield
        return
    _Pending.depth += 1
    try:
        yield
    finally:
        _Pending.depth -= 1
    if _Pending.waiting and not _Pending.depth:
        _Pending.waiting = False
        raise KeyboardInterrupt
