"""The ``ServerApp``: reads the run's config, plays it over the connected nodes, leaves the run directory of a local run.

The keys of its run config are explained in ``options.py``.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.serverapp import ServerApp

import emdcfl.engines.flower.survey  # noqa: F401  registers the scenario "nodes"
from emdcfl.apps.options import Options
from emdcfl.core.errors import EmdcflError
from emdcfl.core.schema import Reply
from emdcfl.engines.flower.post import Wire
from emdcfl.engines.flower.session import Session, session
from emdcfl.methods.base import Serving
from emdcfl.privacy.keylist import KeyList
from emdcfl.runs import runner
from emdcfl.runs.config import Config, load, loads
from emdcfl.runs.scoring import MetricsRow

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.serverapp import Grid

log = logging.getLogger("emdcfl")

app = ServerApp()

ENDED = "Flower ended the run's server process: it was stopped, or the SuperLink did not answer in time (see its log); go on with --resume"


class Journal:
    """An observer that writes what happens to a folder and to the log: ``progress.jsonl`` line by line, ``outcome.json`` at the end."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.started = time.perf_counter()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def note(self, **event: Any) -> None:
        """Add a line."""
        line = json.dumps({**event, "seconds": round(time.perf_counter() - self.started, 2)})
        if self.folder is not None:
            with (self.folder / "progress.jsonl").open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    def begin(self, index: int, total: int, participants: tuple[str, ...]) -> None:
        self.note(event="begin", round=index, total=total, participants=list(participants))

    def reply(self, task: str, client: str, reply: Reply) -> None:
        loss = reply.get("loss")
        accuracy = reply.get("accuracy")
        first = next(iter(accuracy.values()), None) if isinstance(accuracy, dict) else None
        self.note(event="reply", task=task, client=client, loss=loss if isinstance(loss, float) else None, accuracy=first)

    def end(self, index: int, total: int, rows: list[MetricsRow], serving: Serving) -> None:
        clusters = None if serving.clusters is None else serving.clusters.tolist()
        self.note(event="end", round=index, total=total, rows=rows, clusters=clusters)
        log.info("round %d of %d is complete", index, total)

    def outcome(self, **result: Any) -> None:
        """Say how it ended; the file appears in one step."""
        if self.folder is not None:
            temporary = self.folder / ".outcome.json"
            temporary.write_text(json.dumps(result, indent=2), encoding="utf-8")
            temporary.replace(self.folder / "outcome.json")


class _Progress(logging.Handler):
    """Sends the program's own log to the journal."""

    def __init__(self, journal: Journal) -> None:
        super().__init__(logging.INFO)
        self.journal = journal

    def emit(self, record: logging.LogRecord) -> None:
        self.journal.note(event="log", level=record.levelname, text=record.getMessage())


def read_config(value: str) -> Config:
    """Return the config given as text or as a path; the engine is Flower whatever it says."""
    given = Config() if not value.strip() else load(value) if "\n" not in value and value.endswith(".toml") else loads(value, "run config")
    return replace(given, engine=replace(given.engine, name="flower", workers=1))


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the config; an error that a user can act on ends the run with its one line."""
    job = str(context.run_config.get("job", ""))
    journal = Journal(Path(job) if job else None)
    log.setLevel(logging.INFO)
    for handler in (logging.StreamHandler(), _Progress(journal)):
        log.addHandler(handler)
    connected: list[Any] = []
    try:
        options = Options.read(context.run_config)
        out = Path(options.out).resolve()
        log.info("run directory: %s", out)
        wire = Wire(deadline=options.deadline, part_mb=options.part_mb, reply_mb=options.reply_mb, wait=options.wait)
        with session(Session(grid, wire, KeyList(options.keys or None, options.trust))) as here:
            connected = here.federations
            summary = runner.run(read_config(options.config), out, resume=options.resume, observer=journal)
    except EmdcflError as error:
        journal.outcome(ok=False, error=str(error), traffic=_traffic(connected))
        raise
    except SystemExit:  # Flower's own way out, without a word of its own
        journal.outcome(ok=False, error=ENDED, traffic=_traffic(connected))
        raise
    except BaseException as error:
        journal.outcome(ok=False, error=f"{type(error).__name__}: {error}", traffic=_traffic(connected))
        raise
    journal.outcome(ok=True, rounds=summary["rounds"], traffic=_traffic(connected))


def _traffic(federations: list[Any]) -> dict[str, dict[str, int]]:
    """Bytes sent and received by task, over all requests."""
    total: dict[str, dict[str, int]] = {}
    for fed in federations:
        for task, (sent, received, requests) in fed.task_traffic.items():
            entry = total.setdefault(task, {"sent": 0, "received": 0, "requests": 0})
            entry["sent"] += sent
            entry["received"] += received
            entry["requests"] += requests
    return total
