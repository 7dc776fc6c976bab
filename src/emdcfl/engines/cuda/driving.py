"""Trainings driven over lanes: one thread launches, and finished states leave the GPU from two others while the rest still trains.

More threads that launch, or more steps a launch, were no faster (``docs/results/performance.md``). What a training computes does not
depend on the lane it is driven over.

May import: client, tasks, lanes, staged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from emdcfl.core.client import Client
from emdcfl.core.errors import EmdcflError
from emdcfl.core.tasks import Fit, trained
from emdcfl.engines.cuda.streams import StreamTrainer
from emdcfl.engines.local.staged import Outcome

KNOWN = 8
"""Start states kept on the GPU while clients train."""

Piece = tuple[int, Client, Fit]


def drive(lanes: Sequence[StreamTrainer], fits: Sequence[Piece], device: torch.device) -> dict[int, Outcome]:
    """Train everybody; a lane that is done takes the next client. Returns the outcome by the position given with the client."""
    states = States(device)
    with torch.cuda.device(device), ThreadPoolExecutor(2) as leaving:
        left = _keep_busy(lanes, deque(fits), states, leaving)
        outcomes = {i: future.result() for i, future in left.items()}
    torch.cuda.synchronize(device)
    return outcomes


class States:
    """States on their way: clients of one cluster start from one state, which comes to the GPU once; finished ones leave it."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._known = device, dict[tuple[int, int], Tensor]()
        self._way_out = torch.cuda.Stream(device, priority=-1)  # of another kind than the lanes': never one of theirs

    def start(self, theta: Tensor) -> Tensor:
        """Return a start state on the GPU."""
        key = (theta.data_ptr(), theta.numel())
        if key not in self._known:
            if len(self._known) == KNOWN:
                self._known.pop(next(iter(self._known)))
            self._known[key] = theta.to(self.device)
            torch.cuda.current_stream(self.device).synchronize()
        return self._known[key]

    def leave(self, client: Client, fit: Fit, steps: int, theta: Tensor, total: Tensor, done: torch.cuda.Event) -> Outcome:
        """Take a finished state to the host, or say why it is refused."""
        done.synchronize()
        n = len(client.site.train)
        with torch.cuda.stream(self._way_out):
            try:
                return trained(theta, n, total.item() / n, steps, fit.training)
            except EmdcflError as error:  # this client's, not the others'
                return error


def _keep_busy(
    lanes: Sequence[StreamTrainer], waiting: deque[Piece], states: States, leaving: ThreadPoolExecutor
) -> dict[int, Future[Outcome]]:
    """Launch in turn, one step a lane, until nothing is left to train."""
    running: dict[int, Piece] = {}
    left: dict[int, Future[Outcome]] = {}
    while waiting or running:
        for number, lane in enumerate(lanes):
            if lane.ahead:
                lane.advance()
                continue
            if number in running:
                i, client, fit = running.pop(number)
                left[i] = leaving.submit(states.leave, client, fit, lane.steps, *lane.result())
            if waiting:
                running[number] = waiting.popleft()
                _begin(lane, running[number], states)
    return left


def _begin(lane: StreamTrainer, piece: Piece, states: States) -> None:
    """Load a training onto a lane, and capture what it needs."""
    _, client, fit = piece
    plan, sizes = lane.prepare(client, fit)
    lane.begin(plan, sizes, fit, states.start(fit.theta))
    lane.capture()
