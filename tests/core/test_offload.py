from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

import pytest
import torch
from tests.tiny import TRAINING, same, same_bits, tiny

from emdcfl.core import offload
from emdcfl.core.errors import ConfigError
from emdcfl.core.offload import StateOffload
from emdcfl.engines.local import SequentialFederation
from emdcfl.engines.local.batched import BatchedFederation
from emdcfl.methods import make


def mapped_files() -> int:
    return sum("emdcfl-" in line and ".state" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_a_state_in_a_file_has_its_bits_and_its_file_goes_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    state = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    before = mapped_files()
    kept = StateOffload().put(state)
    assert same_bits(kept, state)
    assert mapped_files() == before + 1
    assert not list(tmp_path.iterdir())  # nothing is left behind by a run that is killed
    kept[0] = 7.0
    assert state[0] != 7.0
    del kept
    assert mapped_files() == before
    assert same_bits(StateOffload().put(state.view(100, 100)), state.view(100, 100))
    assert StateOffload().put(torch.zeros(0)).shape == (0,)


def test_states_that_do_not_fit_go_into_files_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(offload, "free_memory", lambda: 10 * 2**30)
    store = StateOffload()
    with caplog.at_level(logging.INFO, logger="emdcfl"):
        assert not store.wanted(40, 2**20)
        assert not caplog.records
        assert store.wanted(40, 2**30)
        assert store.wanted(40, 2**30)
    assert len(caplog.records) == 1
    assert "40 models of 1.00 GiB" in caplog.text and "10.0 GiB of memory are free" in caplog.text
    monkeypatch.setattr(offload, "free_memory", lambda: None)
    assert not store.wanted(10**6, 2**30)


def test_free_memory_is_what_the_system_says() -> None:
    free = offload.free_memory()
    assert free is not None and 2**20 < free < 2**50


def test_no_room_is_an_error_that_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match="No space left on device; free some, or set TMPDIR to a larger disk"):
        StateOffload().put(torch.zeros(8))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("engine", [SequentialFederation, BatchedFederation])
def test_a_run_whose_states_lie_in_files_ends_with_the_same_bits(
    engine: type[SequentialFederation], monkeypatch: pytest.MonkeyPatch
) -> None:
    finals, mapped, before = [], [], mapped_files()
    for free in (None, 0):
        monkeypatch.setattr(offload, "free_memory", lambda free=free: free)
        fed, method = engine(tiny(), training=TRAINING, device="cpu", number=3), make("emdcfl", tolerance=0.08)
        state = method.init(fed, fed.begin(0))
        for index in (1, 2):
            state = method.step(fed, state, fed.begin(index))
        finals.append(state)
        mapped.append(mapped_files() - before)
    assert same(*finals)
    assert mapped[0] == 0 < mapped[1] <= len(finals[1].latest)
