"""Follow a run elsewhere: a ``Tracker`` takes numbers by round. Three are here; anything with two methods is another.

.. code-block:: python

    class Printer:
        def log(self, step, values): print(step, values)
        def close(self): pass

    runner.run(config, out, observer=Tracking(Printer()))
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from emdcfl.core.errors import ConfigError, nearest
from emdcfl.core.optional import require
from emdcfl.core.schema import Reply
from emdcfl.methods.base import Serving
from emdcfl.runs.config import Config, as_dict
from emdcfl.runs.loop import NoOpObserver, Observer
from emdcfl.runs.scoring import MetricsRow, tested_scores
from emdcfl.runs.store.identity import flat


class Tracker(Protocol):
    """Whoever keeps numbers by round."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Keep the values of a round, by names like ``accuracy/mean``."""

    def close(self) -> None:
        """Finish: the run has ended, well or not."""


class Tracking:
    """An observer that passes a run's numbers on to a tracker, and everything to a second observer."""

    def __init__(self, tracker: Tracker, then: Observer | None = None) -> None:
        self.tracker, self.then = tracker, then or NoOpObserver()
        self.losses: list[float] = []

    def begin(self, index: int, total: int, participants: tuple[str, ...]) -> None:
        self.losses = []
        self.then.begin(index, total, participants)

    def reply(self, task: str, client: str, reply: Reply) -> None:
        if isinstance(reply.get("loss"), float):
            self.losses.append(reply["loss"])
        self.then.reply(task, client, reply)

    def end(self, index: int, total: int, rows: list[MetricsRow], serving: Serving) -> None:
        values = {"train/loss": float(np.mean(self.losses))} if self.losses else {}
        if serving.clusters is not None:
            values["clusters"] = float(serving.k)
        for tested, known in tested_scores(rows).items():
            scores = {f"{v}/{what}": float(of(s)) for v, s in known.items() for what, of in (("mean", np.mean), ("worst", min))}
            if tested == index:
                values |= scores
            else:  # the test of an earlier round came with this round's answers
                self.tracker.log(tested, scores)
        self.tracker.log(index, values)
        self.then.end(index, total, rows, serving)


class TensorBoard:
    """Scalars for TensorBoard, in ``tensorboard/`` of the run directory."""

    def __init__(self, folder: Path, config: Config) -> None:
        writer: Any = require("torch.utils.tensorboard", "tensorboard", "for --track tensorboard").SummaryWriter
        self._writer = writer(str(folder / "tensorboard"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class MLflow:
    """A run of MLflow with settings and numbers; ``MLFLOW_TRACKING_URI`` says where, by default ``mlruns/`` of the run directory."""

    def __init__(self, folder: Path, config: Config) -> None:
        mlflow = require("mlflow", "mlflow", "for --track mlflow")
        uri = os.environ.get("MLFLOW_TRACKING_URI") or (folder / "mlruns").resolve().as_uri()
        if uri.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = mlflow.MlflowClient(uri)
        found = self._client.get_experiment_by_name("emdcfl")
        experiment = self._client.create_experiment("emdcfl") if found is None else found.experiment_id
        self._run = self._client.create_run(experiment, run_name=folder.name).info.run_id
        for name, value in flat(as_dict(config)).items():
            self._client.log_param(self._run, name, value)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._client.log_metric(self._run, name, value, step=step)

    def close(self) -> None:
        """Mark the run as finished, or as failed while an error is on its way."""
        self._client.set_terminated(self._run, "FINISHED" if sys.exc_info()[0] is None else "FAILED")


class WandB:
    """A run of Weights & Biases in ``wandb/`` beside the run directory; offline unless ``WANDB_MODE`` says otherwise."""

    def __init__(self, folder: Path, config: Config) -> None:
        wandb = require("wandb", "wandb", "for --track wandb")
        mode = os.environ.get("WANDB_MODE", "offline")
        beside = str(folder.resolve().parent)  # its client makes symbolic links, which a run directory does not have
        self._run = wandb.init(project="emdcfl", name=folder.name, dir=beside, mode=mode, config=flat(as_dict(config)))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish(exit_code=0 if sys.exc_info()[0] is None else 1)


TRACKERS: dict[str, Callable[[Path, Config], Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}


class _WhenNeeded:
    """A tracker that starts with the first numbers: a run directory must be empty before its run begins."""

    def __init__(self, start: Callable[[], Tracker]) -> None:
        self._start = start
        self._tracker: Tracker | None = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._tracker is None:
            self._tracker = self._start()
        self._tracker.log(step, values)

    def close(self) -> None:
        if self._tracker is not None:
            self._tracker.close()


def open_tracker(name: str, folder: Path, config: Config) -> Tracker:
    """Return the tracker called ``name`` for a run in ``folder``; that its client is installed is checked at once."""
    if name not in TRACKERS:
        raise ConfigError(f"--track {name}: {nearest(name, TRACKERS)}")
    require(name, name, f"for --track {name}")
    return _WhenNeeded(lambda: TRACKERS[name](folder, config))
