"""Embedding for many clients at once: every model is loaded once, and all samples that are wanted under it pass through together.

C clients compared with each other are C² pairs of a model and a sample. Pair by pair, a GPU spends its time on loading models, on
launches and on waiting for indices; model by model, it computes. May import: client, tasks, lanes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from emdcfl.client import EVALUATION_BATCH, Client
from emdcfl.engines.local.lanes import Samples
from emdcfl.tasks import Embed

AT_ONCE = 1 << 27
"""Numbers of network input in one forward pass; activations are a few times as many."""

LARGEST = 4096
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
def embed_together(works: Pieces, samples: Samples) -> list[Tensor]:
    """Return g(x) of every work, times its matrix, on the network's device; all of them name the same state and matrix."""
    client, first = works[0]
    net = client.network
    net.load(first.state)
    x = gathered(works, samples)
    with client.mode(training=False):
        size = batch_size(client.preprocess(x[:1]).numel()) if len(x) else 1
        parts = []
        for part in x.split(size):
            z = client.preprocess(part)
            parts.append(net.embed(z.to(memory_format=torch.channels_last) if z.dim() == 4 else z).float())  # see Samples.batch
    embedded = torch.cat(parts)
    if first.matrix is not None:
        embedded = embedded @ first.matrix.to(embedded.device)
    return list(embedded.split([len(work.indices) for _, work in works]))


def gathered(works: Pieces, samples: Samples) -> Tensor:
    """Return the stored samples of all works, in their order, fetched in one step."""
    places = []
    for client, work in works:
        begin = samples.first[client.name] - (0 if work.split == "train" else len(client.site.val))
        places.append(work.indices.cpu() + begin)
    return samples.x.index_select(0, torch.cat(places).to(samples.x.device))


def batch_size(numbers: int) -> int:
    """Samples of a forward pass, from the numbers of one network input."""
    return max(EVALUATION_BATCH, min(LARGEST, AT_ONCE // max(1, numbers)))
