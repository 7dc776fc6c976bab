"""The only way to reach clients: ``fed.run(task, {client: inputs}, **common) -> Replies``.

Engines implement ``_dispatch``; everything a method may rely on is here: typed helpers, replies validated on arrival, failures named and
kept apart, the quorum, the time each phase took, and who takes part in a round. A method never knows which engine serves it.

With ``on_failure="stop"`` (the default on one machine) a client that fails ends the run. With ``"continue"`` (the default over Flower) it
counts as not participating; one whose reply validation rejects is quarantined, for the round at first and for the run after
``trust.max_faults`` rounds.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from emdcfl.core import tasks
from emdcfl.core.client import LOSS_BATCH, TASKS, Task, TaskInfo
from emdcfl.core.errors import ClientError, ConfigError, QuorumError
from emdcfl.core.keys import global_seed, keyed_int
from emdcfl.core.offload import StateOffload
from emdcfl.core.params import Layout, Network
from emdcfl.core.replies import Failure, Replies, brief
from emdcfl.core.rounds import Clock, Round, Traffic, participants
from emdcfl.core.schema import STATE, DivergedError, Reply, all_pass, check
from emdcfl.core.tasks import Training
from emdcfl.trust import Guard, Trust, TrustedMean
from emdcfl.trust.bounds import MAX_GROWTH, Bounds, Update, excesses

if TYPE_CHECKING:
    from emdcfl.transport import QueueFactory

__all__ = ["Clock", "Failure", "Federation", "Inputs", "Replies", "Reply", "Round", "participants"]

log = logging.getLogger("emdcfl")

STATES = ("theta", "models")
"""Names under which a training returns its state, or its K states."""

STARTS = ("theta", "own", "models")
"""Names under which a training is given the state it begins from, or the models it mixes one from."""

Inputs = Mapping[str, Any]
Fold = Callable[[str, Reply], None]
Verify = Callable[[str, Reply], None]


def _start(asked: tuple[Inputs, Inputs]) -> Tensor | None:
    """Return what a training begins from, out of the client's own inputs and the common ones."""
    return next((inputs[key] for key in STARTS for inputs in asked if inputs.get(key) is not None), None)


def _state(reply: Reply) -> str:
    return next(name for name in STATES if name in reply)


