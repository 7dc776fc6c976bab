"""The SuperLink's control interface, with the operator's token: register nodes, start, follow and stop runs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

from emdcfl.apps.deployment.folder import Deployment
from emdcfl.apps.superlink import APP, BUNDLE, ENROLMENT, read_token
from emdcfl.core.errors import ConfigError, EmdcflError, nearest

if TYPE_CHECKING:
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext
    from httpx import Response

T = TypeVar("T")


class ControlError(EmdcflError):
    """The SuperLink does not answer (``status`` is ``None``), or refuses with an HTTP status."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


class _Bearer:
    def __init__(self, token: str) -> None:
        self._token = token

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> Response:
        context.request.headers["Authorization"] = f"Bearer {self._token}"
        return call_next(context)


def ask(deployment: Deployment, call: Callable[[ControlHttpClient], T], *, token: str | None = None) -> T:
    """Make one call, with an empty ``token`` as anybody who has the CA certificate could; an error is a ``ControlError`` of one line."""
    from flwr.supercore.control import ControlHttpClient

    with http_errors(deployment):
        given = read_token(deployment.operator) if token is None else token
        signer = [_Bearer(given)] if given else []
        with closing(ControlHttpClient.from_server_address(deployment.address, False, deployment.authority.read_bytes(), signer)) as client:
            return call(client)


@contextmanager
def http_errors(deployment: Deployment) -> Iterator[None]:
    """Turn errors of HTTP into a ``ControlError``."""
    import httpx

    try:
        yield
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        raise ControlError(f"the SuperLink answered {status}: {error.response.text[:200]}", status) from error
    except (httpx.HTTPError, OSError, ValueError) as error:
        raise ControlError(f"the SuperLink at {deployment.address} does not answer ({type(error).__name__})") from error


def start_run(deployment: Deployment, options: Mapping[str, Any]) -> int:
    """Start the signed bundle with a run config; returns Flower's number of the run."""
    from flwr.common.serde import user_config_to_proto
    from flwr.proto.control_pb2 import StartRunRequest
    from flwr.proto.fab_pb2 import Fab

    stored = Fab(hash_str=hashlib.sha256((deployment.operator / BUNDLE).read_bytes()).hexdigest())
    request = StartRunRequest(fab=stored, app_spec=APP, override_config=user_config_to_proto(dict(options)))
    return int(ask(deployment, lambda client: client.StartRun(request)).run_id)


def stop_run(deployment: Deployment, run: int) -> None:
    from flwr.proto.control_pb2 import StopRunRequest

    ask(deployment, lambda client: client.StopRun(StopRunRequest(run_id=run)))


def run_status(deployment: Deployment, run: int) -> str | None:
    """A run's status, such as ``finished:completed``; ``None`` if the SuperLink does not answer."""
    from flwr.proto.control_pb2 import ListRunsRequest

    try:
        found = ask(deployment, lambda client: client.ListRuns(ListRunsRequest(run_id=run))).run_dict
    except ControlError:
        return None
    status = found[run].status
    return f"{status.status}:{status.sub_status}" if status.sub_status else str(status.status)


@dataclass(frozen=True)
class Enrolled:
    """A node that is registered with the SuperLink; ``since`` is when it last connected (``online``) or left."""

    name: str
    id: int
    key: bytes
    online: bool
    since: str


def enrolled(deployment: Deployment) -> list[Enrolled]:
    """The nodes that may connect."""
    from flwr.proto.control_pb2 import ListNodesRequest

    found = ask(deployment, lambda client: client.ListNodes(ListNodesRequest())).nodes_info
    return [
        Enrolled(
            n.name, n.node_id, n.public_key, n.status == "online", n.last_activated_at if n.status == "online" else n.last_deactivated_at
        )
        for n in found
        if n.status != "unregistered"
    ]


def enrol(deployment: Deployment, name: str, key: bytes, *, replace: bool = False) -> bool:
    """Register a node's public key (``auth.pub``) under its name; enrolment is open for this call alone.

    Returns whether the key was new. With ``replace`` the node takes the place of the one that was enrolled under this name.
    """
    from flwr.proto.control_pb2 import RegisterNodeRequest

    try:
        public = load_ssh_public_key(key).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError("expected a node's public key as in its auth.pub, got something else") from error
    there = enrolled(deployment)
    if owner := next((node for node in there if node.key == public), None):
        if owner.name != name:
            raise ConfigError(f"this key is that of {owner.name!r}, got it for {name!r}; every site has its own auth.pub")
        return False
    before = [node for node in there if node.name == name]
    if before and not replace:
        raise ConfigError(f"{name!r} is enrolled with another key; add --replace if the site has rotated its keys")
    is_open = deployment.operator / ENROLMENT
    is_open.touch(mode=0o600)
    try:
        ask(deployment, lambda client: client.RegisterNode(RegisterNodeRequest(public_key=public, name=name)))
    except ControlError as error:
        if "already" in str(error).lower():
            raise ConfigError(
                f"the key of {name!r} was removed before, and Flower takes no removed key again; the site runs emdcfl node rotate"
            ) from error
        raise ConfigError(f"the node's key could not be registered: {error}") from error
    finally:
        is_open.unlink(missing_ok=True)
    for node in before:
        _unregister(deployment, node)
    return True


def remove(deployment: Deployment, name: str) -> None:
    """Take a node's right to connect away."""
    found = [node for node in enrolled(deployment) if node.name == name]
    if not found:
        known = sorted(node.name for node in enrolled(deployment))
        raise ConfigError(f"no node {name!r} is enrolled: {nearest(name, known) if known else 'there is none at all'}")
    for node in found:
        _unregister(deployment, node)


def _unregister(deployment: Deployment, node: Enrolled) -> None:
    from flwr.proto.control_pb2 import UnregisterNodeRequest

    ask(deployment, lambda client: client.UnregisterNode(UnregisterNodeRequest(node_id=node.id)))
