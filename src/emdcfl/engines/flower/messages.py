"""Send messages to nodes and collect their decoded replies, whatever is lost on the way.

Flower drops a reply that the SuperLink cannot store at that moment (its database is busy, say): the node deletes it, and the server would
wait until the deadline. A node answers messages in order, so one that answers a later message but not an earlier one has lost that reply.
After a while without any reply, the server therefore sends a ``ping`` to every node it waits for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from emdcfl.core.errors import ClientError, EmdcflError
from emdcfl.core.replies import brief
from emdcfl.engines.flower import codec
from emdcfl.engines.flower.codec import LIMITS, MEGABYTE

if TYPE_CHECKING:
    from flwr.app import Message, RecordDict
    from flwr.serverapp import Grid

log = logging.getLogger("emdcfl")

PING = "ping"
"""A node answers this with its name, after everything it was asked before."""

LOST = (3, 4, 5, 8)
"""Flower's error codes for a message, reply, node or client process that is gone: worth another try if the client is back."""

GONE = (3, 4)
"""Those that Flower also gives for a message or reply that another poll is fetching."""

POLL_TIMEOUT = 15.0
"""Seconds a poll for replies may take before the next one starts beside it."""

INCOMPLETE = 200.0
"""Seconds after which a reply that a poll is still fetching counts as lost: Flower gives up on one whose rest never arrives after 180."""

MAX_POLLS = 8
"""Polls that may run at the same time."""

MAX_CARRIED = 4
"""Polls of earlier phases that may run beside them."""

PAUSES = (1.0, 2.0, 4.0, 8.0)
"""Seconds to wait before each further try, if the SuperLink answers with a server error."""

T = TypeVar("T")


