"""Trainings dealt out to CUDA streams: one thread launches steps, and two others copy finished states to the host meanwhile.

More launching threads, or more steps per launch, were no faster (``docs/results/tables/performance.md``). Which stream trains a client
does not change its result.
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

START_STATES = 8
"""Most start states kept on the GPU while clients train."""

Piece = tuple[int, Client, Fit]


def drive(streams: Sequence[StreamTrainer], fits: Sequence[Piece], device: torch.device) -> dict[int, Outcome]:
    """Train all clients; an idle stream takes the next one. Returns outcomes by the position given with each client."""
    states = States(device)
    with torch.cuda.device(device), ThreadPoolExecutor(2) as copying:
        copies = _keep_busy(streams, deque(fits), states, copying)
        outcomes = {i: future.result() for i, future in copies.items()}
    torch.cuda.synchronize(device)
    return outcomes


class States:
    """Copies states between host and GPU. Clients of one cluster share a start state, which is copied once."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._known = device, dict[tuple[int, int], Tensor]()
        self._copies = torch.cuda.Stream(device, priority=-1)  # torch reuses streams of one priority; this must not be a training stream

    def start(self, theta: Tensor) -> Tensor:
        """Return a start state on the GPU."""
        key = (theta.data_ptr(), theta.numel())
        if key not in self._known:
            if len(self._known) == START_STATES:
                self._known.pop(next(iter(self._known)))
            self._known[key] = theta.to(self.device)
            torch.cuda.current_stream(self.device).synchronize()
        return self._known[key]

    def to_host(self, client: Client, fit: Fit, steps: int, theta: Tensor, total: Tensor, done: torch.cuda.Event) -> Outcome:
        """Copy a finished state to the host; returns the reply, or the error that rejects it."""
        done.synchronize()
        n = len(client.site.train)
        with torch.cuda.stream(self._copies):
            try:
                return trained(theta, n, total.item() / n, steps, fit.training)
            except EmdcflError as error:  # of this client alone
                return error


def _keep_busy(
    streams: Sequence[StreamTrainer], waiting: deque[Piece], states: States, copying: ThreadPoolExecutor
) -> dict[int, Future[Outcome]]:
    """Launch one step per stream in turn, until all clients are trained."""
    running: dict[int, Piece] = {}
    copies: dict[int, Future[Outcome]] = {}
    while waiting or running:
        for number, stream in enumerate(streams):
            if stream.ahead:
                stream.advance()
                continue
            if number in running:
                i, client, fit = running.pop(number)
                copies[i] = copying.submit(states.to_host, client, fit, stream.steps, *stream.result())
            if waiting:
                running[number] = waiting.popleft()
                _begin(stream, running[number], states)
    return copies


def _begin(stream: StreamTrainer, piece: Piece, states: States) -> None:
    """Load a training onto a stream, and capture the graphs it needs."""
    _, client, fit = piece
    plan, sizes = stream.prepare(client, fit)
    stream.begin(plan, sizes, fit, states.start(fit.theta))
    stream.capture()
