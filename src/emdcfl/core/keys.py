"""Keyed randomness: every random draw has a key, and none depends on earlier draws.

A generator is derived from (seed, client name, round, purpose) by SHA-256, so the draws of one client do not depend on the number, order
or placement of the others. What protects a client (its projection, its keys, privacy noise) is drawn from a *node secret* instead, because
the server knows the run's seed.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def digest(*parts: object) -> bytes:
    """SHA-256 over the parts, each length-prefixed so that ("a", "bc") and ("ab", "c") differ."""
    h = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        h.update(len(data).to_bytes(8, "big") + data)
    return h.digest()


def keyed_int(*parts: object) -> int:
    """A 63-bit integer from the key."""
    return int.from_bytes(digest(*parts)[:8], "big") >> 1


def generator(seed: int, client: str, round: int, purpose: str) -> np.random.Generator:
    """Return a counter-based (Philox) generator for one purpose of one client in one round."""
    return np.random.Generator(np.random.Philox(keyed_int(seed, client, round, purpose)))


@contextmanager
def global_seed(seed: int) -> Iterator[None]:
    """Seed torch's global generators for a block (initialisation, dropout) and restore them afterwards.

    Those of all GPUs: an engine may compute on another one than the current.
    """
    on_gpus = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=range(len(on_gpus)), device_type="cuda"):
        # torch.manual_seed also records a stack trace for every unused kind of device, at thirty times the cost
        for own in (torch.default_generator, *on_gpus):
            own.manual_seed(seed)
        yield


class NodeSecret:
    """32 bytes only the node knows; protective randomness is derived from it with HMAC-SHA-256.

    A real node draws it from the operating system once and keeps it; only a simulation derives it from the run's seed.
    """

    def __init__(self, secret: bytes, *, is_simulated: bool = False) -> None:
        if len(secret) != 32:
            raise ValueError(f"a node secret has 32 bytes, got {len(secret)}")
        self._secret, self.is_simulated = secret, is_simulated

    @classmethod
    def simulated(cls, seed: int, client: str) -> NodeSecret:
        """Derive a secret from the run's seed. For simulation only: anyone who knows the seed knows the secret."""
        return cls(digest("simulated node secret", seed, client), is_simulated=True)

    def derive(self, *parts: object) -> bytes:
        """32 bytes for one purpose."""
        return hmac.new(self._secret, digest(*parts), hashlib.sha256).digest()

    def __repr__(self) -> str:
        return "NodeSecret(…)"
