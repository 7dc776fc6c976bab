"""Send messages to nodes and collect their decoded replies, whatever is lost on the way.

Flower drops a reply that the SuperLink cannot store at that moment (its database is busy, say): the node deletes it, and the server would
wait until the deadline. A node answers messages in order, so one that answers a later message but not an earlier one has lost that reply.
After a while without any reply, the server therefore sends a ``ping`` to every node it waits for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from emdcfl.core.errors import ClientError
from emdcfl.core.replies import brief
from emdcfl.engines.flower import codec
from emdcfl.engines.flower.codec import LIMITS, MEGABYTE
from emdcfl.engines.flower.polling import ReplyPoller, delete, retry_when_busy

if TYPE_CHECKING:
    from flwr.app import Message, RecordDict
    from flwr.serverapp import Grid

PING = "ping"
"""A node answers this with its name, after everything it was asked before."""

LOST = (3, 4, 5, 8)
"""Flower's error codes for a message, reply, node or client process that is gone: worth another try if the client is back."""


@dataclass(frozen=True)
class MessageSettings:
    """How requests are sent."""

    deadline: float = 600.0
    """Seconds a request may take, training included."""
    part_mb: float = 256.0
    """Largest request of a task that can be divided, in MB; larger ones are sent in several parts."""
    reply_mb: float = 2048.0
    """Largest reply that is read, in MB."""
    poll: float = 0.2
    """Seconds between polls for replies."""
    attempts: int = 2
    """How often a request is sent if its node or its reply is lost."""
    wait: float = 60.0
    """Seconds to wait for missing clients before round 1."""
    patience: float = 60.0
    """Seconds without any reply after which the nodes still missing are pinged."""

    @property
    def hello_deadline(self) -> float:
        """Seconds a node may take to say who it is: less than for a task, but enough for many processes that start at once."""
        return min(self.deadline, max(60.0, self.deadline / 4))


class LostError(ClientError):
    """The node, the message or the reply is gone."""


class LateError(ClientError):
    """No reply within the deadline."""


@dataclass(frozen=True)
class Standing:
    """A request that was not answered in its phase and is still valid, until ``end`` on the monotonic clock."""

    identity: str
    node: int
    end: float


class StragglerError(LateError):
    """No reply before the phase ended; the request still stands."""

    def __init__(self, text: str, standing: Standing) -> None:
        super().__init__(text)
        self.standing = standing


class RefusedError(ClientError):
    """A reply that is not a message of this program, or exceeds the limits."""


class Messenger:
    """Sends records to nodes and collects the decoded replies."""

    def __init__(self, grid: Grid, settings: MessageSettings) -> None:
        self.grid, self.settings = grid, settings
        self._received = 0
        self._abandoned: set[str] = set()
        self._poll = ReplyPoller(grid)

    def take_received(self) -> int:
        """Return the bytes received since the last call."""
        received, self._received = self._received, 0
        return received

    def abandon(self, standing: Standing) -> None:
        """Wait for a request no longer."""
        self._abandon({standing.identity})

    def _abandon(self, identities: Set[str]) -> None:
        self._abandoned |= identities
        self._poll.drop(identities)

    def exchange(
        self,
        kind: str,
        requests: Mapping[Any, tuple[int, RecordDict]],
        *,
        group: str,
        deadline: float,
        phase: float | None = None,
        standing: Mapping[Any, Standing] | None = None,
    ) -> Iterator[tuple[Any, Any]]:
        """Yield ``(key, value or ClientError)`` for every request as replies arrive; the rest when the deadline has passed.

        A ``phase`` that is shorter ends the wait before, and leaves requests ``standing``: a later call can wait for them again, or
        ``abandon`` ends that.
        """
        end = time.monotonic() + (deadline if phase is None else min(deadline, phase))
        asked = {one.identity: one for one in (standing or {}).values()}
        waiting: dict[str, Any] = {one.identity: key for key, one in (standing or {}).items()}
        self._discard()
        for key, (node, record) in requests.items():
            identity = self._send(node, record, kind, group=group, lifetime=max(1.0, deadline))
            if identity is None:
                yield key, ClientError("Flower did not accept the request; see the SuperLink's log")
            else:
                waiting[identity] = key
                asked[identity] = Standing(identity, node, time.monotonic() + deadline)
        pings: dict[str, str] = {}  # message id of a ping → that of the request it is about
        heard = time.monotonic()
        while waiting:
            replies = {reply.metadata.reply_to_message_id: reply for reply in self._poll([*waiting, *pings])}
            self._abandon({identity for identity, reply in replies.items() if reply.has_error()})
            for identity in [identity for identity in waiting if identity in replies]:
                yield waiting.pop(identity), self._read(replies[identity])
                heard = time.monotonic()
            for ping, identity in pings.items():  # after the replies that came with them: a node answers in order
                if identity in waiting and ping in replies and not replies[ping].has_error() and not self._poll.fetches(identity):
                    self._abandon({identity})
                    yield waiting.pop(identity), LostError("its node has answered, but the answer was lost on its way")
            now = time.monotonic()
            if now >= end:
                break
            if waiting and now - heard >= self.settings.patience:
                self._abandon(pings.keys())
                heard, pings = now, self._ping({identity: asked[identity].node for identity in waiting}, group)
            if waiting:
                time.sleep(self.settings.poll)
        self._abandon(pings.keys())
        for identity, key in waiting.items():
            if phase is not None and phase < deadline and time.monotonic() < asked[identity].end:
                yield key, StragglerError(f"late: no answer within {phase:.0f} s", asked[identity])
            else:
                self._abandon({identity})
                yield key, LateError(f"no answer within {deadline:.0f} s")

    def _discard(self) -> None:
        """Have the SuperLink delete what nobody waits for any more, beside the requests that follow.

        Flower keeps a request that its node never fetched until the run ends: a model for every node that died with one.
        """
        old, self._abandoned = self._abandoned, set()
        if old:
            threading.Thread(target=delete, args=(self.grid, old), daemon=True, name="delete old messages").start()

    def _ping(self, waiting: Mapping[str, int], group: str) -> dict[str, str]:
        """Ping the nodes of unanswered requests; a ping expires when the next one is sent, so that none pile up at a busy node."""
        record, lifetime = codec.encode({}), max(1.0, self.settings.patience)
        pings = {self._send(node, record, f"query.{PING}", group=group, lifetime=lifetime): about for about, node in waiting.items()}
        return {ping: about for ping, about in pings.items() if ping is not None}

    def _send(self, node: int, record: RecordDict, kind: str, *, group: str, lifetime: float) -> str | None:
        from flwr.app import Message

        def push() -> str | None:  # a new message each time: Flower takes none twice
            message = Message(content=record, dst_node_id=node, message_type=kind, group_id=group, ttl=lifetime)
            (identity,) = self.grid.push_messages([message]) or (None,)
            return identity

        return retry_when_busy(push)

    def _read(self, message: Message) -> Any:
        if message.has_error():
            reason = brief(str(message.error.reason or "no reason given"))
            text = f"Flower reports error {message.error.code}: {reason}"
            return LostError(text) if message.error.code in LOST else ClientError(text)
        self._received += codec.size(message.content)
        try:
            return codec.decode(message.content, limits=replace(LIMITS, size=int(self.settings.reply_mb * MEGABYTE)))
        except ClientError as error:
            return RefusedError(str(error))