@dataclass(frozen=True)
class MessageSettings:
    """How requests are sent.

    Attributes
    ----------
    deadline : float
        Seconds a request may take, training included.
    part_mb : float
        Largest request of a task that can be divided, in MB; larger ones are sent in several parts.
    reply_mb : float
        Largest reply that is read, in MB.
    poll : float
        Seconds between polls for replies.
    attempts : int
        How often a request is sent if its node or its reply is lost.
    wait : float
        Seconds to wait for missing clients before round 1.
    patience : float
        Seconds without any reply after which the nodes still missing are pinged.
    """

    deadline: float = 600.0
    part_mb: float = 256.0
    reply_mb: float = 2048.0
    poll: float = 0.2
    attempts: int = 2
    wait: float = 60.0
    patience: float = 60.0

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
        self._fetching: list[_Poll] = []  # polls of phases that are over, at work on replies that a later phase waits for

    def take_received(self) -> int:
        """Return the bytes received since the last call."""
        received, self._received = self._received, 0
        return received

    def abandon(self, standing: Standing) -> None:
        """Wait for a request no longer."""
        self._abandoned.add(standing.identity)

    def exchange(
        self,
        kind: str,
        requests: Mapping[Any, tuple[int, RecordDict]],
        *,
        group: str,
        deadline: float,
        phase: float | None = None,
        standing: Mapping[Any, Standing] | None = None,
        carry: bool = False,
    ) -> Iterator[tuple[Any, Any]]:
        """Yield ``(key, value or ClientError)`` for every request as replies arrive; the rest when the deadline has passed.

        A ``phase`` that is shorter ends the wait before, and leaves requests ``standing``, which a later call can wait for again; with
        ``carry``, what is being fetched then is there for that call.
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
        with self._poller(frozenset(asked), carry=carry) as poll:
            while waiting:
                replies = {reply.metadata.reply_to_message_id: reply for reply in poll([*waiting, *pings])}
                self._abandoned |= {identity for identity, reply in replies.items() if reply.has_error()}
                for identity in [identity for identity in waiting if identity in replies]:
                    yield waiting.pop(identity), self._read(replies[identity])
                    heard = time.monotonic()
                for ping, identity in pings.items():  # after the replies that came with them: a node answers in order
                    if identity in waiting and ping in replies and not replies[ping].has_error() and not poll.fetches(identity):
                        self._abandoned.add(identity)
                        yield waiting.pop(identity), LostError("its node has answered, but the answer was lost on its way")
                now = time.monotonic()
                if now >= end:
                    break
                if waiting and now - heard >= self.settings.patience:
                    self._abandoned |= pings.keys()
                    heard, pings = now, self._ping({identity: asked[identity].node for identity in waiting}, group)
                if waiting:
                    time.sleep(self.settings.poll)
        self._abandoned |= pings.keys()
        for identity, key in waiting.items():
            if phase is not None and phase < deadline and time.monotonic() < asked[identity].end:
                yield key, StragglerError(f"late: no answer within {phase:.0f} s", asked[identity])
            else:
                self._abandoned.add(identity)
                yield key, LateError(f"no answer within {deadline:.0f} s")

    @contextmanager
    def _poller(self, identities: frozenset[str], *, carry: bool) -> Iterator[ReplyPoller]:
        """Poll for replies, also with polls of earlier phases that fetch some of these; keep those at work for later phases (``carry``).

        A poll has its replies from the SuperLink for good: with it, a late training would be lost, and what was found beside it.
        """
        mine = [poll for poll in self._fetching if not poll.identities.isdisjoint(identities)]
        self._fetching = [poll for poll in self._fetching if poll not in mine]
        poller = ReplyPoller(self.grid, mine)
        try:
            yield poller
        finally:
            self._fetching = [*self._fetching, *(poller.open if carry else ())][-MAX_CARRIED:]

    def _discard(self) -> None:
        """Have the SuperLink delete what nobody waits for any more, beside the requests that follow.

        Flower keeps a request that its node never fetched until the run ends: a model for every node that died with one.
        """
        old, self._abandoned = self._abandoned, set()
        if old:
            threading.Thread(target=_delete, args=(self.grid, old), daemon=True, name="delete old messages").start()

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


def _delete(grid: Grid, identities: set[str]) -> None:
    """Fetch the replies to messages, which deletes the entries of both, and say that the messages themselves were fetched, too."""
    import httpx
    from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest

    with suppress(httpx.HTTPError, SystemExit):  # what stays is deleted with the run
        grid.pull_messages(identities)
        link: Any = getattr(grid, "_runtime_client", None)  # Grid itself has no such call; a simulated one has no link
        for identity in identities if link is not None else ():
            link.ConfirmMessageReceived(ConfirmMessageReceivedRequest(message_object_id=identity))


class ReplyPoller:
    """Polls for replies without waiting for one that is incomplete.

    ``Grid.pull_messages`` returns when all replies it has found are complete. It waits three minutes for one whose rest never arrives, and
    up to two hours for one that arrives slowly; whatever it found at the same time waits too. So a poll that takes longer than
    ``POLL_TIMEOUT`` seconds continues in its thread while the next one starts; its replies are returned when it ends.
    """

    def __init__(self, grid: Grid, begun: Sequence[_Poll] = ()) -> None:
        self._grid, self._most = grid, MAX_POLLS + len(begun)
        self.open = list(begun)  # oldest first

    def fetches(self, identity: str) -> bool:
        """Whether a poll that is still at work may have the reply to a message: it is not lost yet, and only one of them can be."""
        return any(identity in poll.identities and time.monotonic() - poll.began < INCOMPLETE for poll in self.open)

    def __call__(self, identities: list[str]) -> list[Message]:
        """Return the replies to these messages that have arrived since the last call."""
        if len(self.open) < self._most:
            self.open.append(_Poll(self._grid, identities, alone=not self.open))
        self.open[-1].ended.wait(POLL_TIMEOUT)
        ended = [poll for poll in self.open if poll.ended.is_set()]
        self.open = [poll for poll in self.open if poll not in ended]
        return [reply for poll in ended for reply in poll.result()]


class _Poll(threading.Thread):
    """One poll. Flower hands out a reply once, so it reports what an older poll is fetching as gone to one that is not ``alone``."""

    def __init__(self, grid: Grid, identities: list[str], *, alone: bool) -> None:
        super().__init__(daemon=True, name="poll for replies")
        self.alone, self.ended = alone, threading.Event()
        self.identities, self.began = frozenset(identities), time.monotonic()
        self._grid, self._identities = grid, identities
        self._found: list[Message] = []
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._found = retry_when_busy(lambda: list(self._grid.pull_messages(self._identities)))
        except BaseException as error:  # Flower ends a run with SystemExit
            self._error = error
        finally:
            self.ended.set()

    def result(self) -> list[Message]:
        if self._error is not None:
            raise self._error
        return [reply for reply in self._found if self.alone or not (reply.has_error() and reply.error.code in GONE)]


def retry_when_busy(call: Callable[[], T]) -> T:
    """Call the SuperLink, several times if it is busy: it answers with an HTTP status of 500 or more, or cannot store part of a message."""
    import httpx
    from flwr.supercore.inflatable.inflatable_utils import ObjectPushError

    pauses = iter(PAUSES)
    while True:
        try:
            return call()
        except (httpx.HTTPStatusError, ObjectPushError) as error:  # the latter while its database is locked, which Flower does not tell
            code = error.response.status_code if isinstance(error, httpx.HTTPStatusError) else httpx.codes.SERVICE_UNAVAILABLE.value
            pause = next(pauses, None)
            if code < httpx.codes.INTERNAL_SERVER_ERROR:
                raise
            if pause is None:
                raise EmdcflError(f"the SuperLink keeps answering with error {code}; see its log, and continue with --resume") from error
            log.warning("the SuperLink answered with error %d; trying again in %.0f s", code, pause)
            time.sleep(pause)
