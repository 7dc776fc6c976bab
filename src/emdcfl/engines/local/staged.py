"""What the fast engines share: the clients of a request reach their heavy work together, and it is done for all of them at once.

A task with stages (``client.staged_task``) is a generator. Every client of a batch is taken to its next ``yield``, the works of all
of them are handed to ``_compute``, and each client goes on with its own results. Tasks without stages run as in the sequential engine.

May import: client, federation, the sequential engine, and the worker threads of transport.
"""

from __future__ import annotations

import traceback
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from emdcfl.client import TASKS, Client, Stages, TaskInfo, Work
from emdcfl.engines.local.sequential import SequentialFederation, intra_op_threads
from emdcfl.errors import EmdcflError
from emdcfl.federation import Failure, Inputs
from emdcfl.schema import Reply
from emdcfl.transport import Pool

Outcome = Reply | Exception


def attempt(client: Client, work: Work) -> Outcome:
    """Do one piece of work for one client; what it raises is its result."""
    try:
        return work(client)
    except Exception as error:  # raised again inside the client's own task
        return error


def attempt_all(works: Sequence[tuple[Client, Work]]) -> list[Outcome]:
    """Do works one after the other; those that say they need neither network nor data (``threads``) over all cores."""
    shared = [i for i, (_, work) in enumerate(works) if getattr(work, "threads", False)]
    done: dict[int, Outcome] = {}
    if len(shared) > 1:
        with Pool() as pool:
            done = dict(zip(shared, pool.map(lambda i: attempt(*works[i]), shared), strict=True))
    return [done[i] if i in done else attempt(*work) for i, work in enumerate(works)]


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

    def resume(self, results: list[Outcome]) -> None:
        assert self.running is not None
        for result in results:
            if isinstance(result, Exception):
                self._advance(self.running.throw, result)
                return
        self._advance(self.running.send, results)

    def _advance(self, move: Callable[..., list[Work]], *given: Any) -> None:
        self.works = []
        try:
            self.works = move(*given)
        except StopIteration as finished:
            self.outcome = finished.value
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
    def _compute(self, works: Sequence[tuple[Client, Work]]) -> list[Outcome]:
        """Return the result of every work, or the exception it raised."""

    def _dispatch(self, info: TaskInfo, inputs: Mapping[str, Inputs], common: Inputs) -> Iterator[tuple[str, Reply | Failure]]:
        stages = TASKS[info.name].stages
        if stages is None:
            yield from super()._dispatch(info, inputs, common)
            return
        names = list(inputs)
        together = max(1, self.held // max(1, self.layout.size))
        for begin in range(0, len(names), together):
            scripts = [Script(self._clients[n], info.name, self.index, []) for n in names[begin : begin + together]]
            with intra_op_threads(self.threads):
                for script in scripts:
                    script.start(stages, {**common, **inputs[script.client.name]})
                self._play(scripts)
            for script in scripts:
                assert script.outcome is not None
                yield script.client.name, script.outcome
                script.outcome = None  # what the caller does not keep is free

    def _play(self, scripts: Sequence[Script]) -> None:
        """Take every script to its end, computing together whatever they wait for at the same time."""
        waiting = [s for s in scripts if s.outcome is None]
        while waiting:
            works = [(s.client, work) for s in waiting for work in s.works]
            results = iter(self._compute(works))
            for script in waiting:
                script.resume([next(results) for _ in script.works])
            waiting = [s for s in waiting if s.outcome is None]
