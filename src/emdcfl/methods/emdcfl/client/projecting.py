"""How embeddings are projected, and noised where privacy noise is asked for, before they leave a client of EMD-CFL."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from emdcfl.core.client import Client
from emdcfl.core.keys import NodeSecret, digest
from emdcfl.methods.emdcfl.client.sampling import records
from emdcfl.methods.emdcfl.settings import CompareSettings
from emdcfl.privacy import noise
from emdcfl.privacy.exchange import pair_seed, seal
from emdcfl.transport import projection


def own_seed(client: Client) -> bytes:
    """Return the seed of the projection of a client's own row."""
    return projecting_secret(client).derive("projection", client.run, client.name)


def projecting_secret(client: Client) -> NodeSecret:
    """Return what a client's own projections are drawn from: the secret of the run, or in a simulation the node's."""
    return client.secret if client.session is None else client.session


def box_for(client: Client, partner: str, key: bytes, message: bytes) -> bytes:
    """Seal a message for a partner in this run."""
    return seal(client.secret, key, message, context=(client.run, client.name, partner), session=client.session)


def seed_of_pair(client: Client, partner: str, key: bytes, row: str, settings: CompareSettings) -> bytes:
    """Return the seed both sides derive: one per pair, or one per ordered pair where R is to be fresh in each direction."""
    first, second = sorted((client.name, partner))
    direction = row if settings.projection == "fresh" else ""
    return pair_seed(client.secret, key, context=(client.run, first, second, direction), session=client.session)


@lru_cache(maxsize=128)  # a simulated node answers for many clients, and drawing R costs more than applying it
def matrix(seed: bytes, d: int, p: int) -> Tensor:
    """Return the projection R of a seed."""
    return torch.from_numpy(projection(seed, d, p))


def released(
    client: Client, omega: Tensor, seed: bytes, p: int, whose: Sequence[bytes], projected: Tensor, settings: CompareSettings
) -> Tensor:
    """Return projected embeddings under ``omega`` as they leave: where privacy noise is asked for, at unit length with noise.

    Parameters
    ----------
    whose : sequence of bytes
        The records the embeddings belong to (``sampling.records``); only read where there is noise.
    """
    if not settings.noisy:
        return projected
    model = omega.detach().cpu().numpy().tobytes()
    query = digest(client.run, client.name, model, _network(client), repr(client.preprocess), client.precision, seed, p)
    return torch.from_numpy(noise.released(projected.cpu().numpy(), whose, sigma=settings.sigma, secret=client.secret, query=query))


def _network(client: Client) -> str:
    """Describe the function that ω belongs to, for the key of the noise.

    The layout and the recipe do so for every engine and version of torch alike; the module itself does not, since engines may rewrite its
    layers. The recipe is needed beside the layout: a server that sends the same ω for another network of the same layout would otherwise
    get the same noise on other vectors, and their difference without noise.
    """
    entries = [(e.name, e.shape, e.start, e.stop) for e in client.network.layout.entries]
    recipe: dict[str, Any] = getattr(client.network.factory, "as_dict", dict)()
    options = {name: value for name, value in recipe.get("options", {}).items() if name != "weights"}  # replaced by ω
    return json.dumps([entries, client.network.layout.embedding_width, recipe.get("name"), options], sort_keys=True, default=repr)


@dataclass(frozen=True)
class Side:
    """One side of a client's own problem: a sample of one of its splits, embedded by its own model."""

    client: Client
    omega: Tensor
    split: str
    index: Tensor
    z: Tensor
    settings: CompareSettings

    @property
    def widths(self) -> tuple[int, int]:
        """Width of the embedding and of its projection."""
        return self.z.shape[1], self.settings.width(self.z.shape[1])

    @property
    def labels(self) -> Tensor:
        """Labels of the sample, in host memory."""
        found: Tensor = getattr(self.client.site, self.split).y[self.index]
        return found

    @cached_property
    def _whose(self) -> list[bytes]:
        return records(self.client, self.split, self.index) if self.settings.noisy else []

    def projected(self, seed: bytes, p: int) -> Tensor:
        """Return the sample as it leaves, under the projection of a seed."""
        projected = self.z @ matrix(seed, self.z.shape[1], p).to(self.z.device)
        return released(self.client, self.omega, seed, p, self._whose, projected, self.settings).cpu()
