"""Forward passes of many clients at once: embeddings grouped by model, and losses of many small models in one batched product.

Both equal what ``Embed`` and ``Score`` compute for one client after the other, up to the rounding of float sums. What they do not cover
(training mode, bf16, networks that are no perceptrons) is left to those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

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
    return work.mode == "eval" and client.precision == "fp32" and not client.checks_models and not mixes


@torch.no_grad()
def embed_together(works: Sequence[tuple[Client, Embed]]) -> list[Outcome]:
    """Embed the samples of many clients: one pass for all samples under one model and projection."""
    outcomes: list[Outcome] = [{}] * len(works)
    groups: dict[tuple[int, int], list[int]] = {}
    for i, (_, work) in enumerate(works):
        groups.setdefault((work.state.data_ptr(), id(work.matrix)), []).append(i)
    network, preprocess = works[0][0].network, works[0][0].preprocess  # the same for all clients of a scenario
    network.module.train(False)
    shown: list[tuple[str, str, int]] = []
    for members in groups.values():
        work = works[members[0]][1]
        network.load(work.state)
        wanted = [(client.name, own.split, id(own.indices)) for client, own in (works[i] for i in members)]
        if wanted != shown:  # the same samples under many models are gathered once
            parts = [client.rows(own.split, own.indices) for client, own in (works[i] for i in members)]
            x, sizes, shown = preprocess(torch.cat(parts)), [len(part) for part in parts], wanted
            at_once = min(SAMPLES, max(1, FORWARD // max(1, x[0].numel())))
        z = torch.empty(len(x), network.layout.embedding_width if work.matrix is None else work.matrix.shape[1])
        for part, out in zip(x.split(at_once), z.split(at_once), strict=True):
            embedded = network.embed(part)
            out.copy_(embedded) if work.matrix is None else torch.mm(embedded, work.matrix, out=out)
        for i, own_z in zip(members, z.split(sizes), strict=True):
            outcomes[i] = {"z": own_z}
    return outcomes


@torch.no_grad()
def score_together(works: Sequence[tuple[Client, Score]], chain: Chain, buffers: Buffers) -> list[Outcome]:
    """Score every client's models on its own samples: one batched product for the samples of all clients with the same models."""
    outcomes: list[Outcome] = [{}] * len(works)
    groups: dict[int, list[int]] = {}
    for i, (_, work) in enumerate(works):
        groups.setdefault(id(work.models), []).append(i)
    entries = [e for e in works[0][0].network.layout.entries if e.trainable]
    for alike in groups.values():
        models = torch.stack(list(works[alike[0]][1].models))
        weights = [models[:, e.slice].reshape(-1, *e.shape) for e in entries]
        splits = {i: client.split(work.split) for i, (client, work) in ((i, works[i]) for i in alike)}
        most = FORWARD // (len(models) * max(w.shape[1] for w in weights))
        for members in _portions({i: len(split) for i, split in splits.items()}, most):
            x = torch.cat([works[i][0].preprocess(splits[i].x) for i in members]).expand(len(models), *[-1] * splits[members[0]].x.dim())
            y = torch.cat([splits[i].y for i in members]).expand(len(models), -1)
            logits = chain.logits(weights, x, buffers)
            losses, correct = objective.losses(logits, y), logits.argmax(1) == y
            sizes = [len(splits[i]) for i in members]
            for i, own, right in zip(members, losses.split(sizes, 1), correct.split(sizes, 1), strict=True):
                outcomes[i] = {"losses": own.clone(), "correct": right.clone()}
    return outcomes


def _portions(sizes: Mapping[int, int], most: int) -> list[list[int]]:
    """Divide clients, in their order, so that a portion holds at most so many samples, or one client."""
    portions: list[list[int]] = []
    held = most
    for i, size in sizes.items():
        if held + size > most:
            portions.append([])
            held = 0
        portions[-1].append(i)
        held += size
    return portions
