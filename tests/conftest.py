"""What all tests share: one thread, a headless plot backend, reproducible property tests, and the optional data folders."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: the promise of equal bits is made for one thread
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
import torch
from hypothesis import settings

from emdcfl.runs import signals

settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("repeatable")

TESTS = Path(__file__).parent

gc.disable()  # while modules are imported and tests collected: these objects stay


SLOW_FOLDERS = ("benchmarks", "e2e", "faults")
"""Whole commands, processes and benchmarks; what ``make test-fast`` leaves out, with tests marked ``slow`` and those of real data."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import what ``-m 'not slow'`` leaves out."""
    quick = config.getoption("markexpr") == "not slow"
    return True if quick and collection_path.parent == TESTS and collection_path.name in SLOW_FOLDERS else None


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        slow_folder = item.path.is_relative_to(TESTS) and item.path.relative_to(TESTS).parts[0] in SLOW_FOLDERS
        if slow_folder or {"data_dir", "weights_dir"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def no_wait_for_the_disk() -> Iterator[None]:
    """Tests kill processes, not machines: what was written need not have reached the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """Commands and fuzz targets set the levels of the project's logs; the next test must not inherit them."""
    log, doubts = logging.getLogger("emdcfl"), logging.getLogger("emdcfl.doubts")
    before = log.level, log.propagate, log.disabled, list(log.handlers)
    yield
    log.level, log.propagate, log.disabled, log.handlers = before
    doubts.level = logging.NOTSET
    log.manager._clear_cache()  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """Commands take signals over, and one may be left waiting; neither must reach the next test, nor the processes that it forks."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    signals._Pending.waiting = False
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def sketches() -> Iterator[None]:
    """Runs write their pictures as text: for modules with many runs and no test of a picture."""
    from tests.tiny import SKETCHES

    with pytest.MonkeyPatch.context() as patch:
        for name, instead in SKETCHES.items():
            patch.setattr(f"emdcfl.runs.outputs.{name}", instead)
        yield


def _folder(variable: str) -> Path:
    value = os.environ.get(variable)
    if not value:
        pytest.skip(f"needs real files: set {variable} to their folder")
    if not Path(value).is_dir():
        pytest.fail(f"{variable}={value} is not a folder")
    return Path(value)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder with the real data sets; tests that ask for it skip where there is none."""
    return _folder("EMDCFL_DATA")


@pytest.fixture(scope="session")
def weights_dir() -> Path:
    """The folder with pretrained weights; tests that ask for it skip where there is none."""
    return _folder("EMDCFL_WEIGHTS")
