"""Ask the SuperLink for replies, and fetch each as it comes. A reply that does not end costs nobody but its own client."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence, Set
from concurrent.futures import Future, wait
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from emdcfl.core.errors import EmdcflError
from emdcfl.engines.flower.codec import LIMITS

if TYPE_CHECKING:
    from flwr.app import Message
    from flwr.serverapp import Grid

log = logging.getLogger("emdcfl")

POLL_TIMEOUT = 15.0
"""Seconds to wait for the SuperLink in a poll for replies, before the deadlines are looked at."""

MAX_FETCHES = 8
"""Replies that are fetched at the same time, beside those of which a part has yet to reach the SuperLink."""

STUCK = 12.0
"""Seconds to wait for a further part of a reply that its node has sent: Flower looks for a missing one every ten seconds at least."""

UPLOAD = (0.1, 0.2, 0.4)
"""Seconds to wait for a part that its node is still sending. Flower's own next try comes after 1, 2, 4, … s."""

THREAD = "replies"
"""Name of the threads that ask for replies and fetch them."""

PAUSES = (1.0, 2.0, 4.0, 8.0)
"""Seconds to wait before each further try, if the SuperLink answers with a server error."""

T = TypeVar("T")


class ReplyPoller:
    """Polls for replies without waiting for one that is incomplete.

    The SuperLink announces a reply before all its parts have arrived. ``Grid.pull_messages`` fetches what it has found one after the
    other; it waits three minutes for a part that never arrives, and up to two hours for those that arrive slowly. So a poll asks only
    which replies there are, and each is fetched in a thread of its own, which ends soon after the reply is dropped. There are as many
    threads as requests without a complete reply, at most.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid, self._slots = grid, threading.Semaphore(MAX_FETCHES)
        self._asking: Future[dict[str, Any]] | None = None
        self._fetches: dict[str, _Fetch] = {}
        self._dropped: set[str] = set()  # while a poll is under way

    def fetches(self, identity: str, sent: float) -> bool:
        """Whether a reply that its node had ``sent`` at a moment is on its way; if a part is missing and none comes, it was cut off."""
        fetch = self._fetches.get(identity)
        return fetch is not None and not (fetch.settled.is_set() and time.monotonic() - max(sent, fetch.heard) >= STUCK)

    def drop(self, identities: Set[str]) -> None:
        """Fetch these replies no longer."""
        self._dropped |= identities
        for identity in identities & self._fetches.keys():
            self._fetches.pop(identity).dropped.set()

    def __call__(self, identities: Sequence[str]) -> list[Message]:
        """Return the replies to these messages that are complete since the last call."""
        end = time.monotonic() + POLL_TIMEOUT
        new = [identity for identity in identities if identity not in self._fetches]
        if self._asking is None and new:
            self._dropped.clear()
            self._asking = _begin(lambda: retry_when_busy(lambda: _take(self._grid, new)))
        if self._asking is not None and wait([self._asking], POLL_TIMEOUT).done:
            asked, self._asking = self._asking, None
            self._fetches |= {identity: _Fetch(self._grid, found, self._slots) for identity, found in asked.result().items()}
            self.drop(set(self._dropped))
        fetches = {identity: self._fetches[identity] for identity in identities if identity in self._fetches}
        for fetch in fetches.values():
            fetch.settled.wait(max(0.0, end - time.monotonic()))
        ended = [identity for identity, fetch in fetches.items() if fetch.replies.done()]
        return [reply for identity in ended for reply in self._fetches.pop(identity).replies.result()]


def _begin(call: Callable[[], T]) -> Future[T]:
    """Make one call in a thread of its own, which does not keep the process from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # Flower ends a run with SystemExit
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name=THREAD).start()
    return future


