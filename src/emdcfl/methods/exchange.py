r"""The client side of EMD-CFL: what a client computes at home and what it lets out, projected.

Three tasks. ``reference`` answers for the client as *row*: its train sample under its own model, projected, with the reference
distance :math:`\tau_c` and its variance, and the seed of its projection (with class counts, see ``matching``) sealed for each partner.
``project`` answers for the client as *column*: its sample embedded by each partner's :math:`\omega` and projected with that
partner's :math:`R`. The server holds neither R
nor its seed. Whom a client cannot serve, because the partner's key or box is unusable, it names under ``refused``, and serves the others.
``deposit`` replaces ``project`` where the server may see raw samples (``exchange="server-samples"``).

Modes of projection:

============  ==========================================================================================================
``row``       one :math:`R_c` per row client, for its whole row and for :math:`\tau_c`; the noise of R cancels in W
``pair``      one R per pair, derived by both from their shared key; :math:`\tau` is computed under each of them
``fresh``     one R per ordered pair and a square R for :math:`\tau`, as the authors' public code does
``none``      no projection: the server embeds deposited samples itself, so there is nothing left to hide behind R
============  ==========================================================================================================

A column sample larger than the validation size m consists of several blocks of m. Its further blocks come from the client's train split
too: the partner's model has never seen either split, so for the partner both are fresh draws from the client's law.

With privacy noise (``epsilon`` in the settings) every projected vector is scaled to unit length and released with Gaussian noise
(``privacy.noise``). :math:`\tau_c` and its variance are computed from released vectors alone, so that they cost nothing more, and so that
train, validation and partner's sample are draws from laws smoothed alike: what the noise adds to W it adds to τ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from emdcfl.client import Client, Stages, staged_task, task
from emdcfl.errors import ClientError
from emdcfl.keys import digest
from emdcfl.methods.drawing import column, draw, records
from emdcfl.methods.matching import by_class, packed_counts, shown_to, unpacked_counts, within_classes
from emdcfl.privacy import noise
from emdcfl.privacy.exchange import KEY, open_sealed, pair_seed, seal
from emdcfl.schema import Field, Reply
from emdcfl.tasks import Embed
from emdcfl.transport import cost_matrix, dual_variance, projected_width, projection, solve

ROW = "*"
"""Key under which a row client files what is the same for all its partners."""

ROWS_AT_ONCE = 64
"""Partners' models under which a column client embeds before it projects: bounds what is held unprojected."""

REFERENCE = {
    "samples": Field(torch.float32, (None, "p"), each=True),
    "labels": Field(torch.int64, (None,), low=0, optional=True),
    "tau": Field(torch.float64, ("sizes",), low=-1e-6, each=True),
    "variance": Field(torch.float64, ("sizes",), low=0.0, each=True),
    "within": Field(torch.float64, ("sizes",), low=0.0, each=True, optional=True),
    "boxes": Field(bytes, each=True),
    "refused": Field(str, each=True),
}


@staged_task(phase="embed", returns=REFERENCE)
def reference(
    client: Client,
    *,
    omega: Tensor,
    partners: Mapping[str, bytes],
    sizes: list[int],
    settings: Mapping[str, Any],
    again: bool = False,
) -> Stages:
    r"""Return :math:`Z_{c|c}R` (train sample), and :math:`\tau_c` with the variance of its dual potential for each validation size.

    Parameters
    ----------
    omega : tensor
        The client's own embedding model.
    partners : mapping
        Partner → public key, relayed by the server.
    sizes : list of int
        Numbers of validation samples at which τ is wanted; those above what the client has are answered at what it has.
    settings : mapping
        ``projection, ratio, cap, cost, label_weight, solver, reg, mode, match, epsilon, delta``.
    again : bool
        The server has this client's sample and τ already; it asks only for what new partners need.
    """
    _refuse_uncovered(client, settings)
    reply: Reply = {"samples": {}, "tau": {}, "variance": {}, "boxes": {}, "refused": {}}
    if settings["projection"] == "row":
        message = _own_seed(client) + (packed_counts(client, sizes) if settings["match"] else b"")
        reply["boxes"], reply["refused"] = _where_possible(partners, lambda name: _sealed(client, name, partners[name], message))
    if again:
        return reply
    chosen = client.sample("train", settings["cap"])
    held_out = draw(client, "val", max(sizes))
    found = yield [Embed(omega, "train", chosen, settings["mode"]), Embed(omega, "val", held_out, settings["mode"])]
    z, v = (embedded["z"] for embedded in found)
    labels = client.split("train").y[chosen].cpu(), client.split("val").y[held_out].cpu()
    d, p = z.shape[1], projected_width(settings["ratio"], z.shape[1])
    if settings["cost"] == "label-aware":
        reply["labels"] = labels[0]

    noisy = settings["epsilon"] is not None
    whose = [records(client, name, index) if noisy else [] for name, index in (("train", chosen), ("val", held_out))]

    def own(seed: bytes, p: int) -> Tensor:
        return _hidden(client, omega, seed, p, whose[0], z, settings).cpu()

    def calibration(a: Tensor, seed: bytes, p: int) -> Calibrate:
        return Calibrate(a, _hidden(client, omega, seed, p, whose[1], v, settings).cpu(), labels, sizes, settings)

    wanted: dict[str, Calibrate] = {}
    if settings["projection"] == "none":
        reply["samples"][ROW] = z.cpu()
        wanted[ROW] = Calibrate(z.cpu(), v.cpu(), labels, sizes, settings)
    elif settings["projection"] == "row":
        reply["samples"][ROW] = own(_own_seed(client), p)
        wanted[ROW] = calibration(reply["samples"][ROW], _own_seed(client), p)
    else:
        if settings["projection"] == "fresh":
            square = client.secret.derive("square projection", client.run, client.name)
            wanted[ROW] = calibration(own(square, d), square, d)
        seeds, reply["refused"] = _where_possible(partners, lambda name: _pair(client, name, partners[name], client.name, settings))
        for name, seed in seeds.items():
            reply["samples"][name] = own(seed, p)
            if settings["projection"] == "pair":
                wanted[name] = calibration(reply["samples"][name], seed, p)
    for name, found_here in zip(wanted, (yield list(wanted.values())), strict=True):
        reply["tau"][name], reply["variance"][name] = found_here["tau"], found_here["variance"]
        if settings["match"]:
            reply.setdefault("within", {})[name] = found_here["within"]
    return reply


