"""The benchmark of faults: nothing that went wrong is left out of its table."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from benchmarks.faults.table import DISK, write_table


def test_a_wrong_result_is_counted_even_if_the_fault_was_not_noticed() -> None:
    late = {"kind": DISK, "faults": 0, "finished": True, "wrong": [], "lost": False, "crash": False}
    text, clean = write_table([late])
    assert clean and DISK not in text
    text, clean = write_table([late, {**late, "wrong": ["models/all.safetensors"]}])
    assert not clean and f"| {DISK} | 1 | 0 | 1 | 0 | 1 | 0 | 0 |" in text


def test_an_error_of_a_worker_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")  # it is a script
    for name, value in importlib.import_module("faults.runs").ENVIRONMENT.items():  # it sets these when it is imported
        monkeypatch.setenv(name, value)
    reliability = importlib.import_module("reliability")

    def work(number: int) -> None:
        (tmp_path / str(10 // number)).touch()

    reliability.share_out([1, 2, 5], 2, work)
    assert {path.name for path in tmp_path.iterdir()} == {"10", "5", "2"}
    with pytest.raises(RuntimeError, match=r"codes \[0, 1\]"):
        reliability.share_out([1, 0], 2, work)
