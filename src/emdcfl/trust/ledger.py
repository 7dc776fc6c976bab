"""Record of a run's faulty replies, the clients quarantined for them, and outlying values.

A run stores the record with its state, as plain numbers and text. A fault or a flag counts once per round, even if the round is repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from emdcfl.core.checks import check_options


@dataclass(frozen=True)
class Fault:
    """A reply rejected by validation."""

    round: int
    task: str
    reason: str


@dataclass(frozen=True)
class Flag:
    """A value of a client that is an outlier among the others'."""

    client: str
    what: str
    """Name of the value."""
    first: int
    last: int
    times: int
    """Rounds in which it was an outlier, from ``first`` to ``last``."""
    value: float
    """The largest such value."""
    typical: float
    """The median of the clients at that time."""


@dataclass(frozen=True)
class _Record:
    faults: dict[str, list[dict[str, Any]]]
    flags: list[dict[str, Any]]


class Ledger:
    """Faults and flags by client; one with faults in ``max_faults`` rounds is excluded from the run.

    Examples
    --------
    >>> ledger = Ledger(max_faults=2)
    >>> ledger.begin(1); ledger.fault("a", "train", "theta is not finite"); ledger.fault("a", "train", "again, in a repeated round")
    >>> ledger.banned("a"), ledger.exclusion_reason("a")
    (False, 'quarantined for this round: theta is not finite')
    >>> ledger.begin(2); ledger.exclusion_reason("a"); ledger.fault("a", "train", "theta is not finite"); ledger.banned("a")
    True
    """

    def __init__(self, max_faults: int) -> None:
        self.max_faults, self.round = max_faults, 0
        self.faults: dict[str, list[Fault]] = {}
        self.flags: dict[tuple[str, str], Flag] = {}
        self._now: dict[str, str] = {}

    def begin(self, round: int) -> None:
        """Start a round, or repeat it; clients that are not banned take part again."""
        self.round = round
        self._now.clear()

    def fault(self, client: str, task: str, reason: str) -> None:
        """Record a rejected reply; the client is not asked again in this attempt of the round."""
        self._now.setdefault(client, reason)
        known = self.faults.setdefault(client, [])
        if all(fault.round != self.round for fault in known):
            known.append(Fault(self.round, task, reason))

    @contextmanager
    def revisit(self, round: int, excluded: Mapping[str, str]) -> Iterator[None]:
        """Be in an earlier round for a block, with the clients that were excluded from it then."""
        now = self.round, self._now
        self.round, self._now = round, dict(excluded)
        try:
            yield
        finally:
            self.round, self._now = now

    @property
    def excluded(self) -> dict[str, str]:
        """The clients not asked again in this round, and why."""
        return dict(self._now)

    def banned(self, client: str) -> bool:
        """Whether the client is excluded from the rest of the run."""
        return client in self.faults and sum(fault.round <= self.round for fault in self.faults[client]) >= self.max_faults

    def exclusion_reason(self, client: str) -> str | None:
        """Say why a client must not be asked now; ``None`` if it may be."""
        if self.banned(client):
            return f"quarantined for the run after {self.max_faults} rounds with a rejected reply: {self.faults[client][-1].reason}"
        return f"quarantined for this round: {self._now[client]}" if client in self._now else None

    def exclusions(self, clients: Iterable[str]) -> dict[str, str]:
        """Return who of these must not be asked now, and why."""
        if not self.faults and not self._now:
            return {}
        reasons = {client: self.exclusion_reason(client) for client in clients}
        return {client: reason for client, reason in reasons.items() if reason is not None}

    def flag(self, client: str, what: str, value: float, typical: float) -> None:
        """Record that a value of a client is an outlier."""
        old = self.flags.get((client, what))
        if old is None:
            self.flags[client, what] = Flag(client, what, self.round, self.round, 1, value, typical)
            return
        times = old.times + (self.round != old.last)
        largest = (value, typical) if value > old.value else (old.value, old.typical)
        self.flags[client, what] = Flag(client, what, old.first, self.round, times, *largest)

    def quarantined(self) -> list[dict[str, Any]]:
        """Return the quarantined clients with reason and duration, by round, as the summary lists them."""
        found = []
        for client, faults in self.faults.items():
            for i, fault in enumerate(faults):
                span = "run" if i + 1 >= self.max_faults else "round"
                found.append({"client": client, "round": fault.round, "task": fault.task, "reason": fault.reason, "for": span})
        return sorted(found, key=lambda entry: entry["round"])

    def flagged(self) -> list[dict[str, Any]]:
        """Return the flags as the summary lists them."""
        return [asdict(flag) for flag in self.flags.values()]

    def as_dict(self) -> dict[str, Any]:
        """Return the whole record as JSON values."""
        return {"faults": {c: [asdict(f) for f in faults] for c, faults in self.faults.items()}, "flags": self.flagged()}

    def restore(self, stored: Mapping[str, Any]) -> None:
        record = check_options(_Record, stored, "trust")
        self.faults = {c: [Fault(**check_options(Fault, f, "a fault")) for f in faults] for c, faults in record.get("faults", {}).items()}
        flags = [Flag(**check_options(Flag, f, "a flag")) for f in record.get("flags", [])]
        self.flags = {(flag.client, flag.what): flag for flag in flags}
