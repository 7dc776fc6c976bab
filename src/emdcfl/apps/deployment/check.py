"""``emdcfl federation check``: try what an outsider, a foreign node and a stolen token could do to a running federation.

Nothing is harmed if an attack succeeds: the foreign bundle only says that it ran, and a foreign node that was registered is removed again.
"""

from __future__ import annotations

import base64
import datetime
import ipaddress
import json
import socket
import ssl
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from emdcfl.apps.deployment import control
from emdcfl.apps.deployment.control import ControlError
from emdcfl.apps.deployment.folder import Deployment

if TYPE_CHECKING:
    from flwr.supercore.control import ControlHttpClient

CLOSED = 0
REFUSALS = (CLOSED, 401, 403, 412)
"""A closed connection, and what the gate (403) and Flower answer to those who may not."""

PATIENCE = 120.0
"""Seconds the nodes may take to answer the foreign bundle."""


@dataclass(frozen=True)
class Attack:
    """What was tried; ``held`` is whether the federation withstood it, ``None`` if it could not be tried."""

    name: str
    held: bool | None
    said: str


def attacks(deployment: Deployment) -> Iterator[Attack]:
    """Try every attack, one after the other."""
    wrong = "wrong-token-" + "0" * 32
    for who, token in (("the CA certificate alone", ""), ("a wrong token", wrong)):
        for name, call in _orders().items():
            yield _refused(f"{name} with {who}", lambda call=call, token=token: control.ask(deployment, call, token=token))  # type: ignore[misc]
    yield _refused("register a node after enrolment, with the operator's token", lambda: _register(deployment))
    yield _refused("join as a node with a key that was never registered", lambda: _foreign_node(deployment, "register-node"))
    yield _refused("activate a node with a key that was never registered", lambda: _foreign_node(deployment, "activate-node"))
    yield _refused("speak for a registered node without its private key", lambda: _impersonate(deployment))
    yield _refused("read the SuperLink's pages for developers", lambda: _send(deployment, "/docs", method="GET"))
    if not _is_loopback(deployment.host):  # from the SuperLink's own machine it is served
        yield _refused("take the place of the server program", lambda: _send(deployment, "/v1/runtime/acquire-task"))
    yield _refused("talk to the SuperLink without TLS", lambda: _send(deployment, "/v1/fleet/get-run", scheme="http"))
    yield _foreign_bundle(deployment)


def _is_loopback(host: str) -> bool:
    try:
        return all(ipaddress.ip_address(found[4][0]).is_loopback for found in socket.getaddrinfo(host, None))
    except (OSError, ValueError):
        return False


def _refused(name: str, attempt: Callable[[], Any]) -> Attack:
    """An attempt that must fail because the SuperLink refuses it; one that fails for another reason proves nothing."""
    try:
        attempt()
    except ControlError as error:
        return Attack(name, True if error.status in REFUSALS else None, str(error))
    return Attack(name, False, "it was answered")


def _orders() -> dict[str, Callable[[ControlHttpClient], Any]]:
    """What a stranger would ask of the control interface."""
    from flwr.proto.control_pb2 import (
        ListNodesRequest,
        ListRunsRequest,
        RegisterNodeRequest,
        StartRunRequest,
        StopRunRequest,
        UnregisterNodeRequest,
    )
    from flwr.proto.fab_pb2 import Fab

    return {
        "list the nodes": lambda client: client.ListNodes(ListNodesRequest()),
        "list the runs": lambda client: client.ListRuns(ListRunsRequest()),
        "submit a bundle of one's own": lambda client: client.StartRun(StartRunRequest(fab=Fab(content=_bundle()))),
        "register a node": lambda client: client.RegisterNode(RegisterNodeRequest(public_key=_new_key()[1])),
        "remove a node": lambda client: client.UnregisterNode(UnregisterNodeRequest(node_id=1)),
        "stop a run": lambda client: client.StopRun(StopRunRequest(run_id=1)),
    }


def _new_key() -> tuple[ec.EllipticCurvePrivateKey, bytes]:
    key = ec.generate_private_key(ec.SECP384R1())
    return key, key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def _register(deployment: Deployment) -> None:
    from flwr.proto.control_pb2 import RegisterNodeRequest, UnregisterNodeRequest

    made = control.ask(deployment, lambda client: client.RegisterNode(RegisterNodeRequest(public_key=_new_key()[1])))
    control.ask(deployment, lambda client: client.UnregisterNode(UnregisterNodeRequest(node_id=made.node_id)))


def _send(
    deployment: Deployment,
    path: str,
    body: bytes = b"",
    signature: dict[str, str] | None = None,
    *,
    method: str = "POST",
    scheme: str = "https",
) -> None:
    """Send a request; an answer other than success is a ``ControlError``."""
    import httpx
    from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE

    address = f"{scheme}://{deployment.address}{path}"
    headers = {"content-type": PROTOBUF_MEDIA_TYPE, "accept": PROTOBUF_MEDIA_TYPE, **(signature or {})}
    with control.http_errors(deployment), httpx.Client(verify=ssl.create_default_context(cafile=deployment.authority)) as client:
        try:
            client.request(method, address, content=body, headers=headers).raise_for_status()
        except httpx.RemoteProtocolError as error:
            raise ControlError(f"the SuperLink closed the connection ({error})", CLOSED) from error


