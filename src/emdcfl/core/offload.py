"""Keeps states that do not fit into memory in memory-mapped files, one each.

The states of 40 clients of a large network take many gigabytes (ViT-B: 14), and a method that compares clients needs all of them. A
mapped file is used like any tensor, with the same bits; the system writes unused parts to disk and reads them back.
"""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from emdcfl.core.errors import ConfigError

log = logging.getLogger("emdcfl")

SHARE = 0.4
"""Part of the free memory that states may take before they go into files: averages and copies need as much again."""


def free_memory() -> int | None:
    """Return bytes of memory that a process may still use, or ``None`` if the system does not report it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None
    try:  # a container may have a limit of its own
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
    except (OSError, ValueError):  # no container, or no limit
        return free
    return min(free, max(0, limit - used))


class StateOffload:
    """Decides whether states stay in memory, and puts those that do not fit into unnamed files, which vanish after their last use.

    Examples
    --------
    >>> offload = StateOffload()
    >>> offload.wanted(10, 1000)
    False
    >>> offload.put(torch.arange(3.0))
    tensor([0., 1., 2.])
    """

    def __init__(self) -> None:
        self._logged = False

    def wanted(self, states: int, size: int) -> bool:
        """Say whether this many states of ``size`` bytes each should go into files."""
        free = free_memory()
        if free is None or states * size <= SHARE * free:
            return False
        if not self._logged:
            self._logged = True
            log.info(
                "%d models of %.2f GiB are kept in files in %s: %.1f GiB of memory are free (set TMPDIR for another folder)",
                states,
                size / 2**30,
                tempfile.gettempdir(),
                free / 2**30,
            )
        return True

    def put(self, state: Tensor) -> Tensor:
        """Return the same numbers in a mapped file."""
        if not state.numel():
            return state
        try:
            handle, name = tempfile.mkstemp(prefix="emdcfl-", suffix=".state")
            try:
                os.posix_fallocate(handle, 0, state.numel() * state.element_size())  # a full disk fails here, not later with a crash
                mapped = torch.from_file(name, shared=True, size=state.numel(), dtype=state.dtype).view(state.shape)
            finally:
                os.close(handle)
                Path(name).unlink()  # the map keeps the file until the tensor goes
        except (OSError, RuntimeError) as error:
            raise ConfigError(
                f"expected room for a model of {state.numel() * state.element_size() / 2**30:.2f} GiB in {tempfile.gettempdir()}, got: "
                f"{error}; free some, or set TMPDIR to a larger disk"
            ) from error
        return mapped.copy_(state)
