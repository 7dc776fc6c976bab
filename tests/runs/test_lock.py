"""One process at a time has a run directory; a lock ends with the process that took it, whatever its workers do."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.shell import SOURCES
from tests.runs.test_store import reopen, store

from emdcfl.core.errors import StoreError
from emdcfl.runs.config import Config
from emdcfl.runs.store import RunStore

__all__ = ["store"]  # a fixture


@pytest.mark.slow
def test_two_runs_cannot_share_a_directory(store: RunStore) -> None:
    with pytest.raises(StoreError, match=rf"in use by another emdcfl run \(process {os.getpid()}\)"):
        RunStore.open(store.path, Config(), resume=True)
    script = "from emdcfl.runs.store.run_store import *; import sys; RunStore.open(sys.argv[1], Config(), resume=True)"
    command = [sys.executable, "-c", script, str(store.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **SOURCES})
    assert "in use by another emdcfl run" in done.stderr
    reopen(store).close()


KILLED_PARENT = """
import multiprocessing, os, signal, sys
from emdcfl.runs.store import RunStore
from emdcfl.runs.config import Config

def work(ready):
    ready.set()
    sys.stdin = open(0)
    sys.stdin.read()  # until the test ends

fork = multiprocessing.get_context("fork")
store = RunStore.open(sys.argv[1], Config())
ready = fork.Event()
fork.Process(target=work, args=(ready,)).start()
ready.wait()
print("worker is up", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_worker_that_outlives_its_killed_parent_does_not_keep_the_lock(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED_PARENT, str(tmp_path / "run")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **SOURCES})
    try:
        assert process.stdout.readline() == b"worker is up\n"
        assert process.wait() == -signal.SIGKILL
        RunStore.open(tmp_path / "run", Config(), resume=True).close()
        assert select.select([process.stdout], [], [], 0)[0] == []  # no end of file: the worker was alive all the while
    finally:
        process.stdin.close()
        process.stdout.close()


def _wait(ready: Any, finish: Any) -> None:
    ready.set()
    finish.wait()


def test_forking_a_worker_does_not_give_the_lock_away(store: RunStore) -> None:
    fork = multiprocessing.get_context("fork")
    ready, finish = fork.Event(), fork.Event()
    worker = fork.Process(target=_wait, args=(ready, finish))
    worker.start()
    try:
        ready.wait()
        with pytest.raises(StoreError, match="in use by another emdcfl run"):
            RunStore.open(store.path, Config(), resume=True)
        reopen(store).close()
    finally:
        finish.set()
        worker.join()
