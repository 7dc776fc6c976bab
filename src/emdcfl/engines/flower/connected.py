"""Which connected node is which client. Names come from the nodes' own configs; Flower may give a node another id at any time.

A node that is new to this run is asked ``hello``: it answers with its client's name, its public key, and a proof that it holds the
key. The server's list of keys decides whether the node may use the name. A slow answer is taken when it comes: it holds up the others
for a short while at most, unless a client has left that this node may be.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import emdcfl
from emdcfl.core.errors import ClientError, ConfigError
from emdcfl.core.replies import brief
from emdcfl.engines.flower import codec
from emdcfl.engines.flower.codec import LIMITS
from emdcfl.engines.flower.messages import Messenger, PendingRequest, StragglerError
from emdcfl.privacy.exchange import Challenge, node_key
from emdcfl.privacy.keylist import KeyList

log = logging.getLogger("emdcfl")

HELLO, SURVEY, ALONG = "hello", "survey", "along"
"""The greeting, the first question of a survey in it, and the tasks that come along with a greeting or with another task."""

MAX_PAUSE = 8
"""A node that does not answer ``hello``, or only that it cannot, is asked again after 1, 2, 4, … refreshes, at most this many."""


def compatible(version: str) -> bool:
    """Whether a node of this version may take part: the first two numbers must be those of the server's.

    Examples
    --------
    >>> compatible(emdcfl.__version__), compatible("0.0.9")
    (True, False)
    """
    return _series(version) == _series(emdcfl.__version__)


def _series(version: str) -> list[str]:
    return version.split(".")[:2]


@dataclass(frozen=True)
class Greeting:
    """A ``hello``: its challenge, and what was asked with it."""

    challenge: Challenge
    asked: dict[str, Any]


class ConnectedNodes:
    """Client name → node id, kept up to date; ``keys`` says which key may use which name."""

    def __init__(self, messenger: Messenger, keys: KeyList) -> None:
        if keys.trust == "relay":
            raise ConfigError("expected trust = 'first-use' or 'pinned' at the server, got 'relay', with which any node may take any name")
        self.messenger, self.keys = messenger, keys
        self._names: dict[int, str] = {}  # node id → client; "" for a node that was refused or replaced
        self._online: dict[int, str] = {}  # node id → since when
        self._refreshes = 0
        self._silent: dict[int, tuple[int, int]] = {}  # node → refreshes to pause, refresh at which to ask again
        self._greeted: dict[int, tuple[Greeting, PendingRequest]] = {}  # node → the greeting that it has not answered yet
        self.refused: dict[str, str] = {}  # client → why the last node that used its name was refused
        self.asked: dict[str, Any] = {}  # what nodes are asked together with ``hello``
        self.answers: dict[str, dict[str, Any]] = {}  # client → what it said to that
        self._left: dict[str, str] = {}  # client → when its node was first seen to be gone

    def absence(self, client: str) -> str:
        """Say why a client is not connected: it was refused, its node is gone, or it was never there."""
        if client in self.refused:
            return self.refused[client]
        if client in self._left:
            return f"its node was connected and is gone since {self._left[client]}"
        return "no node with this name has connected since the run began"

    @property
    def nodes(self) -> dict[str, int]:
        """Client name → node id, of the nodes that were connected at the last refresh."""
        return {name: node for node, name in self._names.items() if name}

    def refresh(self) -> None:
        """Ask Flower which nodes are connected, and ask new ones who they are. One that has left and is back may be another program."""
        before, self._online = self._online, self.messenger.online()
        online, same = self._online, {node for node, since in self._online.items() if since == before.get(node)}
        self._refreshes += 1
        self._silent = {node: entry for node, entry in self._silent.items() if node in same}
        for node in [node for node in self._greeted if node not in same]:
            self.messenger.drop({self._greeted.pop(node)[1].identity})
        for node in [node for node in self._names if node not in same]:
            name = self._names.pop(node, "")
            if name:
                self._left[name] = time.strftime("%H:%M:%S UTC", time.gmtime())
                log.warning("client %r: its node %d %s", name, node, "has left and is back" if node in online else "is no longer connected")
                self._names = {other: known for other, known in self._names.items() if known}  # one that it replaced may take its place
        known = self._names.keys() | self._greeted.keys()
        new = [node for node in online if node not in known and self._silent.get(node, (0, 0))[1] <= self._refreshes]
        if new or self._greeted:
            self._greet(new)

    def wait_until(self, complete: Callable[[], bool]) -> None:
        """Refresh until ``complete()`` is true, but no longer than the settings allow."""
        settings, began = self.messenger.settings, time.monotonic()
        self.refresh()
        while not complete() and time.monotonic() - began < max(settings.wait, settings.hello_deadline if self._greeted else 0.0):
            time.sleep(min(2.0, max(0.1, settings.poll)))
            self.refresh()

    def forget(self, client: str) -> None:
        """Ask the node of a client again who it is before its next task."""
        node = self.nodes.get(client)
        if node is not None:
            del self._names[node]

    def verify_identity(self, client: str, key: bytes) -> None:
        """Raise ``ClientError`` if a client shows another key than it proved: partners that remember its key would refuse all its work."""
        self.keys.check(client, node_key(key))

    def _greet(self, new: list[int]) -> None:
        """Ask nodes who they are, and take what those asked before have answered; no node is waited for twice."""
        greeting, settings = Greeting(Challenge(), self.asked), self.messenger.settings
        record = codec.encode({"challenge": greeting.challenge.public, "nonce": greeting.challenge.nonce, **greeting.asked})
        earlier, self._greeted = self._greeted, {}
        pending = {node: request for node, (_, request) in earlier.items()}
        first, again = ([(node, node, record) for node in new if (node in self._silent) == silent] for silent in (False, True))
        how: dict[str, Any] = {"group": "", "deadline": settings.hello_deadline}
        for node, reply in chain(
            self.messenger.exchange(f"query.{HELLO}", again, phase=0.0, pending=pending, **how),
            self.messenger.exchange(f"query.{HELLO}", first, phase=None if self._left else settings.grace, **how),
        ):
            asked = earlier[node][0] if node in earlier else greeting
            if isinstance(reply, StragglerError):
                self._greeted[node] = asked, reply.pending
            else:
                self._hear(node, asked, reply)

    def _hear(self, node: int, greeting: Greeting, reply: Any) -> None:
        """Learn from the answer to ``hello`` which client a node is."""
        failed = reply.get("failure") if isinstance(reply, dict) else reply if isinstance(reply, ClientError) else None
        if failed is not None:
            pause = min(MAX_PAUSE, 2 * self._silent.get(node, (0, 0))[0] or 1)
            self._silent[node] = pause, self._refreshes + pause
            log.warning("node %d did not say who it is: %s", node, brief(str(failed)))
            return
        try:
            name = self._identify(greeting.challenge, reply)
        except ClientError as error:
            self._refuse(node, reply, str(error))
            return
        before = self.nodes.get(name)
        if before is not None:  # the same key under two ids: the node restarted, and the old id has not expired yet
            self._names[before] = ""
        self._names[node] = name
        told = greeting.asked if greeting.asked is self.asked else {}  # a late answer may be about another job
        self.answers[name] = {key: reply[key] for key in (SURVEY, ALONG) if key in reply and key in told}
        self._silent.pop(node, None)
        self.refused.pop(name, None)
        self._left.pop(name, None)
        log.info("client %r is node %d, emdcfl %s", name, node, brief(reply["version"], 40))

    def _refuse(self, node: int, reply: Any, reason: str) -> None:
        self._names[node] = ""
        claimed = reply.get("name") if isinstance(reply, dict) else None
        if isinstance(claimed, str) and len(claimed) <= LIMITS.name:
            self.refused[claimed] = reason
        log.warning("node %d was refused: %s", node, reason)

    def _identify(self, challenge: Challenge, reply: Any) -> str:
        expected = {"name": str, "key": bytes, "proof": bytes, "version": str}
        if not isinstance(reply, dict) or any(type(reply.get(field)) is not kind for field, kind in expected.items()):
            raise ClientError("expected name, key, proof and version in the answer to hello, got something else; is it a node of emdcfl?")
        name = reply["name"]
        if not compatible(reply["version"]):
            wanted, got = ".".join(_series(emdcfl.__version__)), brief(repr(reply["version"]), 40)
            raise ClientError(f"expected a node with emdcfl {wanted}, got {got}; install the same version there")
        if not name.isprintable() or not 0 < len(name) <= LIMITS.name:
            raise ClientError(f"expected a name of 1 to {LIMITS.name} printable characters, got {brief(repr(name), 40)}")
        if not challenge.holds(reply["key"], name, reply["proof"]):
            raise ClientError(f"it calls itself {name!r} but does not hold the key it shows")
        self.keys.check(name, reply["key"])
        return str(name)
