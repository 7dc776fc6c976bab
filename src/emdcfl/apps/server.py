"""The ``ServerApp``: reads the run's config, runs it over the connected nodes, and writes the run directory of a local run.

``options.py`` explains the keys of its run config.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.serverapp import ServerApp

from emdcfl.apps.options import Options
from emdcfl.core.errors import EmdcflError
from emdcfl.core.files import replace_text
from emdcfl.core.schema import Reply
from emdcfl.data.own.cleaning import Cleaning
from emdcfl.data.scenarios.registry import scenario
from emdcfl.data.types import Scenario
from emdcfl.engines.flower.messages import MessageSettings
from emdcfl.engines.flower.session import Session, current, session
from emdcfl.engines.flower.survey import survey_nodes
from emdcfl.methods.base import Serving
from emdcfl.privacy.keylist import KeyList
from emdcfl.runs import runner
from emdcfl.runs.config import AT_NODES, Config, load, loads
from emdcfl.runs.result import Result
from emdcfl.runs.scoring import MetricsRow
from emdcfl.runs.store.identity import Baselines
from emdcfl.runs.verdict.baselines import run_baselines

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.serverapp import Grid

log = logging.getLogger("emdcfl")

app = ServerApp()

STOPPED = "Flower stopped the server of this run, on request or because the SuperLink did not answer (see its log); continue with --resume"


class Journal(logging.Handler):
    """Writes a run's progress and log to ``progress.jsonl`` and its end to ``outcome.json``; without a folder, nothing."""

    def __init__(self, folder: Path | None) -> None:
        super().__init__(logging.INFO)
        self.folder, self.started = folder, time.perf_counter()
        self.session: Session | None = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def write(self, **event: Any) -> None:
        """Add a line to ``progress.jsonl``."""
        if self.folder is not None:
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            line = json.dumps({"time": now, **event, "seconds": round(time.perf_counter() - self.started, 2)})
            with (self.folder / "progress.jsonl").open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    def emit(self, record: logging.LogRecord) -> None:
        self.write(event="log", level=record.levelname, text=record.getMessage())

    def begin(self, index: int, total: int, participants: tuple[str, ...]) -> None:
        if self.session is not None:
            self.session.keep_survey()
        self.write(event="begin", round=index, total=total, participants=list(participants))

    def reply(self, task: str, client: str, reply: Reply) -> None:
        loss, accuracy = reply.get("loss"), reply.get("accuracy")
        first = next(iter(accuracy.values()), None) if isinstance(accuracy, dict) else None
        self.write(event="reply", task=task, client=client, loss=loss if isinstance(loss, float) else None, accuracy=first)

    def end(self, index: int, total: int, rows: list[MetricsRow], serving: Serving) -> None:
        clusters = None if serving.clusters is None else serving.k
        self.write(event="end", round=index, total=total, rows=rows, clusters=clusters)

    def outcome(self, **result: Any) -> None:
        """Write how the run ended; the file appears in one step."""
        if self.folder is not None:
            replace_text(self.folder / "outcome.json", json.dumps(result, indent=2))


def read_config(value: str) -> Config:
    """Return the config given as TOML text or as a path; whatever it says, the engine is Flower."""
    given = Config() if not value.strip() else load(value) if "\n" not in value and value.endswith(".toml") else loads(value, "run config")
    return replace(given, engine=replace(given.engine, name="flower", workers=1))


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the config; an error ends the run, and the journal says why."""
    job = str(context.run_config.get("job", ""))
    journal = Journal(Path(job) if job else None)
    log.setLevel(logging.INFO)
    for handler in (logging.StreamHandler(), journal):
        log.addHandler(handler)
    here = None
    try:
        options = Options.read(context.run_config)
        out = Path(options.out).resolve()
        log.info("run directory: %s", out)
        settings = MessageSettings(deadline=options.deadline, part_mb=options.part_mb, reply_mb=options.reply_mb, wait=options.wait)
        here = Session(grid, settings, KeyList(options.keys or None, options.trust), out / "state")
        journal.session = here
        beside = Baselines.MODELS if options.keep_baselines else Baselines.SCORES if options.baselines else Baselines.NONE
        with session(here):
            result = runner.run(read_config(options.config), out, resume=options.resume, observer=journal, baselines=beside)
            if options.baselines:
                _compare(result, journal, keep=options.keep_baselines)
    except BaseException as error:
        journal.outcome(ok=False, error=_reason(error), traffic=here.traffic() if here else {})
        raise
    journal.outcome(ok=True, rounds=result.summary["rounds"], traffic=here.traffic())


def _compare(result: Result, journal: Journal, *, keep: bool) -> None:
    """Train the baselines with the same nodes; a run that is finished does not fail with them."""
    journal.write(event="baselines", rounds=result.summary["rounds"])
    try:
        run_baselines(result, observer=journal, keep=keep, say=log.info)
    except EmdcflError as error:
        log.warning("whether groups pay is not said: %s; continue with --resume", error)


def _reason(error: BaseException) -> str:
    if isinstance(error, SystemExit):  # raised by Flower, which gives no reason
        return STOPPED
    return str(error) if isinstance(error, EmdcflError) else f"{type(error).__name__}: {error}"


@scenario(AT_NODES, "the connected nodes, each with files of its own (Flower only; see docs/guide/deploy.md)")
def nodes(
    *,
    clients: list[str] | None = None,
    label: str | None = None,
    drop: str | list[str] | None = None,
    only: str | list[str] | None = None,
    data_seed: int = 0,
    size: int | None = None,
    model: str | None = None,
) -> Scenario:
    """Ask the connected nodes about their files.

    The clients are by default those on the server's list of keys or, if it is empty, all that are connected. ``drop`` and ``only`` are
    columns of tables that are no features, or the only ones that are.
    """
    options: dict[str, Any] = {"data_seed": data_seed, "size": size, "model": model, "cleaning": Cleaning.of(drop=drop, only=only)}
    here = current()
    if here.stored:
        log.info("the survey of this run, made before its first round, is used again")
    else:
        here.survey = survey_nodes(here.connected, clients=clients, label=label, **options)
    assert here.survey is not None
    return here.survey.scenario(AT_NODES, model)
