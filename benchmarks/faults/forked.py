"""The ``emdcfl`` command in a fork of this process, which has imported everything and started no thread, so that a run starts at once."""

from __future__ import annotations

import importlib
import io
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

from faults import mortal

MODULES = ("sklearn", "ot", "pyarrow.parquet", "matplotlib.figure", "emdcfl.cli.run", "emdcfl.runs.runner", "emdcfl.report")


def warm() -> None:
    """Import, once, what a run needs, and let matplotlib find its fonts."""
    for module in MODULES:
        importlib.import_module(module)
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    figure.subplots().set_title("x")
    figure.savefig(io.BytesIO())


class Forked:
    """A running command, with the methods of ``subprocess.Popen`` that are needed here."""

    def __init__(self, arguments: list[str], log: Path, fault: tuple[str, int] | None = None, place: Path | None = None) -> None:
        self.returncode: int | None = None
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _run_command(arguments, log, fault, place)

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; ``None`` while it runs."""
        if self.returncode is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end."""
        end = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if end is not None and time.monotonic() >= end:
                raise subprocess.TimeoutExpired("emdcfl", timeout or 0.0)
            time.sleep(0.005)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


def _run_command(arguments: list[str], log: Path, fault: tuple[str, int] | None, place: Path | None) -> None:
    """Run the command in the forked process; never returns."""
    code = 1
    try:
        os.setsid()
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        if place is not None:
            os.chdir(place)
        from emdcfl.cli import main

        if fault is not None:
            mortal.install(*fault)
        main(arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
