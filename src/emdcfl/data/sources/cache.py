"""Cache of decoded images: memory-mapped files, so that images are decoded once and need not fit into memory.

The folder is ``$EMDCFL_CACHE``, else ``~/.cache/emdcfl``. Files are written under a temporary name and renamed when complete.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from emdcfl.core import keys
from emdcfl.core.errors import DataError

Images = NDArray[np.uint8]
_FORMAT = 1  # raise when the stored layout changes: older files are then ignored


def cache_dir() -> Path:
    """Return the cache folder (not necessarily existing)."""
    chosen = os.environ.get("EMDCFL_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "emdcfl"


def fingerprint(files: list[Path], *parts: object) -> str:
    """Key of what was decoded: names, sizes and modification times of the files, and further parts such as the row order."""
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return keys.digest(_FORMAT, stats, *parts).hex()[:20]


def cached_images(name: str, key: str, shape: tuple[int, ...], fill: Callable[[Images], None]) -> Images:
    """Return a memory-mapped uint8 array; ``fill`` writes it the first time.

    The map is private (copy-on-write): nothing a caller does can change the file, and unused pages can be dropped by the system.
    """
    path = cache_dir() / "decoded" / f"{name}-{key}.npy"
    if path.exists():
        found = _open(path, shape)
        if found is not None:
            return found
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        array: Images = np.lib.format.open_memmap(temporary, mode="w+", dtype=np.uint8, shape=shape)
        try:
            fill(array)
            array.flush()  # type: ignore[attr-defined]
            del array
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"cannot write decoded images to {path.parent} ({error}): set EMDCFL_CACHE to a folder with free space") from error
    opened = _open(path, shape)
    if opened is None:
        raise DataError(f"{path} changed while it was written: delete it and run again")
    return opened


def _open(path: Path, shape: tuple[int, ...]) -> Images | None:
    try:
        array: Images = np.load(path, mmap_mode="c", allow_pickle=False)
    except (ValueError, EOFError, OSError):
        return None
    return array if array.shape == shape and array.dtype == np.uint8 else None
