"""A node that stays warm: ``emdcfl node serve HOME``. It loads torch once and answers each message in a fork of itself.

Flower's own SuperNode starts a new Python for every message, which imports torch: seconds of processor time. Here three kinds of process
share one copy of the libraries::

    launcher     imports everything, then waits; no data, no threads, no network but the SuperNode's loopback port
    SuperNode    Flower's own: talks to the SuperLink, checks the bundle's signature (``trusted.yaml``), keeps messages in memory
    answer       one per message, forked from the launcher: opens the node's folder, asks the policy, runs the task, ends

The launcher takes tasks from the SuperNode with a secret drawn at each start, so no other program of this machine can take them.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import logging
import math
import os
import random
import secrets
import select
import shutil
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import IO, TYPE_CHECKING, Any

from emdcfl.apps.admission import explain_refusals, take_place
from emdcfl.core.errors import ConfigError

if TYPE_CHECKING:
    from flwr.supercore.runtime import RuntimeHttpClient

log = logging.getLogger("emdcfl")

HOST = "127.0.0.1"
PORTS = range(20000, 30000)
FILES = {
    "ca.crt": "the operator's",
    "trusted.yaml": "the operator's: whose bundles this node runs",
    "auth.key": "made by emdcfl node init",
}
"""What the node's folder must hold before it can connect."""

BUSY, IDLE, RECENT = 0.25, 3.0, 120.0
"""Seconds between questions to the SuperLink: ``BUSY`` for ``RECENT`` seconds after a message, ``IDLE`` otherwise."""

PLACE = "place"
"""File in the node's folder ``flwr``, locked while it is served: Flower's number of the node, and the boot id of the machine."""

BUNDLES = "apps"
"""Folder there with the bundles that Flower has unpacked; made anew at each start."""

HOUR = 3600.0
"""Seconds between looks for runs that are over."""

WATCH = 1.0
"""Seconds after which the launcher looks around even if nothing woke it."""

TRIES = 10
"""How often it then asks the SuperNode for the message it was told of; a refused bundle leaves none to answer."""

GRACE = 15.0
"""Seconds that processes may take to end."""

QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}


def serve(home: Path, *, name: str, superlink: str) -> int:
    """Serve a node until it is told to stop (SIGTERM, SIGINT) or its SuperNode ends; returns the exit status."""
    for file, whose in FILES.items():
        if not (home / file).exists():
            raise ConfigError(f"{home / file} is missing ({whose}); see docs/guide/deploy.md")
    try:
        ssl.create_default_context(cafile=home / "ca.crt")
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"{home / 'ca.crt'}: expected the operator's certificate, got none that can be read ({error}); copy it again"
        ) from error
    os.environ.update(QUIET, FLWR_HOME=str(home / "flwr"))  # before Flower is imported
    place = _lock(home)  # forks hold it too
    shutil.rmtree(home / "flwr" / BUNDLES, ignore_errors=True)  # a kill may have left half of one
    _import_everything()
    log_with_times()
    secret, port = secrets.token_bytes(32), free_port()  # after the imports: in their seconds another program could take the port
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    launcher = os.getpid()
    supernode = _fork(lambda: _run_supernode(arguments(home, name, superlink, port), secret, waker, launcher, place))
    os.close(waker)
    return _Launcher(home, f"{HOST}:{port}", secret, supernode, wake).loop()


def arguments(home: Path, name: str, superlink: str, port: int) -> list[str]:
    """Flower's options for a node's SuperNode."""
    identity = ["--root-certificates", f"{home}/ca.crt", "--auth-supernode-private-key", f"{home}/auth.key"]
    identity += ["--trusted-entities", f"{home}/trusted.yaml"]
    where = ["--superlink", superlink, "--host", HOST, "--port", str(port), "--isolation", "process"]
    return [*identity, *where, "--node-config", f'name="{name}" home="{home}"']


def free_port() -> int:
    """A port of this machine that nobody listens on now, and that the kernel gives to no outgoing connection."""
    for port in random.SystemRandom().sample(PORTS, 100):
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind((HOST, port))
            return port
    raise ConfigError(f"no port between {PORTS[0]} and {PORTS[-1]} of {HOST} is free")


