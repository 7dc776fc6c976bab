"""How much a run sends: bytes of the tensors in requests and replies, by phase, counted where every request passes.

What a message holds beside its tensors (names, keys, numbers, envelopes) is a few kilobytes and is left out; so the count is the same for
every engine, and for a run that was interrupted. An engine on one machine sends nothing: there it is what a real federation would send.

Imports torch only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

Bytes = dict[str, dict[str, int]]
"""Phase → ``to_clients`` and ``to_server``."""


def payload(value: Any) -> int:
    """Bytes of the tensors in a value.

    Examples
    --------
    >>> import torch
    >>> payload({"theta": torch.zeros(10), "n": 3, "samples": {"a": torch.zeros(2, 4)}})
    72
    """
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, (dict, Mapping)):  # a dict is told at once, other mappings take many times as long
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return 0
    return sum([payload(part) for part in value if not isinstance(part, (int, float, str, bytes))])


class Traffic:
    """Bytes sent and received so far."""

    def __init__(self) -> None:
        self.bytes: Bytes = {}

    def restore(self, counted: Mapping[str, Mapping[str, int]]) -> None:
        """Go on from what a resumed run had counted."""
        self.bytes = {phase: dict(ways) for phase, ways in counted.items()}

    def sent(self, phase: str, inputs: Mapping[str, Mapping[str, Any]], common: Mapping[str, Any]) -> None:
        """Count one request to each client. Of a mapping that all share, a client that names ``rows`` is sent those alone."""
        fixed = sum(payload(v) for v in common.values() if not isinstance(v, Mapping))
        shared = [{key: payload(v) for key, v in value.items()} for value in common.values() if isinstance(value, Mapping)]
        everything = sum(sum(sizes.values()) for sizes in shared)
        total = 0
        for own in inputs.values():
            rows = own.get("rows")
            total += payload(own) + fixed + (everything if rows is None else sum(sizes.get(row, 0) for sizes in shared for row in rows))
        self._add(phase, "to_clients", total)

    def received(self, phase: str, reply: Any) -> None:
        """Count one reply."""
        self._add(phase, "to_server", payload(reply))

    def _add(self, phase: str, way: str, number: int) -> None:
        counted = self.bytes.setdefault(phase, {"to_clients": 0, "to_server": 0})
        counted[way] += number
