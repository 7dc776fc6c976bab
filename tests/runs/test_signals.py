"""A signal waits for a write that has begun; the command then ends with a code of its own, and the run goes on from there."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import tests.tiny
from tests.e2e.shell import ROOT, SOURCES

from emdcfl.core.errors import StoreError
from emdcfl.runs import runner, signals
from emdcfl.runs.store import files

SURROUNDINGS = {**os.environ, **SOURCES}


@pytest.fixture(autouse=True)
def installed() -> None:
    signals.install()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_waits_for_the_outermost_block(number: signal.Signals) -> None:
    done: list[str] = []

    def write() -> None:
        with signals.defer_signals():
            with signals.defer_signals():
                signal.raise_signal(number)
                done.append("inner")
            done.append("outer")

    with pytest.raises(KeyboardInterrupt):
        write()
    assert done == ["inner", "outer"]
    assert signals.received() == number
    with signals.defer_signals():  # and it is obeyed once only
        pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_start_up_ends_the_command_at_once(number: signal.Signals) -> None:
    # the signal comes while torch is being imported, and the importer swallows whatever a handler raises
    code = f"""
import contextlib, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            with contextlib.suppress(BaseException):
                signal.raise_signal({int(number)})
sys.meta_path.insert(0, Finder())
from emdcfl.cli import main
main(["methods"])
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=SURROUNDINGS, check=False)
    assert (ended.returncode, ended.stdout) == (128 + number, "")
    assert "Traceback" not in ended.stderr


def test_a_signal_inside_the_import_system_is_obeyed_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[str] = []

    class Finder:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == "no_such_module_of_this_test":
                signals._interrupt(signal.SIGINT, sys._getframe(1))  # the frame that a handler would be given
                passed.append(sys._getframe(1).f_code.co_filename)

    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    with pytest.raises(ImportError):
        importlib.import_module("no_such_module_of_this_test")
    with pytest.raises(KeyboardInterrupt):
        time.sleep(10)
    assert passed == ["<frozen importlib._bootstrap>"]
    assert signals.received() == signal.SIGINT


def test_an_error_of_the_write_is_not_hidden_by_the_signal() -> None:
    def fail() -> None:
        with signals.defer_signals():
            signal.raise_signal(signal.SIGTERM)
            raise StoreError("no space left")

    with pytest.raises(StoreError, match="no space left"):
        fail()


def test_blocks_of_other_threads_hold_nothing_up() -> None:
    entered, leave = threading.Event(), threading.Event()

    def work() -> None:
        with signals.defer_signals():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    entered.wait(10)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    finally:
        leave.set()
        thread.join()


def test_the_file_that_is_being_written_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    move = os.replace

    def signalled(source: str, target: str) -> None:
        signal.raise_signal(signal.SIGTERM)
        move(source, target)

    monkeypatch.setattr(os, "replace", signalled)
    with pytest.raises(KeyboardInterrupt):
        files.write_file(tmp_path / "x", [b"whole"])
    assert (tmp_path / "x").read_bytes() == b"whole"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


@pytest.mark.slow
def test_sigterm_ends_the_command_with_143_and_the_run_goes_on(tmp_path: Path) -> None:
    config = tests.tiny.config(method="fedavg", rounds=100)
    from emdcfl.runs.config import dump

    (tmp_path / "c.toml").write_text(dump(config))
    out = tmp_path / "run"
    command = [sys.executable, "-m", "tests.tiny", "run", str(tmp_path / "c.toml"), "--out", str(out), "--quiet"]
    process = subprocess.Popen(command, env=SURROUNDINGS, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    end = time.monotonic() + 120
    while not (out / "state" / "metrics.jsonl").exists() and process.poll() is None and time.monotonic() < end:  # a round's file goes soon
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 143, said
    assert "--resume" in said and "Traceback" not in said
    assert not list(out.rglob(".tmp-*"))
    summary = runner.run(config, out, resume=True).summary  # the lock is free, and the run is whole
    assert summary["finished"] and summary["rounds"] == 100
