r"""The client side of EMD-CFL: what a client computes at home and what it lets out, projected.

Three tasks. ``reference`` answers for the client as *row*: its train sample under its own model, projected, with the reference
distance :math:`\tau_c` and its variance, and the seed of its projection (with class counts, see ``matching``) sealed for each partner.
``project`` answers for the client as *column*: its sample embedded by each partner's :math:`\omega` and projected with that partner's
:math:`R`. The server holds neither R nor its seed. Whom a client cannot serve, because the partner's key or box is unusable, it names under
``refused``, and serves the others.
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

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from emdcfl.core.client import Client, Divisible, Stages, staged_task, task
from emdcfl.core.errors import ClientError
from emdcfl.core.schema import Field, Reply
from emdcfl.core.tasks import Embed
from emdcfl.methods.emdcfl.matching import counts_of, packed_counts, pools, shown_to, within_classes
from emdcfl.methods.emdcfl.projecting import Side, matrix, own_seed, refuse_uncovered, released, sealed, seed_of_pair
from emdcfl.methods.emdcfl.sampling import all_labels, column, draw, records
from emdcfl.privacy.exchange import KEY, open_sealed
from emdcfl.transport import cost_matrix, dual_variance, exact, projected_width, solve

ROW = "*"
"""Key under which a row client files what is the same for all its partners."""

ROWS_AT_ONCE = 64
"""Partners' models under which a column client embeds in one go: bounds how many projections are held."""

REFERENCE = {
    "samples": Field(torch.float32, (None, "p"), each=True),
    "labels": Field(torch.int64, (None,), low=0, optional=True),
    "tau": Field(torch.float64, ("sizes",), low=-1e-6, each=True),
    "variance": Field(torch.float64, ("sizes",), low=0.0, each=True),
    "within": Field(torch.float64, ("sizes",), low=0.0, each=True, optional=True),
    "boxes": Field(bytes, each=True),
    "refused": Field(str, each=True),
}


@staged_task(phase="embed", returns=REFERENCE, relayed_keys=("partners",))
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
    refuse_uncovered(client, settings)
    reply: Reply = {"samples": {}, "tau": {}, "variance": {}, "boxes": {}, "refused": {}}
    if settings["projection"] == "row":
        message = own_seed(client) + (packed_counts(client, sizes) if settings["match"] else b"")
        reply["boxes"], reply["refused"] = _where_possible(partners, lambda name: sealed(client, name, partners[name], message))
    if again:
        return reply
    chosen = client.sample("train", settings["cap"])
    held_out = draw(client, "val", max(sizes))
    found = yield [Embed(omega, "train", chosen, settings["mode"]), Embed(omega, "val", held_out, settings["mode"])]
    z, v = (embedded["z"] for embedded in found)
    labels = client.site.train.y[chosen], client.site.val.y[held_out]
    if settings["cost"] == "label-aware":
        reply["labels"] = labels[0]
    own, fresh = Side(client, omega, "train", chosen, z, settings), Side(client, omega, "val", held_out, v, settings)
    reply["samples"], compared, unusable = _sides(own, fresh, partners)
    reply["refused"] |= unusable
    wanted = {name: Calibrate(a, b, labels, sizes, settings) for name, (a, b) in compared.items()}
    for name, found_here in zip(wanted, (yield list(wanted.values())), strict=True):
        reply["tau"][name], reply["variance"][name] = found_here["tau"], found_here["variance"]
        if settings["match"]:
            reply.setdefault("within", {})[name] = found_here["within"]
    return reply


def _sides(
    train: Side, val: Side, partners: Mapping[str, bytes]
) -> tuple[dict[str, Tensor], dict[str, tuple[Tensor, Tensor]], dict[str, str]]:
    """Return the samples to send, the two sides of each τ (of what is sent, wherever R is the same), and whose keys are unusable."""
    client, settings, (d, p) = train.client, train.settings, train.widths
    if settings["projection"] == "none":
        return {ROW: train.z.cpu()}, {ROW: (train.z.cpu(), val.z.cpu())}, {}
    if settings["projection"] == "row":
        seed = own_seed(client)
        sent = train.hidden(seed, p)
        return {ROW: sent}, {ROW: (sent, val.hidden(seed, p))}, {}
    seeds, unusable = _where_possible(partners, lambda name: seed_of_pair(client, name, partners[name], client.name, settings))
    samples = {name: train.hidden(seed, p) for name, seed in seeds.items()}
    if settings["projection"] == "pair":
        return samples, {name: (samples[name], val.hidden(seed, p)) for name, seed in seeds.items()}, unusable
    square = client.secret.derive("square projection", client.run, client.name)
    return samples, {ROW: (train.hidden(square, d), val.hidden(square, d))}, unusable


