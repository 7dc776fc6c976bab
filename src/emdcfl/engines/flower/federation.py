"""A federation whose clients are Flower nodes. A task is a ``query.<task>`` message; everything else is as in one process.

Every request has its own deadline. Replies are matched by message id, never by node; whatever goes wrong becomes a failure that names the
client. Tasks may be repeated without harm (their randomness is keyed, a node's private state is committed by the next round), so a request
whose node or reply was lost is sent again if the client is there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from emdcfl.core.client import TaskInfo
from emdcfl.core.errors import ClientError
from emdcfl.core.federation import Failure, Federation, Inputs
from emdcfl.core.replies import brief
from emdcfl.core.schema import Reply
from emdcfl.engines.flower import codec
from emdcfl.engines.flower.directory import HELLO, Directory
from emdcfl.engines.flower.limits import MEGABYTE
from emdcfl.engines.flower.parts import join, merge_inputs, parts
from emdcfl.engines.flower.post import LateError, LostError, Post, RefusedError, Wire
from emdcfl.privacy.keylist import KeyList

if TYPE_CHECKING:
    from flwr.app import RecordDict
    from flwr.serverapp import Grid

log = logging.getLogger("emdcfl")


class FlowerFederation(Federation):
    """Clients behind a Flower ``Grid``.

    Parameters
    ----------
    grid : Grid
        What a ``ServerApp`` is given.
    clients : sequence of str
        Names of all clients that may take part, connected or not.
    factory : callable
        Builds the network.
    job : mapping
        What a node needs to know about the run, sent with every request (see ``node.py``).
    wire : Wire, optional
    keys : KeyList, optional
        Which key may use which name; by default the first key seen in this run.
    **options
        Those of ``Federation``.
    """

    def __init__(
        self,
        grid: Grid,
        clients: Sequence[str],
        factory: Callable[[], nn.Module],
        *,
        job: Mapping[str, Any],
        wire: Wire | None = None,
        keys: KeyList | None = None,
        **options: Any,
    ) -> None:
        super().__init__(clients, factory, **options)
        self.wire, self.job = wire or Wire(), dict(job)
        self.task_traffic: dict[str, list[int]] = {}  # task → bytes sent, bytes received, requests
        self._post = Post(grid, self.wire)
        self.directory = Directory(grid, keys or KeyList(), self._hello)
        self._unanswered: set[str] = set()

    def _hello(self, requests: Mapping[int, Any]) -> Mapping[int, Any]:
        encoder = codec.Encoder()
        messages = {node: (node, encoder.encode(value)) for node, value in requests.items()}
        return dict(self._post.exchange(f"query.{HELLO}", messages, group="", deadline=self.wire.greeting))

    def gather(self) -> None:
        """Wait for the clients before the first round, and say who is missing."""
        end = time.monotonic() + self.wire.wait
        while True:
            self.directory.refresh()
            missing = [c for c in self.clients if c not in self.directory.nodes]
            if not missing or time.monotonic() >= end:
                break
            time.sleep(min(2.0, max(0.1, self.wire.poll)))
        if missing:
            log.warning("not connected: %s; the run goes on without them until they are", ", ".join(missing))

    def verify_identity(self, client: str, reply: Reply) -> None:
        """Check that the key a client describes itself with is the one it proved to hold."""
        self.directory.verify_identity(client, reply["key"])

    def _dispatch(self, info: TaskInfo, inputs: Mapping[str, Inputs], common: Inputs) -> Iterator[tuple[str, Reply | Failure]]:
        if info.phase == "train":  # a new try: whoever did not answer before is asked again
            self._unanswered.clear()
        full = {client: merge_inputs(info, own, common) for client, own in inputs.items()}
        cut = list(parts(info, full, int(self.wire.part_mb * MEGABYTE)))
        if len(cut) == 1:
            yield from in_order(list(inputs), self._ask(info, cut[0]))
            return
        answers: dict[str, list[Reply]] = {client: [] for client in inputs}
        failed: dict[str, Failure] = {}
        for part in cut:
            for client, outcome in self._ask(info, {c: own for c, own in part.items() if c not in failed}):
                if isinstance(outcome, Failure):
                    failed[client] = outcome
                else:
                    answers[client].append(outcome)
        for client in inputs:
            yield client, failed[client] if client in failed else self._join(client, info, answers.pop(client))

    def _join(self, client: str, info: TaskInfo, replies: list[Reply]) -> Reply | Failure:
        try:
            return join(replies)
        except ClientError as error:
            return self._failure(client, info, str(error), violation=True)

    def _ask(self, info: TaskInfo, requests: Mapping[str, Inputs]) -> Iterator[tuple[str, Reply | Failure]]:
        """Ask clients, twice where a node or its reply was lost (with a deadline of its own each time); yield outcomes as they come."""
        encoder, waiting = codec.Encoder(), dict(requests)
        for attempt in range(self.wire.attempts):
            self.directory.refresh()
            nodes = self.directory.nodes
            last = attempt == self.wire.attempts - 1
            lost: dict[str, str] = {}
            messages: dict[str, tuple[int, RecordDict]] = {}
            for client, own in waiting.items():
                if client in self._unanswered:
                    yield client, self._failure(client, info, "it did not answer an earlier request of this round")
                elif client not in nodes:
                    lost[client] = self.directory.refused.get(client, "no node with this name is connected")
                else:
                    envelope = {"task": info.name, "round": self.index, "client": client, "job": self.job, "inputs": own}
                    messages[client] = nodes[client], encoder.encode(envelope)
            for client, outcome in self._exchange(info, messages):
                if isinstance(outcome, LostError) and not last:
                    lost[client] = str(outcome)
                else:
                    yield client, self._open(client, info, outcome)
            if not lost:
                return
            if last or not messages:  # nobody was asked: another look at once would find the same
                for client, reason in lost.items():
                    yield client, self._failure(client, info, reason)
                return
            waiting = {client: requests[client] for client in lost}

    def _exchange(self, info: TaskInfo, messages: Mapping[str, tuple[int, RecordDict]]) -> Iterator[tuple[str, Any]]:
        count = self.task_traffic.setdefault(info.name, [0, 0, 0])
        count[0] += sum(codec.size(record) for _, record in messages.values())
        count[2] += len(messages)
        kind, group = f"query.{info.name}", str(self.index)
        for client, outcome in self._post.exchange(kind, messages, group=group, deadline=self.wire.deadline):
            if isinstance(outcome, LateError):
                self._unanswered.add(client)
            count[1] += self._post.take_received()
            yield client, outcome

    def _open(self, client: str, info: TaskInfo, outcome: Any) -> Reply | Failure:
        """Take the reply out of its envelope, or say why there is none."""
        if isinstance(outcome, ClientError):
            return self._failure(client, info, str(outcome), violation=isinstance(outcome, RefusedError))
        if not isinstance(outcome, dict) or outcome.get("client") != client:
            who = outcome.get("client") if isinstance(outcome, dict) else None
            self.directory.forget(client)
            reason = f"expected an answer of client {client!r}, got one in the name of {brief(repr(who), 80)}"
            return self._failure(client, info, reason, violation=True)
        if isinstance(outcome.get("failure"), str):
            return self._failure(client, info, brief(outcome["failure"]))
        reply = outcome.get("reply")
        if not isinstance(reply, dict):
            return self._failure(client, info, "expected a reply or a failure in its answer, got neither", violation=True)
        return reply

    def _failure(self, client: str, info: TaskInfo, reason: str, *, violation: bool = False) -> Failure:
        failure = Failure(client, info.name, self.index, reason, violation=violation)
        if not violation:  # those are told where every engine's replies are checked
            log.warning("%s", failure)
        return failure


def in_order(clients: list[str], outcomes: Iterator[tuple[str, Reply | Failure]]) -> Iterator[tuple[str, Reply | Failure]]:
    """Yield outcomes in the order of ``clients``, each as soon as those before it are there."""
    early: dict[str, Reply | Failure] = {}
    for client in clients:
        while client not in early:
            name, outcome = next(outcomes)
            early[name] = outcome
        yield client, early.pop(client)
