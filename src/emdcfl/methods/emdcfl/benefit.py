r"""Grouping by benefit: transport distances propose groups, the members' validation losses decide where a split pays.

All members of a cluster start a round from the same model, so the server can form the average :math:`\theta_S` of any subset S of
their trained states. Two trees over the members propose subsets: average linkage of :math:`\max(W, W^\top, 0)` and of the cosine
distances between updates, which see groups that differ in what labels mean. Bottom up, a node S keeps the best partition below it,
:math:`S = \bigcup_k S_k`, if that lowers the members' validation loss :math:`\ell` (cut at ``LOSS_CUT``) by more than chance:

.. math:: g = \frac{\sum_{c\in S}\sum_i \ell_{ci}(\theta_S) - \ell_{ci}(\theta_{k(c)})}{\sum_{c\in S} m_c}, \qquad
          g > z\,\widehat{\mathrm{se}}(g)

The standard error comes from blocks of consecutive validation samples, so that the neighbours in a series do not count as independent
evidence (batch means; Schmeiser, *Batch size effects in the analysis of simulation output*, 1982). Of more than ``SINGLE`` clients one
side must also gain ``LEAST_SHARE`` of its loss. Of the two trees' partitions the
coarser one holds, unless the finer one beats it in the same way. Clusters are examined in rounds 1, 2, 4, 8, …, and only get finer.

Models that trained apart from random weights may average badly although their data agree, and in round 1 leaving some of them out then
pays. So sides that the paper's tolerance does not tell apart (most pairs across are linked) are not divided there, and nobody scores
what lies below; round 2, in which all start from one trained model, decides.

One client cannot tear others apart: without any single member the split must still pay, unless it does not separate the others. A client
may prevent a split; the run is then FedAvg inside that cluster.

A member learns the averages of the nested subsets it belongs to. Two of them give the average of the part by which they differ, which may
be one client's trained state. It sends means and covariances of its losses and of its hits under these models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emdcfl.clustering import links
from emdcfl.core.errors import ClientError
from emdcfl.core.federation import Federation, Round
from emdcfl.core.params import average
from emdcfl.core.schema import Reply
from emdcfl.methods.emdcfl.client.tasks import LOSS_CUT, SMALLEST_VOTE, loss_moments
from emdcfl.methods.emdcfl.pairing import EMDCFLState
from emdcfl.methods.emdcfl.proposals import SINGLE, Array, Cell, Merge, Tree, key, known, tree, tree_of_columns, updates_apart
from emdcfl.methods.emdcfl.settings import Options

LEAST_SHARE = 0.05
"""Share of its loss that one side must gain where more than ``SINGLE`` clients are divided: of so many, even what nobody would notice is
beyond chance."""

MOST_MODELS = 64
"""Averages a member scores in one request."""

SENT_AT_ONCE = 2**30
"""Bytes of averages held at once."""

MODELS_AT_ONCE = 16
"""Cluster models a newcomer scores in one request."""


@dataclass(frozen=True)
class Gain:
    """What one partition gains over another: per validation sample in nats, in points of accuracy, their standard errors, and by client."""

    mean: float
    error: float
    points: float
    points_error: float
    by_client: Mapping[str, float]

    def strongest(self, count: int = 3) -> list[str]:
        """Clients that gain most, of those that gain."""
        order = sorted(self.by_client, key=lambda c: -self.by_client[c])
        return [c for c in order[:count] if self.by_client[c] > 0]


class Votes:
    """The members' validation losses under the averages they belong to, as arrays over all voters.

    Whoever is missing in the ``loss_moments`` replies has no vote. A client scored the averages of the cells it is in, in their order.
    """

    def __init__(self, replies: Mapping[str, Reply], cells: Sequence[Cell]) -> None:
        row = {c: k for k, c in enumerate(replies)}
        self._voters = list(replies)
        self._n = np.array([int(reply["n"]) for reply in replies.values()])
        self._models = np.array([len(reply["mean"]) for reply in replies.values()], dtype=np.int64)
        self._mean, self._hits, self._V, self._hits_V = (
            np.concatenate([np.zeros(0), *(reply[name].numpy().ravel() for reply in replies.values())])
            for name in ("mean", "accuracy", "covariance", "accuracy_covariance")
        )
        self._first, self._first_V = (np.cumsum(sizes) - sizes for sizes in (self._models, self._models**2))
        self._scored: dict[Cell, tuple[Array, Array]] = {}  # by whom, and as which of their models
        before = np.zeros_like(self._models)
        for cell in cells:
            rows = np.array([row[c] for c in cell if c in row], dtype=np.int64)
            self._scored[cell] = rows, before[rows]
            before[rows] += 1

    def gain(self, coarse: Sequence[Cell], fine: Sequence[Cell]) -> Gain:
        """Return what the members of ``fine`` gain over ``coarse``, two partitions of the same members."""
        rows, old, new = self._compared(coarse, fine)
        gained, variance = self._differences(rows, old, new)
        m = max(1, int(self._n[rows].sum()))
        hits = self._n[rows] * (self._hits[self._first[rows] + new] - self._hits[self._first[rows] + old])
        hits_error = math.sqrt(self._variance(self._hits_V, rows, old, new).sum())
        by_client = dict(zip((self._voters[k] for k in rows.tolist()), gained.tolist(), strict=True))
        return Gain(float(gained.sum()) / m, math.sqrt(variance.sum()) / m, 100 * float(hits.sum()) / m, 100 * hits_error / m, by_client)

    def pays(self, coarse: Sequence[Cell], fine: Sequence[Cell], evidence: float) -> bool:
        """Whether the finer partition is better by more than chance, and not for the sake of one member alone."""
        rows, old, new = self._compared(coarse, fine)
        gained, variance = self._differences(rows, old, new)
        if not _z(gained.sum(), variance.sum()) > evidence:
            return False
        if not self.noticed(coarse, fine):
            return False
        alone = np.isin(rows, [k for cell in fine if len(cell) == 1 for k in self._scored[cell][0]])
        tears = len(fine) - alone > 1
        return bool((_z(_without_each(gained), _without_each(variance)) > evidence)[tears].all())

    def noticed(self, coarse: Sequence[Cell], fine: Sequence[Cell]) -> bool:
        """Whether some set of the finer partition lowers its members' loss by a share that is noticed, where many are divided."""
        if sum(map(len, coarse)) <= SINGLE:
            return True
        rows, old, new = self._compared(coarse, fine)
        gained, before = self._differences(rows, old, new)[0], self._n[rows] * self._mean[self._first[rows] + old]
        ends = np.cumsum([len(self._scored[cell][0]) for cell in fine])[:-1]
        return any(own.sum() > LEAST_SHARE * lost.sum() for own, lost in zip(np.split(gained, ends), np.split(before, ends), strict=True))

    def _compared(self, coarse: Sequence[Cell], fine: Sequence[Cell]) -> tuple[Array, Array, Array]:
        """Voters, cell by cell of ``fine``, and as which of their models they scored their sets of both partitions."""
        at = np.zeros_like(self._models)
        for cell in coarse:
            rows, scored = self._scored[cell]
            at[rows] = scored
        rows, new = (np.concatenate(parts) for parts in zip(*(self._scored[cell] for cell in fine), strict=True))
        return rows, at[rows], new

    def _differences(self, rows: Array, old: Array, new: Array) -> tuple[Array, Array]:
        """What each voter gains over all its samples, and the variances of these sums."""
        gained = self._n[rows] * (self._mean[self._first[rows] + old] - self._mean[self._first[rows] + new])
        return gained, self._variance(self._V, rows, old, new)

    def _variance(self, V: Array, rows: Array, old: Array, new: Array) -> Array:
        """Variances of differences; the covariances come from clients, so they may be none."""
        first, L = self._first_V[rows], self._models[rows]
        return np.asarray(np.maximum(V[first + old * (L + 1)] + V[first + new * (L + 1)] - 2 * V[first + old * L + new], 0.0))


