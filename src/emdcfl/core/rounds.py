"""A round: its number, participants, the server's generators, and the seconds of each phase."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from emdcfl.core.errors import ConfigError
from emdcfl.core.keys import generator


@dataclass(frozen=True)
class Round:
    """One round: its number (1, 2, …; 0 for ``init``), its participants and its generators."""

    index: int
    participants: tuple[str, ...]
    seed: int

    def generator(self, purpose: str) -> np.random.Generator:
        """Return the server's generator for one purpose in this round."""
        return generator(self.seed, "", self.index, purpose)


def participants(clients: Sequence[str], number: int | None, *, seed: int, round: int) -> tuple[str, ...]:
    """Draw the participants: all clients, or ``number`` uniformly without replacement.

    The draw depends on seed and round alone, so every method gets the same clients.

    Examples
    --------
    >>> participants(["a", "b", "c"], None, seed=0, round=1)
    ('a', 'b', 'c')
    >>> len(participants(["a", "b", "c"], 2, seed=0, round=1))
    2
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
