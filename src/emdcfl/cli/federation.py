"""``emdcfl federation …``: a federation on this machine or many: its folder, its processes, its nodes, its runs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from emdcfl.cli.app import AsJson, answer, app, needs_flower, print_json
from emdcfl.core.errors import ConfigError, EmdcflError
from emdcfl.core.units import names

if TYPE_CHECKING:
    from emdcfl.apps.deployment.folder import Deployment
    from emdcfl.apps.deployment.submit import SubmittedRun
    from emdcfl.runs.config import Config
    from emdcfl.runs.result import Result

log = logging.getLogger("emdcfl")

federation = typer.Typer(
    help="Set up and operate a federation of nodes, on this machine or many.",
    no_args_is_help=True,
    add_completion=False,
)
app.add_typer(federation, name="federation")

Folder = Annotated[Path, typer.Argument(help="Folder of the federation.", show_default=False)]


def _read(folder: Path) -> Deployment:
    needs_flower()
    from emdcfl.apps import deployment

    return deployment.Deployment.read(folder)


@federation.command()
def init(
    folder: Folder,
    nodes: Annotated[int | None, typer.Option(help="Number of nodes. Each is a client of rotated-digits.", show_default="4")] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Your own files: one node per client of this folder, or of a config that 'emdcfl data check --fix' wrote. "
            "Each node reads its own part.",
            show_default=False,
        ),
    ] = None,
    deadline: Annotated[float, typer.Option(help="Seconds a node may take to answer one request.")] = 600.0,
    host: Annotated[
        str | None,
        typer.Option(help="Name or address at which nodes on other machines reach the SuperLink; needs --site.", show_default=False),
    ] = None,
    site: Annotated[list[str] | None, typer.Option(help="Name of a client on another machine; repeatable.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Write certificates, keys, the operator's token, the signed app, configs and a start script."""
    needs_flower()
    from emdcfl.apps.deployment.folder import create, create_operator, fingerprints

    if host is not None:
        if nodes is not None or data is not None:
            raise ConfigError("--host is for nodes on other machines, got --nodes or --data too; give --site for each of them")
        create_operator(folder, site or [], host=host, deadline=deadline)
        told = f"wrote {folder}; next: emdcfl federation up {folder}, then emdcfl federation enrol {folder} SITE KEY FINGERPRINT"
        answer({"folder": str(folder), "nodes": {}}, [told], as_json=as_json)
        return
    if site:
        raise ConfigError("--site is for nodes on other machines; give --host too")
    there = create(folder, nodes=nodes, data=data, deadline=deadline)
    known = fingerprints(there)
    lines = [*(f"{node:<20} {print_}" for node, print_ in known.items()), f"wrote {folder}; next: emdcfl federation up {folder}"]
    answer({"folder": str(folder), "nodes": known}, lines, as_json=as_json)


@federation.command()
def up(folder: Folder, as_json: AsJson = False) -> None:
    """Start the SuperLink and the nodes that are not running, and wait until the nodes are accepted."""
    there = _read(folder)
    from emdcfl.apps import deployment

    started = deployment.up(there)
    if not as_json:
        typer.echo(f"started {_listed(started)}" if started else "everything is running already")
    missing = deployment.wait_accepted(there)
    lines = [f"{name:<20} {text}" for name, text in missing.items()]
    if not missing:
        lines = [f"all {len(there.nodes)} nodes are connected", f"next: emdcfl run {folder}/run.toml --federation {folder}"]
    if not there.nodes:
        lines = [
            f"for each new site: emdcfl federation enrol {folder} SITE KEY FINGERPRINT",
            f"once 'emdcfl federation status {folder}' shows all online: emdcfl run {folder}/run.toml --federation {folder}",
        ]
    answer({"started": started, "missing": missing}, lines, as_json=as_json)
    if missing:
        raise EmdcflError(f"{len(missing)} of {len(there.nodes)} nodes are not connected; correct what the logs say and run this again")


@federation.command()
def serve(folder: Folder) -> None:
    """Run only the SuperLink, in the foreground. Services use this instead of 'up'."""
    import os

    there = _read(folder)
    os.umask(0o077)
    os.chdir(there.path)
    command = there.link_command()
    os.execvpe(command[0], command, {**os.environ, **there.environment()})


