"""What stands behind differences from the paper, on digits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from emdcfl.runs.config import Choice, Config, override
from emdcfl.runs.loop import play
from emdcfl.runs.plan import plan

ROOT = Path(__file__).parents[2]


def findings(*arguments: str) -> list[dict[str, Any]]:
    done = subprocess.run([sys.executable, "benchmarks/causes.py", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_engine_trains_as_a_loop_by_hand_does() -> None:
    engine, *loop = findings("apart", "--clients", "0,1,2")
    assert [found["epochs"] for found in loop] == list(range(11))
    assert loop[0]["moved"] == [0.0] * 3
    assert engine["epochs"] == loop[-1]["epochs"]
    assert engine["moved"] == pytest.approx(loop[-1]["moved"], rel=0.2)  # other batches
    for found in (engine, loop[-1]):
        same, *others = found["apart"]  # clients 0 and 1 are of one group, 2 is not
        assert same < min(others)


def test_angles_do_not_depend_on_signs_here() -> None:
    found = findings("angles")
    assert [f["sign"] for f in found] == ["abs", "signed"]
    assert [(f["k"], f["ari"]) for f in found] == [(4, 1.0), (4, 1.0)]


def test_weights_of_a_graph_add_up_and_are_those_of_the_method() -> None:
    first, second = findings("graph", "--rounds", "2")
    for found in (first, second):
        assert sum(found["weight"].values()) == pytest.approx(1.0, abs=0.01)
        assert found["cosine"]["group"] > found["cosine"]["others"]
    config = override(
        Config(scenario=Choice("rotated-digits"), method=Choice("fedsac")), {"engine.name": "sequential", "engine.device": "cpu"}
    )
    plan_ = plan(config)
    with plan_.federation() as fed:
        *_, last = play(fed, plan_.method, rounds=2, evaluate_every=2)
    assert second["weight"]["self"] == pytest.approx(float(last.state.graph.diagonal().mean()), abs=0.001)
