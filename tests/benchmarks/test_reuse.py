"""Benchmarks that go on: which finished runs are taken again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import benefit, precision, tolerance
from emdcfl.data import scenarios


def test_runs_of_other_rounds_or_devices_are_not_taken_for_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played = []
    monkeypatch.setattr(precision, "play", lambda *wanted: {"run": played.append(wanted)})
    for device, rounds in (("cpu", None), ("cpu", 2), ("cuda", 2), ("cpu", 2)):
        precision.settle(tmp_path, "rotated-digits", "fedavg", 0, "bf16", device, rounds)
    assert [wanted[4:] for wanted in played] == [("cpu", None), ("cpu", 2), ("cuda", 2)]


def test_lines_of_other_epochs_or_precision_are_not_taken_for_finished() -> None:
    scenario = scenarios.build("rotated-digits", groups=2)

    def key(**changed: Any) -> str:
        options: Any = SimpleNamespace(**{"epochs": None, "scale": "small", "precision": "fp32", "alpha": 0.005, **changed})
        return tolerance.key(tolerance.described("rotated-digits", scenario, options, 2, 0))

    assert len({key(), key(epochs=1), key(precision="bf16"), key(alpha=0.01)}) == 4
    assert key(epochs=scenario.defaults["local_epochs"]) == key()


def test_sites_that_were_placed_before_are_not_counted_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benefit, "placements", lambda case, seed: [{"case": case, "seed": seed, "site": site} for site in "ab"])
    for seeds in ([0], [0, 1]):
        benefit.place(tmp_path / "place.jsonl", ["watch"], seeds)
    assert len((tmp_path / "place.jsonl").read_text().splitlines()) == 4