PROJECTED = {
    "samples": Field(torch.float32, (None, "p"), each=True),
    "labels": Field(torch.int64, (None,), low=0, optional=True),
    "matched": Field(int, low=0, each=True, optional=True),
    "refused": Field(str, each=True),
}


@staged_task(phase="embed", returns=PROJECTED, divisible=Divisible("rows", ("omegas", "boxes", "keys")), relayed_keys=("keys",))
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
    refuse_uncovered(client, {**settings, "match": settings["match"] or matching is not None})
    reply: Reply = {"samples": {}}
    counts: dict[str, Any] = {}

    def opened(row: str) -> bytes:
        message = _message_of(client, row, keys[row], boxes, settings)
        if matching is not None:  # unusable counts are the row client's failure, as an unusable box is
            counts[row] = counts_of(row, message[KEY:], matching)
        return message[:KEY]

    seeds, reply["refused"] = _where_possible(rows, opened)
    whose: list[bytes] = []
    if matching is not None:
        own = pools(client)
        drawn = {row: shown_to(client, row, counts[row], matching, own) for row in seeds}
        shown = {row: sample for row, (sample, _) in drawn.items()}
        reply["matched"] = {row: blocks for row, (_, blocks) in drawn.items()}
    else:
        chosen = column(client, size, held_out=held_out)
        shown = dict.fromkeys(seeds, chosen)
        whose = records(client, "all", chosen) if settings["epsilon"] is not None else []
        if settings["cost"] == "label-aware":
            reply["labels"] = all_labels(client)[chosen]
    d = client.network.layout.embedding_width
    p, mode = projected_width(settings["ratio"], d), settings["mode"]
    for start in range(0, len(seeds), ROWS_AT_ONCE):
        some = dict(list(seeds.items())[start : start + ROWS_AT_ONCE])
        found = yield [Embed(omegas[row], "all", shown[row], mode, matrix(seed, d, p)) for row, seed in some.items()]
        for (row, seed), projected in zip(some.items(), found, strict=True):
            reply["samples"][row] = released(client, omegas[row], seed, p, whose, projected["z"], settings)
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


def _message_of(client: Client, row: str, key: bytes, boxes: Mapping[str, bytes], settings: Mapping[str, Any]) -> bytes:
    """The seed of the projection that belongs to a row, and what came with it: from the box it sealed, or (the seed) derived by both."""
    if settings["projection"] == "row":
        return open_sealed(client.secret, key, boxes[row], context=(client.run, row, client.name))
    return seed_of_pair(client, row, key, row, settings)


DEPOSITED = {
    "inputs": Field(torch.float32, (None, None)),
    "shape": Field(torch.int64, (None,), low=1),
    "labels": Field(torch.int64, (None,), low=0, optional=True),
}


@task(phase="embed", returns=DEPOSITED)
def deposit(client: Client, *, size: int, held_out: bool, settings: Mapping[str, Any]) -> Reply:
    """Return the client's raw sample as the network would see it, flattened, for the server to embed under every model."""
    refuse_uncovered(client, settings)
    chosen = column(client, size, held_out=held_out)
    x = client.preprocess(client.rows("all", chosen)).float().cpu()
    reply: Reply = {"inputs": x.flatten(1), "shape": torch.tensor(x.shape[1:])}
    if settings["cost"] == "label-aware":
        reply["labels"] = all_labels(client)[chosen]
    return reply


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
            plan = exact(cost, duals=True)  # for the variances whatever the solver: Sinkhorn's potentials vary too little
            taus.append(plan.value if options["solver"] == "exact" else solve(cost, solver="sinkhorn", reg=options["reg"]).value)
            variances.append(dual_variance(plan.g) if cost.shape[1] > 1 else 0.0)
            within.append(within_classes(plan.g, labels_b[:size]))
        found = {"tau": taus, "variance": variances, "within": within}
        return {name: torch.tensor(values, dtype=torch.float64) for name, values in found.items()}
