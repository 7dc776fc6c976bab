"""What the server of EMD-CFL checks in a reply beyond its schema, and what it makes of clients that complain about each other.

A reply that fails a check is its sender's failure. A client that names a partner whose key or sealed box it cannot use is another matter:
the server cannot open a box, so it cannot tell a row client that seals rubbish from a column client that says so of an honest one. A
complaint therefore leaves the pair unset, to be tried again in the next round, with both names on record, and counts against neither.
A client that more partners complain about than were served by it, and at least two, is treated as the author of a refused reply. Liars
who are the majority of a client's partners can have it quarantined; they could as well leave all their pairs with it unset.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from emdcfl.core.errors import ClientError
from emdcfl.core.federation import Failure, Federation
from emdcfl.core.replies import brief
from emdcfl.core.schema import Reply
from emdcfl.core.units import names
from emdcfl.methods.emdcfl.client.sampling import Matching
from emdcfl.methods.emdcfl.client.tasks import DISTRUSTED, ROW
from emdcfl.methods.emdcfl.settings import CompareSettings
from emdcfl.privacy.exchange import BOX, KEY

MAX_BOX_LENGTH = 2**20

AXES = 8
"""Most axes of a sample."""

ACCUSERS = 2
"""Fewest complaints that count."""

Verify = Callable[[str, Reply], None]


def rows_verifier(asked: Mapping[str, Mapping[str, Any]], settings: CompareSettings) -> Verify:
    """Return a check that a row client's reply serves every partner it was asked for (and nothing it was not asked for again)."""

    def verify(row: str, reply: Reply) -> None:
        again, mode = asked[row]["again"], settings.projection_scope
        _refuse_fields(reply, *([] if settings.labelled else ["labels"]), *([] if settings.match_classes else ["within", "freedom"]))
        partners = _unrefused(reply, list(asked[row]["partners"]))
        if again:
            _check_names(reply["samples"], [], "samples")
        else:
            _check_samples(reply, [ROW] if mode in ("row", "none") else partners, None, settings)
        for name, limit in _limits(settings).items():
            _check_names(reply[name], [] if again else partners if mode == "pair" else [ROW], name)
            found = max((float(values.max()) for values in reply[name].values() if values.numel()), default=0.0)
            if found > limit:
                raise ClientError(f"expected {name} <= {limit:g} with the {settings.cost} cost, got {found:g}")
        _check_names(reply["boxes"], partners if mode == "row" else [], "boxes")
        if settings.match_classes:
            for name in ("within", "freedom"):
                _check_names(reply.get(name, {}), [] if again else [ROW], name)
        # all that can be checked of a sealed box is its length, which class counts make longer by the same for all partners
        longer, lengths = settings.match_classes, sorted({len(box) for box in reply["boxes"].values()})
        fine = [BOX < length <= MAX_BOX_LENGTH if longer else length == BOX for length in lengths]
        if len(lengths) > 1 or not all(fine):
            raise ClientError(f"expected boxes of {BOX} bytes{' and the class counts' if longer else ''}, got {lengths}")

    return verify


def _limits(settings: CompareSettings) -> dict[str, float]:
    """Largest τ, and variance of a dual potential, that the ground cost allows: its diameter, and the diameter squared."""
    diameter = math.inf if settings.cost == "euclidean" else 2.0 + (settings.label_weight if settings.labelled else 0.0)
    return {"tau": diameter + 1e-6, "variance": diameter**2}


def _unrefused(reply: Reply, asked: Sequence[str]) -> list[str]:
    """Those of the partners asked about whom the client does not name as unusable."""
    stranger = next((name for name in reply["refused"] if name not in asked), None)
    if stranger is not None:
        raise ClientError(f"expected refused to name partners it was asked about, got {stranger!r}")
    return [name for name in asked if name not in reply["refused"]]


def columns_verifier(columns: Mapping[str, Sequence[str]], sizes: Mapping[str, int], settings: CompareSettings) -> Verify:
    """Return a check that a column client answers for every row it was asked for, with as many samples."""

    def verify(column: str, reply: Reply) -> None:
        _refuse_fields(reply, "matched", "offers", *([] if settings.labelled else ["labels"]))
        _check_samples(reply, _unrefused(reply, columns[column]), sizes[column], settings)

    return verify


def matched_verifier(columns: Mapping[str, Sequence[str]], matching: Mapping[str, Matching]) -> Verify:
    """Return a check that a column client answers for every row with as many blocks as it says, and no more than it was asked for.

    Where it has none it sends an offer, once: a row that took its offer gets a block.
    """

    def verify(column: str, reply: Reply) -> None:
        _refuse_fields(reply, "labels")
        rows, asked = _unrefused(reply, columns[column]), matching[column]
        _check_names(reply.get("matched", {}), rows, "matched")
        served = [row for row in rows if reply["matched"][row] > 0 or row in asked["common"]]
        _check_names(reply["samples"], served, "samples")
        _check_names(reply.get("offers", {}), [row for row in rows if row not in served], "offers")
        for row in served:
            blocks, got, m = reply["matched"][row], len(reply["samples"][row]), asked["common"].get(row, asked["m"][row])
            if not 0 < blocks <= asked["blocks"][row] or got != blocks * m:
                most = f"{asked['blocks'][row]} blocks of {m} samples"
                raise ClientError(f"expected at most {most} for {row!r}, got {blocks} with {got} samples")
        for box in reply.get("offers", {}).values():
            if box and not BOX - KEY < len(box) <= MAX_BOX_LENGTH:
                raise ClientError(f"expected offers of more than {BOX - KEY} bytes, got one of {len(box)}")

    return verify


