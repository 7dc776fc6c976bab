"""The engines' benchmark on a processor: everybody computes the same, and says what it took."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest


def test_tiny_workload(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")  # it is a script
    engines = importlib.import_module("engines")
    result = list(engines.measure(["tiny"], 1, 2))
    engines.show(iter(result), as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == ["machine", "repeats", "tiny", "load after"]
    engines.show(iter(result), as_json=True)
    raced = json.loads(capsys.readouterr().out)["tiny"]
    losses = [raced[name]["loss"] for name in ("bare loop", "sequential", "batched")]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
    assert losses[0] < raced["before"]["loss"]
    assert all(raced[name]["ratio"] > 0 for name in ("sequential", "batched"))
