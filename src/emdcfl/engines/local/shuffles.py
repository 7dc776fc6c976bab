"""The shuffles of many clients at once: the same draws as ``client.generator("shuffle")``, without a generator object for each.

Seeding a NumPy generator takes several times as long as one short permutation. Here the seeds of all clients are mixed in one go, as
``numpy.random.SeedSequence`` mixes them (its algorithm is part of NumPy's promise of stable streams), and one generator is
re-keyed for each client.

Imports numpy, client and keys only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from emdcfl.core.client import Client
from emdcfl.core.keys import keyed_int

Array = np.ndarray[Any, Any]
WORD = 0xFFFFFFFF


def philox_keys(seeds: Sequence[int]) -> Array:
    """Return the key that ``numpy.random.Philox(seed)`` takes from each 64-bit seed, as ``(n, 2)`` uint64.

    Examples
    --------
    >>> bool((philox_keys([7])[0] == np.random.Philox(7).state["state"]["key"]).all())
    True
    """
    u, wide = np.uint32, np.asarray(seeds, dtype=np.uint64)
    low, high = (wide & np.uint64(WORD)).astype(u), (wide >> np.uint64(32)).astype(u)
    constant = 0x43B0D7E5

    def hashed(x: Array, multiplier: int = 0x931E8875) -> Array:
        nonlocal constant
        x = x ^ u(constant)
        constant = constant * multiplier & WORD
        x = x * u(constant)
        mixed: Array = x ^ (x >> u(16))
        return mixed

    def merged(x: Array, y: Array) -> Array:
        words: Array = u(0xCA01F9DD) * x - u(0x4973F715) * y
        mixed: Array = words ^ (words >> u(16))
        return mixed

    with np.errstate(over="ignore"):
        pool = [hashed(word) for word in (low, high, np.zeros_like(low), np.zeros_like(low))]
        for source in range(4):
            for target in range(4):
                if source != target:
                    pool[target] = merged(pool[target], hashed(pool[source]))
        constant = 0x8B51F9DD
        words = [hashed(word, 0x58F38DED).astype(np.uint64) for word in pool]
    return np.stack([words[0] | words[1] << np.uint64(32), words[2] | words[3] << np.uint64(32)], 1)


def shuffles(clients: Sequence[Client], n: int, epochs: int) -> Array:
    """Return the shuffled train indices ``(clients, epochs, n)`` as ``local_sgd`` draws them in the clients' round."""
    orders = np.empty((len(clients), epochs, n), dtype=np.int64)
    philox = np.random.Philox(0)
    rng, fresh = np.random.Generator(philox), philox.state
    keys = philox_keys([keyed_int(c.seed, c.name, c.round, "shuffle") for c in clients])
    for row, key in enumerate(keys):
        fresh["state"]["key"] = key
        philox.state = fresh
        for epoch in range(epochs):
            orders[row, epoch] = rng.permutation(n)
    return orders
