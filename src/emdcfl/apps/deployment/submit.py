"""Submit a run to a federation and follow it: ``emdcfl run --engine flower --federation DIR``."""

from __future__ import annotations

import json
import logging
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from emdcfl.apps.deployment import control
from emdcfl.apps.deployment.folder import Deployment
from emdcfl.apps.deployment.processes import LINK, identity, process_ids
from emdcfl.core.errors import ConfigError, EmdcflError

if TYPE_CHECKING:
    from emdcfl.privacy.keylist import KeyTrust
    from emdcfl.runs.config import Config

log = logging.getLogger("emdcfl")

Event = dict[str, Any]
RUN = "run.json"
"""File of a job's folder that holds Flower's number of the run, and process id and start time of the SuperLink that took it."""

STOPPED = "stopped"
"""File of a job's folder that says somebody asked the run to stop."""

POLL = 0.5
CHECK = 60.0
"""Seconds between questions to the SuperLink whether the run still exists."""

SILENCE = 300.0
"""Seconds without an answer of a SuperLink that a service runs, and without a word of the run, after which nobody waits any longer."""


def submit(
    deployment: Deployment,
    config: Config,
    out: Path,
    *,
    resume: bool = False,
    trust: KeyTrust = "pinned",
    baselines: bool = False,
    keep_baselines: bool = False,
    watch: Callable[[Event], None] | None = None,
) -> dict[str, Any]:
    """Run a config over the federation; return its outcome (``ok``, ``error``, ``traffic``), or raise the error with which it ended."""
    from emdcfl.apps.options import Options  # not for every command: they load torch
    from emdcfl.runs.config import dump
    from emdcfl.runs.store.identity import is_run

    link = identity(deployment, LINK)  # before the run exists, to notice a SuperLink that dies just after taking it
    if (live := live_run(deployment, out)) is not None and resume and link is not None and live.link != link:
        log.info("run %d was left behind by a SuperLink that ended; it is stopped", live.number)
        control.stop_run(deployment, live.run)
    elif live is not None:
        raise ConfigError(
            f"run {live.number} still works in {out}; watch it with: emdcfl federation attach {deployment.path}, "
            f"or stop it with: emdcfl federation stop {deployment.path}"
        )
    if not resume and is_run(out):  # the server would say so too, after it has started
        raise ConfigError(f"{out}: already holds a run; add --resume to continue it, or choose another --out")
    number = 1 + max([int(p.name) for p in (deployment.path / "jobs").iterdir() if p.name.isdigit()], default=0)
    job = deployment.path / "jobs" / str(number)
    job.mkdir(parents=True)
    options = Options(
        config=dump(config),
        out=str(out.resolve()),
        resume=resume,
        keys=str(deployment.path / "server" / "clients.toml"),
        trust=trust,
        deadline=deployment.deadline,
        wait=deployment.wait,
        baselines=baselines,
        keep_baselines=keep_baselines,
        job=str(job),
    )
    (job / "run-config.toml").write_text(tomli_w.dumps(options.as_dict()), encoding="utf-8")
    try:
        run = control.start_run(deployment, options.as_dict())
    except control.ControlError as error:
        raise ConfigError(
            f"the run could not be submitted; is the federation up (emdcfl federation up {deployment.path})? {error}"
        ) from error
    (job / RUN).write_text(json.dumps({"run": run, "link": link}), encoding="ascii")
    try:
        return follow(deployment, job, run, watch or (lambda event: None), link=link)
    except KeyboardInterrupt:  # as in a local run: complete rounds are on disk, and --resume must find no other server at work
        stop(deployment, job, run)
        raise


@dataclass(frozen=True)
class SubmittedRun:
    """A run that was submitted: its number and folder, Flower's number of it, its run directory, and which SuperLink took it."""

    number: int
    path: Path
    run: int
    out: Path
    link: tuple[int, str] | None

    @property
    def outcome(self) -> dict[str, Any] | None:
        """How it ended; ``None`` if its server has not said."""
        path = self.path / "outcome.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def jobs(deployment: Deployment) -> Iterator[SubmittedRun]:
    """Yield the runs that the SuperLink took, latest first."""
    for path in sorted((deployment.path / "jobs").iterdir(), key=lambda p: int(p.name) if p.name.isdigit() else 0, reverse=True):
        if (path / RUN).exists():
            options = tomllib.loads((path / "run-config.toml").read_text(encoding="utf-8"))
            taken = json.loads((path / RUN).read_text(encoding="ascii"))
            link = None if taken["link"] is None else (int(taken["link"][0]), str(taken["link"][1]))
            yield SubmittedRun(int(path.name), path, int(taken["run"]), Path(options["out"]), link)


def live_run(deployment: Deployment, out: Path | None = None) -> SubmittedRun | None:
    """Return the run that is at work, in ``out`` or anywhere; ``None`` if there is none or the SuperLink does not answer."""
    for job in jobs(deployment):
        if job.outcome is None and (out is None or job.out == out.resolve()):
            state = control.run_status(deployment, job.run)
            if state is not None and not state.startswith("finished"):
                return job
    return None


def follow(deployment: Deployment, job: Path, run: int, watch: Callable[[Event], None], *, link: tuple[int, str] | None) -> dict[str, Any]:
    """Pass the server's journal on until the run ends; raise if the SuperLink that took it ends first."""
    position, checked = 0, time.monotonic()
    heard = checked
    while True:
        ended = (job / "outcome.json").exists()
        events, position = new_events(job / "progress.jsonl", position)
        for event in events:
            watch(event)
        heard = time.monotonic() if events else heard
        if ended:
            outcome: dict[str, Any] = json.loads((job / "outcome.json").read_text(encoding="utf-8"))
            if not outcome["ok"]:
                raise EmdcflError(str(outcome["error"]))
            return outcome
        if link is not None and identity(deployment, LINK) != link:
            raise EmdcflError(
                f"the SuperLink ended during the run; start it again (emdcfl federation up {deployment.path}) and use --resume"
            )
        if time.monotonic() - checked > CHECK:
            checked = time.monotonic()
            state = control.run_status(deployment, run)
            heard = checked if state is not None else heard
            if checked - heard > SILENCE:
                raise EmdcflError(
                    f"the SuperLink at {deployment.address} has not answered for {SILENCE:.0f} s; start it again and use --resume"
                )
            if state is not None and state.startswith("finished") and not (job / "outcome.json").exists():
                raise EmdcflError(
                    f"run {run} ended without a result ({state}); see {deployment.path}/logs/superlink.log, then go on with --resume"
                )
        time.sleep(POLL)


def stop(deployment: Deployment, job: Path, run: int) -> None:
    """Stop a run, and wait until its server has ended, a minute at most."""
    (job / STOPPED).touch()
    service = LINK not in process_ids(deployment)  # not started by 'up': whether it runs is seen from its answer
    try:
        control.stop_run(deployment, run)
    except control.ControlError:
        service = False
    end = time.monotonic() + 60.0
    while not (job / "outcome.json").exists() and (service or identity(deployment, LINK) is not None) and time.monotonic() < end:
        time.sleep(POLL)


def new_events(path: Path, position: int) -> tuple[list[Event], int]:
    """Return the complete lines after a position, and the position after them."""
    if not path.exists():
        return [], position
    with path.open("rb") as file:
        file.seek(position)
        content = file.read()
    complete = content[: content.rfind(b"\n") + 1]
    return [json.loads(line) for line in complete.splitlines()], position + len(complete)
