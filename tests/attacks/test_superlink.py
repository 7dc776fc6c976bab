"""A real SuperLink attacked over the network: by somebody with the CA certificate, by a foreign node, with a stolen token."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("flwr", reason="needs the extra emdcfl[flower]")

from flwr.supercore.fab import Fab
from flwr.supernode.start_client_internal import _verify_fab
from tests.apps.trial_runs import federation

from emdcfl.apps import deployment, superlink
from emdcfl.apps.deployment import control
from emdcfl.apps.deployment.certificates import make_node_key, make_publisher_key, sign_bundle
from emdcfl.apps.deployment.check import attacks
from emdcfl.apps.deployment.folder import check_names
from emdcfl.apps.deployment.processes import LINK, _until_listening, start
from emdcfl.apps.superlink import BUNDLE, ENROLMENT, SIGNATURE, TOKEN, UNCHECKED, Gate, read_token
from emdcfl.apps.supernode import arguments
from emdcfl.core.errors import ConfigError


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[deployment.Deployment]:
    """A SuperLink without nodes."""
    with federation(tmp_path_factory.mktemp("link") / "federation", nodes=2, start=False) as there:
        start(there, LINK)
        _until_listening(there)
        yield there


@pytest.mark.slow
def test_outsiders_foreign_nodes_and_a_stolen_token_are_refused(link: deployment.Deployment) -> None:
    *tried, bundle = attacks(link)
    assert len(tried) == 18
    assert [attack for attack in tried if not attack.held] == []
    assert bundle.held is None, "no node is there to refuse it"


@pytest.mark.slow
def test_the_operator_enrols_nodes_one_by_one_and_closes_the_door(link: deployment.Deployment, tmp_path: Path) -> None:
    make_node_key(tmp_path)
    key = (tmp_path / "auth.pub").read_bytes()
    assert control.enrol(link, "north", key)
    assert not control.enrol(link, "north", key), "it is known already"
    with pytest.raises(ConfigError, match="is that of 'north'"):
        control.enrol(link, "south", key)
    assert not (link.operator / ENROLMENT).exists()
    with pytest.raises(ConfigError, match="auth.pub"):
        control.enrol(link, "north", b"no key")


@pytest.mark.slow
def test_a_node_is_replaced_removed_and_comes_back_by_name(link: deployment.Deployment, tmp_path: Path) -> None:
    keys = []
    for number in range(3):
        (tmp_path / str(number)).mkdir()
        make_node_key(tmp_path / str(number))
        keys.append((tmp_path / str(number) / "auth.pub").read_bytes())
    assert control.enrol(link, "east", keys[0])
    with pytest.raises(ConfigError, match="--replace"):
        control.enrol(link, "east", keys[1])
    assert control.enrol(link, "east", keys[1], replace=True)
    assert [node.name for node in control.enrolled(link)].count("east") == 1
    control.remove(link, "east")
    assert "east" not in [node.name for node in control.enrolled(link)]
    with pytest.raises(ConfigError, match="no node 'east'"):
        control.remove(link, "east")
    with pytest.raises(ConfigError, match="emdcfl node rotate"):
        control.enrol(link, "east", keys[1])
    assert control.enrol(link, "east", keys[2])


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    (tmp_path / TOKEN).write_text("t" * 40)
    (tmp_path / TOKEN).chmod(0o600)

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await send({"status": 200})

    return Gate(answer, tmp_path)


def status(gate: Gate, path: str, *tokens: str, client: Any = ("127.0.0.1", 5), kind: str = "http", also: Any = ()) -> int:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": kind, "path": path, "client": client, "headers": [*((b"authorization", t.encode()) for t in tokens), *also]}
    asyncio.run(gate(scope, None, send))  # type: ignore[arg-type]
    return int(sent[0].get("status") or sent[0]["code"])


RIGHT = "Bearer " + "t" * 40


@pytest.mark.parametrize("headers", [(), ("",), ("Bearer",), ("t" * 40,), ("Bearer t",), (RIGHT, RIGHT), ("Basic " + "t" * 40,)])
def test_orders_need_exactly_one_right_token(gate: Gate, headers: tuple[str, ...]) -> None:
    assert status(gate, "/v1/control/start-run", *headers) == 403
    assert status(gate, "/v1/control/start-run", RIGHT) == 200


@pytest.mark.parametrize("client", [("10.0.0.7", 5), ("::ffff:10.0.0.7", 5), ("name", 5), None])
def test_nobody_elsewhere_takes_the_place_of_the_server_program(gate: Gate, client: Any) -> None:
    assert status(gate, "/v1/runtime/acquire-task", RIGHT, client=client) == 403
    assert status(gate, "/v1/runtime/acquire-task") == 200


@pytest.mark.parametrize("header", [b"X-Forwarded-For", b"forwarded", b"X-Real-IP", b"Via"])
def test_what_comes_through_a_proxy_of_this_machine_is_not_from_this_machine(gate: Gate, header: bytes) -> None:
    assert status(gate, "/v1/runtime/acquire-task", also=[(header, b"127.0.0.1")]) == 403


def test_the_environment_opens_no_other_door(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in UNCHECKED:
        monkeypatch.setenv(name, "*")
    monkeypatch.setattr("sys.argv", ["superlink", "--operator", str(tmp_path), "--database", ":memory:"])
    with pytest.raises(ConfigError, match="token"):
        superlink.main()
    assert not set(UNCHECKED) & set(os.environ)


@pytest.mark.parametrize(
    "path", ["/", "/docs", "/openapi.json", "/v1/responses", "/v1/control", "/v1/fleet/../control/start-run/", "//v1/control/x"]
)
def test_nothing_else_is_served(gate: Gate, path: str) -> None:
    assert status(gate, path, client=("10.0.0.7", 5)) == (200 if path.startswith("/v1/fleet/") else 403)  # Flower resolves no dots
    assert status(gate, "/v1/fleet/x", kind="websocket") == 1008


def test_registration_needs_the_open_door_as_well(gate: Gate) -> None:
    for path in ("/v1/control/register-node", "/v1/control/register-node/"):
        assert status(gate, path, RIGHT) == 403
    (gate.folder / ENROLMENT).touch()
    assert status(gate, "/v1/control/register-node", RIGHT) == 200
    assert status(gate, "/v1/control/register-node") == 403


def test_a_token_that_others_can_read_or_guess_is_refused(gate: Gate) -> None:
    (gate.folder / TOKEN).chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_token(gate.folder)
    (gate.folder / TOKEN).chmod(0o600)
    (gate.folder / TOKEN).write_text("short")
    with pytest.raises(ConfigError, match="at least 32"):
        read_token(gate.folder)


def test_nodes_accept_the_publishers_signature_of_this_bundle_and_no_other(tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
        make_publisher_key(tmp_path / name)
    trusted = yaml.safe_load((tmp_path / "ours" / "trusted.yaml").read_text())
    bundle = b"a bundle"
    right, wrong = (sign_bundle(tmp_path / name, bundle) for name in ("ours", "theirs"))
    (ours,) = trusted
    renamed = {ours: next(text for name, text in wrong.items() if name.startswith("fpk_")), "valid_license": "x"}
    assert _verify_fab(Fab("", bundle, right), trusted)
    for content, signed in ((b"another", right), (bundle, wrong), (bundle, renamed), (bundle, {"valid_license": "x"})):
        assert not _verify_fab(Fab("", content, signed), trusted)


def test_init_signs_the_app_and_gives_every_node_the_publishers_key(tmp_path: Path) -> None:
    there = deployment.create(tmp_path / "federation", nodes=2)
    signed = json.loads((there.operator / SIGNATURE).read_text())
    for node in there.nodes:
        trusted = yaml.safe_load((there.home(node) / "trusted.yaml").read_text())
        assert _verify_fab(Fab("", (there.operator / BUNDLE).read_bytes(), signed), trusted)
        assert "--trusted-entities" in arguments(there.home(node), node, there.address, 9094)


@pytest.mark.parametrize("name", ["..", ".", ".ssh", "a/b", "-x", ""])
def test_a_name_that_leads_elsewhere_or_hides_names_no_node(name: str) -> None:
    """A node's folder is called as the node is, and sites say their names themselves."""
    with pytest.raises(ConfigError, match="cannot name a node"):
        check_names(["site-1", name])