def recalibrated_verifier(asked: Mapping[str, Mapping[str, Any]], settings: CompareSettings) -> Verify:
    """Return a check that a row client answers for every offer it was asked about, with values that its size and the cost allow."""

    def verify(row: str, reply: Reply) -> None:
        partners = _unrefused(reply, list(asked[row]["offers"]))
        for name in ("size", "tau", "variance", "within", "freedom"):
            _check_names(reply[name], partners, name)
        for d in partners:
            size, m = reply["size"][d], asked[row]["m"][d]
            if size >= m or reply["freedom"][d] >= size or any(reply[name][d] > limit for name, limit in _limits(settings).items()):
                raise ClientError(f"expected τ of fewer than {m} samples in common with {d!r}, got values that do not fit, at {size}")

    return verify


def deposits_verifier(sizes: Mapping[str, int], settings: CompareSettings) -> Verify:
    """Return a check that a deposited sample has the size asked for and the shape it claims."""

    def verify(column: str, reply: Reply) -> None:
        shape = tuple(reply["shape"].tolist()[: AXES + 1])
        if len(shape) > AXES:
            raise ClientError(f"expected a shape of at most {AXES} sizes, got {len(reply['shape'])}")
        if tuple(reply["inputs"].shape) != (sizes[column], math.prod(shape)):
            raise ClientError(f"expected inputs of {sizes[column]} samples of shape {shape}, got {tuple(reply['inputs'].shape)}")
        _check_labels(reply, {sizes[column]}, settings)

    return verify


def _refuse_fields(reply: Reply, *fields: str) -> None:
    """Refuse fields that another request would have: whoever reads the reply goes by what is in it."""
    if found := [name for name in fields if name in reply]:
        raise ClientError(f"expected no {found[0]} in the answer to this request, got some")


def _check_names(values: Mapping[str, Any], wanted: Sequence[str], name: str) -> None:
    if set(values) != set(wanted):
        raise ClientError(f"expected {name} for {', '.join(map(repr, wanted)) or 'nobody'}, got {', '.join(map(repr, values)) or 'none'}")


def _check_samples(reply: Reply, wanted: Sequence[str], size: int | None, settings: CompareSettings) -> None:
    """Refuse samples that leave a partner out, differ in number from what was asked (for a row: 1 to the cap), or lack their labels."""
    _check_names(reply["samples"], wanted, "samples")
    if not wanted:
        return
    counts = {len(z) for z in reply["samples"].values()}
    most = max(counts)
    if counts != {most if size is None else size} or not 0 < most <= max(size or 0, settings.max_samples):
        expected = f"the same number (1 to {settings.max_samples}) of" if size is None else size
        raise ClientError(f"expected {expected} samples for every partner, got {sorted(counts)}")
    _check_labels(reply, counts, settings)


def _check_labels(reply: Reply, counts: set[int], settings: CompareSettings) -> None:
    labels = reply.get("labels")
    if settings.labelled and (labels is None or {len(labels)} != counts):
        raise ClientError(f"expected {max(counts)} labels beside the samples, got {'none' if labels is None else len(labels)}")


class Complaints:
    """What clients say of each other's keys and boxes in one round."""

    def __init__(self, fed: Federation) -> None:
        self.fed = fed
        self._served: dict[str, set[str]] = {}
        self._against: dict[str, dict[str, tuple[str, str]]] = {}

    def record(self, accuser: str, task: str, served: Iterable[str], refused: Mapping[str, str]) -> None:
        """Note whom a client served and whom it could not; where failures end a run, the first complaint does."""
        for name in served:
            self._served.setdefault(name, set()).add(accuser)
        for name, reason in refused.items():
            if self.fed.on_failure == "stop":
                raise ClientError(str(self._failure(accuser, task, name, reason)))
            self._against.setdefault(name, {})[accuser] = (task, reason)

    def diverged(self, column: str, rows: Iterable[str]) -> None:
        """Note under whose models a client's embeddings are not finite: either may be the cause, so it counts against neither."""
        for row in rows:
            text = f"its embeddings under the model of client {row!r} are not finite; the pair stays unset, which counts against neither"
            failure = Failure(column, "project", self.fed.index, text)
            if self.fed.on_failure == "stop":
                raise ClientError(str(failure))
            self.fed.failures.append(failure)

    def settle(self) -> None:
        """Accuse those a majority complains about; keep the other complaints on record."""
        for name, heard in self._against.items():
            # a partner that is not on a node's own list is no complaint about it: its key may have been replaced a moment ago
            accusers = {who: said for who, said in heard.items() if not said[1].startswith(DISTRUSTED)}
            self.fed.failures += [self._failure(who, task, name, said) for who, (task, said) in heard.items() if who not in accusers]
            served = self._served.get(name, set()) - set(accusers)
            if len(accusers) >= ACCUSERS and len(accusers) > len(served):
                who = names(accusers)
                task, reason = next(iter(accusers.values()))
                self.fed.accuse(name, task, f"its key or box is unusable for {len(accusers)} of its partners ({who}): {reason}")
                continue
            self.fed.failures += [self._failure(accuser, task, name, reason) for accuser, (task, reason) in accusers.items()]
        self._against.clear()

    def _failure(self, accuser: str, task: str, name: str, reason: str) -> Failure:
        text = f"it finds the key or box of client {name!r} unusable ({brief(reason)}); the pair stays unset, which counts against neither"
        return Failure(accuser, task, self.fed.index, text)
