r"""The client side of EMD-CFL: what a client computes locally and what it sends, projected.

``reference`` answers for the client as *row*: its train sample under its own model, projected; the reference distance :math:`\tau_c` with
its variance; and the seed of its projection, sealed for each partner. ``project`` answers for the client as *column*: its sample embedded
by each partner's :math:`\omega` and projected with that partner's :math:`R`. The server holds neither R nor its seed. A client names the
partners whose key or box it cannot use under ``refused``. ``recalibrate`` computes :math:`\tau_c` again at the class counts in common with
partners who are short of some class (see ``sampling``). ``deposit`` replaces ``project`` where the server may see raw samples.

Which R (``CompareSettings.projection_scope``):

============  ==========================================================================================================
``row``       one :math:`R_c` per row client, for its whole row and for :math:`\tau_c`; the noise of R cancels in W
``pair``      one R per pair, derived by both from their shared key; :math:`\tau` is computed under each of them
``paper``     one R per pair, as with ``pair``; :math:`\tau` is computed without a projection, and only its value is sent
``fresh``     one R per ordered pair and a square R for :math:`\tau`, as the authors' public code does
``none``      no projection: the server embeds deposited samples itself
============  ==========================================================================================================

A column sample larger than the validation size m consists of several blocks of m, the further ones from the client's train split too: the
partner's model has seen neither split. With privacy noise, vectors are released at unit length with Gaussian noise (``privacy.noise``), and
:math:`\tau_c` and its variance are computed from released vectors alone.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from emdcfl.core.client import Client, Divisible, Stages, Work, staged_task, task
from emdcfl.core.errors import MAX_MESSAGE, ClientError
from emdcfl.core.keys import digest
from emdcfl.core.replies import brief
from emdcfl.core.schema import Field, Reply
from emdcfl.core.tasks import Embed
from emdcfl.methods.emdcfl.client.projecting import Side, box_for, matrix, own_seed, projecting_secret, released, seed_of_pair
from emdcfl.methods.emdcfl.client.sampling import (
    MIN_COMMON,
    Matching,
    all_labels,
    column,
    common_counts,
    counts_of,
    draw,
    offered,
    packed_counts,
    pools,
    records,
    shown_to,
)
from emdcfl.methods.emdcfl.settings import CompareSettings, accepted
from emdcfl.methods.emdcfl.tolerance import Calibrate
from emdcfl.privacy.exchange import KEY, open_sealed, seal

ROW = "*"
"""Key under which a row client sends what is the same for all its partners."""

DISTRUSTED = "not trusted here: "
"""Begins the reason for refusing a partner whose key is not the one on this node's own list."""

ROWS_AT_ONCE = 64
"""Partners' models under which a column client embeds at once: bounds how many projections are held."""

