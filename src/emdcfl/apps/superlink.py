"""Flower's SuperLink, closed: ``python -m emdcfl.apps.superlink --operator FOLDER [options of flower-superlink]``.

Flower 1.41 serves three interfaces on one port and authenticates nodes only. Whoever reaches the port could submit code to all nodes
and register nodes of their own (control), or take the place of the server program (runtime). This program starts the same SuperLink with
a check in front of every request:

===================  =======================================================================================================
``/v1/fleet/…``      as Flower does it: only registered nodes, by their signature
``/v1/control/…``    only with the operator's token; ``register-node`` also needs the file ``enrolment-open``
``/v1/runtime/…``    only from this machine and through no proxy: it is for the server program that the SuperLink starts
everything else      refused
===================  =======================================================================================================

The operator's folder holds ``operator.token`` (mode 600), ``app.fab`` and ``app.json``: the signed bundle that nodes accept, and
its signature. Flower's own ``flwr run`` submits a bundle without a signature, which nodes with ``--trusted-entities`` refuse.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import ipaddress
import json
import logging
import os
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from emdcfl.core.errors import ConfigError

log = logging.getLogger("emdcfl")

APP = "@emdcfl/emdcfl-app"
"""Publisher and name of the bundle, as in its ``pyproject.toml``."""

TOKEN, BUNDLE, SIGNATURE, ENROLMENT = "operator.token", "app.fab", "app.json", "enrolment-open"
UNCHECKED = ("FLWR_INTERNAL_GRPC_CONTROL_API", "FLWR_INTERNAL_GRPC_FLEET_API", "FORWARDED_ALLOW_IPS")
"""Variables that make Flower serve the same interfaces on further ports without this check, or believe who a request says it is from."""

FORWARDED = (b"forwarded", b"via", b"x-forwarded-for", b"x-real-ip")
"""Headers that a proxy adds: what carries one does not come from this machine, whatever its address is."""

START = 300.0
"""Seconds that the server program of a run may take to start."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Gate:
    """Refuses requests before Flower reads them (an ASGI middleware); ``folder`` is the operator's."""

    def __init__(self, app: App, folder: Path) -> None:
        self.app, self.folder = app, folder
        self._token = hashlib.sha256(read_token(folder).encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reason = None if scope["type"] == "lifespan" else self.refusal(scope)
        if reason is None:
            await self.app(scope, receive, send)
            return
        log.warning("refused %s from %s: %s", str(scope.get("path"))[:100], (scope.get("client") or ["?"])[0], reason)
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        await send({"type": "http.response.start", "status": 403, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": reason.encode()})

    def refusal(self, scope: Scope) -> str | None:
        """Say why a request is refused; ``None`` if it may pass."""
        path = scope["path"]
        if scope["type"] == "http" and path.startswith("/v1/fleet/"):
            return None
        if scope["type"] == "http" and path.startswith("/v1/control/"):
            if not self._is_operator(scope):
                return "this SuperLink takes orders from its operator only: send the operator's token"
            if path.rstrip("/").endswith("/register-node") and not (self.folder / ENROLMENT).exists():
                return "enrolment is closed: no further node is registered; its operator runs emdcfl federation enrol"
            return None
        if scope["type"] == "http" and path.startswith("/v1/runtime/") and _is_local(scope):
            return None
        return "not served here"

    def _is_operator(self, scope: Scope) -> bool:
        sent = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        given = sent[0] if len(sent) == 1 else b""
        right = hmac.compare_digest(hashlib.sha256(given.removeprefix(b"Bearer ")).digest(), self._token)
        return right and given.startswith(b"Bearer ")


def _is_local(scope: Scope) -> bool:
    if any(name.lower() in FORWARDED for name, _ in scope["headers"]):
        return False
    try:
        return ipaddress.ip_address(scope["client"][0]).is_loopback
    except (TypeError, ValueError, IndexError):
        return False


def read_token(folder: Path) -> str:
    path = folder / TOKEN
    try:
        if path.stat().st_mode & 0o077:
            raise ConfigError(f"{path}: the token must be readable by its owner alone; run chmod 600 on it")
        token = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot read the operator's token ({error}); emdcfl federation init writes one") from error
    if len(token) < 32:
        raise ConfigError(f"{path}: expected a token of at least 32 characters, got {len(token)}")
    return token


def store_bundle(database: str, folder: Path) -> str:
    """Put the signed bundle into the SuperLink's database, from which runs are started; returns its hash."""
    from flwr.common.constant import NOOP_FLWR_AID
    from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
    from flwr.supercore.fab import Fab
    from flwr.superlink.config_loader import get_federation_manager, get_objectstore_linkstate_factories

    content, signed = (folder / BUNDLE).read_bytes(), json.loads((folder / SIGNATURE).read_text(encoding="utf-8"))
    found = hashlib.sha256(content).hexdigest()
    _, states = get_objectstore_linkstate_factories(database, get_federation_manager())
    states.state().store_app(Fab(found, content, signed), NOOP_FEDERATION_ID, APP, TaskType.SERVER_APP, NOOP_FLWR_AID)
    return found


def allow_slow_starts() -> None:
    """Give the server program of a run ``START`` seconds to report; the time after which a silent one counts as dead stays as it is.

    Flower gives it half a minute. On a busy machine it is started again and again, and the run never begins.
    """
    from flwr.supercore.corestate import sql_corestate

    state: Any = sql_corestate
    dead = state.HEARTBEAT_PATIENCE * state.HEARTBEAT_DEFAULT_INTERVAL
    state.HEARTBEAT_DEFAULT_INTERVAL, state.HEARTBEAT_PATIENCE = START, dead / START


def main() -> None:
    parser = argparse.ArgumentParser(description="Flower's SuperLink, closed to everybody but registered nodes and the operator")
    parser.add_argument("--operator", type=Path, required=True, help="folder with operator.token, app.fab and app.json")
    parser.add_argument("--database", required=True, help="file of the SuperLink's state")
    given, rest = parser.parse_known_args()
    for name in UNCHECKED:
        os.environ.pop(name, None)
    log.addHandler(logging.StreamHandler())
    from flwr.superlink import extensions
    from flwr.superlink.cli.flower_superlink import flower_superlink
    from starlette.middleware import Middleware

    gate: Any = Middleware(Gate, folder=given.operator)
    read_token(given.operator)
    allow_slow_starts()
    store_bundle(given.database, given.operator)
    extensions.get_middleware = lambda: (gate,)  # Flower's place for further checks, outermost first
    sys.argv = ["flower-superlink", "--database", given.database, *rest]
    flower_superlink()


if __name__ == "__main__":
    main()
