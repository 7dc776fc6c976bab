"""Embedding for many clients at once: every model is loaded once, and all samples that are wanted under it pass through together.

C clients compared with each other are C² pairs of a model and a sample. Pair by pair, a GPU spends its time on loading models, on
launches and on waiting for indices; model by model, it computes. What it needs from the host (indices, matrices) goes there in one piece
before the first model, so that nothing is waited for in between. May import: client, tasks, lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from emdcfl.core.client import EVALUATION_BATCH, Client
from emdcfl.core.tasks import Embed
from emdcfl.engines.cuda.streams import Samples

AT_ONCE = 1 << 27
"""Numbers of network input in one forward pass; activations are a few times as many."""

LARGEST = 8192
"""Samples in one forward pass: more gain nothing."""

RESIDENT = ("train", "val", "all")
"""Splits whose samples lie together on the device."""

Pieces = Sequence[tuple[Client, Embed]]


def groups(works: Pieces) -> list[list[int]]:
    """Return the works that share a model and a matrix, by position; only evaluation mode, where samples do not look at each other."""
    found: dict[tuple[int, int, int], list[int]] = {}
    for i, (_, work) in enumerate(works):
        if work.mode == "eval" and work.split in RESIDENT:
            found.setdefault((work.state.data_ptr(), work.state.numel(), id(work.matrix)), []).append(i)
    return list(found.values())


@torch.no_grad()
def embed_together(works: Pieces, samples: Samples, take: Callable[[list[int], list[Tensor]], None]) -> None:
    """Embed model by model; ``take`` is given the positions of works that share one and their g(x), times their matrix, on the device."""
    together = groups(works)
    if not together:
        return
    client, device = works[together[0][0]][0], samples.x.device
    size = batch_size(client.preprocess(samples.x[:1]).numel())
    index = _sent([_places(*works[i], samples) for members in together for i in members], device)
    matrices = _matrices([works[members[0]][1].matrix for members in together], device)
    begin = 0
    with client.mode(training=False):  # in which nothing depends on the client
        for members, matrix in zip(together, matrices, strict=True):
            sizes = [len(works[i][1].indices) for i in members]
            client.network.load(works[members[0]][1].state)
            embedded = _embedded(client, samples.x, index[begin : begin + sum(sizes)], size)
            begin += sum(sizes)
            if matrix is not None:
                with torch.autocast(device.type, enabled=False):
                    embedded = embedded @ matrix
            take(members, list(embedded.split(sizes)))


def _embedded(client: Client, x: Tensor, index: Tensor, size: int) -> Tensor:
    """g(x) of chosen samples, in passes of like size."""
    parts = []
    for chosen in index.tensor_split(max(1, -(-len(index) // size))):
        z = client.preprocess(x.index_select(0, chosen))
        parts.append(client.network.embed(z.to(memory_format=torch.channels_last) if z.dim() == 4 else z).float())  # see Samples.batch
    return torch.cat(parts)


def _places(client: Client, work: Embed, samples: Samples) -> Tensor:
    """Where the samples of a work lie among everybody's."""
    return work.indices + (samples.first[client.name] - (0 if work.split == "train" else len(client.site.val)))


def _matrices(wanted: Sequence[Tensor | None], device: torch.device) -> list[Tensor | None]:
    there = [matrix for matrix in wanted if matrix is not None]
    sent = iter(_sent([matrix.flatten() for matrix in there], device).split([matrix.numel() for matrix in there]) if there else [])
    return [None if matrix is None else next(sent).view(matrix.shape) for matrix in wanted]


def _sent(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Tensors of the host one after the other on the device, on their way while the host goes on."""
    whole = torch.cat(list(parts))
    return whole.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else whole.to(device)


def batch_size(numbers: int) -> int:
    """Samples of a forward pass, from the numbers of one network input."""
    return max(EVALUATION_BATCH, min(LARGEST, AT_ONCE // max(1, numbers)))
