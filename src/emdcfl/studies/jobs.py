"""Several runs at a time, each worker a fresh process that keeps the scenarios it has built.

Processes are spawned, not forked: a GPU cannot be used on both sides of a fork. A worker that dies takes its run with it and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import signal
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from emdcfl.methods.base import find, register
from emdcfl.studies.compare import Done, Job, attempt


@dataclass
class _Worker:
    process: SpawnProcess
    pipe: Any
    job: Job | None = None


def parallel(jobs: Iterator[Job], number: int, keep: Path | None) -> Generator[Done, None, None]:
    """Yield every job as it ends, ``number`` of them running at a time. Closing the iterator ends the workers at once."""
    workers: list[_Worker] = []
    try:
        while True:
            if len(workers) == number and all(w.job is not None for w in workers):
                yield _next(workers)
            job = next(jobs, None)  # asked for only now: whether its time is enough shows when it begins
            if job is None:
                break
            worker = _idle(workers, keep)
            worker.job = job
            with contextlib.suppress(OSError):  # a dead worker is noticed when its answer is awaited
                worker.pipe.send((job, find(job.config.method.name)))
        while any(w.job is not None for w in workers):
            yield _next(workers)
    finally:
        _end(workers)


def _idle(workers: list[_Worker], keep: Path | None) -> _Worker:
    """Return a worker without a job: one that is there and alive, or a new one."""
    workers[:] = [w for w in workers if w.job is not None or w.process.is_alive()]
    found = next((w for w in workers if w.job is None), None)
    if found is None:
        workers.append(found := _start(keep))
    return found


def _start(keep: Path | None) -> _Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, keep), daemon=False, name="emdcfl-compare")
    process.start()
    theirs.close()
    return _Worker(process, ours)


def _next(workers: list[_Worker]) -> Done:
    """Wait for any worker and return its answer; a worker that died answers with an error."""
    busy = {w.pipe: w for w in workers if w.job is not None}
    worker = busy[wait(list(busy))[0]]
    job, worker.job = worker.job, None
    assert job is not None
    try:
        row, error = worker.pipe.recv()
        return Done(job, row, error)
    except (EOFError, OSError):
        worker.process.join()
        return Done(job, None, f"its process ended with code {worker.process.exitcode} (out of memory?); try fewer --jobs")


def _end(workers: list[_Worker]) -> None:
    for w in workers:
        if w.job is None:
            with contextlib.suppress(OSError):
                w.pipe.send(None)
        else:
            w.process.terminate()
    for w in workers:
        w.process.join(timeout=20)
        if w.process.is_alive():
            w.process.kill()
            w.process.join()
        w.pipe.close()


def _work(pipe: Connection[Any, Any], keep: Path | None) -> None:
    """Answer jobs until there are no more. An interrupt from the terminal reaches every process; only the parent decides what it means."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.getLogger("emdcfl").setLevel(logging.WARNING)
    while True:
        try:
            asked = pipe.recv()
        except EOFError:
            return
        if asked is None:
            return
        job, method = asked
        register(method)  # a class of one's own is in nobody's registry until somebody gives an object of it
        done = attempt(job, keep)
        pipe.send((done.row, done.error))