def _lock(home: Path) -> IO[str]:
    """Keep other processes from serving the same node."""
    (home / "flwr").mkdir(mode=0o700, exist_ok=True)
    place = (home / "flwr" / PLACE).open("a+", encoding="ascii")
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"{home}: another process serves this node; stop it first") from None
    return place


def _import_everything() -> None:
    """Import what an answer needs, and nothing that starts a thread; forks then share it."""
    for name in (
        "flwr.supernode.cli.flower_supernode",
        "flwr.supernode.main",
        "flwr.supernode.runtime.run_clientapp",
        "emdcfl.apps.client",
    ):
        import_module(name)
    install_whole(import_module("flwr.supernode.runtime.run_clientapp"))
    gc.collect()
    gc.freeze()  # the collector would touch, and so copy, what forks share


def install_whole(program: Any) -> None:
    """Let a module of Flower's leave no half of a bundle where the disk is full: Flower would take it for the whole from then on."""
    from flwr.supercore.utils import get_flwr_home

    install = program.install_from_fab

    def install_from_fab(*given: Any, **options: Any) -> Path:
        try:
            made: Path = install(*given, **options)
        except OSError:
            shutil.rmtree(get_flwr_home() / BUNDLES, ignore_errors=True)
            raise
        return made

    program.install_from_fab = install_from_fab


def log_with_times() -> None:
    """Write every line of the log, Flower's too, with its time (UTC) and level."""
    handler = logging.StreamHandler()
    handler.setLevel(logging.INFO)
    handler.setFormatter(_Line())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    for logger in ("emdcfl", "flwr", "uvicorn", "uvicorn.error", "uvicorn.access"):
        logging.getLogger(logger).handlers.clear()
        logging.getLogger(logger).propagate = True
    for logger in ("alembic", "httpx"):
        logging.getLogger(logger).setLevel(logging.WARNING)


class _Line(logging.Formatter):
    """``2026-11-17T16:41:20.123Z INFO text``, or with ``EMDCFL_LOG=json`` an object with ``time``, ``level`` and ``text``."""

    def format(self, record: logging.LogRecord) -> str:
        moment = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"
        text = super().format(record)
        if os.environ.get("EMDCFL_LOG") == "json":
            return json.dumps({"time": moment, "level": record.levelname, "text": text})
        return f"{moment} {record.levelname} {text}"


def _fork(run: Callable[[], None]) -> int:
    """Run a function in a child process, which ends with it; returns its id."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        run()
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        log.exception("the process failed")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run_supernode(arguments: list[str], secret: bytes, waker: int, launcher: int, place: IO[str]) -> None:
    """Be Flower's SuperNode, with shorter pauses and a launcher that is told of each message."""
    from flwr.supercore.app_utils import start_parent_process_monitor

    loop: Any = import_module("flwr.supernode.start_client_internal")
    program: Any = import_module("flwr.supernode.cli.flower_supernode")

    for number in (signal.SIGTERM, signal.SIGINT):  # Flower handles the first; what it restores for the second must not end it half-way
        signal.signal(number, signal.SIG_IGN)
    start_parent_process_monitor(launcher)
    client = import_module("flwr.supernode.fleet_http_client").FleetHttpClient
    take_place(client, place)
    explain_refusals(client, arguments[arguments.index("--superlink") + 1])
    parse, push = program._parse_supernode_lifespan_config, loop._push_messages
    pauses = _Pauses()

    def push_messages(**given: Any) -> None:
        pauses.heard()
        with contextlib.suppress(BlockingIOError):
            os.write(waker, b"m")
        push(**given)
        pauses.heard()

    program._parse_supernode_lifespan_config = lambda: replace(parse(), superexec_auth_secret=secret)
    loop._push_messages = push_messages
    loop.time = SimpleNamespace(sleep=pauses.sleep)
    import_module("uvicorn.config").LOGGING_CONFIG["loggers"].clear()  # its lines have no time
    sys.argv = ["flower-supernode", *arguments]
    program.flower_supernode()


