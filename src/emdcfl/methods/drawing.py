"""Which of its samples a client shows in EMD-CFL, and in which order. Imports client and tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from emdcfl.client import Client
from emdcfl.keys import digest
from emdcfl.tasks import Embed


@dataclass(frozen=True)
class Column:
    """A client's sample as column: indices of both splits, and the random order in which they are shown."""

    val: Tensor
    train: Tensor
    order: Tensor

    def works(self, omega: Tensor, mode: Literal["eval", "train"]) -> list[Embed]:
        return [Embed(omega, name, index, mode) for name, index in self.parts()]

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts))[self.order.to(parts[0].device)]

    def labels(self, client: Client) -> Tensor:
        return torch.cat([client.split(name).y[index].cpu() for name, index in self.parts()])[self.order]

    def records(self, client: Client) -> list[bytes]:
        every = [record for name, index in self.parts() for record in records(client, name, index)]
        return [every[i] for i in self.order.tolist()]

    def raw(self, client: Client) -> tuple[Tensor, Tensor]:
        x = torch.cat([client.preprocess(client.split(name).x[index]).float().cpu() for name, index in self.parts()])
        return x[self.order], self.labels(client)

    def parts(self) -> list[tuple[str, Tensor]]:
        return [(name, index) for name, index in (("val", self.val), ("train", self.train)) if len(index)]


def column(client: Client, size: int, *, held_out: bool) -> Column:
    """Draw a sample from the validation split alone (``held_out``), or fill it up from the train split, in an order of its own."""
    val = client.sample("val", size)
    train = client.sample("train", 0 if held_out else size - len(val))
    order = client.generator("order of the column sample", round=0).permutation(len(val) + len(train))
    return Column(val, train, torch.from_numpy(order))


def draw(client: Client, split: str, size: int) -> Tensor:
    """A sample in random order, so that its first entries are a sample too, whatever order the data are stored in."""
    chosen = client.sample(split, size)
    return chosen[torch.from_numpy(client.generator(f"order of the {split} sample", round=0).permutation(len(chosen))).to(chosen.device)]


def records(client: Client, split: str, index: Tensor) -> list[bytes]:
    """What records are known by where privacy noise is drawn for them: their place and their content."""
    x = client.split(split).x
    return [digest(split, i, x[i].cpu().numpy().tobytes()) for i in index.tolist()]
