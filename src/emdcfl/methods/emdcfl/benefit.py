r"""Grouping by benefit: transport distances propose groups, the members' validation losses decide where a split pays.

Two trees over the members of a cluster propose subsets: average linkage of :math:`\max(W, W^\top, 0)` and of the cosine distances between
updates. All members began the round with one model, so the average :math:`\theta_S` of any subset's trained states is a model. Bottom up,
a node S keeps the best partition below it, :math:`S = \bigcup_k S_k`, if that lowers the members' validation loss :math:`\ell` (cut at
``LOSS_CUT``) by more than chance:

.. math:: g = \frac{\sum_{c\in S}\sum_i \ell_{ci}(\theta_S) - \ell_{ci}(\theta_{k(c)})}{\sum_{c\in S} m_c}, \qquad
          g > z\,\widehat{\mathrm{se}}(g)

The standard error comes from blocks of consecutive samples (batch means; Schmeiser, *Batch size effects in the analysis of simulation
output*, 1982). Without any single member the split must still pay, unless it does not separate the others. Of more than ``SINGLE`` clients
one side must also gain ``MIN_SHARE`` of its loss. Of the two trees' partitions the coarser one holds, unless the finer one beats it in the
same way. Clusters are examined in rounds 1, 2, 4, 8, …, and only get finer. In round 1, sides that the paper's tolerance does not tell
apart are not divided. ``docs/explanation/emdcfl.md`` says why.

A member learns the averages of the nested subsets it belongs to. Two of them give the average of the part by which they differ, which may
be one client's trained state. It sends means and covariances of its losses and of its hits under these models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emdcfl.clustering import links
from emdcfl.core.federation import Federation, Round
from emdcfl.methods.emdcfl.member_losses import MemberLosses, ask_losses
from emdcfl.methods.emdcfl.pairing import EMDCFLState
from emdcfl.methods.emdcfl.proposals import Cell, Merge, Tree, fill_unknown, key, tree, tree_of_columns, updates_apart
from emdcfl.methods.emdcfl.settings import Options

MODELS_AT_ONCE = 16
"""Cluster models a newcomer scores in one request."""


@dataclass(frozen=True)
class Examined:
    """Clusters a set of members falls into, and what each split gains, from all members down to the clusters that stay together."""

    cells: list[Cell]
    splits: list[dict[str, Any]]


def regroup(
    options: Options, fed: Federation, state: EMDCFLState, local: Mapping[str, Tensor], round: Round
) -> tuple[list[list[str]], dict[str, int], list[dict[str, Any]]]:
    """Return the clusters after a round, the cluster of every client seen, and the splits weighed so far."""
    seen = [c for c in state.clients if c in state.n]
    if not state.labels:
        sets, new = [list(seen)], []
    else:
        new = [c for c in seen if c not in state.labels]
        sets = [list(members) for members in state.sets]
        for c, k in _chosen_by_validation(fed, new, state).items():
            sets[k].append(c)
    splits = list(state.splits or [])
    if round.index & (round.index - 1) == 0:
        found, local = [], fed.near(local)
        for members in sets:
            present = [c for c in members if c in local and c not in new and not fed.guard.ledger.banned(c)]
            examined = examine(options, fed, state, present, local, round) if len(present) > 1 else Examined([tuple(present)], [])
            splits += examined.splits
            examined_here = set(present)
            found += _with_absent(state, examined.cells, [c for c in members if c not in examined_here])
        sets = found
    order = {c: i for i, c in enumerate(state.clients)}
    sets = sorted((sorted(members, key=order.__getitem__) for members in sets if members), key=lambda members: order[members[0]])
    return sets, {c: k for k, members in enumerate(sets) for c in members}, splits


def examine(
    options: Options, fed: Federation, state: EMDCFLState, members: Sequence[str], local: Mapping[str, Tensor], round: Round
) -> Examined:
    """Divide one cluster's members where it pays."""
    trees = _proposals(fed, state, members, local, round)
    if round.index == 1 and not state.by_rows:
        put_off = _linked_sides(state, trees)
        trees = {name: proposed.cut(put_off) for name, proposed in trees.items()}
    trees = {name: proposed for name, proposed in trees.items() if proposed.merges}
    if not trees:
        return Examined([key(members)], [])
    losses = ask_losses(fed, _cells(trees), local, state.n)
    about = {"round": round.index, "evidence": options.evidence}
    candidates = [_pruned(proposed.merges, losses, {**about, "proposal": name}) for name, proposed in trees.items()]
    candidates.sort(key=lambda candidate: len(candidate.cells))
    best = candidates[0]
    for finer in candidates[1:]:
        if len(finer.cells) > len(best.cells) and losses.pays(best.cells, finer.cells, options.evidence):
            best = finer
    return best


