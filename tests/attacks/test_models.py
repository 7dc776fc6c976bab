"""A server names code for the node to run: only registered networks, and those the operator lists, are built."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra emdcfl[flower]")

from tests.attacks.hostile import HostileServer, digits, digits_job


def job(name: str, **options: Any) -> dict[str, Any]:
    return {"model": {"name": name, "options": options}}


def test_a_model_named_os_system_runs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = HostileServer(tmp_path / "home")
    with caplog.at_level(logging.WARNING, logger="emdcfl"):
        reason = server.refused("describe", job=job("os:system", command=f"touch {tmp_path / 'ran'}"))
    assert not (tmp_path / "ran").exists()
    assert "os:system" in reason and "policy.models" in reason
    assert [r for r in caplog.records if r.levelno == logging.WARNING and "os:system" in r.getMessage()]


def test_a_module_that_is_not_listed_is_not_even_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "unlisted_network.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\ndef net(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    HostileServer(tmp_path / "home").refused("describe", job=job("unlisted_network:net"))
    assert not (tmp_path / "ran").exists()


def test_a_listed_model_is_built_and_another_function_of_its_module_is_not(tmp_path: Path) -> None:
    server = HostileServer(tmp_path / "home", toml='[policy]\nmodels = ["emdcfl.models.networks:small_cnn"]')
    assert server.ask("describe", job=job("emdcfl.models.networks:small_cnn"))["reply"]["n"] > 0
    assert "policy.models" in server.refused("describe", job=job("emdcfl.models.networks:cnn"))


@pytest.mark.parametrize("options", [{"size": "8"}, {"depth": 3}, {"classes": 2.5}])
def test_options_that_the_builder_does_not_declare_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    assert next(iter(options)) in HostileServer(tmp_path / "home").refused("describe", job=job("small_cnn", **options))


def test_initial_weights_from_a_file_of_the_node_are_refused(tmp_path: Path) -> None:
    assert "policy.weights" in HostileServer(tmp_path / "home").refused("describe", job=job("resnet18", weights="/etc/passwd"))


@pytest.mark.parametrize("name", [None, 3, ["cnn"], ""])
def test_a_model_whose_name_is_no_text_is_refused(tmp_path: Path, name: Any) -> None:
    HostileServer(tmp_path / "home").refused("describe", job={"model": {"name": name, "options": {}}})


def test_a_scenario_that_reads_a_folder_of_the_servers_choice_is_refused(tmp_path: Path) -> None:
    data = {"scenario": "folder", "options": {"path": str(tmp_path)}}
    assert "reads files" in HostileServer(tmp_path / "home").refused("describe", job={"data": data})


def test_a_server_may_not_choose_the_data_folder(tmp_path: Path) -> None:
    data = {"scenario": "watch", "options": {"data_root": str(tmp_path)}}
    assert "set EMDCFL_DATA at the node" in HostileServer(tmp_path / "home").refused("describe", job={"data": data})


def test_a_scenario_with_a_model_of_the_servers_choice_is_refused(tmp_path: Path) -> None:
    data = {"scenario": "custom", "options": {"model": "os:system"}}
    assert "policy.models" in HostileServer(tmp_path / "home").refused("describe", job={"data": data})


def test_an_honest_request_is_answered_by_a_default_node(tmp_path: Path) -> None:
    said = HostileServer(tmp_path / "home").ask("describe", job=digits_job())
    assert said["reply"]["n"] == len(digits().sites[0].train)
