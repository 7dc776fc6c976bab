"""What hides embeddings before they leave a client of EMD-CFL: the projection, privacy noise, and the boxes that seeds travel in.

Imports client, drawing, privacy and transport.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from emdcfl.core.client import Client
from emdcfl.core.errors import ClientError
from emdcfl.core.keys import digest
from emdcfl.methods.emdcfl.sampling import records
from emdcfl.privacy import noise
from emdcfl.privacy.exchange import pair_seed, seal
from emdcfl.transport import projected_width, projection


def own_seed(client: Client) -> bytes:
    """Return the seed of the projection of a client's own row."""
    return client.secret.derive("projection", client.run, client.name)


def sealed(client: Client, partner: str, key: bytes, message: bytes) -> bytes:
    """Seal a message for a partner in this run."""
    return seal(client.secret, key, message, context=(client.run, client.name, partner))


def seed_of_pair(client: Client, partner: str, key: bytes, row: str, settings: Mapping[str, Any]) -> bytes:
    """Return the seed both sides derive: one per pair, or one per ordered pair where R is to be fresh in each direction."""
    first, second = sorted((client.name, partner))
    direction = row if settings["projection"] == "fresh" else ""
    return pair_seed(client.secret, key, context=(client.run, first, second, direction))


def released(
    client: Client, omega: Tensor, seed: bytes, p: int, whose: Sequence[bytes], projected: Tensor, settings: Mapping[str, Any]
) -> Tensor:
    """Return projected embeddings under ``omega`` as they leave: where privacy noise is asked for, at unit length with noise.

    Parameters
    ----------
    whose : sequence of bytes
        The records the embeddings belong to (``drawing.records``); only read where there is noise.
    """
    if settings["epsilon"] is None:
        return projected
    model, input_ = omega.detach().cpu().numpy().tobytes(), repr(client.preprocess)
    query = digest(client.run, client.name, model, repr(client.network.module), input_, client.precision, seed, p)
    sigma = _sigma(settings["epsilon"], settings["delta"])
    return torch.from_numpy(noise.released(projected.cpu().numpy(), whose, sigma=sigma, secret=client.secret, query=query))


@dataclass(frozen=True)
class Side:
    """One side of a client's own problem: a sample of one of its splits, embedded by its own model."""

    client: Client
    omega: Tensor
    split: str
    index: Tensor
    z: Tensor
    settings: Mapping[str, Any]

    @property
    def widths(self) -> tuple[int, int]:
        """Width of the embedding and of its projection."""
        return self.z.shape[1], projected_width(self.settings["ratio"], self.z.shape[1])

    @cached_property
    def _whose(self) -> list[bytes]:
        return records(self.client, self.split, self.index) if self.settings["epsilon"] is not None else []

    def hidden(self, seed: bytes, p: int) -> Tensor:
        projected = self.z @ matrix(seed, self.z.shape[1], p).to(self.z.device)
        return released(self.client, self.omega, seed, p, self._whose, projected, self.settings).cpu()


def refuse_uncovered(client: Client, settings: Mapping[str, Any]) -> None:
    """Refuse, whatever a server asks for, what noise does not cover beside it, and less noise than the node's operator wants."""
    epsilon, most = settings["epsilon"], client.most_epsilon
    for name, uncovered in (("cost", "label-aware"), ("mode", "train"), ("projection", "none"), ("match", True)):
        if epsilon is not None and settings[name] == uncovered:
            raise ClientError(f"expected a request that privacy noise covers, got {name} {settings[name]!r}; see docs/privacy.md")
    if most is not None and (epsilon is None or _sigma(epsilon, settings["delta"]) < _sigma(most, noise.DELTA)):
        asked = "none" if epsilon is None else f"({epsilon:g}, {settings['delta']:g})"
        raise ClientError(
            f"client {client.name!r} sends embeddings only with privacy noise of epsilon {most:g} or less (delta {noise.DELTA:g}), "
            f"got a request with {asked}; set privacy.epsilon"
        )


@lru_cache(maxsize=128)  # a simulated node answers for many clients, and drawing R costs more than applying it
def matrix(seed: bytes, d: int, p: int) -> Tensor:
    """The projection R of a seed."""
    return torch.from_numpy(projection(seed, d, p))


@lru_cache(maxsize=16)  # one search per run, not one per matrix
def _sigma(epsilon: float, delta: float) -> float:
    return noise.gaussian_sigma(epsilon, delta)