def _linked_sides(state: EMDCFLState, trees: Mapping[str, Tree]) -> set[Cell]:
    """Return the nodes whose two sides follow the same law as far as W can tell: most pairs across are linked."""
    at = {c: i for i, c in enumerate(state.clients)}
    M = links(state.W.numpy(), state.epsilon.numpy())
    merges = [merge for proposed in trees.values() for merge in proposed.merges]
    return {key(a + b) for a, b in merges if M[np.ix_([at[c] for c in a], [at[c] for c in b])].mean() > 0.5}


def _proposals(fed: Federation, state: EMDCFLState, members: Sequence[str], local: Mapping[str, Tensor], round: Round) -> dict[str, Tree]:
    where = {c: i for i, c in enumerate(state.clients)}
    at = [where[c] for c in members]
    trees = {}
    if state.rows:
        trees["transport"] = tree_of_columns(fill_unknown(state.W[:, at].numpy()), members)
    elif not state.by_rows:
        W = state.W[at][:, at].numpy()
        trees["transport"] = tree(fill_unknown(np.maximum(np.maximum(W, W.T), 0.0)), [(c,) for c in members])
    rng = round.generator(f"representatives of {members[0]}'s cluster")
    start = fed.near({c: state.start(c) for c in members})
    apart, few = updates_apart(fed.layout, [local[c] for c in members], [start[c].to(local[c].device) for c in members], rng)
    return {**trees, "updates": tree_of_columns(apart, members) if few else tree(apart, [(c,) for c in members])}


def _cells(trees: Mapping[str, Tree]) -> list[Cell]:
    """Return the leaves, then the nodes of the trees, each once."""
    leaves = [leaf for proposed in trees.values() for leaf in proposed.leaves]
    return list(dict.fromkeys([*leaves, *(key(a + b) for proposed in trees.values() for a, b in proposed.merges)]))


def _pruned(merges: Sequence[Merge], losses: MemberLosses, about: Mapping[str, Any]) -> Examined:
    """Bottom up, keep what lies below a node only where it pays."""
    below: dict[Cell, list[Cell]] = {}
    weighed: dict[Cell, dict[str, Any]] = {}
    for left, right in merges:
        node = key(left + right)
        fine = below.get(left, [left]) + below.get(right, [right])
        pays = losses.pays([node], fine, about["evidence"])
        gain = losses.gain([node], fine)
        below[node] = fine if pays else [node]
        numbers = {"gain": gain.mean, "error": gain.error, "points": gain.points, "points_error": gain.points_error}
        decision = {"pays": pays, "noticed": losses.noticed([node], fine), "decided_by": gain.strongest()}
        weighed[node] = {**about, "members": list(node), "cells": [list(cell) for cell in fine], **numbers, **decision}
    cells = below[node]
    shown = [split for node, split in weighed.items() if not any(set(node) < set(cell) for cell in cells)]
    return Examined(cells, shown[::-1])


def _chosen_by_validation(fed: Federation, clients: Sequence[str], state: EMDCFLState) -> dict[str, int]:
    """Return the cluster whose model has the lowest validation loss at each newcomer; the largest cluster for one that cannot say."""
    largest = max(range(len(state.sets)), key=lambda k: len(state.sets[k]))
    losses: dict[str, list[float]] = {c: [] for c in clients}
    for models in state.models.split(MODELS_AT_ONCE) if clients else ():
        replies = fed.evaluate(clients, models)
        for c in clients:
            table = replies.valid[c]["table"][:, 0] if c in replies.valid else torch.full((len(models),), torch.inf)
            losses[c] += table.tolist()
    return {c: int(np.argmin(values)) if np.isfinite(values).any() else largest for c, values in losses.items()}


def _with_absent(state: EMDCFLState, cells: Sequence[Cell], absent: Sequence[str]) -> list[list[str]]:
    """Add the members that were not examined to the cell nearest by W, or to the largest where W does not say."""
    found = [list(cell) for cell in cells if cell]
    if not found:
        return [list(absent)]
    at = {c: i for i, c in enumerate(state.clients)}
    for c in absent:
        near = [_mean_distance(state, at[c], [at[d] for d in cell]) for cell in cells]
        k = int(np.argmin(near)) if np.isfinite(near).any() else int(np.argmax([len(cell) for cell in cells]))
        found[k].append(c)
    return found


def _mean_distance(state: EMDCFLState, i: int, others: Sequence[int]) -> float:
    if state.by_rows:
        W = (state.W[:, i, None] - state.W[:, list(others)]).abs().mean(0)
    else:
        W = torch.maximum(state.W[i, list(others)], state.W[list(others), i])
    finite = W[torch.isfinite(W)]
    return float(finite.mean()) if len(finite) else float("inf")
