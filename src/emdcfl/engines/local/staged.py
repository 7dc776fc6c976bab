"""What the fast engines share: the clients of a request reach their heavy work together, and it is done for all of them at once.

A task with stages (``client.staged_task``) is a generator. Every client of a crew is taken to its next ``yield``, the works of all
of them are handed to ``_compute``, and each client goes on with its own results. Tasks without stages run as in the sequential engine.
Where an engine computes while the host goes on, several crews are on their way: the next one's works are begun before the replies of the
one before are handed over, so that whoever asked looks at those meanwhile.

May import: client, federation, schema, the sequential engine.
"""

from __future__ import annotations

import traceback
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

from emdcfl.core.client import TASKS, Client, Stages, TaskInfo, Work
from emdcfl.core.errors import EmdcflError
from emdcfl.core.federation import Failure, Inputs
from emdcfl.core.schema import Reply
from emdcfl.engines.local.sequential import SequentialFederation, intra_op_threads

Outcome = Reply | Exception


class Awaited(Protocol):
    """An outcome on its way (a ``Future``, for one)."""

    def result(self) -> Outcome: ...


Result = Outcome | Awaited

CREWS, AT_ONCE, SMALLEST, LARGEST = 3, 2, 8, 32
"""Crews where works go on while the host does, and how many are on their way; fewest and most clients of one."""


def _is_awaited(result: Result) -> TypeGuard[Awaited]:
    """Tell what is on its way from an outcome, whatever a method's own work makes of that."""
    return not isinstance(result, (dict, Exception)) and hasattr(result, "result")


def attempt(client: Client, work: Work) -> Outcome:
    """Do one piece of work for one client; what it raises is its result."""
    try:
        return work(client)
    except Exception as error:  # raised again inside the client's own task
        return error


@dataclass(slots=True)
class Script:
    """One client's task on its way: waiting for the results of ``works``, or finished with ``outcome``."""

    client: Client
    task: str
    round: int
    works: list[Work]
    running: Stages | None = None
    outcome: Reply | Failure | None = None

    def start(self, stages: Callable[..., Stages], inputs: Mapping[str, Any]) -> None:
        self._advance(self._first, stages, inputs)

    def _first(self, stages: Callable[..., Stages], inputs: Mapping[str, Any]) -> list[Work]:
        self.client.begin(self.round)
        self.running = stages(self.client, **inputs)
        return next(self.running)

    def resume(self, results: Sequence[Result]) -> None:
        assert self.running is not None
        outcomes = [result.result() if _is_awaited(result) else result for result in results]
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                self._advance(self.running.throw, outcome)
                return
        self._advance(self.running.send, outcomes)

    def _advance(self, move: Callable[..., list[Work]], *given: Any) -> None:
        self.works = []
        try:
            self.works = move(*given)
        except StopIteration as finished:
            self.outcome = {} if finished.value is None else finished.value  # a task without a reply has ended too
        except EmdcflError as error:
            self.outcome = Failure(self.client.name, self.task, self.round, str(error), traceback.format_exc())
        except Exception as error:  # a client's bug must not take the server down
            self.outcome = Failure(self.client.name, self.task, self.round, f"{type(error).__name__}: {error}", traceback.format_exc())


class StagedFederation(SequentialFederation):
    """Every client in this process; works of many clients are computed together by ``_compute``.

    Attributes
    ----------
    held : int
        Numbers of model state that may be in work between two replies, so that a fold never meets all clients' states at once.
    """

    held = 1 << 25

    @abstractmethod
    def _compute(self, works: Sequence[tuple[Client, Work]]) -> Sequence[Result]:
        """Return the result of every work, or the exception it raised; or what will have it."""

    def _overlaps(self, info: TaskInfo) -> bool:
        """Say whether works of a task go on while the host does."""
        return False

    def _dispatch(self, info: TaskInfo, inputs: Mapping[str, Inputs], common: Inputs) -> Iterator[tuple[str, Reply | Failure]]:
        stages = TASKS[info.name].stages
        if stages is None:
            yield from super()._dispatch(info, inputs, common)
            return
        waiting, at_once = self._crews(list(inputs), info)
        crews: deque[ClientBatch] = deque()
        while waiting or crews:
            with intra_op_threads(self.threads):
                while waiting and len(crews) < at_once:
                    scripts = [Script(self._clients[name], info.name, self.index, []) for name in waiting.popleft()]
                    for script in scripts:
                        script.start(stages, {**common, **inputs[script.client.name]})
                    crews.append(ClientBatch(scripts, self._compute))
                for crew in crews:  # one stage each, so that what one waits for is computed while another goes on
                    crew.advance()
                    if crews[0].done:
                        break
            if crews[0].done:
                for script in crews.popleft().scripts:
                    assert script.outcome is not None
                    yield script.client.name, script.outcome
                    script.outcome = None  # what the caller does not keep is free

    def _crews(self, names: Sequence[str], info: TaskInfo) -> tuple[deque[Sequence[str]], int]:
        """Split the clients, in their order, into crews; returns them and how many may be on their way."""
        most, at_once = max(1, self.held // max(1, self.layout.size)), 1
        if self._overlaps(info):
            most, at_once = min(max(1, most // AT_ONCE), LARGEST, max(SMALLEST, -(-len(names) // CREWS))), AT_ONCE
        return deque(names[begin : begin + most] for begin in range(0, len(names), most)), at_once


class ClientBatch:
    """Clients that are taken through a task together; their first works are begun at once."""

    def __init__(self, scripts: Sequence[Script], compute: Callable[[Sequence[tuple[Client, Work]]], Sequence[Result]]) -> None:
        self.scripts, self._compute = scripts, compute
        self._begin()

    @property
    def done(self) -> bool:
        """Whether every script is at its end."""
        return not self._waiting

    def advance(self) -> None:
        """Take every script one stage further, and begin to compute whatever they wait for then."""
        results = iter(self._results)
        for script in self._waiting:
            script.resume([next(results) for _ in script.works])
        self._begin()

    def _begin(self) -> None:
        self._waiting = [script for script in self.scripts if script.outcome is None]
        works = [(script.client, work) for script in self._waiting for work in script.works]
        self._results: Sequence[Result] = self._compute(works) if works else []
