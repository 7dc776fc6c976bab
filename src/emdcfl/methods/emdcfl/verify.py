"""What the server of EMD-CFL checks in a reply beyond its schema; a reply that fails is its sender's failure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from emdcfl.core.errors import ClientError
from emdcfl.core.schema import Reply
from emdcfl.methods.emdcfl.client import ROW
from emdcfl.privacy.exchange import BOX

LONGEST_BOX = 2**20

Verify = Callable[[str, Reply], None]


def rows_verifier(asked: Mapping[str, Mapping[str, Any]], settings: Mapping[str, Any]) -> Verify:
    """Return a check that a row client's reply serves every partner it was asked for (and nothing it was not asked for again)."""

    def verify(row: str, reply: Reply) -> None:
        again, mode = asked[row]["again"], settings["projection"]
        partners = _unrefused(reply, list(asked[row]["partners"]))
        if again:
            _names(reply["samples"], [], "samples")
        else:
            _samples(reply, [ROW] if mode in ("row", "none") else partners, None, settings)
        for name, limit in zip(("tau", "variance"), _largest(settings), strict=True):
            _names(reply[name], [] if again else partners if mode == "pair" else [ROW], name)
            found = max((float(values.max()) for values in reply[name].values() if values.numel()), default=0.0)
            if found > limit:
                raise ClientError(f"expected {name} <= {limit:g} with the {settings['cost']} cost, got {found:g}")
        _names(reply["boxes"], partners if mode == "row" else [], "boxes")
        if settings["match"]:
            _names(reply.get("within", {}), [] if again else [ROW], "within")
        _boxes(reply["boxes"].values(), longer=settings["match"])

    return verify


def _boxes(boxes: Iterable[bytes], *, longer: bool) -> None:
    """All that can be checked of a box that is sealed: its length, which class counts make longer by the same for all partners."""
    lengths = sorted({len(box) for box in boxes})
    fine = [BOX < length <= LONGEST_BOX if longer else length == BOX for length in lengths]
    if len(lengths) > 1 or not all(fine):
        raise ClientError(f"expected boxes of {BOX} bytes{' and the class counts' if longer else ''}, got {lengths}")


def _largest(settings: Mapping[str, Any]) -> tuple[float, float]:
    """Largest τ, and variance of a dual potential, that the ground cost allows: its diameter, and the diameter squared."""
    if settings["cost"] == "euclidean":
        return math.inf, math.inf
    diameter = 2.0 + (settings["label_weight"] if settings["cost"] == "label-aware" else 0.0)
    return diameter + 1e-6, diameter**2


def _unrefused(reply: Reply, asked: Sequence[str]) -> list[str]:
    """Those of the partners asked about whom the client does not name as unusable."""
    stranger = next((name for name in reply["refused"] if name not in asked), None)
    if stranger is not None:
        raise ClientError(f"expected refused to name partners it was asked about, got {stranger!r}")
    return [name for name in asked if name not in reply["refused"]]


def columns_verifier(columns: Mapping[str, Sequence[str]], sizes: Mapping[str, int], settings: Mapping[str, Any]) -> Verify:
    """Return a check that a column client answers for every row it was asked for, with as many samples."""
    return lambda column, reply: _samples(reply, _unrefused(reply, columns[column]), sizes[column], settings)


def matched_verifier(columns: Mapping[str, Sequence[str]], matching: Mapping[str, Mapping[str, Any]]) -> Verify:
    """Return a check that a column client answers for every row with as many blocks as it says, and no more than it was asked for."""

    def verify(column: str, reply: Reply) -> None:
        rows, asked = _unrefused(reply, columns[column]), matching[column]
        _names(reply["samples"], rows, "samples")
        _names(reply.get("matched", {}), rows, "matched")
        for row in rows:
            blocks, got = reply["matched"][row], len(reply["samples"][row])
            if blocks > asked["blocks"][row] or got != max(1, blocks) * asked["m"][row]:
                most = f"{asked['blocks'][row]} blocks of {asked['m'][row]} samples"
                raise ClientError(f"expected at most {most} for {row!r}, got {blocks} with {got} samples")

    return verify


def deposits_verifier(sizes: Mapping[str, int], settings: Mapping[str, Any]) -> Verify:
    """Return a check that a deposited sample has the size asked for and the shape it claims."""

    def verify(column: str, reply: Reply) -> None:
        shape = tuple(reply["shape"].tolist())
        if tuple(reply["inputs"].shape) != (sizes[column], math.prod(shape)):
            raise ClientError(f"expected inputs of {sizes[column]} samples of shape {shape}, got {tuple(reply['inputs'].shape)}")
        _labels(reply, {sizes[column]}, settings)

    return verify


def _names(values: Mapping[str, Any], wanted: Sequence[str], name: str) -> None:
    if set(values) != set(wanted):
        raise ClientError(f"expected {name} for {', '.join(map(repr, wanted)) or 'nobody'}, got {', '.join(map(repr, values)) or 'none'}")


def _samples(reply: Reply, wanted: Sequence[str], size: int | None, settings: Mapping[str, Any]) -> None:
    """Refuse samples that leave a partner out, differ in number from what was asked (for a row: 1 to the cap), or lack their labels."""
    _names(reply["samples"], wanted, "samples")
    if not wanted:
        return
    counts = {len(z) for z in reply["samples"].values()}
    most = max(counts)
    if counts != {most if size is None else size} or not 0 < most <= max(size or 0, settings["cap"]):
        expected = f"the same number (1 to {settings['cap']}) of" if size is None else size
        raise ClientError(f"expected {expected} samples for every partner, got {sorted(counts)}")
    _labels(reply, counts, settings)


def _labels(reply: Reply, counts: set[int], settings: Mapping[str, Any]) -> None:
    labels = reply.get("labels")
    if settings["cost"] == "label-aware" and (labels is None or {len(labels)} != counts):
        raise ClientError(f"expected {max(counts)} labels beside the samples, got {'none' if labels is None else len(labels)}")
