"""Progress of a run: a live bar on a terminal; elsewhere one line per round, and per minute of a long round; and the console for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Self

import numpy as np
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.segment import Segment

from emdcfl.core.metric import metric_of, score_of
from emdcfl.core.schema import Reply
from emdcfl.core.units import escaped, plural, seconds
from emdcfl.methods.base import Serving
from emdcfl.runs.scoring import MetricsRow, tested_scores
from emdcfl.runs.watching.forecast import Forecast

HEARTBEAT = 60.0
"""Seconds between two lines of progress where there is no bar."""
SURE = 0.05
"""Share of a forecast after which the time it took corrects what is left."""
SETTLED = 30.0
"""Seconds after which the remaining time is estimated."""
ENOUGH = 0.25
"""Share of the first round's clients that must have trained before: where all train at once, the first replies when all are nearly done."""


class _Terminal(Console):
    """A console that shows control characters of names as escapes; its own styles stay."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(escaped(segment.text, keep="\n"), segment.style)


def terminal() -> Console:
    """Return a command's console. It prints text, never markup: names and paths may hold brackets or :100:."""
    return _Terminal(markup=False, emoji=False, highlight=False)


PHASES = {
    "train": "training",
    "reference": "comparing",
    "recalibrate": "comparing",
    "project": "comparing",
    "deposit": "comparing",
    "loss_moments": "deciding",
    "evaluate": "deciding",
    "test": "testing",
    "personalize": "fine-tuning",
}
"""What people call a client's task."""


class Pace:
    """Progress counted in clients that are done with a phase, and the remaining time: as forecast, or at the speed of the rounds so far.

    A forecast covers everything, baselines too: it counts each reply as the seconds it was expected to take, and what is left is corrected
    by how long the replies so far took.
    """

    def __init__(self, forecast: Forecast | None = None) -> None:
        self.started = self.spoke = self.begun = self.round_began = time.monotonic()
        self.first = self.index = self.total = 0
        self.participants = 0
        self.forecast, self.done = forecast, 0.0
        self.trained: set[str] = set()
        self.phase, self.answered = "training", set[str]()

    def begin(self, index: int, total: int, participants: tuple[str, ...]) -> None:
        if index <= self.index or not self.first:  # another run than before
            self.first, self.started = index, time.monotonic()
        self.round_began = time.monotonic()
        self.index, self.total, self.participants = index, total, len(participants)
        self.trained.clear()
        self.phase, self.answered = "training", set()

    def reply(self, task: str, client: str, reply: Reply) -> None:
        if isinstance(reply.get("loss"), float):
            self.trained.add(client)
        if task in PHASES:
            if PHASES[task] != self.phase:
                self.phase, self.answered = PHASES[task], set()
            self.answered.add(client)
        if self.forecast is not None:
            self.done += self.forecast.replies.get(task, 0.0)

    @property
    def left(self) -> float | None:
        """Seconds to go; None while unknown."""
        if self.forecast is not None:
            rest, so_far = max(self.forecast.total - self.done, 0.0), time.monotonic() - self.begun
            return rest * so_far / self.done if self.done > SURE * self.forecast.total else rest
        took, rounds = time.monotonic() - self.started, self.index - self.first
        if rounds:
            each = (self.round_began - self.started) / rounds
            return max(each - (time.monotonic() - self.round_began), 0.0) + each * (self.total - self.index)
        done = len(self.trained) / max(self.participants, 1)
        if took < SETTLED or done < ENOUGH:
            return None
        return took / done * (self.total - self.first + 1 - done)

    def due(self) -> bool:
        """Whether a line of progress is due; true once per ``HEARTBEAT``."""
        now = time.monotonic()
        if now - self.spoke < HEARTBEAT:
            return False
        self.spoke = now
        return True

    def __str__(self) -> str:
        if not self.first:
            return "before round 1"
        to_go = f", about {seconds(self.left)} to go" if self.left is not None and self.left >= 1 else ""
        return f"round {self.index}/{self.total}, {self.phase} {len(self.answered)} of {self.participants} clients{to_go}"


class Live:
    """An observer that shows round, client, loss and accuracy."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.losses: list[float] = []
        self.pace = Pace()
        self.started = time.perf_counter()
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn())
        self.bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.task = self.bar.add_task("starting", total=None)

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def expect(self, forecast: Forecast) -> None:
        """Show the time that is left as forecast."""
        self.pace = Pace(forecast)

    def begin(self, index: int, total: int, participants: tuple[str, ...]) -> None:
        self.losses = []
        self.pace.begin(index, total, participants)
        self.bar.update(self.task, description=str(self.pace), total=len(participants), completed=0)

    def reply(self, task: str, client: str, reply: Reply) -> None:
        detail = ""
        self.pace.reply(task, client, reply)
        if task == "train" and isinstance(reply.get("loss"), float):
            self.losses.append(reply["loss"])
            detail = f"  loss {reply['loss']:.3f}"
        elif task == "test" and (tested := score_of(reply)):
            metric = metric_of(reply)
            detail = f"  {metric.label} {metric.text(next(iter(tested.values())))}"
        self.bar.update(self.task, completed=len(self.pace.answered), total=self.pace.participants or None)
        self.bar.update(self.task, description=f"{self.pace}{detail}")
        if not self.console.is_terminal and self.pace.due():
            self.console.print(f"{self.pace}  {time.perf_counter() - self.started:.0f} s", soft_wrap=True)

    def end(self, index: int, total: int, rows: list[MetricsRow], serving: Serving) -> None:
        parts = [f"round {index:>{len(str(total))}}/{total}"]
        if serving.clusters is not None:
            parts.append(plural(serving.k, "cluster"))
        if self.losses:
            parts.append(f"train loss {np.mean(self.losses):.4f}")
        main = next((variant for row in rows for variant in score_of(row) or ()), "")
        for tested, by_variant in tested_scores(rows).items():
            metric, scores = metric_of(rows[0]), by_variant.get(main)
            if not scores:
                continue
            said = f"{metric.label} {metric.text(float(np.mean(scores)))}, worst {metric.text(min(scores))}"
            if tested == index:
                parts.append(said)
            else:  # the test of an earlier round came with this round's answers
                self.bar.console.print(f"round {tested:>{len(str(total))}}/{total}  {said}", soft_wrap=True)
        parts.append(f"{time.perf_counter() - self.started:.0f} s")
        self.pace.spoke = time.monotonic()
        self.bar.console.print("  ".join(parts), soft_wrap=True)
