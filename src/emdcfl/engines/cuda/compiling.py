"""What torch compiles of a training step, and the folder that keeps compiled kernels from one run to the next."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from emdcfl.core.learning.objective import losses
from emdcfl.data.sources.parquet import cache_dir
from emdcfl.engines.cuda.resident import Samples


def batch(samples: Samples, index: Tensor, low: bool) -> tuple[Tensor, Tensor]:
    """Return the inputs and labels of a batch.

    Compiled apart from ``objective``: fused with the first convolution, the preprocessing of a pixel would run once per patch it is in.
    """
    x, y = samples.batch(index)
    return x.to(torch.bfloat16) if low else x, y


def objective(module: nn.Module, x: Tensor, y: Tensor, scale: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of a batch weighted by ``scale``, to be differentiated, and by ``last``, to be reported.

    The caller enters autocast: torch does not keep compiled functions that enter it themselves.
    """
    found = losses(module(x), y)
    return (found * scale).sum(), (found.detach() * last).sum()


Function = TypeVar("Function", bound=Callable[..., Any])


@functools.cache
def compile_once(function: Function) -> Function:
    """Return a function compiled with its backward pass; one compilation serves all streams."""
    keep_kernels()
    options: dict[str, str | int | bool | Callable[..., Any]] = {}
    import torch._inductor.config as inductor  # importing it takes a second

    if hasattr(inductor, "deterministic"):  # choose kernels by rule, not by timing: every process must get the same bits
        options["deterministic"] = True
    return cast(Function, torch.compile(function, dynamic=False, fullgraph=True, options=options))


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
