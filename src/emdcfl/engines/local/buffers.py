"""Memory that is used again from step to step and from round to round.

Imports torch only.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Buffers:
    """Float32 blocks by name; a block grows to the largest size asked for and is never cleared.

    Examples
    --------
    >>> buffers = Buffers()
    >>> a = buffers("x", 2, 3, device=torch.device("cpu"))
    >>> a.data_ptr() == buffers("x", 3, 1, device=torch.device("cpu")).data_ptr()
    True
    """

    def __init__(self) -> None:
        self._blocks: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int, device: torch.device) -> Tensor:
        """Return uninitialised memory of this shape, the same as last time."""
        size = math.prod(shape)
        if name not in self._blocks or self._blocks[name].numel() < size:
            self._blocks[name] = torch.empty(size, device=device)
        return self._blocks[name][:size].view(shape)
