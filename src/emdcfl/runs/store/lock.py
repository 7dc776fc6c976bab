"""One process per run directory.

Imports errors only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref
from pathlib import Path

from emdcfl.core.errors import StoreError

_HELD: weakref.WeakSet[Lock] = weakref.WeakSet()


class Lock:
    """An exclusive lock on a file, held until ``release`` or the end of the process, however it ends.

    A forked worker would share the lock and keep it after its parent was killed; it closes its copy at once instead.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.read(self._descriptor, 20).decode(errors="replace").strip()
            os.close(self._descriptor)
            by = f" (process {owner})" if owner else ""
            raise StoreError(f"{path.parent}: in use by another emdcfl run{by}; wait for it to end, or choose another --out") from error
        except OSError:  # a file system without locks
            os.close(self._descriptor)
            raise
        with contextlib.suppress(OSError):  # the number is for the error message only; a full disk must not stop whoever frees it
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)
        _HELD.add(self)

    def release(self) -> None:
        """Give the lock back. Doing it twice does no harm."""
        if self._descriptor is not None:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # at once, even where a worker was forked this instant and has a copy still
        self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _leave_to_parent() -> None:
    for lock in list(_HELD):
        lock._close()


os.register_at_fork(after_in_child=_leave_to_parent)
