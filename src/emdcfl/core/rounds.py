"""A round: its number, participants, the server's generators, and the seconds and bytes of each phase.

Bytes are those of the tensors in requests and replies. Names, keys, numbers and headers are a few kilobytes per message and not counted,
so the count is the same for every engine and for a resumed run. An engine on one machine sends nothing; there, the count is what a real
federation would send.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from emdcfl.core.client import Divisible
from emdcfl.core.errors import ConfigError
from emdcfl.core.keys import generator


@dataclass(frozen=True)
class Round:
    """One round: its number (1, 2, …; 0 for ``init``), its participants and its generators, and how many rounds there are, if known."""

    index: int
    participants: tuple[str, ...]
    seed: int
    total: int | None = None

    def generator(self, purpose: str) -> np.random.Generator:
        """Return the server's generator for one purpose in this round."""
        return generator(self.seed, "", self.index, purpose)


def participants(clients: Sequence[str], number: int | None, *, seed: int, round: int) -> tuple[str, ...]:
    """Draw the participants: all clients, or ``number`` uniformly without replacement.

    The draw depends on seed and round alone, so every method gets the same clients.
    """
    if number is None or number == len(clients):
        return tuple(clients)
    if not 1 <= number <= len(clients):
        raise ConfigError(f"expected participants between 1 and {len(clients)} (the number of clients), got {number}")
    chosen = generator(seed, "", round, "participants").choice(len(clients), size=number, replace=False)
    return tuple(clients[i] for i in sorted(chosen))


class Clock:
    """Seconds by phase. ``with clock("transport"): …``; a phase inside another is not counted twice."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inside: list[float] = []

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        self._inside.append(0.0)
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            self.seconds[phase] = self.seconds.get(phase, 0.0) + spent - self._inside.pop()
            if self._inside:
                self._inside[-1] += spent


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
    if isinstance(value, (dict, Mapping)):  # checking for dict first is many times faster
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return value.nbytes if isinstance(value, Tensor) else 0
    total = 0
    for part in value:
        if type(part) is Tensor:
            total += part.nbytes
        elif not isinstance(part, (int, float, str, bytes)):
            total += payload(part)
    return total


class Traffic:
    """Bytes sent and received so far."""

    def __init__(self) -> None:
        self.bytes: Bytes = {}

    def restore(self, counted: Mapping[str, Mapping[str, int]]) -> None:
        """Continue from the count of a resumed run."""
        self.bytes = {phase: {way: ways.get(way, 0) for way in ("to_clients", "to_server")} for phase, ways in counted.items()}

    def sent(
        self, phase: str, inputs: Mapping[str, Mapping[str, Any]], common: Mapping[str, Any], divisible: Divisible | None = None
    ) -> None:
        """Count one request to each client. Of common inputs that a ``divisible`` task maps by item, a client gets its own items only."""
        rule = divisible or Divisible("", ())
        by_item = [{item: payload(v) for item, v in common[name].items()} for name in rule.by_item if name in common]
        fixed = sum(payload(value) for name, value in common.items() if name not in rule.by_item)
        total = sum(map(payload, inputs.values())) + fixed * len(inputs)
        total += sum(sizes.get(item, 0) for sizes in by_item for own in inputs.values() for item in own.get(rule.items, ()))
        self._add(phase, "to_clients", total)

    def received(self, phase: str, reply: Any, times: int = 1) -> None:
        """Count a reply, or so many of the same size."""
        self._add(phase, "to_server", payload(reply) * times)

    def _add(self, phase: str, way: str, number: int) -> None:
        counted = self.bytes.setdefault(phase, {"to_clients": 0, "to_server": 0})
        counted[way] += number
