"""The members' validation losses under averages of their states: asked for, checked, and compared between two partitions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emdcfl.core.errors import ClientError
from emdcfl.core.federation import Federation
from emdcfl.core.params import average
from emdcfl.core.schema import Reply
from emdcfl.methods.emdcfl.client.losses import LOSS_CUT, MIN_VOTE, loss_moments
from emdcfl.methods.emdcfl.proposals import SINGLE, Array, Cell

MIN_SHARE = 0.05
"""Share of its loss that one side must gain where more than ``SINGLE`` clients are divided: of so many, even what nobody would notice is
beyond chance."""

MAX_MODELS = 64
"""Averages a member scores in one request."""

SENT_AT_ONCE = 2**30
"""Bytes of averages held at once."""


@dataclass(frozen=True)
class Gain:
    """What one partition gains over another: per validation sample in nats, in points of accuracy, their standard errors, and by client."""

    mean: float
    error: float
    points: float
    points_error: float
    by_client: Mapping[str, float]

    def strongest(self) -> list[str]:
        """Return the three clients that gain most, or fewer where fewer gain."""
        order = sorted(self.by_client, key=lambda c: -self.by_client[c])
        return [c for c in order[:3] if self.by_client[c] > 0]


class MemberLosses:
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
        divides_others = len(fine) - alone > 1  # without this voter, two sets or more are left
        return bool((_z(_without_each(gained), _without_each(variance)) > evidence)[divides_others].all())

    def noticed(self, coarse: Sequence[Cell], fine: Sequence[Cell]) -> bool:
        """Whether some set of the finer partition lowers its members' loss by a share that is noticed, where many are divided."""
        if sum(map(len, coarse)) <= SINGLE:
            return True
        rows, old, new = self._compared(coarse, fine)
        gained, before = self._differences(rows, old, new)[0], self._n[rows] * self._mean[self._first[rows] + old]
        ends = np.cumsum([len(self._scored[cell][0]) for cell in fine])[:-1]
        return any(own.sum() > MIN_SHARE * lost.sum() for own, lost in zip(np.split(gained, ends), np.split(before, ends), strict=True))

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
        """Variances of differences, at least 0: clients send the covariances, which need not be any."""
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


def ask_losses(fed: Federation, cells: Sequence[Cell], local: Mapping[str, Tensor], n: Mapping[str, int]) -> MemberLosses:
    """Let each client score the averages of the sets it is in; ``n`` are train sizes."""
    m = {c: reply["m"] for c, reply in fed.describe(sorted({c for cell in cells for c in cell})).items()}
    paths: dict[str, list[int]] = {c: [] for c, size in m.items() if size >= MIN_VOTE}  # sets by number: hashing one takes long
    for number, cell in enumerate(cells):
        for c in cell:
            if c in paths:
                paths[c].append(number)
    parts: dict[str, list[Reply]] = {c: [] for c in paths}
    averages: dict[int, Tensor] = {}
    for asked in portions(paths, 4 * fed.layout.size):
        wanted = {number for numbers in asked.values() for number in numbers}
        averages = {number: averages[number] for number in wanted if number in averages}
        for number in wanted - set(averages):
            cell = cells[number]
            averages[number] = average([local[c] for c in cell], [float(n[c]) for c in cell]) if len(cell) > 1 else local[cell[0]]
        alike = {numbers: tuple(averages[number] for number in numbers) for numbers in {*map(tuple, asked.values())}}
        inputs = {c: {"models": alike[tuple(numbers)]} for c, numbers in asked.items()}
        replies = fed.run(loss_moments, inputs, verify=moments_verifier({c: len(numbers) for c, numbers in asked.items()}, m))
        for c, reply in replies.valid.items():
            parts[c].append(reply)
    return MemberLosses(
        {c: joined(found) for c, found in parts.items() if sum(len(part["mean"]) for part in found) == len(paths[c])}, cells
    )


def joined(parts: Sequence[Reply]) -> Reply:
    """Join the replies to several requests; covariances between them are not known, and 0 errs on the safe side."""
    if len(parts) == 1:
        return parts[0]
    covariances = {name: torch.block_diag(*[part[name] for part in parts]) for name in ("covariance", "accuracy_covariance")}
    return {**parts[0], **{name: torch.cat([part[name] for part in parts]) for name in ("mean", "accuracy")}, **covariances}


def portions(paths: Mapping[str, Sequence[int]], size: int) -> Iterator[dict[str, Sequence[int]]]:
    """Divide what is asked so that nobody scores more than ``MAX_MODELS``, and all within ``SENT_AT_ONCE`` bytes, at once."""
    at_once = max(1, min(MAX_MODELS, SENT_AT_ONCE // size))
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


def moments_verifier(models: Mapping[str, int], m: Mapping[str, int]) -> Callable[[str, Reply], None]:
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
