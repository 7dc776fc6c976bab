"""Scoring for many clients at once: each model is loaded once, and the samples of all clients that score it pass through together."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from emdcfl.core.client import Client
from emdcfl.core.learning import objective
from emdcfl.core.params import Network
from emdcfl.core.tasks import Score
from emdcfl.engines.cuda.embedding import batch_size, passed
from emdcfl.engines.cuda.resident import Samples
from emdcfl.engines.local.sequential import one_line
from emdcfl.engines.local.staged import WorkResult

log = logging.getLogger("emdcfl")

SCORED_ALONE = "scoring models client by client"
"""First words of the warning that models are not scored together."""


def score_together(works: Sequence[tuple[int, Client, Score]], samples: Samples, network: Network) -> dict[int, WorkResult]:
    """Score model by model with a network; returns losses and hits by the position given with each work. Works that failed are left out."""
    pieces = [piece for piece in works if piece[2].split == "val"]
    try:
        return _scored(pieces, samples, network) if pieces else {}
    except Exception as error:  # out of memory, say
        log.warning("%s: %s", SCORED_ALONE, one_line(error))
        return {}


@torch.no_grad()
def _scored(works: Sequence[tuple[int, Client, Score]], samples: Samples, network: Network) -> dict[int, WorkResult]:
    client, device = works[0][1], samples.x.device
    size = batch_size(client.preprocess(samples.x[:1]).numel())
    own = [torch.arange(samples.first[c.name] - len(c.site.val), samples.first[c.name], device=device) for _, c, _ in works]
    losses = [torch.empty(len(work.models), len(index), device=device) for index, (_, _, work) in zip(own, works, strict=True)]
    correct = [torch.empty_like(table, dtype=torch.bool) for table in losses]
    with client.mode(training=False):  # evaluation does not depend on the client
        for state, places in _places(work for _, _, work in works):
            network.load(state)
            index = torch.cat([own[i] for i, _ in places])
            logits, y = passed(network.module, client, samples.x, index, size), samples.y.index_select(0, index)
            sizes = [len(own[i]) for i, _ in places]
            found = zip(objective.losses(logits, y).split(sizes), (logits.argmax(1) == y).split(sizes), strict=True)
            for (i, row), (loss, hit) in zip(places, found, strict=True):
                losses[i][row], correct[i][row] = loss, hit
    tables = zip(_to_host(losses), _to_host(correct), strict=True)
    return {i: {"losses": loss, "correct": hit} for (i, _, _), (loss, hit) in zip(works, tables, strict=True)}


def _places(works: Iterable[Score]) -> Iterable[tuple[Tensor, list[tuple[int, int]]]]:
    """Return every distinct state, with the works that score it and its row in each."""
    places: dict[tuple[int, int], tuple[Tensor, list[tuple[int, int]]]] = {}
    for i, work in enumerate(works):
        for row, state in enumerate(work.models):
            places.setdefault((state.data_ptr(), state.numel()), (state, []))[1].append((i, row))
    return places.values()


def _to_host(tables: Sequence[Tensor]) -> list[Tensor]:
    """Copy tables in one piece."""
    parts = torch.cat([table.flatten() for table in tables]).cpu().split([table.numel() for table in tables])
    return [part.view(table.shape) for part, table in zip(parts, tables, strict=True)]
