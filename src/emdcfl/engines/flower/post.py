"""Messages to nodes and their decoded replies, whatever happens on the way.

Flower drops a reply that the SuperLink cannot take at that moment (its database is busy, say): the node deletes it, and the server would
wait for it until the deadline. A node works on one message after the other, so one that answers a later question and not an earlier one has
lost that answer. After a while without any answer every node that is waited for is therefore asked ``here``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from emdcfl.core.errors import ClientError, EmdcflError
from emdcfl.core.replies import brief
from emdcfl.engines.flower import codec
from emdcfl.engines.flower.limits import LIMITS, MEGABYTE

if TYPE_CHECKING:
    from flwr.app import Message, RecordDict
    from flwr.serverapp import Grid

log = logging.getLogger("emdcfl")

HERE = "here"
"""The question that any node answers with its name, once it has dealt with everything it was asked before."""

LOST = (3, 4, 5, 8)
"""Flower's error codes for a message, reply, node or client process that is gone: worth another try if the client is back."""

GONE = (3, 4)
"""Those of them that a message or reply has which somebody else is just fetching."""

LOOK = 15.0
"""Seconds a look for replies may take before another is begun."""

MOST_LOOKS = 8
"""Looks that may be under way at the same time."""

PAUSES = (1.0, 2.0, 4.0, 8.0)
"""Seconds to wait before the SuperLink, which answered with an error of its own, is asked again."""

T = TypeVar("T")


@dataclass(frozen=True)
class Wire:
    """How requests travel.

    Attributes
    ----------
    deadline : float
        Seconds a request may take, training included.
    part_mb : float
        Largest request for embedding models of partners, in MB; larger ones go in several parts.
    reply_mb : float
        Largest reply that is read.
    poll : float
        Seconds between looks for replies.
    attempts : int
        How often a request is sent if its node or its reply is lost.
    wait : float
        Seconds to wait for missing clients before round 1.
    patience : float
        Seconds without any reply after which those still missing are looked for.
    """

    deadline: float = 600.0
    part_mb: float = 256.0
    reply_mb: float = 2048.0
    poll: float = 0.2
    attempts: int = 2
    wait: float = 60.0
    patience: float = 60.0

    @property
    def greeting(self) -> float:
        """Seconds a node may take to say who it is: less than for a task, but enough for many processes that start at once."""
        return min(self.deadline, max(60.0, self.deadline / 4))


class LostError(ClientError):
    """The node, the message or the reply is gone."""


class LateError(ClientError):
    """No reply within the deadline."""


class RefusedError(ClientError):
    """A reply that is not a message of this program, or exceeds the limits."""