@federation.command()
def enrol(
    folder: Folder,
    name: Annotated[str, typer.Argument(help="The client's name.", show_default=False)],
    key: Annotated[Path, typer.Argument(help="Its auth.pub.", show_default=False)],
    fingerprint: Annotated[
        str | None,
        typer.Argument(help="Its fingerprint, SHA256:…, compared by telephone; not needed in a trial on one machine.", show_default=False),
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="The site has rotated its keys: replace the old one.")] = False,
    as_json: AsJson = False,
) -> None:
    """Register a node's key with the SuperLink, add its fingerprint to the server's list, and close registration again."""
    there = _read(folder)
    from emdcfl.apps.deployment import control
    from emdcfl.apps.deployment.folder import check_names, clients_of_runs
    from emdcfl.privacy.keylist import add_name, check_fingerprint

    if fingerprint is not None:
        check_fingerprint(fingerprint)  # before anything is registered
    try:
        public = key.read_bytes()
    except OSError as error:
        raise ConfigError(f"{key}: cannot read the node's public key ({error})") from error
    check_names([name])
    new = control.enrol(there, name, public, replace=replace)
    if fingerprint is not None:
        add_name(there.operator / "clients.toml", name, fingerprint, replace=replace)
    lines = [f"{name} is {'registered' if new else 'registered already'}; enrolment is closed"]
    listed = clients_of_runs(there)
    if listed is not None and name not in listed:
        lines.append(f"next: add {name} to clients in {folder}/run.toml; a run asks the sites of that list only")
    answer({"name": name, "new": bool(new)}, lines, as_json=as_json)


@federation.command()
def remove(
    folder: Folder, name: Annotated[str, typer.Argument(help="The client's name.", show_default=False)], as_json: AsJson = False
) -> None:
    """Revoke a node's access. If it is to come back, it rotates its keys, and you enrol it again."""
    there = _read(folder)
    from emdcfl.apps.deployment import control
    from emdcfl.apps.deployment.folder import clients_of_runs
    from emdcfl.privacy.keylist import remove_name

    control.remove(there, name)
    remove_name(there.operator / "clients.toml", name)
    lines = [f"{name} is removed; its partners delete its line from their partners.toml"]
    if name in (clients_of_runs(there) or []):
        lines.append(f"next: take {name} off clients in {folder}/run.toml; a run waits for the sites of that list")
    answer({"removed": name}, lines, as_json=as_json)


@federation.command()
def renew(folder: Folder, as_json: AsJson = False) -> None:
    """Make a new certificate for the SuperLink, for the same addresses. Nodes need nothing new."""
    there = _read(folder)
    from emdcfl.apps.deployment.certificates import renew_server_certificate

    until = renew_server_certificate(there.path / "certificates")
    lines = [
        f"the certificate is valid until {until:%Y-%m-%d}; nodes need nothing new",
        f"next: restart the SuperLink, between runs: emdcfl federation down {folder}; emdcfl federation up {folder}",
    ]
    answer({"valid_until": f"{until:%Y-%m-%d}"}, lines, as_json=as_json)


@federation.command()
def check(folder: Folder, as_json: AsJson = False) -> None:
    """Try attacks of an outsider, a foreign node and a stolen token on the running federation. Fail if one succeeds."""
    there = _read(folder)
    from emdcfl.apps.deployment.check import attacks

    words = {True: "held", False: "BROKEN", None: "not tried"}
    tried = []
    for attack in attacks(there):
        tried.append(attack)
        if not as_json:
            typer.echo(f"{words[attack.held]:<10} {attack.name}: {attack.said}")
    if as_json:
        print_json([asdict(one) for one in tried])
    found = [one.held for one in tried]
    if not all(found):
        raise EmdcflError(f"{found.count(False)} attacks succeeded, {found.count(None)} could not be tried; see docs/guide/deploy.md")
    if not as_json:
        typer.echo(f"all {len(found)} attacks were refused")


@federation.command()
def status(folder: Folder, as_json: AsJson = False) -> None:
    """Show the current run and which nodes are online. Exit with 1 unless the SuperLink answers and all enrolled nodes are online."""
    there = _read(folder)
    from emdcfl.apps.deployment.report import lines, report

    found = report(there)
    answer(found, lines(found), as_json=as_json)
    raise typer.Exit(0 if found["ok"] else 1)


@federation.command()
def metrics(folder: Folder, port: Annotated[int, typer.Option(help="Port of 127.0.0.1.", min=0, max=65535)] = 9464) -> None:
    """Serve the numbers of 'status' to Prometheus, on this machine only, until stopped."""
    there = _read(folder)
    from emdcfl.apps.deployment.report import metrics_server

    with metrics_server(there, port) as server, contextlib.suppress(KeyboardInterrupt):
        typer.echo(f"http://127.0.0.1:{server.server_port}/metrics")
        server.serve_forever()


