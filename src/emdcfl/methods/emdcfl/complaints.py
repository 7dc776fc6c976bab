"""Clients that name a partner whose key or sealed box they cannot use: what the server makes of it.

The server cannot open a box, so it cannot tell a row client that seals rubbish from a column client that says so of an honest one. A
complaint therefore only leaves the pair open, to be tried again in the next round, with both names on record, and counts against neither.
Where more clients complain about one than were served by it, and at least two, that one is treated as the author of a refused reply. Liars
who are the majority of somebody's partners can have it quarantined; they could as well leave all their pairs with it unset.

Imports federation only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from emdcfl.core.errors import ClientError
from emdcfl.core.federation import Failure, Federation

ACCUSERS = 2
"""Fewest complaints that count."""


class Complaints:
    """What clients say of each other's keys and boxes in one round."""

    def __init__(self, fed: Federation) -> None:
        self.fed = fed
        self._served: dict[str, set[str]] = {}
        self._against: dict[str, dict[str, tuple[str, str]]] = {}

    def heard(self, accuser: str, task: str, served: Iterable[str], refused: Mapping[str, str]) -> None:
        """Note whom a client served and whom it could not; where failures end a run, the first complaint does."""
        for name in served:
            self._served.setdefault(name, set()).add(accuser)
        for name, reason in refused.items():
            if self.fed.on_failure == "stop":
                raise ClientError(str(self._failure(accuser, task, name, reason)))
            self._against.setdefault(name, {})[accuser] = (task, reason)

    def settle(self) -> None:
        """Accuse those a majority complains about; keep the other complaints on record."""
        for name, accusers in self._against.items():
            served = self._served.get(name, set()) - set(accusers)
            if len(accusers) >= ACCUSERS and len(accusers) > len(served):
                who = ", ".join(map(repr, accusers))
                task, reason = next(iter(accusers.values()))
                self.fed.accuse(name, task, f"its key or box is unusable for {len(accusers)} of its partners ({who}): {reason}")
                continue
            self.fed.failures += [self._failure(accuser, task, name, reason) for accuser, (task, reason) in accusers.items()]
        self._against.clear()

    def _failure(self, accuser: str, task: str, name: str, reason: str) -> Failure:
        text = f"it finds the key or box of client {name!r} unusable ({reason}); the pair stays open, and counts against neither"
        return Failure(accuser, task, self.fed.index, text)
