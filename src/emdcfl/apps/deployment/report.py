"""What a federation is doing, as one object: for people, for programs (``status --json``) and for Prometheus."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from cryptography import x509

from emdcfl.apps.deployment import control
from emdcfl.apps.deployment.folder import Deployment
from emdcfl.apps.deployment.processes import LINK, process_ids, seconds_running
from emdcfl.apps.deployment.submit import STOPPED, SubmittedRun, jobs
from emdcfl.apps.supernode import HOST
from emdcfl.core.errors import ConfigError

ACCEPTED = 300.0
"""Seconds the nodes may take to be accepted: after a hard kill and a reboot the SuperLink refuses a key for about a minute."""

STATES = ("at work", "finished", "failed", "stopped", "unknown")
"""What a run may be; unknown while the SuperLink does not answer."""

ENDED, SILENT = "ended by itself", "not answering"


def report(deployment: Deployment) -> dict[str, Any]:
    """Return the state of the SuperLink, of every node and of the latest run.

    ``ok`` is whether the SuperLink answers and all enrolled nodes are online.
    """
    pids = process_ids(deployment)
    link = _process(pids, LINK)
    nodes: dict[str, dict[str, Any]] = {
        n: {"process": _process(pids, n), "online": False, "id": None, "since": None} for n in deployment.nodes
    }
    try:
        for node in control.enrolled(deployment):
            here = nodes.setdefault(node.name, {"process": "elsewhere"})
            online = node.online and here["process"] != ENDED and not _of_predecessor(deployment, node)
            here.update(online=online, id=str(node.id), since=(node.since or None) if online == node.online else None)
        answers = True
    except control.ControlError:
        answers = False
    latest = next(jobs(deployment), None)
    end = x509.load_pem_x509_certificate((deployment.path / "certificates" / "server.pem").read_bytes()).not_valid_after_utc
    return {
        "ok": answers and bool(nodes) and all(node["online"] for node in nodes.values()),
        "superlink": {
            "state": "running" if answers else SILENT if link == "running" else link,
            "address": deployment.address,
            "certificate_until": end.isoformat(),
            "database_bytes": sum(path.stat().st_size for path in deployment.operator.glob("link.db*")),
        },
        "nodes": nodes,
        "run": None if latest is None else _run(deployment, latest, answers=answers),
        "logs": str(deployment.path / "logs"),
    }


def wait_accepted(deployment: Deployment) -> dict[str, str]:
    """Wait until the SuperLink has accepted all nodes of this machine; returns those that it has not, and why."""
    end = time.monotonic() + ACCEPTED
    while True:
        found = report(deployment)
        missing = {name: str(found["nodes"][name]["process"]) for name in deployment.nodes if not found["nodes"][name]["online"]}
        if "running" not in missing.values() or time.monotonic() > end:
            late = f"runs, and is not accepted after {ACCEPTED:.0f} s"
            return {name: f"{late if text == 'running' else text}; see {found['logs']}/{name}.log" for name, text in missing.items()}
        time.sleep(0.5)


def _process(pids: dict[str, int | None], name: str) -> str:
    return "stopped" if name not in pids else ENDED if pids[name] is None else "running"


def _of_predecessor(deployment: Deployment, node: control.Enrolled) -> bool:
    """Whether a node connected before its process here began: the one before it was killed, which the SuperLink notices after a minute."""
    running = seconds_running(deployment, node.name)
    return running is not None and bool(node.since) and time.time() - datetime.datetime.fromisoformat(node.since).timestamp() > running


def _run(deployment: Deployment, job: SubmittedRun, *, answers: bool) -> dict[str, Any]:
    outcome, complete, total, warnings, last, compared = job.outcome, 0, 0, 0, None, False
    journal = job.path / "progress.jsonl"
    for line in journal.read_text(encoding="utf-8").splitlines() if journal.exists() else ():
        try:
            event = json.loads(line)
        except ValueError:  # being written
            continue
        last, compared = event.get("time"), compared or event["event"] == "baselines"
        if event["event"] == "baselines":  # the run itself is complete, and may have been when it was resumed
            total = complete = event.get("rounds", total)
        elif not compared and "total" in event:  # rounds of baselines are not the run's
            total, complete = event["total"], event["round"] - (event["event"] == "begin")
        warnings += event["event"] == "log" and event["level"] == "WARNING"
    ended = "stopped" if (job.path / STOPPED).exists() else "failed"
    state = ended
    if outcome is not None and outcome["ok"]:
        state, total, complete = "finished", outcome["rounds"], outcome["rounds"]
    if outcome is None:
        said = control.run_status(deployment, job.run) if answers else None
        state = "unknown" if said is None else ended if said.startswith("finished") else "at work"
    error = None if outcome is None else outcome.get("error")
    about = {"number": job.number, "out": str(job.out), "state": state, "round": complete, "rounds": total}
    return {**about, "warnings": warnings, "last": last, "error": error}


def lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield a report as lines for people."""
    link, nodes, run = found["superlink"], found["nodes"], found["run"]
    online = sum(bool(node["online"]) for node in nodes.values())
    yield f"{LINK:<20} {link['state']} at {link['address']}, {online} of {len(nodes)} nodes online" + _log(found, LINK, link["state"])
    for name, node in sorted(nodes.items()):
        since = f" since {node['since'][:19]}Z" if node["since"] else ""
        where = "" if node["process"] == "elsewhere" else f"{node['process']}, "
        yield f"{name:<20} {where}{'online' if node['online'] else 'offline'}{since}" + _log(found, name, node["process"])
    if run is not None:
        rounds = f"{run['round']} of {run['rounds']} rounds complete" if run["rounds"] else "before round 1"
        yield f"{'run ' + str(run['number']):<20} {run['state']}, {rounds}, in {run['out']}"
        if run["error"] and run["state"] == "failed":
            yield f"{'':<20} {run['error']}"


