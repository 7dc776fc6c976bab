"""Replies of clients: the valid ones in client order, and the failures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from emdcfl.core.schema import Reply


@dataclass(frozen=True)
class Failure:
    """A client that did not answer, or whose reply validation rejected (``violation``)."""

    client: str
    task: str
    round: int
    reason: str
    traceback: str = ""
    violation: bool = False

    def __str__(self) -> str:
        return f"client {self.client!r} failed in round {self.round} ({self.task}): {self.reason}"


@dataclass
class Replies:
    """Valid replies by client, in client order, and failures.

    Examples
    --------
    >>> replies = Replies({"a": {"n": 1}, "b": {"n": 3}})
    >>> replies.clients, replies.column("n")
    (('a', 'b'), {'a': 1, 'b': 3})
    """

    valid: dict[str, Reply] = field(default_factory=dict)
    failures: dict[str, Failure] = field(default_factory=dict)

    @property
    def clients(self) -> tuple[str, ...]:
        return tuple(self.valid)

    def __getitem__(self, client: str) -> Reply:
        return self.valid[client]

    def __len__(self) -> int:
        return len(self.valid)

    def column(self, name: str) -> dict[str, Any]:
        """Return one field of every reply, by client."""
        return {client: reply[name] for client, reply in self.valid.items()}

    def stack(self, name: str) -> Tensor:
        """Return a tensor field of every reply as one matrix, rows in client order."""
        return torch.stack([reply[name] for reply in self.valid.values()])


def brief(text: str, most: int = 400) -> str:
    r"""Return a reason, which may quote a client, on one line of bounded length.

    Examples
    --------
    >>> brief("two\nlines"), brief("x" * 50, 8)
    ('two lines', 'xxxxxxx…')
    """
    head = text[: 4 * most]  # bounded before it is processed
    line = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in " ".join(head.split()))
    return line if len(line) <= most and len(head) == len(text) else line[: most - 1] + "…"
