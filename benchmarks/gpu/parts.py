"""The parts of ``engines.py`` for a machine with a CUDA device: ``steps``, ``pairs``, ``runs``.

One line of JSON per measurement. Settings are measured one after the other, so nothing else may run on the machine. A measurement in which
the engine fell back to a slower way is reported as failed, with the engine's warning.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from emdcfl.studies.results import commit
from emdcfl.transport.pool import cores
from gpu import pairs, runs, steps
from gpu.machine import Line, Machine, attempt

PARTS = {"gpu-steps": steps.measure, "gpu-pairs": pairs.measure, "gpu-runs": runs.measure}


def measure(parts: Sequence[str], about: Line, *, repeats: int, seconds: float, rows: Path | None, tiny: bool) -> int:
    """Measure the parts in turn; returns 1 if anything failed, else 0."""
    machine, began, failed = Machine.here(tiny=tiny), time.monotonic(), 0
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the engine sets it too, which is too late once a bare loop has run
    torch.set_num_threads(1 if tiny else cores())  # for what the server computes, as in a run of one's own

    def emit(line: Line) -> None:
        nonlocal failed
        failed += "failed" in line
        print(json.dumps({**line, "after_s": round(time.monotonic() - began, 1)}, ensure_ascii=False), flush=True)

    emit({"machine": about, "commit": commit(), "repeats": repeats, "engine": machine.engine, "parts": list(parts)})
    for part in parts:

        def whole(part: str = part) -> Line:
            PARTS[part](machine, emit, repeats=repeats, seconds=seconds, rows=rows)
            return {}

        attempt(whole, {"part": part}, emit)
    return int(failed > 0)
