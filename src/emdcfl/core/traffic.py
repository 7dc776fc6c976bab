"""How much a run sends: bytes of the tensors in requests and replies, by phase.

Names, keys, numbers and headers are a few kilobytes per message and are not counted, so the count is the same for every engine and for a
resumed run. An engine on one machine sends nothing; there, the count is what a real federation would send.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from emdcfl.core.client import Divisible

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
    if isinstance(value, (dict, Mapping)):  # checking for dict first is many times faster
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return 0
    return sum([payload(part) for part in value if not isinstance(part, (int, float, str, bytes))])


class Traffic:
    """Bytes sent and received so far."""

    def __init__(self) -> None:
        self.bytes: Bytes = {}

    def restore(self, counted: Mapping[str, Mapping[str, int]]) -> None:
        """Continue from the count of a resumed run."""
        self.bytes = {phase: dict(ways) for phase, ways in counted.items()}

    def sent(
        self, phase: str, inputs: Mapping[str, Mapping[str, Any]], common: Mapping[str, Any], divisible: Divisible | None = None
    ) -> None:
        """Count one request to each client. Of common inputs that a ``divisible`` task maps by item, a client gets its own items only."""
        rule = divisible or Divisible("", ())
        by_item = [{item: payload(v) for item, v in common[name].items()} for name in rule.by_item if name in common]
        fixed = sum(payload(value) for name, value in common.items() if name not in rule.by_item)
        total = 0
        for own in inputs.values():
            total += payload(own) + fixed + sum(sizes.get(item, 0) for sizes in by_item for item in own.get(rule.items, ()))
        self._add(phase, "to_clients", total)

    def received(self, phase: str, reply: Any) -> None:
        """Count one reply."""
        self._add(phase, "to_server", payload(reply))

    def _add(self, phase: str, way: str, number: int) -> None:
        counted = self.bytes.setdefault(phase, {"to_clients": 0, "to_server": 0})
        counted[way] += number