def _signed(key: ec.EllipticCurvePrivateKey, public: bytes) -> dict[str, str]:
    """A request's signature as a SuperNode makes it: of the time."""
    from flwr.common.constant import TIMESTAMP_HEADER
    from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER

    now = datetime.datetime.now(datetime.UTC).isoformat()
    signature = key.sign(now.encode("ascii"), ec.ECDSA(hashes.SHA256()))
    encoded = {FLEET_HTTP_PUBLIC_KEY_HEADER: public, FLEET_HTTP_SIGNATURE_HEADER: signature}
    return {TIMESTAMP_HEADER: now, **{name: base64.b64encode(value).decode() for name, value in encoded.items()}}


def _foreign_node(deployment: Deployment, action: str) -> None:
    from flwr.proto.fleet_pb2 import ActivateNodeRequest, RegisterNodeFleetRequest

    key, public = _new_key()
    register = RegisterNodeFleetRequest(public_key=public)
    request = register if action == "register-node" else ActivateNodeRequest(public_key=public, heartbeat_interval=30)
    _send(deployment, f"/v1/fleet/{action}", request.SerializeToString(), _signed(key, public))


def _impersonate(deployment: Deployment) -> None:
    """Send a heartbeat for the first registered node, signed with another key."""
    from flwr.proto.control_pb2 import ListNodesRequest
    from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
    from flwr.proto.node_pb2 import Node

    known = control.ask(deployment, lambda client: client.ListNodes(ListNodesRequest())).nodes_info
    key, public = _new_key()
    victim = Node(node_id=known[0].node_id if known else 1)
    beat = SendNodeHeartbeatRequest(node=victim, heartbeat_interval=30)
    claimed = known[0].public_key if known else public
    _send(deployment, "/v1/fleet/send-node-heartbeat", beat.SerializeToString(), _signed(key, claimed))


_FOREIGN = """
import json
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

client, server = ClientApp(), ServerApp()

@client.query("intrude")
def intrude(message, context):
    return Message(RecordDict({"found": ConfigRecord({"config": str(sorted(context.node_config))})}), reply_to=message)

@server.main()
def main(grid, context):
    asked = [Message(content=RecordDict(), dst_node_id=node, message_type="query.intrude") for node in grid.get_node_ids()]
    replies = grid.send_and_receive(asked, timeout=float(context.run_config["patience"]))
    ran = [not reply.has_error() for reply in replies]
    path = Path(context.run_config["answer"])
    path.with_suffix(".tmp").write_text(json.dumps({"asked": len(asked), "answered": len(ran), "ran": sum(ran)}))
    path.with_suffix(".tmp").replace(path)
"""

_PROJECT = """\
[project]
name = "foreign"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "stranger"
[tool.flwr.app.components]
serverapp = "foreign:server"
clientapp = "foreign:client"
[tool.flwr.app.config]
answer = ""
patience = 60.0
"""


def _bundle() -> bytes:
    """A bundle with code of its own, as a stranger would submit it."""
    from flwr.cli.build import build_fab_from_files

    made, _ = build_fab_from_files({"pyproject.toml": _PROJECT.encode(), "foreign.py": _FOREIGN.encode()})
    return made


def _foreign_bundle(deployment: Deployment) -> Attack:
    """Submit a bundle without the publisher's signature, with the operator's token: a stolen token must not be enough."""
    from flwr.common.serde import user_config_to_proto
    from flwr.proto.control_pb2 import StartRunRequest
    from flwr.proto.fab_pb2 import Fab

    name = "run a foreign bundle on the nodes, with the operator's token"
    try:
        online = any(node.online for node in control.enrolled(deployment))
    except ControlError as error:
        return Attack(name, None, str(error))
    if not online:
        return Attack(name, None, "no node is online; start the nodes and try again")
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        config = user_config_to_proto({"answer": str(answer), "patience": PATIENCE})
        request = StartRunRequest(fab=Fab(content=_bundle()), override_config=config)
        try:
            run = int(control.ask(deployment, lambda client: client.StartRun(request)).run_id)
        except ControlError as error:
            return Attack(name, True, str(error))
        end = time.monotonic() + 2 * PATIENCE
        while not answer.exists() and time.monotonic() < end:
            time.sleep(0.5)
        if not answer.exists():
            control.stop_run(deployment, run)
            return Attack(name, None, "the foreign server program did not end; see the SuperLink's log")
        found = json.loads(answer.read_text(encoding="utf-8"))
    said = f"{found['ran']} of {found['asked']} nodes ran it, {found['answered'] - found['ran']} refused"
    refused_by_all = found["ran"] == 0 and found["answered"] == found["asked"] > 0
    return Attack(name, False if found["ran"] else True if refused_by_all else None, said)
