"""What a run shows while it runs: a live line on a terminal, one plain line per round elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from emdcfl.experiments.scoring import Row
from emdcfl.methods.base import Serving
from emdcfl.schema import Reply


class Live:
    """An observer that shows round, client, loss and accuracy."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.losses: list[float] = []
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
        self.head = f"round {index}/{total}"
        self.bar.update(self.task, description=f"{self.head}  training", total=2 * len(participants), completed=0)

    def reply(self, task: str, client: str, reply: Reply) -> None:
        detail = ""
        if task == "train" and isinstance(reply.get("loss"), float):
            self.losses.append(reply["loss"])
            detail = f"  loss {reply['loss']:.3f}"
        elif task == "test" and reply["accuracy"]:
            detail = f"  accuracy {next(iter(reply['accuracy'].values())):.1%}"
        self.bar.update(self.task, advance=1, description=f"{getattr(self, 'head', 'before round 1')}  {task} {escape(client)}{detail}")

    def end(self, index: int, total: int, rows: list[Row], serving: Serving) -> None:
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
        self.bar.console.print("  ".join(parts), highlight=False, soft_wrap=True)
