"""A federation whose clients are Flower nodes. A task is a ``query.<task>`` message; everything else is as in one process.

Every request has its own deadline. Replies are matched by message id, never by node; every error becomes a failure that names the client.
Repeating a task does no harm: its randomness is keyed, and a client keeps nothing of it. So a request whose node or
reply was lost is sent again if the client is connected.

Each message costs a node processor time and the round seconds, so requests that can wait travel along with others: the description with
the greeting, a round's test with the first request of the next one. The node answers each of them, and ``run`` finds the answers here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from emdcfl.core import tasks
from emdcfl.core.client import TASKS, Task, TaskInfo
from emdcfl.core.errors import ClientError
from emdcfl.core.federation import Failure, Federation, Inputs
from emdcfl.core.replies import Replies, brief
from emdcfl.core.schema import Reply
from emdcfl.core.units import names
from emdcfl.engines.flower import codec
from emdcfl.engines.flower.codec import MEGABYTE
from emdcfl.engines.flower.connected import ALONG, ConnectedNodes
from emdcfl.engines.flower.messages import LateError, LostError, PendingRequest, RefusedError, Retry, StragglerError
from emdcfl.engines.flower.parts import join, merge_inputs, parts
from emdcfl.engines.flower.stragglers import Straggler, stale, staleness

if TYPE_CHECKING:
    from flwr.app import RecordDict

log = logging.getLogger("emdcfl")

DESCRIBE = tasks.describe.__name__


@dataclass(frozen=True)
class Postponed:
    """A request to one client that travels along with the next one."""

    task: str
    round: int
    inputs: Inputs


class FlowerFederation(Federation):
    """Clients that are nodes of Flower, connected or not.

    Parameters
    ----------
    job : mapping
        What a node needs to know about the run, sent with every request (see ``node/home.py``).
    phase_deadline : float, optional
        Seconds to wait in a phase; who has not answered then is late. By default, a phase lasts as long as a request is valid.
    late_updates : bool
        Whether the method takes a training that comes late for one of a later round (``stale``); else it is dropped.
    """

    def __init__(
        self,
        connected: ConnectedNodes,
        clients: Sequence[str],
        factory: Callable[[], nn.Module],
        *,
        job: Mapping[str, Any],
        phase_deadline: float | None = None,
        late_updates: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(clients, factory, **options)
        self.connected, self.job = connected, dict(job)
        self.settings, self._messenger = connected.messenger.settings, connected.messenger
        self.task_traffic: dict[str, list[int]] = {}  # task → bytes sent, bytes received, requests
        self._unanswered: set[str] = set()
        self._phase, self._takes_late = phase_deadline, late_updates
        self._stragglers: dict[str, Straggler] = {}
        self._postponed: dict[str, list[Postponed]] = {}
        self._early: dict[tuple[str, str], tuple[Postponed, Any]] = {}  # task, client → what came along with another answer
        connected.answers.clear()
        connected.asked = {"job": self.job, ALONG: [vars(Postponed(DESCRIBE, 0, {}))]}

    def wait_for_clients(self) -> None:
        """Wait for the clients before the first round, and warn of those that are missing."""
        self.connected.wait_until(lambda: not self._missing())
        if missing := self._missing():
            log.warning("not connected: %s; the run goes on without them until they connect", names(missing))

    def _missing(self) -> list[str]:
        return [client for client in self.clients if client not in self.connected.nodes]

    def verify_identity(self, client: str, reply: Reply) -> None:
        """Check that the key a client describes itself with is the one it proved to hold."""
        self.connected.verify_identity(client, reply["key"])

    def piggyback(self, task: Task, inputs: Mapping[str, Inputs]) -> bool:
        """Send a task along with what these clients are asked next."""
        for client, own in inputs.items():
            if self.exclusion_reason(client) is None:
                self._postponed.setdefault(client, []).append(Postponed(task.__name__, self.index, own))
        return True

    def _answered_early(self, info: TaskInfo, client: str, inputs: Inputs) -> Any:
        """Return a client's answer to this request, if it came along with another one; it is not asked for again either way."""
        if info.name == DESCRIBE:
            said = self.connected.answers.pop(client, {}).get(ALONG)
            return {"client": client, **said[0]} if isinstance(said, list) and len(said) == 1 and isinstance(said[0], dict) else None
        if client in self._postponed:
            self._postponed[client] = [asked for asked in self._postponed[client] if asked.task != info.name]
        asked, answer = self._early.pop((info.name, client), (None, None))
        same = asked is not None and asked.round == self.index and _same(asked.inputs, inputs)
        return answer if same else None

    def _dispatch(self, info: TaskInfo, inputs: Mapping[str, Inputs], common: Inputs) -> Iterator[tuple[str, Reply | Failure]]:
        if info.phase == "train":  # a new round: ask those again that did not answer before
            self._unanswered.clear()
        full = {client: merge_inputs(info, own, common) for client, own in inputs.items()}
        cut = list(parts(info, full, int(self.settings.part_mb * MEGABYTE)))
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
        """Yield outcomes as they arrive; ask clients that were not connected once more when the others have answered."""
        encoder, waiting = codec.Encoder(), dict(requests)

        def write(client: str) -> RecordDict:
            if client in pending:  # its late answer was lost
                self._stragglers.pop(client, None)
            request = {"task": info.name, "round": self.index, "client": client, "job": self.job, "inputs": requests[client]}
            if along := self._postponed.get(client):
                request[ALONG] = [vars(asked) for asked in along]
            return encoder.encode(request)

        for last in (False, True):
            nodes = self._find()
            absent: list[str] = []
            fresh: list[str] = []
            pending: dict[str, PendingRequest] = {}
            for client, own in waiting.items():
                if (answer := self._answered_early(info, client, own)) is not None:
                    yield client, self._open(client, info, answer)
                elif client in self._unanswered:
                    yield client, self._failure(client, info, "it did not answer an earlier request of this round")
                elif client not in nodes:
                    absent.append(client)
                elif (late := self._pending_request(client, info, nodes[client])) is not None:
                    pending[client] = late
                else:
                    fresh.append(client)
            for client, outcome in self._exchange(info, {client: nodes[client] for client in fresh}, pending, write):
                if isinstance(outcome, StragglerError):
                    yield client, self._straggle(client, info, requests[client], outcome)
                    continue
                late_one = self._stragglers.pop(client, None) if client in pending else None  # whatever came, nothing else will
                if isinstance(outcome, LostError):
                    gone = client not in self.connected.nodes
                    yield client, self._failure(client, info, self.connected.absence(client) if gone else str(outcome))
                elif late_one is not None:
                    yield client, self._stale(client, info, requests[client], outcome, late_one)
                else:
                    self._take_along(client, outcome)
                    yield client, self._open(client, info, outcome)
            if last or not absent or not (fresh or pending):  # nobody was asked: refreshing at once would change nothing
                for client in absent:
                    yield client, self._failure(client, info, self.connected.absence(client))
                return
            waiting = {client: requests[client] for client in absent}

    def _find(self) -> dict[str, int]:
        """Return the node of every client that is connected now."""
        self.connected.refresh()
        self._messenger.take_received()  # what nodes said of themselves is not part of a task
        return self.connected.nodes

    def _pending_request(self, client: str, info: TaskInfo, node: int) -> PendingRequest | None:
        """Return a request of an earlier round that this client is still at work on, if its answer would be taken now."""
        late = self._stragglers.get(client)
        if late is None or late.task != info.name:
            return None
        if late.pending.node == node and time.monotonic() < late.pending.end:
            return late.pending
        self._messenger.drop({self._stragglers.pop(client).pending.identity})
        return None

    def _straggle(self, client: str, info: TaskInfo, asked: Inputs, late: StragglerError) -> Failure:
        """Go on without a client; wait for its answer in later rounds if the method takes it."""
        before = self._stragglers.get(client)
        if before is not None and before.pending.identity == late.pending.identity:
            return self._failure(client, info, f"{late}; it is still at work on round {before.round}")
        if not self._takes_late or info.phase != "train" or "theta" not in asked:
            self._messenger.drop({late.pending.identity})
            return self._failure(client, info, f"{late}; a late answer is not used")
        self._postponed.pop(client, None)
        self._stragglers[client] = Straggler(late.pending, info.name, self.index, asked["theta"])
        return self._failure(client, info, f"{late}; its answer counts in the round in which it comes")

    def _stale(self, client: str, info: TaskInfo, asked: Inputs, outcome: Any, late: Straggler) -> Reply | Failure:
        """Return a late answer as one of this round."""
        reply = self._open(client, info, outcome)
        if isinstance(reply, Failure):
            return reply
        age = self.index - late.round
        self.late.append({"client": client, "round": late.round, "used_in": self.index, "weight": round(staleness(age), 4)})
        log.info(
            "client %r: its training of round %d came late and counts now, with %.2f of its weight", client, late.round, staleness(age)
        )
        about: dict[str, Any] = {"trainable": self.layout.trainable, "max_n": self.guard.policy.max_n, "age": age}
        return stale(reply, start=late.start, now=asked["theta"], **about)

    def _fail(self, failure: Failure, replies: Replies) -> None:
        """Also remove a late training from the list, if it did not count in the end."""
        if failure.task in TASKS and TASKS[failure.task].phase == "train":
            self.late = [one for one in self.late if (one["client"], one["used_in"]) != (failure.client, failure.round)]
        super()._fail(failure, replies)

    def _exchange(
        self, info: TaskInfo, nodes: Mapping[str, int], pending: Mapping[str, PendingRequest], write: Callable[[str], RecordDict]
    ) -> Iterator[tuple[str, Any]]:
        count = self.task_traffic.setdefault(info.name, [0, 0, 0])

        def counted(client: str) -> RecordDict:
            record = write(client)
            count[0] += codec.size(record)
            count[2] += 1
            return record

        kind, group = f"query.{info.name}", str(self.index)
        requests = ((client, node, counted(client)) for client, node in nodes.items())  # the first is at work while others are encoded
        how: dict[str, Any] = {"group": group, "deadline": self.settings.deadline, "phase": self._phase, "pending": pending}
        for client, outcome in self._messenger.exchange(kind, requests, retry=Retry(self._find, counted), **how):
            if isinstance(outcome, LateError):
                self._unanswered.add(client)
            count[1] += self._messenger.take_received()
            yield client, outcome

    def _take_along(self, client: str, outcome: Any) -> None:
        """Keep what a client answered to the requests that came along; where it says nothing of them, ``run`` asks again."""
        asked = self._postponed.pop(client, [])
        answers = outcome.get(ALONG) if isinstance(outcome, dict) and outcome.get("client") == client else None
        if isinstance(answers, list) and len(answers) == len(asked):
            self._early |= {(one.task, client): (one, answer) for one, answer in zip(asked, answers, strict=True)}

    def _open(self, client: str, info: TaskInfo, outcome: Any) -> Reply | Failure:
        """Return the reply in a node's answer, or a failure that says why there is none."""
        if isinstance(outcome, ClientError):
            return self._failure(client, info, str(outcome), violation=isinstance(outcome, RefusedError))
        if not isinstance(outcome, dict) or outcome.get("client") != client:
            who = outcome.get("client") if isinstance(outcome, dict) else None
            self.connected.forget(client)
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
        if not violation:  # violations are logged where every engine's replies are checked
            log.warning("%s", failure)
        return failure


def _same(a: Inputs, b: Inputs) -> bool:
    """Whether two requests hold the same objects."""
    return set(a) == set(b) and all(a[name] is b[name] for name in a)


def in_order(clients: list[str], outcomes: Iterator[tuple[str, Reply | Failure]]) -> Iterator[tuple[str, Reply | Failure]]:
    """Yield outcomes in the order of ``clients``, each as soon as those before it are there."""
    early: dict[str, Reply | Failure] = {}
    for client in clients:
        while client not in early:
            name, outcome = next(outcomes)
            early[name] = outcome
        yield client, early.pop(client)