class Federation(ABC):
    """The clients of a run, reached by requests only; their names are in the order in which results are reported.

    Parameters
    ----------
    factory : callable
        Builds the network; the server uses it for the layout and the initial models only.
    training : Training
        Local SGD settings sent with every ``train`` request.
    number : int or None
        Participants per round; ``None`` means all.
    on_failure : "stop" or "continue"
        Whether a failed client ends the run, or counts as not participating in that round.
    quorum : float
        Smallest share of the asked clients that must return a valid ``train`` reply.
    truth : mapping, optional
        True group of every client, for Oracle and for scoring. No other method looks at it.
    """

    device: torch.device = torch.device("cpu")
    """Where the server's own arithmetic may run: the CPU, unless the engine trains on a GPU of this machine."""

    checked: int = 0
    """Most numbers of trained states that are checked together, by an engine that has many at the same time."""

    def __init__(
        self,
        clients: Sequence[str],
        factory: Callable[[], nn.Module],
        *,
        training: Training,
        seed: int = 0,
        number: int | None = None,
        on_failure: Literal["stop", "continue"] = "stop",
        quorum: float = 0.5,
        truth: Mapping[str, str] | None = None,
        k: int | None = None,
        trust: Trust | None = None,
    ) -> None:
        if len(set(clients)) != len(clients):
            raise ConfigError("expected client names to differ, got the same name twice")
        self.clients = tuple(clients)
        self.training, self.seed, self.number = training, seed, number
        self.on_failure, self.quorum, self.truth, self.k = on_failure, quorum, truth, k
        self.clock, self.guard, self.traffic, self.offload = Clock(), Guard(trust), Traffic(), StateOffload()
        self.index = 0
        self.failures: list[Failure] = []
        self.late: list[dict[str, Any]] = []  # trainings that counted in a later round than they were asked for
        self.observer: Callable[[str, str, Reply], None] = lambda task, client, reply: None
        participants(clients, number, seed=seed, round=0)  # a wrong number is an error before anything is trained
        self._factory = factory
        with global_seed(0):
            self.layout: Layout = Network(factory).layout
        self._bounds = Bounds(self.layout, self.initial)
        self._described: dict[str, Reply] = {}

    @property
    def everyone_answers(self) -> bool:
        """Whether every client trains in every round or the run stops; then nobody's old state is ever needed."""
        return self.number in (None, len(self.clients)) and self.on_failure == "stop"

    def begin(self, index: int, total: int | None = None) -> Round:
        """Enter a round of ``total``, or try it again, and say who takes part: those drawn, without whoever is quarantined for the run."""
        self.index = index
        self.guard.ledger.begin(index)
        drawn = participants(self.clients, self.number, seed=self.seed, round=index)
        here = tuple(c for c in drawn if not self.guard.ledger.banned(c))
        if not here:  # the rest is drawn from: a run of few participants must not end where it happens to draw the banned
            rest = [c for c in self.clients if not self.guard.ledger.banned(c)]
            if not rest:
                raise QuorumError(f"expected clients for round {index}, got none: all are quarantined; see 'quarantined' in summary.json")
            here = participants(rest, min(len(drawn), len(rest)), seed=self.seed, round=index)
        return Round(index, here, self.seed, total)

    def initial(self, index: int = 0) -> Tensor:
        """Return initial model number ``index``; for pretrained networks only the heads differ between numbers."""
        with global_seed(keyed_int(self.seed, "", 0, f"initial model {index}")):
            return Network(self._factory).theta.clone()

    def network(self) -> Network:
        """Return a network of the server's own, for what it computes itself; its weights mean nothing until a state is loaded."""
        with global_seed(0):
            return Network(self._factory)

    def describe(self, clients: Sequence[str]) -> dict[str, Reply]:
        """Return sizes and public keys of the clients, asking each of them once per run."""
        unknown = [c for c in clients if c not in self._described]
        if unknown:
            self._described |= self.run(tasks.describe, {c: {} for c in unknown}, verify=self.verify_identity).valid
        return {c: self._described[c] for c in clients if c in self._described}

    def described(self, client: str) -> bool:
        """Say whether a client has said its sizes and public key in this run."""
        return client in self._described

    def verify_identity(self, client: str, reply: Reply) -> None:  # noqa: B027  who simulates clients knows them
        """Check that a description is its sender's own; an engine that knows the sender's key compares it."""

    def expect(self, task: Task) -> None:  # noqa: B027  most engines are always ready
        """Announce a task that a method will ask for once clients have trained, so that an engine can prepare for it."""

    def piggyback(self, task: Task, inputs: Mapping[str, Inputs]) -> bool:
        """Announce a task of this round that will be run later, with these inputs.

        An engine for which messages are expensive sends it along with its next request to these clients; ``run`` then finds the answers.
        Returns whether it does; if not, nothing is gained by running the task later.
        """
        return False

    @contextmanager
    def revisit(self, index: int, excluded: Mapping[str, str]) -> Iterator[None]:
        """Run the tasks of a block as tasks of an earlier round, without the clients that were ``excluded`` from it then."""
        now, self.index = self.index, index
        try:
            with self.guard.ledger.revisit(index, excluded):
                yield
        finally:
            self.index = now

    def transport_queue(self) -> QueueFactory | None:
        """Return what decides transport problems on this engine's GPU (``transport.Screen``); ``None`` leaves them to the CPU."""
        return None

    def near(self, states: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return states on the device where the server's arithmetic on them is fastest, for this round."""
        return states

    def run(
        self,
        task: Task,
        inputs: Mapping[str, Inputs],
        *,
        fold: Fold | None = None,
        dims: Mapping[str, int] | None = None,
        verify: Verify | None = None,
        **common: Any,
    ) -> Replies:
        """Ask clients to run a task with keyword arguments of their own (``inputs``) and some that are the same for all (``common``).

        Parameters
        ----------
        fold : callable, optional
            Receives ``(client, reply)`` in client order as they come; the replies are then not kept.
        dims : mapping, optional
            Further named dimensions of the reply's schema, beside ``"P"`` and ``"d"``.
        verify : callable, optional
            Receives ``(client, reply)`` after the schema; a ``ClientError`` it raises makes the reply a failure like any other.
        """
        info = TASKS[task.__name__]
        replies, ordered = Replies(), {c: inputs[c] for c in self.clients if c in inputs}
        for c, reason in self.guard.ledger.exclusions(ordered).items():
            del ordered[c]
            replies.failures[c] = Failure(c, info.name, self.index, reason)  # on record already, with the reply that was refused
        dims = {"P": self.layout.size, "d": self.layout.embedding_width, "max_n": self.guard.policy.max_n, **(dims or {})}
        states = [name for name, field in info.returns.items() if field.shape[-1:] == STATE]
        bounded = self.on_failure == "continue" and info.phase == "train" and bool(states)
        size = 4 * self.layout.size * (dims.get("K", 1) if "models" in states else 1)
        offloaded = (fold is None or bounded) and states and self.offload.wanted(len(ordered) * len(states), size)
        updates: dict[str, Update] = {}
        with self.clock(info.phase):
            self.traffic.sent(info.phase, ordered, common, info.divisible)
            for client, outcome in self._inspected(info, ordered, common, dims, verify, self.checked if states else 0):
                if isinstance(outcome, Failure):
                    self._fail(outcome, replies)
                    continue
                self.observer(info.name, client, outcome)
                if bounded and (start := _start((ordered[client], common))) is not None:
                    updates[client] = self._bounds.update(outcome[_state(outcome)], start, outcome["n"])
                if fold is None or bounded:
                    replies.valid[client] = (
                        {**outcome, **{n: self.offload.put(outcome[n]) for n in states if n in outcome}} if offloaded else outcome
                    )
                else:
                    fold(client, outcome)
                    replies.valid[client] = {}
            self._leave_out(info, updates, replies)
            if fold is not None and bounded:
                for client, reply in replies.valid.items():
                    fold(client, reply)
                    replies.valid[client] = {}
        return replies

    def _leave_out(self, info: TaskInfo, updates: Mapping[str, Update], replies: Replies) -> None:
        """Leave out updates far beyond those of the client's peers."""
        for client, excess in excesses(updates).items():
            del replies.valid[client]
            fault = excess.proven and self._bounds.healthy(updates[client].start_norm)
            self._fail(Failure(client, info.name, self.index, excess.reason, violation=fault), replies)

    def _inspected(
        self, info: TaskInfo, inputs: Mapping[str, Inputs], common: Inputs, dims: Mapping[str, int], verify: Verify | None, checked: int
    ) -> Iterator[tuple[str, Reply | Failure]]:
        """Yield what ``_dispatch`` does, with a failure in place of every reply that does not pass; count the bytes of the others."""
        answers = iter(self._dispatch(info, inputs, common))  # an engine of others may return a list
        while part := list(islice(answers, max(1, checked // self.layout.size))):
            alike = len(part) > 1 and verify is None and self.on_failure == "stop"
            if alike and all_pass([outcome for _, outcome in part], info.returns, dims, norm=MAX_GROWTH):
                self.traffic.received(info.phase, part[0][1], len(part))
                yield from part
                continue
            for client, outcome in part:
                if not isinstance(outcome, Failure):
                    outcome = self._inspect(client, info, outcome, dims, verify, (inputs[client], common)) or outcome
                if not isinstance(outcome, Failure):
                    self.traffic.received(info.phase, outcome)
                yield client, outcome

    def _inspect(
        self, client: str, info: TaskInfo, reply: Reply, dims: Mapping[str, int], verify: Verify | None, asked: tuple[Inputs, Inputs]
    ) -> Failure | None:
        try:
            squares: dict[str, float] = {}
            check(reply, info.returns, dims, squares)
            for name in STATES:
                if name not in reply:
                    continue
                if squares.get(name, math.inf) > MAX_GROWTH**2:
                    self._bounds.check_state(reply[name], _start(asked))
                if self.on_failure == "continue":
                    self._bounds.check_variances(reply[name], _start(asked))
            if verify is not None:
                verify(client, reply)
        except DivergedError as error:
            return Failure(client, info.name, self.index, str(error))
        except ClientError as error:
            return Failure(client, info.name, self.index, str(error), violation=True)
        return None

    def _fail(self, failure: Failure, replies: Replies) -> None:
        failure = replace(failure, reason=brief(failure.reason))
        self.failures.append(failure)
        replies.failures[failure.client] = failure
        if self.on_failure == "stop":
            raise ClientError(str(failure))
        if failure.violation:
            self.guard.ledger.fault(failure.client, failure.task, failure.reason)
            log.warning("%s; it is not asked again in this round", failure)

    def exclusion_reason(self, client: str) -> str | None:
        """Say why a client is not to be asked now; ``None`` if it is."""
        return self.guard.ledger.exclusion_reason(client)

    def average(self) -> TrustedMean:
        """Return a running average under the trust policy."""
        return self.guard.mean()

    def accuse(self, client: str, task: str, reason: str, *, proven: bool = True) -> None:
        """Treat a client as one whose reply broke the rules, or (not ``proven``) could not be used, where a method found out later."""
        self._fail(Failure(client, task, self.index, reason, violation=proven), Replies())

    def train(
        self,
        starts: Mapping[str, Tensor],
        *,
        task: Task = tasks.train,
        own: Mapping[str, Inputs] | None = None,
        fold: Fold | None = None,
        verify: Verify | None = None,
        **common: Any,
    ) -> Replies:
        """Train every client of ``starts`` from its state, with inputs of its own (``own``) and some for all (``common``).

        Raises
        ------
        QuorumError
            If fewer than the quorum's share of the clients asked gave a valid reply.
        """
        inputs = {c: {"theta": theta, **(own or {}).get(c, {})} for c, theta in starts.items()}
        replies = self.run(task, inputs, fold=fold, verify=verify, training=self.training.as_dict(), **common)
        self.check_quorum(replies, len(starts))
        return replies

    def evaluate(self, clients: Sequence[str], models: Tensor, *, split: str = "val", reduction: tasks.Reduction = "mean") -> Replies:
        """Have clients score K states on a split; see ``tasks.evaluate`` for the reductions."""
        replies = self.run(
            tasks.evaluate, {c: {} for c in clients}, dims={"K": len(models)}, models=models, split=split, reduction=reduction
        )
        for client, reply in list(replies.valid.items()):
            columns = {"per_batch": -(-reply["n"] // LOSS_BATCH), "per_sample": reply["n"]}.get(reduction, 1)
            announced = self._described[client]["m"] if split == "val" and client in self._described else reply["n"]
            reason = ""
            if reply["n"] != announced:
                reason = f"expected losses of the {announced} validation samples announced, got {reply['n']}"
            elif reply["table"].shape[1] != columns:
                reason = f"expected a table of {columns} columns for {reply['n']} samples, got {reply['table'].shape[1]}"
            if reason:
                del replies.valid[client]
                self._fail(Failure(client, "evaluate", self.index, reason, violation=True), replies)
        return replies

    def check_quorum(self, replies: Replies, asked: int) -> None:
        """Raise ``QuorumError`` if fewer than the quorum's share of the clients asked to train gave a valid reply."""
        if len(replies) < self.quorum * asked:
            missing = "; ".join(str(f) for f in replies.failures.values())
            raise QuorumError(
                f"expected {self.quorum:.0%} of {asked} clients to train in round {self.index}, got {len(replies)}: {missing}"
            )

    @abstractmethod
    def _dispatch(self, info: TaskInfo, inputs: Mapping[str, Inputs], common: Inputs) -> Iterator[tuple[str, Reply | Failure]]:
        """Yield ``(client, reply or failure)`` in the order of ``inputs``."""

    def memory(self) -> dict[str, float]:
        """Return GiB of accelerator memory ``allocated`` now and at its ``peak``; nothing where the engine computes on the CPU."""
        return {}

    def close(self) -> None:  # noqa: B027  most engines hold nothing
        """Release workers and connections."""

    def __enter__(self) -> Federation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
