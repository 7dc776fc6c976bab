"""The files of ``deploy/``: services are closed, and name commands and folders that exist. No daemon is needed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from click import Group
from typer.main import get_command

import emdcfl.cli.federation
import emdcfl.cli.node  # noqa: F401
from emdcfl.cli.app import app

DEPLOY = Path(__file__).parents[2] / "deploy"
SERVICES = [
    (path.name, name, service)
    for path in sorted(DEPLOY.glob("compose.*.yaml"))
    for name, service in yaml.safe_load(path.read_text(encoding="utf-8"))["services"].items()
]


def exists(words: list[str]) -> bool:
    group, command = words[:2]
    found = get_command(app).commands[group]  # type: ignore[attr-defined]
    return isinstance(found, Group) and command in found.commands


@pytest.mark.parametrize(("file", "name", "service"), SERVICES, ids=[f"{file}-{name}" for file, name, _ in SERVICES])
def test_containers_are_closed(file: str, name: str, service: dict[str, Any]) -> None:
    assert service["read_only"] and service["cap_drop"] == ["ALL"] and service["user"] == "10001:10001"
    assert service["security_opt"] == ["no-new-privileges:true"] and service["healthcheck"]["test"]
    assert "privileged" not in service and service.get("network_mode") is None
    if service["image"] == "emdcfl":
        assert exists(service["command"])


def test_only_the_proxy_is_reached_from_outside_and_passes_the_fleet_interface_alone() -> None:
    services = {name: service for file, name, service in SERVICES if "superlink" in file}
    assert [name for name, service in services.items() if "ports" in service] == ["proxy"]
    assert services["superlink"]["networks"] == ["inside"]
    assert "wget" not in services["proxy"]["healthcheck"]["test"]  # it fails on 404, and nobody but a node gets another answer
    conf = (DEPLOY / "nginx.conf").read_text(encoding="utf-8")
    assert re.findall(r"location (\S+) \{\s*(\S+)", conf) == [("/v1/fleet/", "proxy_pass"), ("/", "return")]
    mounted = {volume.removesuffix(":ro").rpartition(":")[2] for volume in services["proxy"]["volumes"]}
    assert mounted == {"/etc/nginx/emdcfl.conf", *re.findall(r"/certificates/[\w.]+", conf)}  # and no key of the certificate authority
    assert "X-Forwarded-For" in conf and conf.count("{") == conf.count("}")


def test_a_run_without_out_is_written_where_its_container_may_write() -> None:
    (service,) = (service for file, name, service in SERVICES if name == "superlink")
    assert service["working_dir"] in [volume.rpartition(":")[2] for volume in service["volumes"]]


@pytest.mark.parametrize("path", sorted(DEPLOY.glob("compose.*.yaml")), ids=lambda path: path.name)
def test_variables_that_must_be_set_are_set_in_the_commands_shown(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    shown = "".join(line for line in text.splitlines() if line.startswith("#"))
    needed = re.findall(r"\$\{(\w+):\?", text)
    assert needed and all(f"{name}=" in shown for name in needed)


@pytest.mark.parametrize("unit", sorted(DEPLOY.glob("*.service")), ids=lambda unit: unit.stem)
def test_units_start_commands_that_exist_and_are_hardened(unit: Path) -> None:
    (started,) = re.findall(r"^ExecStart=/opt/emdcfl/bin/emdcfl (.+)$", unit.read_text(encoding="utf-8"), flags=re.M)
    assert exists(started.split())
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=20", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-300:] + done.stderr
