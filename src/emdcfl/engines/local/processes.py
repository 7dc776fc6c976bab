"""The sequential engine spread over worker processes, with bit-identical results.

Each worker holds the data of its own clients and one network. Requests and replies travel over pipes between processes of one user on one
machine. A tensor that several clients receive (the model of their cluster) is sent once per worker. A worker imports the module of a task
when it is first asked for it, so no engine names a method.
"""

from __future__ import annotations

import importlib
import multiprocessing as mp
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor

from emdcfl.core.client import TASKS, Client, TaskInfo
from emdcfl.core.errors import ConfigError
from emdcfl.core.federation import Failure, Federation, Inputs
from emdcfl.core.keys import global_seed
from emdcfl.core.params import Network
from emdcfl.core.schema import Reply
from emdcfl.data.types import Scenario, Site, Split
from emdcfl.engines.local.sequential import answer, one_line, pick_device, simulated_clients

MAX_UNREAD = 4
"""Most replies of one worker that wait here for their turn: a fast worker goes on, and memory stays bounded."""

DIED = "its worker process died: out of memory, or started from a script that does not check __name__ == '__main__'; see what it printed"


def to_wire(value: Any, seen: dict[object, _Array] | None = None) -> Any:
    """Replace tensors by arrays: torch's own pickling would open a shared-memory file per tensor. A repeated tensor is sent once."""
    seen = {} if seen is None else seen
    if isinstance(value, Tensor):
        key = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        return seen.setdefault(key, _Array(value)) if value.numel() else _Array(value)
    if isinstance(value, Mapping):
        return {k: to_wire(v, seen) for k, v in value.items()}
    return [to_wire(v, seen) for v in value] if isinstance(value, (list, tuple)) else value


def from_wire(value: Any) -> Any:
    if isinstance(value, _Array):
        return value.tensor()
    if isinstance(value, dict):
        return {k: from_wire(v) for k, v in value.items()}
    return [from_wire(v) for v in value] if isinstance(value, list) else value


class _Array:
    """A tensor in transit."""

    def __init__(self, tensor: Tensor) -> None:
        self.array = tensor.detach().cpu().numpy()

    def tensor(self) -> Tensor:
        return torch.from_numpy(self.array)


