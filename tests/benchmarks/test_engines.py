"""The engines' benchmark on a processor: everybody computes the same, and says what it took."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("form", ["lines", "json"])
def test_tiny_workload(form: str) -> None:
    command = [sys.executable, "benchmarks/engines.py", "--only", "tiny", "--repeats", "1", *(["--json"] if form == "json" else [])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    if form == "lines":
        assert [line for line in done.stdout.splitlines() if not line.startswith(" ")] == ["machine", "repeats", "tiny", "load after"]
        return
    raced = json.loads(done.stdout)["tiny"]
    losses = [raced[name]["loss"] for name in ("bare loop", "sequential", "batched")]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
    assert losses[0] < raced["before"]["loss"]
    assert all(raced[name]["ratio"] > 0 for name in ("sequential", "batched"))
