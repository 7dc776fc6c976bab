"""What lies on the GPU beside the data while clients are compared: the models they embed with. Imports torch only."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("emdcfl")

SHARE = 0.5
"""Part of the free GPU memory that models may take while clients are embedded."""

Place = tuple[int, torch.Size, tuple[int, ...], torch.dtype]


class Resident:
    """Tensors of the host that were brought to a GPU, kept until they are cleared: in a round, models are asked for several times."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[Place, tuple[Tensor, int, Tensor]] = {}

    def clear(self) -> None:
        """Let go of everything."""
        self._known.clear()

    def moved(self, value: Any) -> Any:
        """Return the same value with its tensors on the GPU, or as it is, where there is no room for them."""
        new = {_place(t): t for t in _tensors(value) if self._found(t) is None}
        size = sum(t.numel() * t.element_size() for t in new.values())
        free = torch.cuda.mem_get_info(self._device)[0]
        if size > SHARE * free:
            log.info("%.1f GiB of models stay in host memory: %.1f GiB are free on the GPU", size / 2**30, free / 2**30)
            return value
        for dtype in {t.dtype for t in new.values()}:
            self._bring({place: t for place, t in new.items() if t.dtype == dtype}, dtype)
        return self._replaced(value)

    def _bring(self, tensors: Mapping[Place, Tensor], dtype: torch.dtype) -> None:
        """Copy tensors to one piece of memory: asking for it many times takes longer than the copies."""
        there = torch.empty(sum(t.numel() for t in tensors.values()), dtype=dtype, device=self._device)
        begin = 0
        for place, tensor in tensors.items():
            mine = there[begin : begin + tensor.numel()].view(tensor.shape)
            self._known[place] = tensor, tensor._version, mine.copy_(tensor)
            begin += tensor.numel()

    def _replaced(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(self._replaced(item) for item in value)
        if isinstance(value, Mapping):
            return {key: self._replaced(item) for key, item in value.items()}
        return self._found(value) if isinstance(value, Tensor) else value

    def _found(self, tensor: Tensor) -> Tensor | None:
        """FirstBounds a tensor up by where it lies; one that was written to since then is another."""
        known = self._known.get(_place(tensor))
        return known[2] if known is not None and known[0]._version == known[1] else None


def _place(tensor: Tensor) -> Place:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)