def _serve(pipe: Connection, threads: int) -> None:
    """Run in a worker: build the clients that the first message describes, then answer requests until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and closes the pipe
    torch.set_num_threads(threads)
    clients: dict[str, Client] = {}
    broken = ""
    with suppress(EOFError, OSError):  # the parent is gone or done
        first = pipe.recv()
        try:
            clients = _clients(*first)
        except Exception as error:  # every request is answered with it
            broken = f"its worker could not start: {type(error).__name__}: {one_line(error)}"
        while True:
            task, module, round, common, own = pipe.recv()
            common = from_wire(common)
            reason = broken or _unknown(task, module)
            for name, inputs in own.items():
                if reason:
                    pipe.send((name, Failure(name, task, round, reason)))
                    continue
                reply = answer(clients[name], TASKS[task], round, {**common, **from_wire(inputs)})
                _send(pipe, name, task, round, reply)


def _unknown(task: str, module: str) -> str:
    """Import the module that registers a task; returns why the task stays unknown, or nothing."""
    try:
        if task not in TASKS:
            importlib.import_module(module)
        TASKS[task]
    except Exception as error:  # the client's failure, not the end of the worker
        return f"its worker cannot import the task from {module}: {type(error).__name__}: {one_line(error)}"
    return ""


def _clients(scenario: Scenario, sites: Mapping[str, Any], device: torch.device, options: Mapping[str, Any]) -> dict[str, Client]:
    splits = {name: {key: Split(*pair) for key, pair in own.items()} for name, own in from_wire(sites).items()}
    whole = replace(scenario, sites=tuple(Site.from_splits(name, own) for name, own in splits.items()))
    with global_seed(0):
        network = Network(whole.model, device)
    return simulated_clients(whole, [site.name for site in whole.sites], network, **options)


def _send(pipe: Connection, name: str, task: str, round: int, reply: Reply | Failure) -> None:
    """Send a reply; one that cannot be sent is a failure of the client, not the end of the worker."""
    try:
        pipe.send((name, to_wire(reply)))
    except OSError:
        raise
    except Exception as error:
        pipe.send((name, Failure(name, task, round, f"its reply cannot be sent: {type(error).__name__}: {one_line(error)}")))


class ProcessFederation(Federation):
    """Clients spread over ``workers`` processes, bitwise equal to the sequential engine.

    In a script, create it under ``if __name__ == "__main__":``, because workers import the script again.
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        workers: int,
        device: str = "auto",
        threads: int = 1,
        run: str = "run",
        precision: str = "fp32",
        **options: Any,
    ) -> None:
        super().__init__([s.name for s in scenario.sites], scenario.model, truth=scenario.groups, k=scenario.k, **options)
        if workers < 1:
            raise ConfigError(f"expected workers >= 1, got {workers}")
        chosen = pick_device(device)
        rest = replace(scenario, sites=())
        try:
            ForkingPickler.dumps(rest)
        except Exception as error:  # pickling fails in many ways
            raise ConfigError(
                f"expected a model that worker processes can import, got one that cannot be sent to them ({one_line(error)}); "
                "write its function in a file of its own, or leave workers at 1"
            ) from error
        context = mp.get_context("spawn")
        self._worker_of = {name: i % min(workers, len(self.clients)) for i, name in enumerate(self.clients)}
        self._pipes: list[Connection] = []
        self._workers: list[Any] = []
        for w in range(min(workers, len(self.clients))):
            here, there = context.Pipe()
            worker = context.Process(target=_serve, args=(there, threads), daemon=True)
            worker.start()
            there.close()
            own = [site for site in scenario.sites if self._worker_of[site.name] == w]
            sites = {site.name: {name: [split.x, split.y] for name, split in site.splits.items()} for site in own}
            with suppress(OSError):  # the worker died at once; reading from it says so
                here.send((rest, to_wire(sites), chosen, {"seed": self.seed, "run": run, "precision": precision}))
            self._pipes.append(here)
            self._workers.append(worker)

    def _dispatch(self, info: TaskInfo, inputs: Mapping[str, Inputs], common: Inputs) -> Iterator[tuple[str, Reply | Failure]]:
        seen: dict[object, _Array] = {}
        wire = to_wire(common, seen)
        asked: dict[int, list[str]] = {}
        for w, pipe in enumerate(self._pipes):
            own = {c: to_wire(i, seen) for c, i in inputs.items() if self._worker_of[c] == w}
            if own:
                asked[w] = list(own)
                with suppress(OSError):  # the worker is dead; reading from it says so below
                    pipe.send((info.name, info.run.__module__, self.index, wire, own))
        here: dict[int, dict[str, Reply | Failure]] = {w: {} for w in asked}
        try:
            for client in inputs:
                worker = self._worker_of[client]
                while client not in here[worker]:
                    self._read(info, asked, here, worker)
                yield client, here[worker].pop(client)
        except GeneratorExit:  # nobody will read the replies that are still to come
            self.close(patience=0.0)
            raise

    def _read(self, info: TaskInfo, asked: dict[int, list[str]], here: dict[int, dict[str, Reply | Failure]], worker: int) -> None:
        """Take the next reply of every worker that has one, so that no worker waits for another; ``asked`` lists those to come."""
        open_ = {self._pipes[w]: w for w in asked if asked[w] and (w == worker or len(here[w]) < MAX_UNREAD)}
        for pipe in wait(list(open_)):
            assert isinstance(pipe, Connection)
            w = open_[pipe]
            try:
                name, reply = pipe.recv()
            except (EOFError, OSError):
                here[w] |= {c: Failure(c, info.name, self.index, DIED) for c in asked[w]}
                asked[w] = []
                continue
            asked[w].remove(name)
            here[w][name] = from_wire(reply)

    def close(self, patience: float = 5.0) -> None:
        """End the workers, waiting that many seconds for tasks in progress."""
        for pipe in self._pipes:
            pipe.close()
        end = time.monotonic() + patience
        for worker in self._workers:
            worker.join(timeout=max(0.0, end - time.monotonic()))
            if worker.is_alive():
                worker.terminate()
                worker.join()
        self._pipes, self._workers = [], []