class _Pauses:
    """Shortens the SuperNode's pauses: three seconds between questions to the SuperLink, half a second between looks for the answer."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def heard(self) -> None:
        self._last = time.monotonic()

    def sleep(self, seconds: float) -> None:
        if seconds < 1:
            time.sleep(0.05)
        else:
            time.sleep(BUSY if time.monotonic() - self._last < RECENT else IDLE)


def _terminate(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)


class _Launcher:
    """Takes tasks from the SuperNode and answers each in a fork."""

    def __init__(self, home: Path, address: str, secret: bytes, supernode: int, wake: int) -> None:
        self.home, self.address, self.supernode, self.wake = home, address, supernode, wake
        self._secret, self._looked = secret, -math.inf
        self._answers: set[int] = set()
        self._stopping = False
        self._connection: RuntimeHttpClient | None = None

    def loop(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        tries = 0
        while not self._stopping:
            self._forget_runs()
            if (status := self._ended(self.supernode)) is not None:
                self._end_answers()
                return status if 0 < status < 128 else 1  # nobody told it to end, whatever it says
            self._answers = {pid for pid in self._answers if self._ended(pid) is None}
            tries = TRIES if self._wait() else tries - 1
            if tries > 0 and (answer := self._take()) is not None:
                # Flower keeps the task of a message it dropped because its run was stopped: it comes first, and waits for ever.
                while (later := self._take()) is not None:
                    _terminate(answer)
                    answer = later
                tries = 0
        return self._end()

    def _stop(self, *_: object) -> None:
        self._stopping = True

    def _forget_runs(self) -> None:
        """Delete the keys of runs that are over: after the last run of all no request comes that would do it."""
        if time.monotonic() - self._looked < HOUR:
            return
        from emdcfl.engines.flower.node.home import read_config
        from emdcfl.engines.flower.node.releases import expire

        self._looked = time.monotonic()
        try:
            expire(self.home / "state", read_config(self.home / "node.toml").policy)
        except (OSError, ConfigError) as error:
            log.warning("the keys of runs that are over could not be deleted: %s", error)

    def _wait(self) -> bool:
        """Wait for the SuperNode's word that there is a message."""
        with contextlib.suppress(InterruptedError):
            if select.select([self.wake], [], [], WATCH)[0]:
                return bool(os.read(self.wake, 1))
        return False

    def _client(self) -> RuntimeHttpClient:
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
        from flwr.supercore.runtime import RuntimeHttpClient

        signer = SuperExecAuthHttpInterceptor(master_secret=self._secret, protected_methods=frozenset({"/flwr.proto.Runtime/AcquireTask"}))
        return RuntimeHttpClient.from_server_address(
            server_address=self.address,
            insecure=True,
            root_certificates=None,
            interceptors=[RuntimeVersionHttpInterceptor(component_name="SuperExec"), signer],
        )

    def _take(self) -> int | None:
        """Take a task, if there is one, and answer it in a fork; returns its process id."""
        import httpx
        from flwr.proto.runtime_pb2 import AcquireTaskRequest
        from flwr.supercore.constant import TaskType

        try:
            if self._connection is None:
                self._connection = self._client()
            answer = self._connection.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
        except httpx.HTTPError as error:
            log.warning("the SuperNode did not hand out a task (%s); trying again", type(error).__name__)
            return None
        if not answer.HasField("task") or not answer.token:
            return None
        launcher = os.getpid()
        child = _fork(lambda: self._answer(answer.token, launcher))
        self._answers.add(child)
        return child

    def _answer(self, token: str, launcher: int) -> None:
        from flwr.supernode.runtime.run_clientapp import run_clientapp

        os.close(self.wake)
        run_clientapp(self.address, token, insecure=True, parent_pid=launcher)

    @staticmethod
    def _ended(pid: int) -> int | None:
        """Exit status of a child that has ended, else ``None``."""
        try:
            found, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return 1
        return os.waitstatus_to_exitcode(status) if found else None

    def _end_answers(self) -> None:
        for pid in self._answers:
            _terminate(pid)

    def _end(self) -> int:
        """Stop the SuperNode, which deactivates itself at the SuperLink, and what is being answered."""
        self._end_answers()
        _terminate(self.supernode)
        end = time.monotonic() + GRACE
        while (status := self._ended(self.supernode)) is None and time.monotonic() < end:
            time.sleep(0.05)
        if status is None:
            os.kill(self.supernode, signal.SIGKILL)
        return 0
