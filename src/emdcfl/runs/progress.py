"""Progress of a run: a live bar on a terminal; elsewhere one line per round, and per minute of a long round; and the console for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import numpy as np
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.segment import Segment

from emdcfl.core.schema import Reply
from emdcfl.core.units import escaped, seconds
from emdcfl.methods.base import Serving
from emdcfl.runs.scoring import MetricsRow

HEARTBEAT = 60.0
"""Seconds between two lines of progress where there is no bar."""
SETTLED = 30.0
"""Seconds after which the remaining time is estimated."""


class _Terminal(Console):
    """A console that shows control characters of names as escapes; its own styles stay."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(escaped(segment.text, keep="\n"), segment.style)


def terminal() -> Console:
    """Return a command's console. It prints text, never markup: names and paths may hold brackets or :100:."""
    return _Terminal(markup=False, emoji=False, highlight=False)


class Pace:
    """Progress counted in trained clients, and the remaining time at this speed."""

    def __init__(self) -> None:
        self.started = self.spoke = time.monotonic()
        self.first = self.index = self.total = 0
        self.participants = 0
        self.trained: set[str] = set()

    def begin(self, index: int, total: int, participants: tuple[str, ...]) -> None:
        if index <= self.index or not self.first:  # another run than before
            self.first, self.started = index, time.monotonic()
        self.index, self.total, self.participants = index, total, len(participants)
        self.trained.clear()

    def reply(self, client: str, reply: Reply) -> None:
        if isinstance(reply.get("loss"), float):
            self.trained.add(client)

    @property
    def left(self) -> float | None:
        """Seconds to go; None while unknown."""
        took = time.monotonic() - self.started
        done = self.index - self.first + len(self.trained) / max(self.participants, 1)
        if took < SETTLED or done <= 0:
            return None
        return took / done * max(self.total - self.first + 1 - done, 0.0)

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
        left = "" if self.left is None else f", about {seconds(self.left)} to go"
        return f"round {self.index}/{self.total}, {len(self.trained)} of {self.participants} clients trained{left}"


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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.bar.stop()

    def begin(self, index: int, total: int, participants: tuple[str, ...]) -> None:
        self.losses = []
        self.pace.begin(index, total, participants)
        self.head = f"round {index}/{total}"
        self.bar.update(self.task, description=f"{self.head}  training", total=2 * len(participants), completed=0)

    def reply(self, task: str, client: str, reply: Reply) -> None:
        detail = ""
        self.pace.reply(client, reply)
        if task == "train" and isinstance(reply.get("loss"), float):
            self.losses.append(reply["loss"])
            detail = f"  loss {reply['loss']:.3f}"
        elif task == "test" and reply["accuracy"]:
            detail = f"  accuracy {next(iter(reply['accuracy'].values())):.1%}"
        left = "" if self.pace.left is None else f"  about {seconds(self.pace.left)} to go"
        self.bar.update(
            self.task, advance=1, description=f"{getattr(self, 'head', 'before round 1')}  {task} {escape(client)}{detail}{left}"
        )
        if not self.console.is_terminal and self.pace.due():
            self.console.print(f"{self.pace}  {time.perf_counter() - self.started:.0f} s", soft_wrap=True)

    def end(self, index: int, total: int, rows: list[MetricsRow], serving: Serving) -> None:
        parts = [f"round {index:>{len(str(total))}}/{total}"]
        if serving.clusters is not None:
            found = len(set(serving.clusters.tolist()))
            parts.append(f"{found} cluster{'s' if found != 1 else ''}")
        if self.losses:
            parts.append(f"train loss {np.mean(self.losses):.4f}")
        scores = [next(iter(r["accuracy"].values())) for r in rows if r["accuracy"]]
        if scores:
            parts.append(f"accuracy {np.mean(scores):.1%}, worst {min(scores):.1%}")
        parts.append(f"{time.perf_counter() - self.started:.0f} s")
        self.pace.spoke = time.monotonic()
        self.bar.console.print("  ".join(parts), soft_wrap=True)
