"""One process per run directory."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from filelock import FileLock, Timeout

from emdcfl.core.errors import StoreError


class Lock:
    """An exclusive lock on a file, held until ``release`` or the end of the process, however it ends.

    A forked worker does not keep it: ``filelock`` closes the worker's copy of the descriptor.
    """

    def __init__(self, path: Path) -> None:
        self._lock = FileLock(path, blocking=False, thread_local=False, fallback_to_soft=False)
        try:
            self._lock.acquire()
        except Timeout as error:
            raise StoreError(
                f"{path.parent}: in use by another emdcfl run{_owner(path)}; wait for it to end, or choose another --out"
            ) from error
        with contextlib.suppress(OSError):  # the number is for the error message only; a full disk must not stop whoever frees it
            path.write_text(f"{os.getpid()}\n", encoding="ascii")

    def release(self) -> None:
        """Give the lock back. Doing it twice does no harm."""
        self._lock.release(force=True)


def _owner(path: Path) -> str:
    try:
        owner = path.read_text(encoding="ascii", errors="replace")[:20].strip()
    except OSError:  # Windows does not let others read a locked file
        owner = ""
    return f" (process {owner})" if owner.isdigit() else ""
