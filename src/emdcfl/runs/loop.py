"""Rounds of a method over a federation: the loop that ``run`` and ``fit`` share. Knows no files and no terminal."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from emdcfl.core.errors import QuorumError
from emdcfl.core.federation import Federation, Round
from emdcfl.core.schema import Reply
from emdcfl.methods.base import Method, Serving
from emdcfl.runs.scoring import MetricsRow, RoundTest, Untested

log = logging.getLogger("emdcfl")


class Observer(Protocol):
    """Whoever wants to see a run progress."""

    def begin(self, index: int, total: int, participants: tuple[str, ...]) -> None:
        """Note that a round begins."""

    def reply(self, task: str, client: str, reply: Reply) -> None:
        """Note that a client answered."""

    def end(self, index: int, total: int, rows: list[MetricsRow], serving: Serving) -> None:
        """Note that a round is finished; ``rows`` are those of tests that came in with it: the last round's, its own, both or none."""


class NoOpObserver:
    """An observer that does nothing."""

    def begin(self, index: int, total: int, participants: tuple[str, ...]) -> None: ...
    def reply(self, task: str, client: str, reply: Reply) -> None: ...
    def end(self, index: int, total: int, rows: list[MetricsRow], serving: Serving) -> None: ...


@dataclass(frozen=True)
class Finished:
    """A finished round, with the rows of all tests that came in with it; its own is missing as long as it is ``untested``."""

    index: int
    state: Any
    serving: Serving
    rows: list[MetricsRow]
    untested: Untested | None = None


def play(
    fed: Federation,
    method: Method,
    *,
    rounds: int,
    state: Any = None,
    done: int = 0,
    evaluate_every: int = 1,
    retries: int = 2,
    observer: Observer | None = None,
    variants: Mapping[str, Collection[str]] | None = None,
    untested: Untested | None = None,
) -> Iterator[Finished]:
    """Yield every round after ``done``, from ``state`` (or from ``init``), scored where ``evaluate_every`` says and in the last one.

    A round below the quorum is repeated ``retries`` times; the state it started from is still there, because ``step`` changes nothing.
    ``variants`` names the test variants of each client, where they are known. ``untested`` says what is missing of round ``done``.

    An engine may send a round's test along with the next round's requests. The rows come with that round, and say what they would have
    said; only a client that is quarantined for the run because of its answer to the test is so one round later.
    """
    watch = observer or NoOpObserver()
    losses: dict[str, float] = {}

    def note(task: str, client: str, reply: Reply) -> None:
        if isinstance(reply.get("loss"), float):
            losses[client] = reply["loss"]
        watch.reply(task, client, reply)

    fed.observer = note
    if state is None:
        state = method.init(fed, fed.begin(0, rounds))
    rows: list[MetricsRow] = []
    waiting = None if untested is None else RoundTest(fed, method.serve(state), untested, variants)
    if waiting is not None and not waiting.piggyback():
        rows, waiting = waiting.rows(), None
    for index in range(done + 1, rounds + 1):
        losses.clear()
        round = fed.begin(index, rounds)
        watch.begin(index, rounds, round.participants)
        state = _step_with_retries(fed, method, state, round, retries)
        trained = dict(losses)
        rows += [] if waiting is None else waiting.rows()
        serving, waiting = method.serve(state), None
        if index % evaluate_every == 0 or index == rounds:
            test = RoundTest(fed, serving, Untested(index, trained, fed.guard.ledger.excluded), variants)
            if index < rounds and test.piggyback():
                waiting = test
            else:
                rows += test.rows()
        watch.end(index, rounds, rows, serving)
        yield Finished(index, state, serving, rows, None if waiting is None else waiting.about)
        rows = []


def _step_with_retries(fed: Federation, method: Method, state: Any, round: Round, retries: int) -> Any:
    """Play a round; repeat it up to ``retries`` times where too few clients answer."""
    for attempt in range(1, retries + 1):
        try:
            return method.step(fed, state, round)
        except QuorumError as error:
            log.warning("round %d is repeated (%d of %d): %s", round.index, attempt, retries, error)
            round = fed.begin(round.index, round.total)
    return method.step(fed, state, round)