def _z(total: Any, variance: Any) -> Array:
    """Standard errors above zero; 0 where there is no spread."""
    known = np.asarray(variance) > 0
    return np.asarray(np.where(known, total / np.sqrt(np.where(known, variance, 1.0)), 0.0))


def _without_each(values: Array) -> Array:
    """Sums of all values but one, without cancellation: a rest of zeros is zero."""
    before = np.concatenate([[0.0], np.cumsum(values)[:-1]])
    after = np.concatenate([np.cumsum(values[::-1])[::-1][1:], [0.0]])
    return np.asarray(before + after)


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
        put_off = _alike(state, trees)
        trees = {name: tree.cut(put_off) for name, tree in trees.items()}
    trees = {name: tree for name, tree in trees.items() if tree.merges}
    if not trees:
        return Examined([key(members)], [])
    votes = _ask(fed, state, _cells(trees), local)
    about = {"round": round.index, "evidence": options.evidence}
    candidates = [_pruned(tree.merges, votes, {**about, "proposal": name}) for name, tree in trees.items()]
    candidates.sort(key=lambda candidate: len(candidate.cells))
    best = candidates[0]
    for finer in candidates[1:]:
        if len(finer.cells) > len(best.cells) and votes.pays(best.cells, finer.cells, options.evidence):
            best = finer
    return best


