"""Trainings driven over lanes: a few threads launch, and finished states leave the GPU while others still train.

While one thread lays out or loads a client's training, the others launch; launches run outside Python's lock. (Training alone was as
fast from one thread: ``docs/results/performance.md``.) What a training computes does not depend on the thread or the lane it is driven
from.

May import: client, tasks, lanes, staged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

import torch
from torch import Tensor

from emdcfl.client import Client
from emdcfl.engines.local.lanes import Lane
from emdcfl.engines.local.staged import Outcome
from emdcfl.errors import EmdcflError
from emdcfl.tasks import Fit, trained

THREADS = 4
"""Threads that launch."""

KNOWN = 8
"""Start states kept on the GPU while clients train."""

Piece = tuple[int, Client, Fit]


def drive(lanes: Sequence[Lane], fits: Sequence[Piece], device: torch.device) -> dict[int, Outcome]:
    """Train everybody; a lane that is done takes the next client. Returns the outcome by the position given with the client."""
    work = Queue(fits, device)
    number = min(THREADS, len(lanes), len(fits))
    with ThreadPoolExecutor(number, thread_name_prefix="emdcfl-launch") as threads, ThreadPoolExecutor(2) as leaving:
        drivers = [threads.submit(_drive, lanes[k::number], work, leaving) for k in range(number)]
        outcomes = {i: future.result() for driver in drivers for i, future in driver.result().items()}
    torch.cuda.synchronize(device)
    return outcomes


class Queue:
    """Trainings not begun yet, and the start states on the GPU: clients of one cluster start from one state, and it travels once."""

    def __init__(self, fits: Sequence[Piece], device: torch.device) -> None:
        self.device, self._waiting, self._known = device, deque(fits), dict[tuple[int, int], Tensor]()
        self._lock, self._way_out = Lock(), torch.cuda.Stream(device, priority=-1)  # of another kind than the lanes': never one of theirs

    def next(self) -> Piece | None:
        """Take the next training."""
        try:
            return self._waiting.popleft()
        except IndexError:
            return None

    def drop(self) -> None:
        """Let nothing more begin."""
        self._waiting.clear()

    def begin(self, lane: Lane, client: Client, fit: Fit) -> None:
        """Load a training onto a lane, and capture what it needs."""
        plan, sizes = lane.prepare(client, fit)
        with self._lock:  # captures and what allocates memory, one at a time; launches go on meanwhile
            lane.begin(plan, sizes, fit, self._start(fit.theta))
            lane.capture()

    def _start(self, theta: Tensor) -> Tensor:
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


def _drive(lanes: Sequence[Lane], work: Queue, leaving: ThreadPoolExecutor) -> dict[int, Future[Outcome]]:
    """Keep some lanes busy until nothing is left to train; what fails here lets the other threads stop as well."""
    try:
        with torch.cuda.device(work.device):  # a thread begins on the first one
            return _keep_busy(lanes, work, leaving)
    except BaseException:
        work.drop()
        raise


def _keep_busy(lanes: Sequence[Lane], work: Queue, leaving: ThreadPoolExecutor) -> dict[int, Future[Outcome]]:
    running: dict[int, Piece] = {}
    left: dict[int, Future[Outcome]] = {}
    while True:
        for number, lane in enumerate(lanes):
            if lane.launches:
                lane.advance()
                continue
            if number in running:
                i, client, fit = running.pop(number)
                left[i] = leaving.submit(work.leave, client, fit, lane.steps, *lane.result())
            piece = work.next()
            if piece is not None:
                running[number] = piece
                work.begin(lane, *piece[1:])
        if not running:
            return left