class Post:
    """Sends records to nodes and collects the decoded replies."""

    def __init__(self, grid: Grid, wire: Wire) -> None:
        self.grid, self.wire = grid, wire
        self._received = 0

    def take_received(self) -> int:
        """Return the bytes received since this was last asked."""
        received, self._received = self._received, 0
        return received

    def exchange(
        self, kind: str, requests: Mapping[Any, tuple[int, RecordDict]], *, group: str, deadline: float
    ) -> Iterator[tuple[Any, Any]]:
        """Yield ``(key, value or ClientError)`` for every request as replies come; the rest when the deadline has passed."""
        waiting: dict[str, Any] = {}
        end = time.monotonic() + deadline
        for key, (node, record) in requests.items():
            identity = self._send(node, record, kind, group=group, lifetime=max(1.0, deadline))
            if identity is None:
                yield key, ClientError("the request could not be handed to Flower; see the SuperLink's log")
            else:
                waiting[identity] = key
        probes: dict[str, str] = {}  # message id of a probe → that of the request it asks about
        heard, looks = time.monotonic(), Looks(self.grid)
        while waiting:
            replies = {reply.metadata.reply_to_message_id: reply for reply in looks([*waiting, *probes])}
            for identity in [identity for identity in waiting if identity in replies]:
                yield waiting.pop(identity), self._read(replies[identity])
                heard = time.monotonic()
            for probe, identity in probes.items():  # after the replies that came with them: a node answers in order
                if identity in waiting and probe in replies and not replies[probe].has_error():
                    yield waiting.pop(identity), LostError("its node has answered, but the answer was lost on its way")
            now = time.monotonic()
            if now >= end:
                break
            if waiting and now - heard >= self.wire.patience:
                heard, probes = now, self._probe({identity: requests[key][0] for identity, key in waiting.items()}, group)
            if waiting:
                time.sleep(self.wire.poll)
        for key in waiting.values():
            yield key, LateError(f"no answer within {deadline:.0f} s")

    def _probe(self, waiting: Mapping[str, int], group: str) -> dict[str, str]:
        """Ask the nodes of unanswered requests ``here``; a question lives until the next one, so that none pile up at a busy node."""
        record, lifetime = codec.encode({}), max(1.0, self.wire.patience)
        probes = {self._send(node, record, f"query.{HERE}", group=group, lifetime=lifetime): about for about, node in waiting.items()}
        return {probe: about for probe, about in probes.items() if probe is not None}

    def _send(self, node: int, record: RecordDict, kind: str, *, group: str, lifetime: float) -> str | None:
        from flwr.app import Message

        def push() -> str | None:  # a new message each time: Flower takes none twice
            message = Message(content=record, dst_node_id=node, message_type=kind, group_id=group, ttl=lifetime)
            (identity,) = self.grid.push_messages([message]) or (None,)
            return identity

        return steady(push)

    def _read(self, message: Message) -> Any:
        if message.has_error():
            reason = brief(str(message.error.reason or "no reason given"))
            text = f"Flower reports error {message.error.code}: {reason}"
            return LostError(text) if message.error.code in LOST else ClientError(text)
        self._received += codec.size(message.content)
        try:
            return codec.decode(message.content, limits=replace(LIMITS, size=int(self.wire.reply_mb * MEGABYTE)))
        except ClientError as error:
            return RefusedError(str(error))


class Looks:
    """Looks for replies without being held up by one of them.

    ``Grid.pull_messages`` returns when all replies it has found are complete. It waits three minutes for one whose rest never comes, up to
    two hours for one that trickles in, and whatever it found at the same time waits too. So a look that takes longer than ``LOOK`` seconds
    is left to itself and the next one begun; what it finds is handed on when it ends.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._open: list[_Look] = []  # oldest first

    def __call__(self, identities: list[str]) -> list[Message]:
        """Return the replies to these messages that have come since the last look."""
        if len(self._open) < MOST_LOOKS:
            self._open.append(_Look(self._grid, identities, alone=not self._open))
        self._open[-1].ended.wait(LOOK)
        ended = [look for look in self._open if look.ended.is_set()]
        self._open = [look for look in self._open if look not in ended]
        return [reply for look in ended for reply in look.result()]


class _Look(threading.Thread):
    """One look. A reply is handed out once, so what an older look is fetching is reported gone to one that is not ``alone``."""

    def __init__(self, grid: Grid, identities: list[str], *, alone: bool) -> None:
        super().__init__(daemon=True, name="look for replies")
        self.alone, self.ended = alone, threading.Event()
        self._grid, self._identities = grid, identities
        self._found: list[Message] = []
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._found = steady(lambda: list(self._grid.pull_messages(self._identities)))
        except BaseException as error:  # Flower ends a run with SystemExit
            self._error = error
        finally:
            self.ended.set()

    def result(self) -> list[Message]:
        if self._error is not None:
            raise self._error
        return [reply for reply in self._found if self.alone or not (reply.has_error() and reply.error.code in GONE)]


def steady(call: Callable[[], T]) -> T:
    """Call the SuperLink, several times if it answers with an error of its own (an HTTP status of 500 or more): a busy one recovers."""
    import httpx

    for pause in PAUSES:
        try:
            return call()
        except httpx.HTTPStatusError as error:
            if error.response.status_code < httpx.codes.INTERNAL_SERVER_ERROR:
                raise
            log.warning("the SuperLink answered with error %d; it is asked again in %.0f s", error.response.status_code, pause)
            time.sleep(pause)
    try:
        return call()
    except httpx.HTTPStatusError as error:
        code = error.response.status_code
        raise EmdcflError(f"the SuperLink keeps answering with error {code}; see its log, and go on with --resume") from error