class _Fetch:
    """Fetches one reply that a poll has found. Flower's own code does it, and takes this object for the link to the SuperLink.

    ``settled`` is set when the reply has been fetched, or a part of it is missing at the SuperLink; ``dropped`` when nobody waits any more.
    """

    def __init__(self, grid: Grid, found: Any, slots: threading.Semaphore) -> None:
        self._grid, self._link, self._announced, self._slots = cast(Any, grid), _link(grid), found, slots
        self.heard = time.monotonic()  # when the last part came
        self.settled, self.dropped, self._first = threading.Event(), threading.Event(), threading.Lock()
        self._counting, self._received = threading.Lock(), 0
        self._sizes: dict[str, int] = {}
        self._arrays: dict[str, bytes] = {}  # which chunks each consists of, as Flower writes it
        self.replies = _begin(self._fetch)
        self.replies.add_done_callback(lambda _: self._settle())

    def _settle(self) -> None:
        """Let others fetch; once."""
        if self._first.acquire(blocking=False):
            self._slots.release()
            self.settled.set()

    def _fetch(self) -> list[Message]:
        import httpx
        from flwr.app import RecordDict
        from flwr.superlink.grid.http_grid import HttpGrid

        self._slots.acquire()
        asker: Any = SimpleNamespace(_run=self._grid._run, node=self._grid.node, _runtime_client=self)
        about, readable = self._announced.messages_list[0].metadata, True
        try:
            found = list(retry_when_busy(lambda: HttpGrid.pull_messages(asker, ())))
            if any(one.metadata.reply_to_message_id != about.reply_to_message_id for one in found):
                raise ValueError("it says that it answers another message")
            if not all(one.has_error() or isinstance(one.content, RecordDict) for one in found):
                raise TypeError("its content is no record")
        except (httpx.HTTPError, OSError, EmdcflError):
            raise
        except Exception as error:  # Flower puts the parts together without a check: whatever they are, they cost their sender alone
            found, readable = [_malformed(about, f"the reply cannot be read ({type(error).__name__}: {error})")], False
        if self.dropped.is_set() or not readable:
            _confirm(self._link, about.message_id)  # the SuperLink deletes it
        return found

    def PullMessages(self, request: Any) -> Any:
        return self._announced

    def PullObject(self, request: Any) -> Any:
        from flwr.supercore.inflatable.inflatable_utils import ObjectPullError

        for pause in (*UPLOAD, 0.0):
            if self.dropped.is_set():
                raise ObjectPullError(request.object_id, "nobody waits for it")
            part = self._link.PullObject(request)
            if part.object_available or not part.object_found:
                self.heard = time.monotonic()
                self._count(request.object_id, len(part.object_content))
                if part.object_content.startswith(b"Array "):
                    self._arrays[request.object_id] = part.object_content
                break
            self._settle()
            self.dropped.wait(pause)
        return part

    def _count(self, identity: str, size: int) -> None:
        """Refuse a reply as soon as its parts are too large together: they are all held in memory."""
        with self._counting:  # Flower fetches several parts at the same time
            self._sizes[identity] = size
            self._received += size
            if self._received > LIMITS.size:
                raise ValueError(f"it has more than {LIMITS.size} bytes")

    def ConfirmMessageReceived(self, request: Any) -> None:
        """Pass on that all parts are here; refuse arrays that name the same chunk so often that they would fill the memory."""
        self._link.ConfirmMessageReceived(request)
        total = 0
        for head, _, body in (array.partition(b"\x00") for array in self._arrays.values()):
            chunks = head.decode().split(" ")[1].split(",")
            total += sum(self._sizes[chunks[i]] for i in json.loads(body)["arraychunk_ids"])
        if total > LIMITS.size:
            raise ValueError(f"it unpacks to {total} bytes, expected at most {LIMITS.size}")


def _malformed(about: Any, reason: str) -> Message:
    from flwr.common.serde import message_from_proto
    from flwr.proto.error_pb2 import Error
    from flwr.proto.message_pb2 import Message

    return message_from_proto(Message(metadata=about, error=Error(code=0, reason=reason)))


def delete(grid: Grid, identities: Set[str]) -> None:
    """Take the replies to messages from the SuperLink, and say that they and the messages themselves were fetched: it deletes both."""
    import httpx

    with suppress(httpx.HTTPError, SystemExit):  # what stays is deleted with the run
        found = _take(grid, identities)
        for identity in (*identities, *(reply.messages_list[0].metadata.message_id for reply in found.values())):
            _confirm(_link(grid), identity)


def _link(grid: Grid) -> Any:
    """Return what reaches the SuperLink call by call, which ``Grid`` itself does not offer."""
    return cast(Any, grid)._runtime_client


def _take(grid: Grid, identities: Iterable[str]) -> dict[str, Any]:
    """Ask which of these messages have replies. The SuperLink tells each once: message id → Flower's answer with this reply alone."""
    from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse

    found = _link(grid).PullMessages(PullAppMessagesRequest(message_ids=identities))
    return {
        reply.metadata.reply_to_message_id: PullAppMessagesResponse(messages_list=[reply], message_object_trees=[tree])
        for reply, tree in zip(found.messages_list, found.message_object_trees, strict=True)
    }


def _confirm(link: Any, identity: str) -> None:
    from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest

    link.ConfirmMessageReceived(ConfirmMessageReceivedRequest(message_object_id=identity))


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
