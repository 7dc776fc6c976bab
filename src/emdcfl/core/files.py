"""Small files that several processes read and write: replaced in one step, changed by one process at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def replace_text(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Write a file in one step: whoever reads it, also after a kill or a power cut, finds the old text or the new one.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "count"
    >>> replace_text(path, "1"); replace_text(path, "2")
    >>> path.read_text(), len(list(path.parent.iterdir()))
    ('2', 1)
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)  # of a process that was killed
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Change a file in this block while no other process does; a hidden file beside it is the lock. Not on Windows."""
    if os.name == "nt":
        yield
        return
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