def _alike(state: EMDCFLState, trees: Mapping[str, Tree]) -> set[Cell]:
    """Return the nodes whose two sides follow the same law as far as W can tell: most pairs across are linked."""
    at = {c: i for i, c in enumerate(state.clients)}
    M = links(state.W.numpy(), state.epsilon.numpy())
    merges = [merge for tree in trees.values() for merge in tree.merges]
    return {key(a + b) for a, b in merges if M[np.ix_([at[c] for c in a], [at[c] for c in b])].mean() > 0.5}


def _proposals(fed: Federation, state: EMDCFLState, members: Sequence[str], local: Mapping[str, Tensor], round: Round) -> dict[str, Tree]:
    where = {c: i for i, c in enumerate(state.clients)}
    at = [where[c] for c in members]
    trees = {}
    if state.rows:
        trees["transport"] = tree_of_columns(known(state.W[:, at].numpy()), members)
    elif not state.by_rows:
        W = state.W[at][:, at].numpy()
        trees["transport"] = tree(known(np.maximum(np.maximum(W, W.T), 0.0)), [(c,) for c in members])
    rng = round.generator(f"representatives of {members[0]}'s cluster")
    start = fed.near({c: state.start(c) for c in members})
    apart, few = updates_apart(fed.layout, [local[c] for c in members], [start[c].to(local[c].device) for c in members], rng)
    return {**trees, "updates": tree_of_columns(apart, members) if few else tree(apart, [(c,) for c in members])}


def _cells(trees: Mapping[str, Tree]) -> list[Cell]:
    """Return the leaves, then the nodes of the trees, each once."""
    leaves = [leaf for proposed in trees.values() for leaf in proposed.leaves]
    return list(dict.fromkeys([*leaves, *(key(a + b) for proposed in trees.values() for a, b in proposed.merges)]))


def _pruned(tree: Sequence[Merge], votes: Votes, about: Mapping[str, Any]) -> Examined:
    """Bottom up, keep what lies below a node only where it pays."""
    below: dict[Cell, list[Cell]] = {}
    weighed: dict[Cell, dict[str, Any]] = {}
    for left, right in tree:
        node = key(left + right)
        fine = below.get(left, [left]) + below.get(right, [right])
        pays = votes.pays([node], fine, about["evidence"])
        gain = votes.gain([node], fine)
        below[node] = fine if pays else [node]
        numbers = {"gain": gain.mean, "error": gain.error, "points": gain.points, "points_error": gain.points_error}
        decision = {"pays": pays, "noticed": votes.noticed([node], fine), "decided_by": gain.strongest()}
        weighed[node] = {**about, "members": list(node), "cells": [list(cell) for cell in fine], **numbers, **decision}
    cells = below[node]
    shown = [split for node, split in weighed.items() if not any(set(node) < set(cell) for cell in cells)]
    return Examined(cells, shown[::-1])