REFERENCE = {
    "samples": Field(torch.float32, (None, "p"), each=True, blamed=False),
    "labels": Field(torch.int64, (None,), low=0, optional=True),
    "tau": Field(torch.float64, ("sizes",), low=-1e-6, each=True, blamed=False),
    "variance": Field(torch.float64, ("sizes",), low=0.0, each=True, blamed=False),
    "within": Field(torch.float64, ("sizes",), low=0.0, each=True, optional=True, blamed=False),
    "freedom": Field(torch.int64, ("sizes",), low=0, each=True, optional=True),
    "boxes": Field(bytes, each=True),
    "refused": Field(str, high=MAX_MESSAGE, each=True),
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
        ``CompareSettings`` as a dict.
    again : bool
        The server has this client's sample and τ already; it asks only for what new partners need.
    """
    use = accepted(client, settings)
    reply: Reply = {"samples": {}, "tau": {}, "variance": {}, "boxes": {}, "refused": {}}
    if use.projection_scope == "row":
        message = own_seed(client) + (packed_counts(client, sizes) if use.match_classes else b"")
        reply["boxes"], reply["refused"] = _where_possible(client, partners, lambda name: box_for(client, name, partners[name], message))
    if again:
        return reply
    train, val = yield from _embedded(client, omega, sizes, use)
    if use.labelled:
        reply["labels"] = train.labels
    reply["samples"], compared, unusable = _sides(train, val, partners)
    reply["refused"] |= unusable
    wanted = {name: Calibrate(a, b, (train.labels, val.labels), sizes, use) for name, (a, b) in compared.items()}
    for name, found_here in zip(wanted, (yield list(wanted.values())), strict=True):
        reply["tau"][name], reply["variance"][name] = found_here["tau"], found_here["variance"]
        if use.match_classes:
            for field in ("within", "freedom"):
                reply.setdefault(field, {})[name] = found_here[field]
    return reply


def _embedded(
    client: Client, omega: Tensor, sizes: Sequence[int], use: CompareSettings
) -> Generator[list[Work], list[Reply], tuple[Side, Side]]:
    """Embed the client's train and validation sample by its own model, or refuse a model that looks made to show the projection."""
    index = {"train": client.sample("train", use.max_samples), "val": draw(client, "val", max(sizes))}
    found = yield [Embed(omega, split, chosen, use.embedding_mode) for split, chosen in index.items()]
    for embedded in found:
        if "suspicious" in embedded:
            raise ClientError(embedded["suspicious"])
    train, val = (Side(client, omega, split, index[split], z["z"], use) for split, z in zip(index, found, strict=True))
    return train, val


def _sides(
    train: Side, val: Side, partners: Mapping[str, bytes]
) -> tuple[dict[str, Tensor], dict[str, tuple[Tensor, Tensor]], dict[str, str]]:
    """Return the samples to send, the two sides of each τ (of what is sent, wherever R is the same), and whose keys are unusable."""
    client, settings, (d, p) = train.client, train.settings, train.widths
    if settings.projection_scope == "none":
        return {ROW: train.z.cpu()}, {ROW: (train.z.cpu(), val.z.cpu())}, {}
    if settings.projection_scope == "row":
        seed = own_seed(client)
        sent = train.projected(seed, p)
        return {ROW: sent}, {ROW: (sent, val.projected(seed, p))}, {}
    seeds, unusable = _where_possible(client, partners, lambda name: seed_of_pair(client, name, partners[name], client.name, settings))
    samples = {name: train.projected(seed, p) for name, seed in seeds.items()}
    if settings.projection_scope == "pair":
        return samples, {name: (samples[name], val.projected(seed, p)) for name, seed in seeds.items()}, unusable
    if settings.projection_scope == "paper":
        return samples, {ROW: (train.z.cpu(), val.z.cpu())}, unusable
    square = projecting_secret(client).derive("square projection", client.run, client.name)
    return samples, {ROW: (train.projected(square, d), val.projected(square, d))}, unusable


RECALIBRATED = {
    "size": Field(int, low=MIN_COMMON, each=True),
    "tau": Field(float, low=-1e-6, each=True, blamed=False),
    "variance": Field(float, low=0.0, each=True, blamed=False),
    "within": Field(float, low=0.0, each=True, blamed=False),
    "freedom": Field(int, low=0, each=True),
    "refused": Field(str, high=MAX_MESSAGE, each=True),
}


@staged_task(phase="embed", returns=RECALIBRATED, relayed_keys=("keys",))
def recalibrate(
    client: Client,
    *,
    omega: Tensor,
    sizes: list[int],
    m: Mapping[str, int],
    offers: Mapping[str, bytes],
    keys: Mapping[str, bytes],
    settings: Mapping[str, Any],
) -> Stages:
    r"""Return :math:`\tau_c` and its variances at the class counts that partners offer, and how many samples these are.

    Parameters
    ----------
    omega, sizes, settings
        As for ``reference``.
    m : mapping
        Partner → number of validation samples at which the two are compared.
    offers, keys : mapping
        Partner → counts in common, sealed by it, and its public key.
    """
    use = accepted(client, settings, matching=True)
    train, val = yield from _embedded(client, omega, sizes, use)
    kept: dict[str, Tensor] = {}

    def taken(partner: str) -> bytes:
        context = (client.run, partner, client.name, "offer")
        message = open_sealed(client.secret, keys[partner], offers[partner], context=context, session=client.session)
        kept[partner] = offered(message, val.labels[: m[partner]].numpy())
        return message

    _, refused = _where_possible(client, offers, taken)
    a, b = _sides(train, val, {})[1][ROW]
    found = yield [Calibrate(a, b[index], (train.labels, val.labels[index]), [len(index)], use) for index in kept.values()]
    of = {name: dict(zip(kept, (one[name][0].item() for one in found), strict=True)) for name in ("tau", "variance", "within", "freedom")}
    return {**of, "size": {partner: len(index) for partner, index in kept.items()}, "refused": refused}


PROJECTED = {
    "samples": Field(torch.float32, (None, "p"), each=True, finite=False),
    "labels": Field(torch.int64, (None,), low=0, optional=True),
    "matched": Field(int, low=0, each=True, optional=True),
    "offers": Field(bytes, each=True, optional=True),
    "refused": Field(str, high=MAX_MESSAGE, each=True),
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
    matching: Matching | None = None,
) -> Stages:
    r"""Return :math:`Z_{c|c'}R_{c'}` for each row client c': the client's sample embedded by the partner's model, projected.

    Parameters
    ----------
    size : int
        Samples wanted.
    held_out : bool
        Take them from the validation split alone, or from both splits.
    matching : Matching, optional
        Draw samples with each row's class counts instead. ``matched`` in the reply says how many blocks there are; 0 where classes
        are short: there is no sample then, but the counts in common under ``offers``, sealed, or nothing where these are too few.
    """
    use = accepted(client, settings, matching=matching is not None)
    counts: dict[str, Any] = {}

    def opened(row: str) -> bytes:
        message = _message_of(client, row, keys[row], boxes, use)
        if matching is not None:  # unusable counts are the row client's failure, as an unusable box is
            counts[row] = counts_of(row, message[KEY:], matching)
        return message[:KEY]

    seeds, refused = _where_possible(client, rows, opened)
    reply: Reply = {"samples": {}, "refused": refused}
    whose: list[bytes] = []
    if matching is not None:
        shown, said = _matched(client, counts, keys, matching)
        reply |= said
    else:
        chosen = column(client, size, held_out=held_out)
        shown = dict.fromkeys(seeds, chosen)
        whose = records(client, "all", chosen) if use.noisy else []
        if use.labelled:
            reply["labels"] = all_labels(client)[chosen]
    d = client.network.layout.embedding_width
    p = use.width(d)
    for start in range(0, len(shown), ROWS_AT_ONCE):
        some = {row: seeds[row] for row in list(shown)[start : start + ROWS_AT_ONCE]}
        found = yield [Embed(omegas[row], "all", shown[row], use.embedding_mode, matrix(seed, d, p)) for row, seed in some.items()]
        for (row, seed), projected in zip(some.items(), found, strict=True):
            if "suspicious" in projected:
                reply["refused"][row] = projected["suspicious"]
                reply.get("matched", {}).pop(row, None)
                continue
            reply["samples"][row] = released(client, omegas[row], seed, p, whose, projected["z"], use)
    return reply


def _matched(
    client: Client, counts: Mapping[str, Any], keys: Mapping[str, bytes], matching: Matching
) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Return the sample with the class counts of each row that there is one for, and ``matched`` and ``offers`` of the reply."""
    own = pools(client)
    shown: dict[str, Tensor] = {}
    blocks: dict[str, int] = {}
    offers: dict[str, bytes] = {}
    for row, wanted in counts.items():
        if found := shown_to(row, wanted, matching, own):
            shown[row], blocks[row] = found
        else:
            blocks[row], offers[row] = 0, _offer(client, row, keys[row], common_counts(wanted, own))
    return shown, {"matched": blocks, "offers": offers}


def _offer(client: Client, row: str, key: bytes, counts: Any) -> bytes:
    """Seal the class counts in common, four bytes each, for a row client; nothing where they are too few to compare."""
    if counts.sum() < MIN_COMMON:
        return b""
    return seal(client.secret, key, counts.astype("<u4").tobytes(), context=(client.run, client.name, row, "offer"), session=client.session)


def _where_possible(client: Client, names: Iterable[str], make: Callable[[str], bytes]) -> tuple[dict[str, bytes], dict[str, str]]:
    """Make something for every partner; say why for those whose key or box is unusable or not trusted, and serve the others."""
    made: dict[str, bytes] = {}
    refused: dict[str, str] = {}
    for name in names:
        if name in client.distrusted:
            refused[name] = brief(DISTRUSTED + client.distrusted[name], MAX_MESSAGE)
            continue
        try:
            made[name] = make(name)
        except ClientError as error:
            refused[name] = str(error)
    return made, refused


def _message_of(client: Client, row: str, key: bytes, boxes: Mapping[str, bytes], settings: CompareSettings) -> bytes:
    """Return the seed of a row's projection, and what came with it: from the box it sealed, or (the seed) derived by both."""
    if settings.projection_scope != "row":
        return seed_of_pair(client, row, key, row, settings)
    message = open_sealed(client.secret, key, boxes[row], context=(client.run, row, client.name), session=client.session)
    whose, found = digest(row, key).hex(), digest(message[:KEY]).hex()
    if client.projections is not None and client.projections.setdefault(whose, found) != found:
        # each further seed would draw the noise of the same embeddings anew, uncounted; under another key of the run it is counted
        raise ClientError(f"client {row!r} has one projection in a run, and its box holds another than before")
    return message


DEPOSITED = {
    "inputs": Field(torch.float32, (None, None)),
    "shape": Field(torch.int64, (None,), low=1),
    "labels": Field(torch.int64, (None,), low=0, optional=True),
}


@task(phase="embed", returns=DEPOSITED)
def deposit(client: Client, *, size: int, held_out: bool, settings: Mapping[str, Any]) -> Reply:
    """Return the client's raw sample as the network would see it, flattened, for the server to embed under every model."""
    use = accepted(client, settings)
    if use.exchange != "server-samples":
        raise ClientError(f"expected a request for raw samples only with exchange = 'server-samples', got {use.exchange!r}")
    chosen = column(client, size, held_out=held_out)
    x = client.preprocess(client.rows("all", chosen)).float().cpu()
    reply: Reply = {"inputs": x.flatten(1), "shape": torch.tensor(x.shape[1:])}
    if use.labelled:
        reply["labels"] = all_labels(client)[chosen]
    return reply
