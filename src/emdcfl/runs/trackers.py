"""Follow a run elsewhere: a ``Tracker`` takes numbers by round. TensorBoard is one; anything with two methods is another.

.. code-block:: python

    class Printer:
        def log(self, step, values): print(step, values)
        def close(self): pass

    runner.run(config, out, observer=Tracking(Printer()))
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from emdcfl.core.errors import ConfigError
from emdcfl.core.schema import Reply
from emdcfl.methods.base import Serving
from emdcfl.runs.loop import Observer, Silent
from emdcfl.runs.scoring import MetricsRow


class Tracker(Protocol):
    """Whoever keeps numbers by round."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Keep the values of a round, by names like ``accuracy/mean``."""

    def close(self) -> None:
        """Finish: the run has ended, well or not."""


class Tracking:
    """An observer that passes a run's numbers on to a tracker, and everything to a second observer."""

    def __init__(self, tracker: Tracker, then: Observer | None = None) -> None:
        self.tracker, self.then = tracker, then or Silent()
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
            values["clusters"] = float(len(set(serving.clusters.tolist())))
        known = [row["accuracy"] for row in rows if row["accuracy"]]
        for variant in known[0] if known else ():
            scores = [accuracy[variant] for accuracy in known]
            values |= {f"{variant}/mean": float(np.mean(scores)), f"{variant}/worst": float(min(scores))}
        self.tracker.log(index, values)
        self.then.end(index, total, rows, serving)


class TensorBoard:
    """Scalars for TensorBoard, in ``folder``; needs the extra ``emdcfl[tensorboard]``."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError("TensorBoard is not installed; install emdcfl[tensorboard], or leave out --tensorboard") from error
        writer: Any = SummaryWriter
        self._writer = writer(str(folder))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of a round."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()
