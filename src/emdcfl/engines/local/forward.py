"""Forward passes of many clients at once: embeddings grouped by model, and losses of many small models in one batched product.

Both equal what ``Embed`` and ``Score`` compute for one client after the other, up to the rounding of float sums. What they do not cover
(training mode, bf16, networks that are no perceptrons) is left to those.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from emdcfl.core.client import Client
from emdcfl.core.learning import objective
from emdcfl.core.tasks import Embed, Score
from emdcfl.engines.local.stack import Buffers, Chain
from emdcfl.engines.local.staged import Outcome

FORWARD = 1 << 21
"""Most numbers of network input, or of stacked states, in one pass: more does not fit into the processor's cache."""

SAMPLES = 1 << 12
"""Most samples embedded in one pass, for the same reason: layers may be wider than the input."""


def embeds_together(client: Client, work: Embed) -> bool:
    """Whether samples of several clients may pass the network together: one does not change another's embedding."""
    mixes = client.network.layout.batch_statistics  # a BatchNorm without running statistics normalises by what passes with it
    return work.mode == "eval" and client.precision == "fp32" and not client.wary and not mixes


class Inputs:
    """Network inputs of the samples that works ask for; a sample shown under many models is gathered once."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str, int], Tensor] = {}

    def of(self, client: Client, split: str, indices: Tensor) -> Tensor:
        """Return the preprocessed samples, in the order of the indices."""
        key = client.name, split, id(indices)
        if key not in self._known:
            self._known[key] = client.preprocess(client.rows(split, indices))
        return self._known[key]


@torch.no_grad()
def embed_together(works: Sequence[tuple[Client, Embed]]) -> list[Outcome]:
    """Embed the samples of many clients: one pass for all samples under one model and projection."""
    outcomes: list[Outcome] = [{}] * len(works)
    groups: dict[tuple[int, int], list[int]] = {}
    for i, (_, work) in enumerate(works):
        groups.setdefault((work.state.data_ptr(), id(work.matrix)), []).append(i)
    inputs, network = Inputs(), works[0][0].network
    network.module.train(False)
    for members in groups.values():
        work = works[members[0]][1]
        network.load(work.state)
        parts = [inputs.of(client, own.split, own.indices) for client, own in (works[i] for i in members)]
        at_once = min(SAMPLES, max(1, FORWARD // max(1, parts[0][0].numel())))
        passes = [network.embed(x).float().cpu() for x in torch.cat(parts).split(at_once)]
        z = torch.cat(passes if work.matrix is None else [part @ work.matrix for part in passes])
        for i, own in zip(members, z.split([len(x) for x in parts]), strict=True):
            outcomes[i] = {"z": own}
    return outcomes


@torch.no_grad()
def score_together(works: Sequence[tuple[Client, Score]], chain: Chain, buffers: Buffers) -> list[Outcome]:
    """Score every client's models on its own samples: clients with as many samples and models in one batched product."""
    outcomes: list[Outcome] = [{}] * len(works)
    groups: dict[tuple[int, int], list[int]] = {}
    for i, (client, work) in enumerate(works):
        groups.setdefault((len(client.split(work.split)), len(work.models)), []).append(i)
    entries = [e for e in works[0][0].network.layout.entries if e.trainable]
    for (_, models), alike in groups.items():
        at_once = max(1, FORWARD // (models * works[0][0].network.layout.size))
        for begin in range(0, len(alike), at_once):
            members = alike[begin : begin + at_once]
            states = torch.stack([theta for i in members for theta in works[i][1].models])
            splits = [client.split(work.split) for client, work in (works[i] for i in members)]
            x = torch.stack([client.preprocess(split.x) for (client, _), split in zip((works[i] for i in members), splits, strict=True)])
            y = torch.stack([split.y for split in splits]).repeat_interleave(models, 0)
            weights = [states[:, e.slice].reshape(-1, *e.shape) for e in entries]
            logits = chain.logits(weights, x.repeat_interleave(models, 0), buffers)
            losses = objective.losses(logits, y)
            correct = logits.argmax(1) == y
            for i, own, right in zip(members, losses.split(models), correct.split(models), strict=True):
                outcomes[i] = {"losses": own.clone(), "correct": right.clone()}
    return outcomes
