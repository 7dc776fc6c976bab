"""The gpu parts of the engines' benchmark, at a size and on an engine for any machine; and what ends a measurement."""

from __future__ import annotations

import importlib
import json
import logging
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.watch import FallbackError, refusing_fallbacks

from emdcfl.engines.cuda.engine import FALLBACKS
from emdcfl.studies.results import read_results

ROOT = Path(__file__).parents[2]


def test_every_part_prints_a_line_per_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")  # it is a script
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which it would set
    monkeypatch.setattr(sys, "argv", ["engines", "--only", "gpu", "--tiny", "--repeats", "1", "--rows", str(tmp_path)])
    with pytest.raises(SystemExit, match="0"):
        importlib.import_module("engines").main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    steps, pairs, runs = ([line for line in lines if line.get("part") == part] for part in ("gpu-steps", "gpu-pairs", "gpu-runs"))
    assert not any("failed" in line or "skipped" in line for line in lines)
    for network in ("paper CNN", "ResNet18, 224²"):
        names = [line["contestant"] for line in steps if line["network"] == network]
        assert (
            names[:4] == ["bare loop", "bare loop, bf16", "the engine as it is", "one captured graph"] and names[-1] == "bare loop, again"
        )
    assert all(line["ms_per_step"] > 0 and line["ratio"] > 0 for line in steps)
    assert all(line["same_bits"] for line in steps if "streams" in line)
    compared = [line for line in pairs if "tolerance" in line]
    assert {line["tolerance"] for line in compared} == {"auto", 0.025} and all(line["embed"] > 0 < line["problems"] for line in compared)
    played = [*importlib.import_module("gpu.runs").METHODS.split(","), "oracle, again"]
    assert [line["run"] for line in runs[2:-1]] == played == list(runs[-1]["total_over_oracle"])
    assert all(ratio > 0 for ratio in runs[-1]["total_over_oracle"].values())
    assert [row["method"] for row in read_results(tmp_path)] == [name.partition(":")[0] for name in played[:-1]]


def test_ratios_are_to_the_bare_loop_or_are_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    steps, machine = importlib.import_module("gpu.steps"), importlib.import_module("gpu.machine").Machine("cpu", "batched", tiny=True)
    monkeypatch.setattr(steps, "TINY", steps.TINY[:1])
    monkeypatch.setattr(steps, "engine", lambda *_: {"ms_per_step": 3.0})

    def bare(*_: object, low: bool, broken: bool) -> dict[str, float]:
        if broken and not low:
            raise RuntimeError("out of memory")
        return {"ms_per_step": 1.5 if low else 2.0}

    for broken in (False, True):
        lines: list[dict[str, Any]] = []
        monkeypatch.setattr(steps, "bare", partial(bare, broken=broken))
        steps.measure(machine, lines.append, repeats=1, seconds=60.0, rows=None)
        ratios = [line.get("ratio") for line in lines]
        assert ratios == [None] * len(lines) if broken else ratios[:3] == [1.0, 0.75, 1.5]


@pytest.mark.parametrize("said", FALLBACKS)
def test_a_fallback_ends_a_measurement(said: str) -> None:
    log = logging.getLogger("emdcfl")
    log.setLevel(logging.ERROR)
    before = list(log.handlers)
    with refusing_fallbacks():
        log.warning("another matter")
        with pytest.raises(FallbackError, match=said):
            log.warning("%s: out of memory", said)
    assert log.level == logging.ERROR and log.handlers == before
    log.warning("%s: nobody measures", said)
