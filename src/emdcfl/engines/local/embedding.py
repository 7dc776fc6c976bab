"""Embedding for many clients at once: every model is loaded once, and all samples that are wanted under it pass through together.

C clients compared with each other are C² pairs of a model and a sample. Pair by pair, a GPU spends its time on loading models and on
launches; model by model, it computes. May import: client, tasks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from emdcfl.client import EVALUATION_BATCH, Client
from emdcfl.tasks import Embed

AT_ONCE = 1 << 27
"""Numbers of network input in one forward pass; activations are a few times as many."""

LARGEST = 4096
"""Samples in one forward pass: more gain nothing."""

Pieces = Sequence[tuple[Client, Embed]]


def groups(works: Pieces) -> list[list[int]]:
    """Return the works that share a model, by position; only evaluation mode, where samples do not look at each other."""
    found: dict[tuple[int, int], list[int]] = {}
    for i, (_, work) in enumerate(works):
        if work.mode == "eval":
            found.setdefault((work.state.data_ptr(), work.state.numel()), []).append(i)
    return list(found.values())


@torch.no_grad()
def embed_together(works: Pieces) -> list[Tensor]:
    """Return g(x) of every work, on the network's device; all of them name the same state."""
    client, first = works[0]
    net = client.network
    net.load(first.state)
    x = torch.cat([c.split(work.split).x[work.indices] for c, work in works])
    with client.mode(training=False):
        size = batch_size(client.preprocess(x[:1]).numel()) if len(x) else 1
        parts = []
        for part in x.split(size):
            z = client.preprocess(part)
            parts.append(net.embed(z.to(memory_format=torch.channels_last) if z.dim() == 4 else z).float())  # see Samples.batch
    return list(torch.cat(parts).split([len(work.indices) for _, work in works]))


def batch_size(numbers: int) -> int:
    """Samples of a forward pass, from the numbers of one network input."""
    return max(EVALUATION_BATCH, min(LARGEST, AT_ONCE // max(1, numbers)))