PROJECTED = {
    "samples": Field(torch.float32, (None, "p"), each=True),
    "labels": Field(torch.int64, (None,), low=0, optional=True),
    "matched": Field(int, low=0, each=True, optional=True),
    "refused": Field(str, each=True),
}


@staged_task(phase="embed", returns=PROJECTED)
def project(
    client: Client,
    *,
    rows: list[str],
    boxes: Mapping[str, bytes],
    size: int,
    held_out: bool,
    omegas: Mapping[str, Tensor],
    keys: Mapping[str, bytes],
    settings: Mapping[str, Any],
    matching: Mapping[str, Any] | None = None,
) -> Stages:
    r"""Return :math:`Z_{c|c'}R_{c'}` for each row client c': the client's sample embedded by the partner's model, projected.

    Parameters
    ----------
    size : int
        Samples wanted.
    held_out : bool
        Take them from the validation split alone, or from both splits.
    matching : mapping, optional
        Instead: samples with each row's class counts. ``sizes`` that its box has counts for, and per row the size ``m`` and the most
        ``blocks`` of it. ``matched`` in the reply says how many there are; 0 where classes are short and the sample is a plain one.
    """
    _refuse_uncovered(client, settings)
    chosen = column(client, size, held_out=held_out)
    reply: Reply = {"samples": {}}
    if settings["cost"] == "label-aware":
        reply["labels"] = chosen.labels(client)
    whose = chosen.records(client) if settings["epsilon"] is not None else []
    seeds, reply["refused"] = _where_possible(rows, lambda row: _seed_of(client, row, keys[row], boxes, settings, matching))
    shown = dict.fromkeys(seeds, chosen)
    if matching is not None:
        pools = by_class(client)
        drawn = {row: shown_to(client, row, message[KEY:], matching, pools) for row, message in seeds.items()}
        shown = {row: sample for row, (sample, _) in drawn.items()}
        reply["matched"] = {row: blocks for row, (_, blocks) in drawn.items()}
    for start in range(0, len(seeds), ROWS_AT_ONCE):
        some = list(seeds)[start : start + ROWS_AT_ONCE]
        found = iter((yield [work for row in some for work in shown[row].works(omegas[row], settings["mode"])]))
        hidden = []
        for row in some:
            z = shown[row].joined([next(found)["z"] for _ in shown[row].parts()])
            p = projected_width(settings["ratio"], z.shape[1])
            hidden.append(_hidden(client, omegas[row], seeds[row][:KEY], p, whose, z, settings))
        if hidden and hidden[0].device.type != "cpu":  # one copy for all of them
            hidden = list(torch.cat(hidden).cpu().split([len(sample) for sample in hidden]))
        reply["samples"] |= zip(some, hidden, strict=True)
    return reply


def _where_possible(names: Iterable[str], make: Callable[[str], bytes]) -> tuple[dict[str, bytes], dict[str, str]]:
    """Make something for every partner; for those whose key or box is unusable say why, so that it does not cost the others theirs."""
    made: dict[str, bytes] = {}
    refused: dict[str, str] = {}
    for name in names:
        try:
            made[name] = make(name)
        except ClientError as error:
            refused[name] = str(error)
    return made, refused


