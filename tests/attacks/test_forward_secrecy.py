"""Sealed boxes that a server recorded stay closed when a node's secret.key is stolen after the run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra emdcfl[flower]")

from tests.attacks.hostile import HostileServer, settings
from tests.attacks.test_policy import omega

from emdcfl.apps import supernode
from emdcfl.core.errors import ClientError
from emdcfl.core.keys import NodeSecret
from emdcfl.engines.flower.node.releases import Releases
from emdcfl.privacy.exchange import KEY, announced_key, load_secret, node_key, open_sealed, pair_seed, public_key, seal

RUN = "run"


def drawn() -> tuple[NodeSecret, NodeSecret]:
    return NodeSecret(os.urandom(32)), NodeSecret(os.urandom(32))


(A, A_RUN), (B, B_RUN), (SERVER, SERVER_RUN) = drawn(), drawn(), drawn()


def test_both_sides_agree_with_run_keys_and_nobody_else_does() -> None:
    a, b = announced_key(A, A_RUN), announced_key(B, B_RUN)
    box = seal(A, b, b"seed", context=(RUN,), session=A_RUN)
    assert open_sealed(B, a, box, context=(RUN,), session=B_RUN) == b"seed"
    assert pair_seed(A, b, context=(RUN,), session=A_RUN) == pair_seed(B, a, context=(RUN,), session=B_RUN)
    for secret, session in ((B, SERVER_RUN), (SERVER, B_RUN), (SERVER, SERVER_RUN)):
        with pytest.raises(ClientError):
            open_sealed(secret, a, box, context=(RUN,), session=session)
    with pytest.raises(ClientError):
        open_sealed(B, a[:KEY], box, context=(RUN,))


def test_a_run_key_of_the_servers_opens_nothing() -> None:
    swapped = public_key(B) + public_key(SERVER_RUN)  # the pinned part is B's
    box = seal(A, swapped, b"seed", context=(RUN,), session=A_RUN)
    for secret in (SERVER, SERVER_RUN):
        with pytest.raises(ClientError):
            open_sealed(secret, announced_key(A, A_RUN), box, context=(RUN,), session=SERVER_RUN)
    with pytest.raises(ClientError):  # and B notices
        open_sealed(B, announced_key(A, A_RUN), box, context=(RUN,), session=B_RUN)


def asked(server: HostileServer, partner: bytes) -> dict[str, object]:
    said = server.ask("reference", omega=omega(), partners={"partner": partner}, sizes=[16], settings=settings())["reply"]
    return {"boxes": said["boxes"], "refused": said["refused"]}


def test_a_recorded_box_of_a_real_node_stays_closed_to_who_steals_both_secrets(tmp_path: Path) -> None:
    server = HostileServer(tmp_path / "home", toml='trust = "relay"')
    box = asked(server, announced_key(B, B_RUN))["boxes"]["partner"]  # type: ignore[index]
    node, state = load_secret(server.home / "secret.key"), Releases(server.home / "state", RUN)
    announced = server.ask("describe")["reply"]["key"]
    assert announced == announced_key(node, state.session()) and node_key(announced) == public_key(node)
    context = (RUN, server.name, "partner")
    opened = open_sealed(B, announced, box, context=context, session=B_RUN)
    assert opened[:KEY] == state.session().derive("projection", RUN, server.name)
    assert opened[:KEY] != node.derive("projection", RUN, server.name), "the stolen secret does not give R either"
    for stolen, key in ((B, announced), (node, announced_key(B, B_RUN))):
        for session in (None, B, node, SERVER_RUN):
            with pytest.raises(ClientError):
                open_sealed(stolen, key[:KEY] if session is None else key, box, context=context, session=session)


def test_a_server_that_leaves_run_keys_out_gets_no_box(tmp_path: Path) -> None:
    said = asked(HostileServer(tmp_path / "home", toml='trust = "relay"'), public_key(B))
    assert said["boxes"] == {} and "partner" in said["refused"]  # type: ignore[operator]


def test_keys_of_runs_are_deleted_although_no_server_asks_again(tmp_path: Path) -> None:
    """Who steals the secrets long after the last run would open what was recorded of it."""
    server = HostileServer(tmp_path / "home", toml="[policy]\nrun_days = 7")
    server.ask("describe", job={"run": "last"})
    (recent,) = (server.home / "state").glob("*/run.key")
    server.ask("describe", job={"run": "over"})
    (over,) = set((server.home / "state").glob("*/run.key")) - {recent}
    forgotten = server.home / "state" / "entered-by-half" / "run.key"
    load_secret(forgotten)
    for key in (over, forgotten):
        os.utime(key, (0, 0))

    def serve() -> None:
        supernode._Launcher(server.home, "", b"", supernode._fork(lambda: None), os.pipe()[0]).loop()

    os.waitpid(supernode._fork(serve), 0)
    assert [key.exists() for key in (recent, over, forgotten)] == [True, False, False]
