"""A tracker sees every round of a run, and whoever watched before still does."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from emdcfl.core.errors import ConfigError
from emdcfl.runs import runner
from emdcfl.runs.config import Choice, Config, RunConfig, TrainingConfig
from emdcfl.runs.loop import Silent
from emdcfl.runs.trackers import TensorBoard, Tracking

CONFIG = Config(
    run=RunConfig(rounds=2),
    scenario=Choice("rotated-digits", {"groups": 2, "clients_per_group": 1}),
    method=Choice("oracle"),
    training=TrainingConfig(local_epochs=1),
)


class Kept:
    """A tracker that remembers."""

    def __init__(self) -> None:
        self.seen: dict[int, dict[str, float]] = {}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.seen[step] = dict(values)

    def close(self) -> None:
        """Nothing to close."""


class Counting(Silent):
    def __init__(self) -> None:
        self.ended = 0

    def end(self, *_: object) -> None:
        self.ended += 1


def test_every_round_is_tracked(tmp_path: Path) -> None:
    kept, counting = Kept(), Counting()
    summary = runner.run(CONFIG, tmp_path / "run", observer=Tracking(kept, counting)).summary
    assert set(kept.seen) == {1, 2} and counting.ended == 2
    assert kept.seen[2]["test/mean"] == pytest.approx(summary["accuracy"]["mean"])
    assert kept.seen[2]["test/worst"] == pytest.approx(summary["accuracy"]["worst"])
    assert kept.seen[2]["clusters"] == 2.0
    assert kept.seen[1]["train/loss"] > kept.seen[2]["train/loss"] > 0


def test_rounds_without_scores_have_losses_only(tmp_path: Path) -> None:
    kept = Kept()
    runner.run(replace(CONFIG, run=RunConfig(rounds=2, evaluate_every=2)), tmp_path / "run", observer=Tracking(kept))
    assert set(kept.seen[1]) == {"train/loss", "clusters"}


def test_tensorboard_missing_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"emdcfl\[tensorboard\]"):
        TensorBoard(tmp_path)


def test_tensorboard_writes_events(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra emdcfl[tensorboard] is not installed")
    board = TensorBoard(tmp_path)
    board.log(1, {"test/mean": 0.5})
    board.close()
    assert list(tmp_path.glob("events.out.tfevents.*"))
