"""Which node speaks for which client. Names come from the nodes' own configs; Flower's node ids may change at any time.

A node that is new to this run is asked ``hello``: it answers with its client's name, its public key, and a proof that it holds the
key. The server's list of keys decides whether the name is its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from emdcfl.core.errors import ClientError
from emdcfl.core.replies import brief
from emdcfl.engines.flower.limits import LIMITS
from emdcfl.engines.flower.post import steady
from emdcfl.privacy.keylist import KeyList
from emdcfl.privacy.nodekeys import Challenge

if TYPE_CHECKING:
    from flwr.serverapp import Grid

log = logging.getLogger("emdcfl")

HELLO = "hello"
PAUSE = 8
"""A node that does not answer ``hello`` is asked again after 1, 2, 4, … looks, at most so many: every try may cost a deadline."""

Ask = Callable[[Mapping[int, Any]], Mapping[int, Any]]
"""Sends a value to each node and returns the decoded replies, or a ``ClientError`` in their place."""


class Directory:
    """Client name → node id, kept up to date.

    Attributes
    ----------
    refused : dict
        Client name → why the last node that used it was turned away.
    """

    def __init__(self, grid: Grid, keys: KeyList, ask: Ask) -> None:
        self._grid, self._keys, self._ask = grid, keys, ask
        self._names: dict[int, str] = {}
        self._looks = 0
        self._silent: dict[int, tuple[int, int]] = {}  # node → looks to pause, look at which to ask again
        self.refused: dict[str, str] = {}

    @property
    def nodes(self) -> dict[str, int]:
        """Client name → node id, of the nodes that are connected as far as known."""
        return {name: node for node, name in self._names.items() if name}

    def refresh(self) -> None:
        """Look who is connected; greet those not met before."""
        online = steady(lambda: list(self._grid.get_node_ids()))
        self._looks += 1
        self._silent = {node: entry for node, entry in self._silent.items() if node in online}
        gone = [node for node in self._names if node not in online]
        for node in gone:
            name = self._names.pop(node)
            if name:
                log.info("client %r: its node %d is no longer connected", name, node)
        new = [node for node in online if node not in self._names and self._silent.get(node, (0, 0))[1] <= self._looks]
        if new:
            self._greet(new)

    def forget(self, name: str) -> None:
        """Have the node of a client greeted again before it is next asked."""
        node = self.nodes.get(name)
        if node is not None:
            del self._names[node]

    def _greet(self, new: list[int]) -> None:
        challenge = Challenge()
        request = {"challenge": challenge.public, "nonce": challenge.nonce}
        for node, reply in self._ask(dict.fromkeys(new, request)).items():
            failed = reply.get("failure") if isinstance(reply, dict) else reply if isinstance(reply, ClientError) else None
            if failed is not None:
                pause = min(PAUSE, 2 * self._silent.get(node, (0, 0))[0] or 1)
                self._silent[node] = pause, self._looks + pause
                log.warning("node %d did not say who it is: %s", node, brief(str(failed)))
                continue
            try:
                name = self._recognise(challenge, reply)
            except ClientError as error:
                self._names[node] = ""  # known, and turned away
                claimed = reply.get("name") if isinstance(reply, dict) else None
                if isinstance(claimed, str) and len(claimed) <= LIMITS.name:
                    self.refused[claimed] = str(error)
                log.warning("node %d was turned away: %s", node, error)
                continue
            before = self.nodes.get(name)
            if before is not None:  # the same key under two ids: the node restarted, and the old id has not expired yet
                self._names[before] = ""
            self._names[node] = name
            self._silent.pop(node, None)
            self.refused.pop(name, None)
            log.info("client %r is node %d", name, node)

    def verify_identity(self, name: str, key: bytes) -> None:
        """Raise ``ClientError`` if a client shows another key than it proved: partners who know better would refuse all their work."""
        self._keys.check(name, key)

    def _recognise(self, challenge: Challenge, reply: Any) -> str:
        expected = {"name": str, "key": bytes, "proof": bytes}
        if not isinstance(reply, dict) or any(type(reply.get(field)) is not kind for field, kind in expected.items()):
            raise ClientError("expected a name, a key and a proof in the answer to hello, got something else; is it a node of emdcfl?")
        name = reply["name"]
        if not name.isprintable() or not 0 < len(name) <= LIMITS.name:
            raise ClientError(f"expected a name of 1 to {LIMITS.name} printable characters, got {brief(repr(name), 40)}")
        if not challenge.holds(reply["key"], name, reply["proof"]):
            raise ClientError(f"it calls itself {name!r} but does not hold the key it shows")
        self._keys.check(name, reply["key"])
        return str(name)