def _log(found: dict[str, Any], name: str, state: str) -> str:
    return f"; see {found['logs']}/{name}.log" if state in (ENDED, SILENT) else ""


def metrics(found: dict[str, Any]) -> str:
    """Return a report as text for Prometheus."""
    link, nodes, run = found["superlink"], found["nodes"], found["run"] or {}
    left = datetime.datetime.fromisoformat(link["certificate_until"]) - datetime.datetime.now(datetime.UTC)
    online = {f'{{node="{name}"}}': int(node["online"]) for name, node in sorted(nodes.items())}
    gauges: list[tuple[str, str, Any]] = [
        ("emdcfl_superlink_up", "1 if the SuperLink answers", int(link["state"] == "running")),
        ("emdcfl_nodes_enrolled", "nodes that may connect", sum(node["id"] is not None for node in nodes.values())),
        ("emdcfl_node_online", "1 if the node is connected", online),
        ("emdcfl_run_active", "1 while the latest run is at work", int(run.get("state") == "at work")),
        ("emdcfl_run_state", "1 for the state of the latest run", {f'{{state="{s}"}}': int(run.get("state") == s) for s in STATES}),
        ("emdcfl_run_round", "rounds of the latest run that are complete", run.get("round", 0)),
        ("emdcfl_run_rounds", "rounds it will have", run.get("rounds", 0)),
        ("emdcfl_run_warnings", "warnings of the latest run so far", run.get("warnings", 0)),
        ("emdcfl_certificate_seconds", "seconds until the certificate of the SuperLink ends", int(left.total_seconds())),
        ("emdcfl_database_bytes", "size of the database of the SuperLink, its journal included", link["database_bytes"]),
    ]
    text = []
    for name, help_, value in gauges:
        text += [f"# HELP {name} {help_}", f"# TYPE {name} gauge"]
        text += [f"{name}{labels} {v}" for labels, v in value.items()] if isinstance(value, dict) else [f"{name} {value}"]
    return "\n".join(text) + "\n"


def metrics_server(deployment: Deployment, port: int) -> ThreadingHTTPServer:
    """Return a server of ``/metrics`` on 127.0.0.1; port 0 takes a free one."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.path == "/metrics"
            body = metrics(report(deployment)).encode() if known else b"try /metrics\n"
            self.send_response(200 if known else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing of every scrape."""

    try:
        return ThreadingHTTPServer((HOST, port), Handler)
    except OSError as error:
        raise ConfigError(f"port {port} of {HOST} cannot be used ({error.strerror}); choose another with --port") from error
