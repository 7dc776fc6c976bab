"""SIGTERM and Ctrl-C wait for a write that has begun: what is inside ``defer_signals`` is finished, then the program is interrupted.

Only the command line calls ``install``; a library must not take over its host program's signals.

An exception that a signal handler raises inside Python's import system may be dropped there, or leave a module locked, for which a thread
then waits for ever. So before ``install`` a signal ends the process at once, and afterwards it waits until no import machinery runs.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

IMPORTING = "<frozen importlib"
"""How the file names of Python's import system begin."""

AGAIN = 0.02
"""Seconds until a signal that came inside the import system is tried again."""


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


def end_at_once() -> None:
    """Make SIGTERM and SIGINT end the process, with the exit code of the command line, until ``install`` is called."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    print("stopped before anything began", file=sys.stderr, flush=True)
    os._exit(128 + number)


def _interrupt(number: int, frame: FrameType | None) -> None:
    _Pending.received = number
    if _Pending.depth:
        _Pending.waiting = True
    elif frame is not None and frame.f_code.co_filename.startswith(IMPORTING) and hasattr(signal, "setitimer"):  # Windows has none
        signal.signal(signal.SIGALRM, lambda _, later: _interrupt(number, later))
        signal.setitimer(signal.ITIMER_REAL, AGAIN)
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
