"""What the server of EMD-CFL checks in a reply beyond its schema; a reply that fails is its sender's failure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from emdcfl.errors import ClientError
from emdcfl.methods.exchange import ROW
from emdcfl.schema import Reply

Verify = Callable[[str, Reply], None]


def rows_verifier(asked: Mapping[str, Mapping[str, Any]], settings: Mapping[str, Any]) -> Verify:
    """Return a check that a row client's reply serves every partner it was asked for (and nothing it was not asked for again)."""

    def verify(row: str, reply: Reply) -> None:
        partners, again = list(asked[row]["partners"]), asked[row]["again"]
        shared = settings["projection"] in ("row", "none")
        if again:
            _names(reply["samples"], [], "samples")
        else:
            _samples(reply, [ROW] if shared else partners, None, settings)
        for name in ("tau", "variance"):
            _names(reply[name], [] if again else partners if settings["projection"] == "pair" else [ROW], name)
        _names(reply["boxes"], partners if settings["projection"] == "row" else [], "boxes")

    return verify


def columns_verifier(columns: Mapping[str, Sequence[str]], sizes: Mapping[str, int], settings: Mapping[str, Any]) -> Verify:
    """Return a check that a column client answers for every row it was asked for, with as many samples."""
    return lambda column, reply: _samples(reply, columns[column], sizes[column], settings)


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
    """Refuse samples that leave a partner out, differ in number from what was asked (any but none for a row), or lack their labels."""
    _names(reply["samples"], wanted, "samples")
    counts = {len(z) for z in reply["samples"].values()}
    if counts != ({size} if size is not None else counts & {max(counts)}) or 0 in counts:
        raise ClientError(f"expected {'the same number of' if size is None else size} samples for every partner, got {sorted(counts)}")
    _labels(reply, counts, settings)


def _labels(reply: Reply, counts: set[int], settings: Mapping[str, Any]) -> None:
    labels = reply.get("labels")
    if settings["cost"] == "label-aware" and (labels is None or {len(labels)} != counts):
        raise ClientError(f"expected {max(counts)} labels beside the samples, got {'none' if labels is None else len(labels)}")
