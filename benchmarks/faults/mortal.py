"""A fault at the file event of a given number.

Events are flushes, renames, deletions and new folders. Faults: ``count`` (none; the number of events goes to the file in $MORTAL_COUNT),
``before`` and ``after`` (kill -9 around the event), ``torn`` (kill -9 with the file being written cut in half), and ``ENOSPC``, ``EDQUOT``,
``EIO``, ``EROFS``: this error from the event on, for everything that writes.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

EVENTS = ("fsync", "replace", "unlink", "mkdir")


def install(fault: str, number: int) -> None:
    """Put the fault in the way of the file events."""
    seen = 0

    def wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def event(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            seen += 1
            if fault.startswith("E") and seen >= number and not (name == "unlink" and fault != "EROFS"):  # a full disk lets files go
                code = getattr(errno, fault)
                raise OSError(code, os.strerror(code), str(args[0]))
            if fault == "torn" and seen >= number and name == "fsync":
                os.ftruncate(args[0], os.fstat(args[0]).st_size // 2)
                die()
            if fault == "before" and seen == number:
                die()
            result = function(*args, **kwargs)
            if fault == "after" and seen == number:
                die()
            if fault == "count":
                Path(os.environ["MORTAL_COUNT"]).write_text(str(seen), encoding="utf-8")
            return result

        return event

    for name in EVENTS:
        setattr(os, name, wrap(name, getattr(os, name)))


def die() -> None:
    """End as if the power had failed."""
    os.kill(os.getpid(), signal.SIGKILL)
