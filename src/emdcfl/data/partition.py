"""Dividing samples among clients: evenly, by label, by quantity. Pure functions; every draw comes from the generator passed in.

Each returns one index array per client; together they hold every sample exactly once.
"""

from __future__ import annotations

import numpy as np

from emdcfl.core.errors import ConfigError
from emdcfl.data.split import Indices, equal_parts
from emdcfl.data.transforms import Labels

_TRIES = 100


def iid(labels: Labels, clients: int, rng: np.random.Generator) -> list[Indices]:
    """Equal shares of a shuffle; the last client takes what is left over."""
    _check(len(labels), clients)
    return equal_parts(rng.permutation(len(labels)), clients)


def balanced(labels: Labels, clients: int, rng: np.random.Generator) -> list[Indices]:
    """Class by class, equal shares of a shuffle, the last client taking what is left over; then each share is shuffled."""
    _check(len(labels), clients)
    slices = [equal_parts(rng.permutation(np.flatnonzero(labels == label)), clients) for label in np.unique(labels)]
    return [rng.permutation(np.concatenate(parts)) for parts in zip(*slices, strict=True)]


def dirichlet(labels: Labels, clients: int, rng: np.random.Generator, *, alpha: float = 0.5, minimum: int = 10) -> list[Indices]:
    """Label skew: the share of each class that goes to each client is drawn from ``Dirichlet(alpha)``.

    Drawn again until every client has at least ``minimum`` samples.
    """
    _check(len(labels), clients)
    if alpha <= 0:
        raise ConfigError(f"dirichlet: alpha must be positive, got {alpha}")
    if minimum * clients > len(labels):
        raise ConfigError(f"dirichlet: {len(labels)} samples cannot give {clients} clients {minimum} each")
    for _ in range(_TRIES):
        parts: list[list[Indices]] = [[] for _ in range(clients)]
        for label in np.unique(labels):
            members = rng.permutation(np.flatnonzero(labels == label))
            cuts = np.rint(np.cumsum(rng.dirichlet(np.full(clients, alpha)))[:-1] * len(members)).astype(int)
            for part, piece in zip(parts, np.split(members, cuts), strict=True):
                part.append(piece)
        joined = [rng.permutation(np.concatenate(part)) for part in parts]
        if min(map(len, joined)) >= minimum:
            return joined
    raise ConfigError(f"dirichlet: no draw in {_TRIES} gave each of {clients} clients {minimum} samples: raise alpha or lower minimum")


def shards(labels: Labels, clients: int, rng: np.random.Generator, *, per_client: int = 2) -> list[Indices]:
    """Label skew: samples sorted by label are cut into ``clients · per_client`` shards, and each client draws ``per_client`` of them."""
    if per_client < 1:
        raise ConfigError(f"shards: per_client must be at least 1, got {per_client}")
    _check(len(labels), clients * per_client)
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    pieces = np.array_split(order, clients * per_client)
    drawn = rng.permutation(clients * per_client).reshape(clients, per_client)
    return [rng.permutation(np.concatenate([pieces[shard] for shard in row])) for row in drawn]


def quantity(labels: Labels, clients: int, rng: np.random.Generator, *, ratio: float = 4.0) -> list[Indices]:
    """Quantity skew: sizes fall geometrically, the largest ``ratio`` times the smallest."""
    _check(len(labels), clients)
    if ratio < 1:
        raise ConfigError(f"quantity: ratio (largest to smallest client) must be at least 1, got {ratio}")
    weights = ratio ** (-np.arange(clients) / max(clients - 1, 1))
    cuts = np.rint(np.cumsum(weights / weights.sum())[:-1] * len(labels)).astype(int)
    return [piece.astype(np.int64) for piece in np.split(rng.permutation(len(labels)), cuts)]


def _check(samples: int, parts: int) -> None:
    if parts < 1:
        raise ConfigError(f"the number of clients must be at least 1, got {parts}")
    if parts > samples:
        raise ConfigError(f"{samples} samples cannot be divided into {parts} parts")
