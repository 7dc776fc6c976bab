"""What stays on the GPU between requests: every client's data, and the models that clients embed and score with."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from emdcfl.core.client import Client
from emdcfl.data.types import Preprocess

log = logging.getLogger("emdcfl")

SHARE = 0.5
"""Part of the free GPU memory that models may take while clients embed or score."""

Address = tuple[int, torch.Size, tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Samples:
    """Every client's samples on the GPU, as stored, and the preprocessing that turns them into network inputs there.

    A client's validation samples come before its train samples, which begin at ``first``.
    """

    x: Tensor
    y: Tensor
    first: dict[str, int]
    preprocess: Preprocess
    mean: Tensor
    std: Tensor

    @classmethod
    def of(cls, clients: list[Client], device: torch.device) -> Samples:
        first, total = {}, 0
        for client in clients:
            first[client.name] = total + len(client.site.val)
            total += len(client.site.val) + len(client.site.train)
        splits = [split for c in clients for split in (c.site.val, c.site.train)]
        x, y = torch.cat([s.x for s in splits]).to(device), torch.cat([s.y for s in splits]).to(device)
        p = clients[0].preprocess
        shape = (1, -1) + (1,) * (x.dim() - 2)
        return cls(x, y, first, p, torch.tensor(p.mean, device=device).view(shape), torch.tensor(p.std, device=device).view(shape))

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Gather inputs and labels; images in channels-last order, which tensor cores need."""
        z = (self.preprocess.resized(self.x.index_select(0, index)) - self.mean) / self.std
        if z.dim() == 4:  # not contiguous(), which leaves single-channel images, and so the whole network, in channels-first order
            z = z.to(memory_format=torch.channels_last)
        return z, self.y.index_select(0, index)


class ModelCache:
    """Copies of host tensors on the GPU, kept until they are cleared: a round needs the same models several times."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[Address, tuple[Tensor, int, Tensor]] = {}

    def clear(self) -> None:
        self._known.clear()

    def moved(self, value: Any) -> Any:
        """Return the same value with its tensors on the GPU, or unchanged if they do not fit."""
        new = {_address(t): t for t in _tensors(value) if self._found(t) is None}
        size = sum(t.numel() * t.element_size() for t in new.values())
        free = torch.cuda.mem_get_info(self._device)[0]
        if size > SHARE * free:
            log.info("%.1f GiB of models stay in host memory: %.1f GiB are free on the GPU", size / 2**30, free / 2**30)
            return value
        for dtype in {t.dtype for t in new.values()}:
            self._copy({address: t for address, t in new.items() if t.dtype == dtype}, dtype)
        return self._replaced(value)

    def _copy(self, tensors: Mapping[Address, Tensor], dtype: torch.dtype) -> None:
        """Copy tensors into one allocation: many allocations take longer than the copies."""
        there = torch.empty(sum(t.numel() for t in tensors.values()), dtype=dtype, device=self._device)
        begin = 0
        for address, tensor in tensors.items():
            mine = there[begin : begin + tensor.numel()].view(tensor.shape)
            self._known[address] = tensor, tensor._version, mine.copy_(tensor)
            begin += tensor.numel()

    def _replaced(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(self._replaced(item) for item in value)
        if isinstance(value, Mapping):
            return {key: self._replaced(item) for key, item in value.items()}
        return self._found(value) if isinstance(value, Tensor) else value

    def _found(self, tensor: Tensor) -> Tensor | None:
        """Return a tensor that is there already, or the copy of one, found by its address, unless the tensor was written to since."""
        if tensor.device.type == self._device.type:
            return tensor
        known = self._known.get(_address(tensor))
        return known[2] if known is not None and known[0]._version == known[1] else None


def _address(tensor: Tensor) -> Address:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)
