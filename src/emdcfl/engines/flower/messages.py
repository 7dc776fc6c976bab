"""Send messages to nodes and collect their decoded replies, whatever is lost on the way.

Flower drops a reply that the SuperLink cannot store at that moment (its database is busy, say): the node deletes it, and the server would
wait until the deadline. A node answers messages in order, so one that answers a later message but not an earlier one has lost that reply.
After a while without any reply, the server therefore sends a ``ping`` to every node it waits for.

A node that is killed takes the message with it. The server looks every few seconds whether the nodes it waits for are connected, and since
when. One that is gone is waited for a short while. One that has left and is back is pinged at once: if it is another process now, it
answers the ping and not the message, which is then sent again; if only its connection was cut, it answers the message first.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
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

AWAY = 5
"""The one of these that says that the node is not connected; the message waits for it."""


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
    check_interval: float = 5.0
    """Seconds between checks whether the nodes still missing are connected."""
    grace: float = 30.0
    """Seconds that a node which is gone has to come back: systemd starts it again after 5, which takes some on a busy machine.

    Others wait as long for a new node to say who it is, if no client has left."""

    @property
    def hello_deadline(self) -> float:
        """Seconds a node may take to say who it is: less than for a task, but enough for many processes that start at once."""
        return min(self.deadline, max(60.0, self.deadline / 4))


class LostError(ClientError):
    """The node, the message or the reply is gone."""


class AwayError(LostError):
    """The node is not connected."""


class LateError(ClientError):
    """No reply within the deadline."""


@dataclass(frozen=True)
class PendingRequest:
    """A request without an answer yet, valid until ``end`` on the monotonic clock; its node was connected ``since`` then."""

    identity: str
    node: int
    end: float
    since: str = ""


class StragglerError(LateError):
    """No reply before the phase ended; the request is still pending."""

    def __init__(self, text: str, pending: PendingRequest) -> None:
        super().__init__(text)
        self.pending = pending


class RefusedError(ClientError):
    """A reply that is not a message of this program, or exceeds the limits."""


@dataclass(frozen=True)
class Retry:
    """How to send a lost request again: ``find`` says which keys have a node now, ``write`` what to send for one."""

    find: Callable[[], Mapping[Any, int]]
    write: Callable[[Any], RecordDict]


class Messenger:
    """Sends records to nodes and collects the decoded replies."""

    def __init__(self, grid: Grid, settings: MessageSettings) -> None:
        self.grid, self.settings = grid, settings
        self._received = 0
        self._abandoned: set[str] = set()
        self._since: dict[int, str] = {}
        self.poll = ReplyPoller(grid)

    def take_received(self) -> int:
        """Return the bytes received since the last call."""
        received, self._received = self._received, 0
        return received

    def drop(self, identities: Set[str]) -> None:
        """Wait for the replies to these messages no longer."""
        self._abandoned |= identities
        self.poll.drop(identities)

    def online(self) -> dict[int, str]:
        """Return the connected nodes, and since when: one that has left and is back has another time."""
        found = retry_when_busy(lambda: list(self.grid.get_nodes()))
        self._since = {node.node_id: node.last_activated_at for node in found}
        return self._since

    def exchange(
        self,
        kind: str,
        requests: Iterable[tuple[Any, int, RecordDict]],
        *,
        group: str,
        deadline: float,
        phase: float | None = None,
        pending: Mapping[Any, PendingRequest] | None = None,
        retry: Retry | None = None,
    ) -> Iterator[tuple[Any, Any]]:
        """Yield ``(key, value or ClientError)`` for every request as replies arrive; the rest when the deadline has passed.

        A request is a key, the node to ask, and what to send; each is sent before the next is taken.
        A ``phase`` that is shorter ends the wait before, and leaves requests ``pending``: a later call can wait for them again, or
        ``drop`` ends that. With ``retry``, a request whose node or reply is lost is sent again, with a deadline of its own.
        """
        self._discard()
        return _Exchange(self, kind, group, deadline, phase, retry).run(requests, pending or {})

    def _discard(self) -> None:
        """Have the SuperLink delete what nobody waits for any more, beside the requests that follow.

        Flower keeps a request that its node never fetched until the run ends: a model for every node that died with one.
        """
        old, self._abandoned = self._abandoned, set()
        if old:
            threading.Thread(target=delete, args=(self.grid, old), daemon=True, name="delete old messages").start()

    def ping(self, waiting: Mapping[str, int], group: str) -> dict[str, str]:
        """Ping the nodes of unanswered requests; a ping expires when the next one is sent, so that none pile up at a busy node."""
        record, lifetime = codec.encode({}), max(1.0, self.settings.patience)
        pings = {self.send(node, record, f"query.{PING}", group=group, lifetime=lifetime): about for about, node in waiting.items()}
        return {sent.identity: about for sent, about in pings.items() if sent is not None}

    def send(self, node: int, record: RecordDict, kind: str, *, group: str, lifetime: float) -> PendingRequest | None:
        """Send a message; ``None`` if Flower does not accept it."""
        from flwr.app import Message

        def push() -> str | None:  # a new message each time: Flower takes none twice
            message = Message(content=record, dst_node_id=node, message_type=kind, group_id=group, ttl=lifetime)
            (identity,) = self.grid.push_messages([message]) or (None,)
            return identity

        end = time.monotonic() + lifetime  # before Flower's: what expires there is late, not lost
        identity = retry_when_busy(push)
        return None if identity is None else PendingRequest(identity, node, end, self._since.get(node, ""))

    def read(self, message: Message) -> Any:
        """Return what a reply says, or the error that it is."""
        if message.has_error():
            reason = brief(str(message.error.reason or "no reason given"))
            text = f"Flower reports error {message.error.code}: {reason}"
            return AwayError(text) if message.error.code == AWAY else LostError(text) if message.error.code in LOST else ClientError(text)
        self._received += codec.size(message.content)
        try:
            return codec.decode(message.content, limits=replace(LIMITS, size=int(self.settings.reply_mb * MEGABYTE)))
        except ClientError as error:
            return RefusedError(str(error))


class _Exchange:
    """Requests that wait for their replies."""

    def __init__(self, messenger: Messenger, kind: str, group: str, deadline: float, phase: float | None, retry: Retry | None) -> None:
        self._messenger, self._settings, self._retry = messenger, messenger.settings, retry
        self._kind, self._group, self._deadline = kind, group, deadline
        self._phase = phase if phase is not None and phase < deadline else None
        self._waiting: dict[str, Any] = {}  # message id → key
        self._asked: dict[str, PendingRequest] = {}  # by message id
        self._sent: Counter[Any] = Counter()  # key → how often
        self._away: dict[str, float] = {}  # message id → when its node was seen to be gone
        self._pings: dict[str, str] = {}  # message id of a ping → that of the request it is about
        self._passed: dict[str, float] = {}  # message id → when its node answered a later ping

    def run(self, requests: Iterable[tuple[Any, int, RecordDict]], pending: Mapping[Any, PendingRequest]) -> Iterator[tuple[Any, Any]]:
        """See ``Messenger.exchange``."""
        for key, one in pending.items():
            self._wait_for(key, one)
        for request in requests:
            yield from self._send(*request)
        began = self._heard = checked = time.monotonic()  # a phase is as long for the last one asked
        while self._waiting:
            yield from self._collect()
            if time.monotonic() - checked >= self._settings.check_interval:
                self._check_nodes()
                checked = time.monotonic()
            yield from self._end(phase_over=self._phase is not None and time.monotonic() - began >= self._phase)
            if self._waiting and time.monotonic() - self._heard >= self._settings.patience:
                self._messenger.drop(self._pings.keys())
                self._pings, self._heard = {}, time.monotonic()
                self._ping(self._waiting.keys() - self._away.keys())
            if self._waiting:
                time.sleep(self._settings.poll)

    def _send(self, key: Any, node: int, record: RecordDict) -> Iterator[tuple[Any, Any]]:
        sent = self._messenger.send(node, record, self._kind, group=self._group, lifetime=max(1.0, self._deadline))
        if sent is None:
            yield key, ClientError("Flower did not accept the request; see the SuperLink's log")
        else:
            self._wait_for(key, sent)

    def _wait_for(self, key: Any, sent: PendingRequest) -> None:
        self._waiting[sent.identity], self._asked[sent.identity] = key, sent
        self._sent[key] += 1

    def _leave(self, identity: str, *, drop: bool = True) -> Any:
        """Wait for a message no longer; returns its key."""
        pings = {ping for ping, about in self._pings.items() if about == identity}
        for ping in pings:
            del self._pings[ping]
        self._messenger.drop(pings | {identity} if drop else pings)
        return self._waiting.pop(identity)

    def _ping(self, identities: Iterable[str]) -> None:
        self._pings |= self._messenger.ping({identity: self._asked[identity].node for identity in identities}, self._group)

    def _collect(self) -> Iterator[tuple[Any, Any]]:
        """Yield what has come, and see what was lost."""
        polled = [identity for identity in self._waiting if identity not in self._away]
        replies = {reply.metadata.reply_to_message_id: reply for reply in self._messenger.poll([*polled, *self._pings])}
        lost: dict[str, LostError] = {}
        for identity in [identity for identity in polled if identity in replies]:
            value, self._heard = self._messenger.read(replies[identity]), time.monotonic()
            if isinstance(value, AwayError) and self._retry is not None:
                self._away[identity] = time.monotonic()
            elif isinstance(value, LostError):
                if time.monotonic() < self._asked[identity].end:
                    lost[identity] = value
            else:
                yield self._leave(identity, drop=isinstance(value, ClientError)), value
        for ping in [ping for ping in replies if ping in self._pings]:  # after the replies that came with them: a node answers in order
            about = self._pings.pop(ping)
            if replies[ping].has_error():
                self._messenger.drop({ping})
            else:
                self._passed.setdefault(about, time.monotonic())
        for identity, moment in self._passed.items():
            if identity in self._waiting and not self._messenger.poll.fetches(identity, sent=moment):
                lost.setdefault(identity, LostError("its node has answered, but the answer was lost on its way"))
        yield from self._again(lost)

    def _check_nodes(self) -> None:
        """See whose node is gone, and ping those that have left and are back."""
        online = self._messenger.online()
        back = []
        for identity in self._waiting:
            since, asked = online.get(self._asked[identity].node), self._asked[identity]
            if since is None:
                self._away.setdefault(identity, time.monotonic())
            elif self._away.pop(identity, None) is not None or since != asked.since:
                self._asked[identity] = replace(asked, since=since)
                back.append(identity)
        self._ping(back)

    def _end(self, *, phase_over: bool) -> Iterator[tuple[Any, Any]]:
        """Yield who does not come back, and who is late."""
        now, grace = time.monotonic(), self._settings.grace if self._retry is not None else 0.0
        gone = {identity for identity, moment in self._away.items() if identity in self._waiting and now - moment >= grace}
        yield from self._again({identity: AwayError("its node was connected and is gone") for identity in gone}, send=not phase_over)
        for identity, asked in [(identity, self._asked[identity]) for identity in self._waiting]:
            if now < asked.end and not phase_over:
                continue
            if identity in self._away:
                yield self._leave(identity), AwayError("its node was connected and is gone")
            elif now < asked.end and self._phase is not None:
                yield self._leave(identity, drop=False), StragglerError(f"late: no answer within {self._phase:.0f} s", asked)
            else:
                yield self._leave(identity), LateError(f"no answer within {self._deadline:.0f} s")

    def _again(self, lost: Mapping[str, LostError], *, send: bool = True) -> Iterator[tuple[Any, Any]]:
        """Send lost requests again to the nodes that their clients have now."""
        errors = {self._leave(identity): error for identity, error in lost.items()}
        allowed = {key for key in errors if send and self._sent[key] < self._settings.attempts}
        nodes = self._retry.find() if self._retry is not None and allowed else {}
        for key, error in errors.items():
            if self._retry is not None and key in allowed and key in nodes:
                yield from self._send(key, nodes[key], self._retry.write(key))
            else:
                yield key, error
