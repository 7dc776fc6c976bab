"""What the batched and the CUDA engine share: clients are taken through a task together, and their heavy work is done at once.

A staged task (``client.staged_task``) is a generator. Every client of a batch is advanced to its next ``yield``, the works of all of them
go to ``_compute``, and each client continues with its own results. Tasks without stages run as in the sequential engine.

Where ``_compute`` returns before its works are done, several batches are under way: the next batch's works begin before the caller
gets the replies of the batch before.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

from emdcfl.core.client import Client, Stages, TaskInfo, Work
from emdcfl.core.federation import Failure, Inputs
from emdcfl.core.schema import Reply
from emdcfl.engines.local.sequential import SequentialFederation, failure, intra_op_threads

Outcome = Reply | Exception


class Awaited(Protocol):
    """An outcome that is still being computed, such as a ``Future``."""

    def result(self) -> Outcome: ...


WorkResult = Outcome | Awaited

BATCHES, AT_ONCE, MIN_GROUP, MAX_GROUP = 3, 2, 8, 32
"""For tasks whose works overlap with the caller: client batches aimed at, batches under way, and the least and most clients of one."""


def _is_awaited(result: WorkResult) -> TypeGuard[Awaited]:
    """Tell a result still being computed from an outcome, whatever type a method's own work returns."""
    return not isinstance(result, (dict, Exception)) and hasattr(result, "result")


def attempt(client: Client, work: Work) -> Outcome:
    """Do one piece of work for one client; an exception is returned as its result."""
    try:
        return work(client)
    except Exception as error:  # raised again inside the client's own task
        return error


@dataclass(slots=True)
class RunningTask:
    """One client's running task: waiting for the results of ``works``, or finished with ``outcome``."""

    client: Client
    task: str
    round: int
    works: list[Work]
    running: Stages | None = None
    outcome: Reply | Failure | None = None

    def start(self, stages: Callable[..., Stages], inputs: Mapping[str, Any]) -> None:
        try:
            self.client.begin(self.round)
            self.running = stages(self.client, **inputs)
            self.works = next(self.running)
        except Exception as error:
            self._end(error)

    def resume(self, results: Sequence[WorkResult]) -> None:
        assert self.running is not None
        outcomes: list[Any] = [result.result() if _is_awaited(result) else result for result in results]
        try:
            for outcome in outcomes:
                if isinstance(outcome, Exception):
                    self.works = self.running.throw(outcome)
                    return
            self.works = self.running.send(outcomes)
        except Exception as error:
            self._end(error)

    def _end(self, error: Exception) -> None:
        """Take what a generator returned, or raised: a client's bug must not take the server down."""
        self.works = []
        if isinstance(error, StopIteration):
            self.outcome = {} if error.value is None else error.value  # the schema check reports the missing reply
        else:
            self.outcome = failure(self.client, self.task, self.round, error)


class StagedFederation(SequentialFederation):
    """Every client in this process; ``_compute`` does the works of many clients at once."""

    held = 1 << 25
    """Most numbers of model state computed before the caller gets their replies, which bounds memory."""

    @abstractmethod
    def _compute(self, works: Sequence[tuple[Client, Work]]) -> Sequence[WorkResult]:
        """Return for every work its result, the exception it raised, or an ``Awaited`` with either."""

    def _overlaps(self, info: TaskInfo) -> bool:
        """Say whether ``_compute`` returns before the works of this task are done."""
        return False

    def _dispatch(self, info: TaskInfo, inputs: Mapping[str, Inputs], common: Inputs) -> Iterator[tuple[str, Reply | Failure]]:
        stages = info.stages
        if stages is None:
            yield from super()._dispatch(info, inputs, common)
            return
        waiting, at_once = self._client_batches(list(inputs), info)
        batches: deque[ClientBatch] = deque()
        while waiting or batches:
            with intra_op_threads(self.threads):
                while waiting and len(batches) < at_once:
                    tasks = [RunningTask(self._clients[name], info.name, self.index, []) for name in waiting.popleft()]
                    for task in tasks:
                        task.start(stages, {**common, **inputs[task.client.name]})
                    batches.append(ClientBatch(tasks, self._compute))
                for batch in batches:  # one stage each: the works of one batch are computed while another goes on
                    batch.advance()
                    if batches[0].done:
                        break
            if batches[0].done:
                for task in batches.popleft().tasks:
                    assert task.outcome is not None
                    yield task.client.name, task.outcome
                    task.outcome = None  # frees memory that the caller does not keep

    def _client_batches(self, names: Sequence[str], info: TaskInfo) -> tuple[deque[Sequence[str]], int]:
        """Split the clients, in their order, into batches; returns them and how many may be under way."""
        most, at_once = max(1, self.held // max(1, self.layout.size)), 1
        if self._overlaps(info):
            most, at_once = min(max(1, most // AT_ONCE), MAX_GROUP, max(MIN_GROUP, -(-len(names) // BATCHES))), AT_ONCE
        return deque(names[begin : begin + most] for begin in range(0, len(names), most)), at_once


class ClientBatch:
    """Clients that are taken through a task together; their first works begin at once."""

    def __init__(self, tasks: Sequence[RunningTask], compute: Callable[[Sequence[tuple[Client, Work]]], Sequence[WorkResult]]) -> None:
        self.tasks, self._compute = tasks, compute
        self._begin()

    @property
    def done(self) -> bool:
        """Whether every client's task has ended."""
        return not self._waiting

    def advance(self) -> None:
        """Take every task one stage further, and begin the works they yield."""
        done = 0
        for task in self._waiting:
            number = len(task.works)
            task.resume(self._results[done : done + number])
            done += number
        self._begin()

    def _begin(self) -> None:
        self._waiting = [task for task in self.tasks if task.outcome is None]
        works = [(task.client, work) for task in self._waiting for work in task.works]
        self._results: Sequence[WorkResult] = self._compute(works) if works else []
