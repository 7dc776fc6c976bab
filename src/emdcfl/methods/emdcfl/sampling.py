"""Which of its samples a client shows in EMD-CFL, and in which order. Imports client.

A column sample may come from both splits. It is a tensor of places among all samples of the client, the validation samples first
(``Client.rows`` with ``"all"``), in the order in which it is shown.
"""

from __future__ import annotations

import torch
from torch import Tensor

from emdcfl.core.client import Client
from emdcfl.core.keys import digest


def column(client: Client, size: int, *, held_out: bool) -> Tensor:
    """Draw a sample from the validation split alone (``held_out``), or fill it up from the train split, in an order of its own."""
    val = client.sample("val", size)
    train = client.sample("train", 0 if held_out else size - len(val))
    order = client.generator("order of the column sample", round=0).permutation(len(val) + len(train))
    return torch.cat([val, len(client.site.val) + train])[torch.from_numpy(order)]


def draw(client: Client, split: str, size: int) -> Tensor:
    """A sample in random order, so that its first entries are a sample too, whatever order the data are stored in."""
    chosen = client.sample(split, size)
    return chosen[torch.from_numpy(client.generator(f"order of the {split} sample", round=0).permutation(len(chosen)))]


def all_labels(client: Client) -> Tensor:
    """Labels of all samples of a client, the validation samples first, in host memory."""
    return torch.cat([client.site.val.y, client.site.train.y])


def records(client: Client, split: str, index: Tensor) -> list[bytes]:
    """What records are known by where privacy noise is drawn for them: their place and their content."""
    if split == "all":
        m = len(client.site.val)
        return [records(client, *(("val", i) if i < m else ("train", i - m)))[0] for i in index.view(-1, 1)]
    x = client.split(split).x
    return [digest(split, i, x[i].cpu().numpy().tobytes()) for i in index.tolist()]