def _seed_of(
    client: Client, row: str, key: bytes, boxes: Mapping[str, bytes], settings: Mapping[str, Any], matching: Mapping[str, Any] | None
) -> bytes:
    """The seed of the projection that belongs to a row, with its class counts: from the box it sealed, or (the seed) derived by both."""
    if settings["projection"] == "row":
        message = open_sealed(client.secret, key, boxes[row], context=(client.run, row, client.name))
        if matching is not None:
            unpacked_counts(message[KEY:], len(matching["sizes"]))  # unusable counts are the row client's failure, as an unusable box is
        return message
    return _pair(client, row, key, row, settings)


DEPOSITED = {
    "inputs": Field(torch.float32, (None, None)),
    "shape": Field(torch.int64, (None,), low=1),
    "labels": Field(torch.int64, (None,), low=0, optional=True),
}


@task(phase="embed", returns=DEPOSITED)
def deposit(client: Client, *, size: int, held_out: bool, settings: Mapping[str, Any]) -> Reply:
    """Return the client's raw sample as the network would see it, flattened, for the server to embed under every model."""
    _refuse_uncovered(client, settings)
    x, y = column(client, size, held_out=held_out).raw(client)
    reply: Reply = {"inputs": x.flatten(1), "shape": torch.tensor(x.shape[1:])}
    if settings["cost"] == "label-aware":
        reply["labels"] = y
    return reply


def _own_seed(client: Client) -> bytes:
    return client.secret.derive("projection", client.run, client.name)


def _sealed(client: Client, partner: str, key: bytes, message: bytes) -> bytes:
    return seal(client.secret, key, message, context=(client.run, client.name, partner))


@lru_cache(maxsize=64)  # a simulated node answers for many clients, and drawing R costs more than applying it
def _matrix(seed: bytes, d: int, p: int, device: torch.device) -> Tensor:
    return torch.from_numpy(projection(seed, d, p)).to(device)


def _hidden(client: Client, omega: Tensor, seed: bytes, p: int, whose: Sequence[bytes], z: Tensor, settings: Mapping[str, Any]) -> Tensor:
    """Project embeddings; where privacy noise is asked for, release them at unit length with noise."""
    projected = z @ _matrix(seed, z.shape[1], p, z.device)
    if settings["epsilon"] is None:
        return projected
    model, input_ = omega.detach().cpu().numpy().tobytes(), repr(client.preprocess)
    query = digest(client.run, client.name, model, repr(client.network.module), input_, client.precision, seed, p)
    sigma = _sigma(settings["epsilon"], settings["delta"])
    return torch.from_numpy(noise.released(projected.cpu().numpy(), whose, sigma=sigma, secret=client.secret, query=query))


def _refuse_uncovered(client: Client, settings: Mapping[str, Any]) -> None:
    """Whatever a server asks for: nothing beside the noise that it does not cover, and no less noise than the node's operator wants."""
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


@lru_cache(maxsize=16)  # one search per run, not one per matrix
def _sigma(epsilon: float, delta: float) -> float:
    return noise.gaussian_sigma(epsilon, delta)


def _pair(client: Client, partner: str, key: bytes, row: str, settings: Mapping[str, Any]) -> bytes:
    """The seed both sides derive: one per pair, or one per ordered pair where R is to be fresh in each direction."""
    first, second = sorted((client.name, partner))
    direction = row if settings["projection"] == "fresh" else ""
    return pair_seed(client.secret, key, context=(client.run, first, second, direction))


@dataclass(frozen=True)
class Calibrate:
    """A piece of work: τ and the variance of its dual potential, at each validation size. Needs neither network nor data."""

    z: Tensor
    v: Tensor
    labels: tuple[Tensor, Tensor]
    sizes: list[int]
    settings: Mapping[str, Any]

    threads: ClassVar[bool] = True

    def __call__(self, client: Client) -> Reply:
        options, (labels_a, labels_b) = self.settings, self.labels
        taus, variances, within = [], [], []
        for size in self.sizes:
            weight = options["label_weight"]
            cost = cost_matrix(
                self.z, self.v[:size], cost=options["cost"], labels_a=labels_a, labels_b=labels_b[:size], label_weight=weight
            )
            plan = solve(cost, solver=options["solver"], reg=options["reg"], duals=True)
            taus.append(plan.value)
            variances.append(dual_variance(plan.g) if cost.shape[1] > 1 else 0.0)
            within.append(within_classes(plan.g, labels_b[:size]))
        found = {"tau": taus, "variance": variances, "within": within}
        return {name: torch.tensor(values, dtype=torch.float64) for name, values in found.items()}