@federation.command()
def attach(folder: Folder) -> None:
    """Watch the current run. Ctrl-C does not stop it."""
    there = _read(folder)
    from emdcfl.apps.deployment.submit import follow

    job = _live(there)
    typer.echo(f"run {job.number} in {job.out}")
    try:
        follow(there, job.path, job.run, lambda event: show_event(event, None), link=job.link)
    except KeyboardInterrupt:
        typer.echo(f"run {job.number} goes on; stop it with: emdcfl federation stop {folder}")
    else:
        typer.echo(f"run {job.number} is finished")


@federation.command()
def stop(folder: Folder, as_json: AsJson = False) -> None:
    """Stop the current run. 'emdcfl run --resume' continues it after its last complete round."""
    there = _read(folder)
    from emdcfl.apps.deployment.submit import stop as stop_run

    job = _live(there)
    if not as_json:
        typer.echo(f"stopping run {job.number}")
    stop_run(there, job.path, job.run)
    told = f"stopped; continue it with: emdcfl run --federation {folder} --resume --out {job.out}"
    answer({"stopped": job.number, "out": str(job.out)}, [told], as_json=as_json)


def _live(there: Deployment) -> SubmittedRun:
    from emdcfl.apps.deployment.control import run_status
    from emdcfl.apps.deployment.submit import jobs, live_run

    if (job := live_run(there)) is not None:
        return job
    latest = next(jobs(there), None)
    if latest is None or latest.outcome is not None:
        raise ConfigError(f"no run is at work in this federation; start one with: emdcfl run --federation {there.path}")
    resume = f"continue it with: emdcfl run --federation {there.path} --resume --out {latest.out}"
    if run_status(there, latest.run) is None:
        up = f"start it (emdcfl federation up {there.path})"
        raise ConfigError(f"the SuperLink does not answer, and run {latest.number} does not go on without it; {up}, then {resume}")
    raise ConfigError(f"no run is at work in this federation, run {latest.number} ended without a result; {resume}")


@federation.command()
def down(folder: Folder, as_json: AsJson = False) -> None:
    """Stop everything that 'up' started."""
    there = _read(folder)
    from emdcfl.apps import deployment

    stopped = deployment.down(there)
    answer({"stopped": stopped}, [f"stopped {_listed(stopped)}" if stopped else "nothing was running"], as_json=as_json)


def _listed(processes: list[str]) -> str:
    from emdcfl.apps.deployment.processes import LINK

    nodes = [name for name in processes if name != LINK]
    return " and ".join([*([LINK] if LINK in processes else []), *([names(nodes)] if nodes else [])])


def runner_over(folder: Path | None, aside: Any = None) -> Callable[..., Result]:
    """Return a function like ``runner.run`` that submits the config to a federation and follows it; ``aside`` observes its baselines."""
    if folder is None:
        raise ConfigError("engine 'flower' needs a federation: add --federation DIR (make one with: emdcfl federation init DIR --nodes 4)")
    there = _read(folder)
    from emdcfl.apps import deployment
    from emdcfl.models import BUILDERS
    from emdcfl.runs.result import load
    from emdcfl.runs.store.identity import Baselines

    def run(config: Config, out: Path, *, resume: bool = False, observer: Any = None, baselines: Baselines = Baselines.NONE) -> Result:
        engine = replace(config.engine, name="flower", workers=1)
        watching = observer

        def watch(event: dict[str, Any]) -> None:
            nonlocal watching
            watching = aside if event["event"] == "baselines" else watching
            show_event(event, watching)

        beside: dict[str, Any] = {"baselines": baselines is not Baselines.NONE, "keep_baselines": baselines is Baselines.MODELS}
        deployment.submit(there, replace(config, engine=engine), out, resume=resume, **beside, watch=watch)
        own = config.model is not None and config.model.name not in BUILDERS  # what the user asked for is what may come back
        return load(out, trust_model=own)

    return run


def show_event(event: dict[str, Any], observer: Any) -> None:
    """Pass an event of the server's journal on to the log or to an observer."""
    kind = event["event"]
    if kind == "log":
        log.log(logging.getLevelName(event["level"]), "%s", event["text"])
    elif observer is None:
        if kind == "end":
            log.info("round %d of %d is complete", event["round"], event["total"])
    elif kind == "begin":
        observer.begin(event["round"], event["total"], tuple(event["participants"]))
    elif kind == "reply":
        accuracy = {} if event["accuracy"] is None else {"test": event["accuracy"]}
        observer.reply(event["task"], event["client"], {"loss": event["loss"], "accuracy": accuracy})
    elif kind == "end":
        import torch  # not for those who only read the log

        from emdcfl.methods.base import Serving

        clusters = None if event["clusters"] is None else torch.arange(event["clusters"])
        observer.end(event["round"], event["total"], event["rows"], Serving(torch.zeros(0, 0), torch.zeros(0, 0), clusters=clusters))