def _ask(fed: Federation, state: EMDCFLState, cells: Sequence[Cell], local: Mapping[str, Tensor]) -> Votes:
    """Let each client score the averages of the sets it is in."""
    m = {c: reply["m"] for c, reply in fed.describe(sorted({c for cell in cells for c in cell})).items()}
    paths: dict[str, list[int]] = {c: [] for c, size in m.items() if size >= SMALLEST_VOTE}  # sets by number: hashing one takes long
    for number, cell in enumerate(cells):
        for c in cell:
            if c in paths:
                paths[c].append(number)
    parts: dict[str, list[Reply]] = {c: [] for c in paths}
    averages: dict[int, Tensor] = {}
    for asked in _portions(paths, 4 * fed.layout.size):
        wanted = {number for numbers in asked.values() for number in numbers}
        averages = {number: averages[number] for number in wanted if number in averages}
        for number in wanted - set(averages):
            cell = cells[number]
            averages[number] = average([local[c] for c in cell], [float(state.n[c]) for c in cell]) if len(cell) > 1 else local[cell[0]]
        alike = {numbers: tuple(averages[number] for number in numbers) for numbers in {*map(tuple, asked.values())}}
        inputs = {c: {"models": alike[tuple(numbers)]} for c, numbers in asked.items()}
        replies = fed.run(loss_moments, inputs, verify=_verifier({c: len(numbers) for c, numbers in asked.items()}, m))
        for c, reply in replies.valid.items():
            parts[c].append(reply)
    return Votes({c: _joined(found) for c, found in parts.items() if sum(len(part["mean"]) for part in found) == len(paths[c])}, cells)


def _joined(parts: Sequence[Reply]) -> Reply:
    """Join the replies to several requests; covariances between them are not known, and 0 errs on the safe side."""
    if len(parts) == 1:
        return parts[0]
    covariances = {name: torch.block_diag(*[part[name] for part in parts]) for name in ("covariance", "accuracy_covariance")}
    return {**parts[0], **{name: torch.cat([part[name] for part in parts]) for name in ("mean", "accuracy")}, **covariances}


def _portions(paths: Mapping[str, Sequence[int]], size: int) -> Iterator[dict[str, Sequence[int]]]:
    """Divide what is asked so that nobody scores more than ``MOST_MODELS``, and all within ``SENT_AT_ONCE`` bytes, at once."""
    at_once = max(1, min(MOST_MODELS, SENT_AT_ONCE // size))
    for start in range(0, max(map(len, paths.values()), default=0), at_once):
        portion: dict[str, Sequence[int]] = {}
        held = 0
        for c, numbers in ((c, numbers[start : start + at_once]) for c, numbers in paths.items()):
            if portion and held + len(numbers) * size > SENT_AT_ONCE:
                yield portion
                portion, held = {}, 0
            if numbers:
                portion[c] = numbers
                held += len(numbers) * size
        if portion:
            yield portion


def _verifier(models: Mapping[str, int], m: Mapping[str, int]) -> Callable[[str, Reply], None]:
    """Return what refuses moments that no losses have."""

    def verify(client: str, reply: Reply) -> None:
        L = models[client]
        shapes = [tuple(reply[name].shape) for name in ("mean", "accuracy", "covariance", "accuracy_covariance")]
        if shapes != [(L,), (L,), (L, L), (L, L)]:
            raise ClientError(f"expected losses of {L} models, got shapes {shapes}")
        if reply["n"] != m[client]:
            raise ClientError(f"expected losses of the {m[client]} validation samples announced, got {reply['n']}")
        if not _possible(reply["covariance"], LOSS_CUT * reply["n"]) or not _possible(reply["accuracy_covariance"], reply["n"]):
            raise ClientError("expected covariance matrices, got one that no losses have")

    return verify


def _possible(V: Tensor, largest: float) -> bool:
    """Whether a matrix can be the covariance of sums of at most ``largest``."""
    variance = V.diagonal()
    deviation = variance.clamp_min(0).sqrt()
    bound = torch.outer(deviation, deviation) * (1 + 1e-6) + 1e-9
    in_range = float(variance.min()) >= 0 and float(variance.max()) <= 2 * largest**2
    return in_range and not bool((V.abs() > bound).any()) and torch.equal(V, V.T)


def _chosen_by_validation(fed: Federation, clients: Sequence[str], state: EMDCFLState) -> dict[str, int]:
    """Return the cluster whose model has the lowest validation loss at each newcomer; the largest cluster for one that cannot say."""
    largest = max(range(len(state.sets)), key=lambda k: len(state.sets[k]))
    losses: dict[str, list[float]] = {c: [] for c in clients}
    for models in state.models.split(MODELS_AT_ONCE) if clients else ():
        replies = fed.evaluate([c for c in clients if fed.exclusion_reason(c) is None], models)
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
