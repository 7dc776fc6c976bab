"""The objective of a training step, compiled by torch, and the folder that keeps compiled kernels from one run to the next."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from emdcfl.data.sources.parquet import cache_dir
from emdcfl.engines.cuda.resident import Samples


def objective(module: nn.Module, samples: Samples, index: Tensor, scale: Tensor, low: bool) -> tuple[Tensor, Tensor]:
    """Return the weighted loss of a batch, to be differentiated, and the loss of every sample."""
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=low, cache_enabled=False):
        x, y = samples.batch(index)
        losses = F.cross_entropy(module(x), y, reduction="none")
    return (losses * scale).sum(), losses.detach()


@functools.cache
def compiled_objective() -> Callable[..., tuple[Tensor, Tensor]]:
    """Return ``objective`` compiled with its backward pass; one compilation serves all streams."""
    keep_kernels()
    options: dict[str, str | int | bool | Callable[..., Any]] = {}
    import torch._inductor.config as inductor  # importing it takes a second

    if hasattr(inductor, "deterministic"):  # choose kernels by rule, not by timing: every process must get the same bits
        options["deterministic"] = True
    return torch.compile(objective, dynamic=False, fullgraph=True, options=options)


def keep_kernels() -> None:
    """Have torch keep compiled kernels in the user's cache folder, unless ``TORCHINDUCTOR_CACHE_DIR`` names another.

    torch runs what it finds there, and its own choice is a folder in ``/tmp`` whose name anybody can guess. So the folder is this user's
    alone; if it cannot be, torch decides.
    """
    folder = cache_dir() / "kernels"
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ and _made_private(folder):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder.resolve())


def _made_private(folder: Path) -> bool:
    """Make a folder that only this user can enter; returns whether it is one."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError:
        return False
    return found.st_uid == os.getuid() and not found.st_mode & 0o077
