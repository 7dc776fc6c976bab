"""A tracker sees every round of a run, and whoever watched before still does."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

import emdcfl
from emdcfl.core.errors import ConfigError
from emdcfl.runs import runner
from emdcfl.runs.config import Choice, Config, RunConfig, TrainingConfig
from emdcfl.runs.loop import NoOpObserver
from emdcfl.runs.watching.trackers import Tracking, open_tracker

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


class Counting(NoOpObserver):
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


def test_the_model_for_all_beside_a_run_is_not_tracked() -> None:
    kept, counting = Kept(), Counting()
    held = replace(CONFIG, run=RunConfig(rounds=1, hold_out=("rot0-2",)), scenario=Choice("rotated-digits", {"groups": 2}))
    summary = runner.run(held, observer=Tracking(kept, counting)).summary
    assert counting.ended == 2  # with the model for all that held-out sites are tested with
    assert kept.seen[1]["test/mean"] == pytest.approx(summary["accuracy"]["mean"]) and kept.seen[1]["clusters"] == 2.0


def test_rounds_without_scores_have_losses_only(tmp_path: Path) -> None:
    kept = Kept()
    runner.run(replace(CONFIG, run=RunConfig(rounds=2, evaluate_every=2)), tmp_path / "run", observer=Tracking(kept))
    assert set(kept.seen[1]) == {"train/loss", "clusters"}


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "wandb"])
def test_a_missing_client_is_said_in_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"emdcfl\[{name}\]"):
        open_tracker(name, tmp_path, CONFIG)
    with pytest.raises(ConfigError, match="did you mean 'mlflow'"):
        open_tracker("mlfow", tmp_path, CONFIG)


def tracked(name: str, out: Path) -> float:
    """Run with a real client, and return what it should hold of the last round."""
    with closing(open_tracker(name, out, CONFIG)) as tracker:
        result = runner.run(CONFIG, out, observer=Tracking(tracker))
    return float(result.summary["accuracy"]["mean"])


def test_tensorboard_keeps_scalars(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra emdcfl[tensorboard] is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    mean = tracked("tensorboard", tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    last = events.Scalars("test/mean")[-1]
    assert last.step == 2 and last.value == pytest.approx(mean)


def test_mlflow_keeps_settings_and_metrics_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="the extra emdcfl[mlflow] is not installed")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    mean = tracked("mlflow", tmp_path / "run")
    client = mlflow.MlflowClient((tmp_path / "run" / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("emdcfl").experiment_id])
    assert run.info.status == "FINISHED" and run.data.params["method.name"] == "oracle"
    last = max(client.get_metric_history(run.info.run_id, "test/mean"), key=lambda metric: metric.step)
    assert last.step == 2 and last.value == pytest.approx(mean)


def test_wandb_writes_offline_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the extra emdcfl[wandb] is not installed")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    tracked("wandb", tmp_path / "run")
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    assert list(folder.glob("*.wandb"))
    assert emdcfl.load(tmp_path / "run").summary["finished"]  # what the client leaves does not disturb the run
