"""What the server takes for itself: the benchmark runs, and its parts add up."""

from __future__ import annotations

import json
import sys

import pytest
from benchmarks.memory import Case

from benchmarks import server


def test_seconds_of_phases_and_the_rest_are_the_whole(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    methods, small = ["fedavg", "fedsoft"], Case(2, "small_cnn", {"channels": 3, "classes": 10, "size": 32}, 3, 32, 8, 4)
    monkeypatch.setattr(server, "Case", lambda *_: small)  # instead of ResNet18
    monkeypatch.setattr(sys, "argv", ["server", "--methods", *methods, "--rounds", "1", "--json"])
    server.main()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["method"] for row in rows] == methods
    for row in rows:
        parts = {name: value for name, value in row.items() if name not in ("method", "total")}
        assert row["train"] > 0 and row["rest"] > 0
        assert sum(parts.values()) == pytest.approx(row["total"], abs=0.01)
