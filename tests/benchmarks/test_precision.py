"""``benchmarks/precision.py``: which finished runs are taken again."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import precision


def test_runs_of_other_rounds_or_devices_are_not_taken_for_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played = []
    monkeypatch.setattr(precision, "play", lambda *wanted: {"run": played.append(wanted)})
    for device, rounds in (("cpu", None), ("cpu", 2), ("cuda", 2), ("cpu", 2)):
        precision.settle(tmp_path, "rotated-digits", "fedavg", 0, "bf16", device, rounds)
    assert [wanted[4:] for wanted in played] == [("cpu", None), ("cpu", 2), ("cuda", 2)]
