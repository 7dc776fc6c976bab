"""A server hides tasks behind other tasks, or behind the greeting: each is allowed, counted and logged as if it came by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra emdcfl[flower]")

from tests.attacks.hostile import HostileServer, digits_job, settings
from tests.attacks.test_policy import omega, states
from tests.attacks.test_releases import other

from emdcfl.engines.flower.connected import ALONG, HELLO
from emdcfl.engines.flower.node import log as node_log
from emdcfl.engines.flower.node.serve import MAX_ALONG
from emdcfl.methods.emdcfl.client.losses import LOSS_CUT
from emdcfl.privacy.exchange import Challenge

DESCRIBE = {"task": "describe", "round": 1, "inputs": {}}
DENIED = {"task": "deposit", "round": 1, "inputs": {"size": 8, "held_out": True, "settings": settings(exchange="server-samples")}}


@pytest.fixture
def server(tmp_path: Path) -> HostileServer:
    return HostileServer(tmp_path / "home", toml='trust = "relay"')


def with_task(server: HostileServer, along: Any, **changed: Any) -> dict[str, Any]:
    return server.send("describe", {**DESCRIBE, "client": server.name, "job": digits_job(), ALONG: along, **changed})


def with_greeting(server: HostileServer, along: Any, **job: Any) -> dict[str, Any]:
    challenge = Challenge()
    return server.send(HELLO, {"challenge": challenge.public, "nonce": challenge.nonce, "job": {**digits_job(), **job}, ALONG: along})


def reference(number: int) -> dict[str, Any]:
    return {"task": "reference", "round": 1, "inputs": {"omega": other(number), "partners": {}, "sizes": [16], "settings": settings()}}


def entries(server: HostileServer) -> list[tuple[str, str]]:
    return [(entry["what"], entry["text"].partition(":")[0]) for entry in node_log.read(server.home / "state")]


@pytest.mark.parametrize("send", [with_task, with_greeting])
def test_a_denied_task_is_refused_and_neither_blocks_nor_opens_the_others(server: HostileServer, send: Any) -> None:
    said = send(server, [DENIED, DESCRIBE, {}, {"task": ["deposit"], "round": 1, "inputs": {}}, {**DESCRIBE, "round": float("inf")}])
    assert ["reply" in one for one in said[ALONG]] == [False, True, False, False, False]
    assert "policy.tasks" in said[ALONG][0]["failure"] and "policy.tasks" in said[ALONG][3]["failure"]
    assert "reply" in said or "proof" in said
    logged = entries(server)
    assert logged[:2] == [("refused", "deposit"), ("released", "describe")]
    assert len(logged) == 5 + ("reply" in said), "one entry for every task"


@pytest.mark.parametrize("send", [with_task, with_greeting])
@pytest.mark.parametrize("along", [[DESCRIBE] * (MAX_ALONG + 1), [[]], "describe", {"0": DESCRIBE}, torch.zeros(3), 7, [DESCRIBE, None]])
def test_too_many_tasks_or_no_list_of_them_release_nothing_and_are_in_the_log(server: HostileServer, send: Any, along: Any) -> None:
    said = send(server, along)
    assert "failure" in said and "reply" not in said and "proof" not in said and ALONG not in said
    assert [what for what, _ in entries(server)] == ["failed"]


def test_tasks_along_with_a_task_along_are_not_run(server: HostileServer) -> None:
    said = with_task(server, [{**DESCRIBE, ALONG: [DENIED, DESCRIBE]}])
    assert said[ALONG][0].keys() == {"client", "reply"}
    assert entries(server) == [("released", "describe")] * 2


def test_another_client_or_job_of_a_task_along_is_not_used(tmp_path: Path) -> None:
    server = HostileServer(tmp_path / "home", toml='[policy]\nrun_names = ["study"]')
    said = with_task(server, [{**DESCRIBE, "job": {**digits_job(), "run": "study"}}])
    assert "policy.run_names" in said["failure"] and "policy.run_names" in said[ALONG][0]["failure"]
    allowed = {**digits_job(), "run": "study"}
    said = with_task(server, [{**DESCRIBE, "client": server.name}], client="rot1-1", job=allowed)
    assert "for client" in said["failure"] and "for client" in said[ALONG][0]["failure"]


def test_a_stranger_learns_no_more_from_a_greeting_than_name_and_key(tmp_path: Path) -> None:
    server = HostileServer(tmp_path / "home", toml='[policy]\nrun_names = ["study"]')
    said = with_greeting(server, [DESCRIBE, {"task": "train", "round": 1, "inputs": {"theta": states(1)[0], "training": {}}}])
    assert said.keys() == {"name", "key", "proof", "version", ALONG}
    assert all(one.keys() == {"client", "failure"} and "policy.run_names" in one["failure"] for one in said[ALONG])


def test_models_and_requests_are_counted_for_every_task_along(tmp_path: Path) -> None:
    server = HostileServer(tmp_path / "home", toml='trust = "relay"\n[policy]\nrequests_per_run = 4\nmodels_at_once = 2')
    said = with_task(server, [reference(0), reference(1), reference(0)])
    assert ["reply" in one for one in said[ALONG]] == [True, False, True], "a second model in one round"
    assert "policy.models_per_round" in said[ALONG][1]["failure"]
    scored = {"task": "evaluate", "round": 1, "inputs": {"models": states(3), "reduction": "mean"}}
    said = with_task(server, [scored, DESCRIBE])
    assert "policy.models_at_once" in said[ALONG][0]["failure"] and "reply" in said[ALONG][1]
    assert "policy.requests_per_run" in said["failure"]
    assert "policy.requests_per_run" in with_greeting(server, [DESCRIBE])[ALONG][0]["failure"]


def test_a_task_does_not_meet_what_another_of_its_message_left_in_the_network(server: HostileServer) -> None:
    """Of fine-tuning, only a reply is left; a model without a head of its own must not be scored, or trained, with that head."""
    tuned = {"models": states(1), "weights": torch.ones(1), "training": {"local_epochs": 2, "lr": 10.0}, "always": False}
    headless = {"task": "loss_moments", "round": 1, "inputs": {"models": [omega()]}}
    alone = server.ask("loss_moments", models=[omega()])
    said = with_task(server, [{"task": "personalize", "round": 1, "inputs": tuned}, headless])[ALONG]
    assert said[0]["reply"]["gain"] < 0
    assert said[1]["reply"]["mean"] == alone["reply"]["mean"]


@pytest.mark.parametrize(
    "models",
    [
        lambda: [states(1)[0], omega()[:-1]],
        lambda: [states(1)[0], torch.zeros(0)],
        lambda: [states(1)[0].reshape(1, -1)],
        lambda: [states(1)[0], 3],
        list,
        lambda: {"0": states(1)[0]},
        lambda: [[states(1)[0]]],
    ],
)
def test_averages_of_other_shapes_are_refused(server: HostileServer, models: Any) -> None:
    server.refused("loss_moments", models=models())


def test_averages_that_are_not_finite_or_of_another_type_give_moments_of_losses_all_the_same(server: HostileServer) -> None:
    theta = states(1)[0]
    models = [theta * torch.nan, theta * torch.inf, theta.double() * 1e300, (theta * 0).bool(), theta.half(), theta, theta]
    reply = server.ask("loss_moments", models=models)["reply"]
    assert all(bool(reply[name].isfinite().all()) for name in ("mean", "covariance", "accuracy", "accuracy_covariance"))
    assert reply["mean"].shape == (7,) and float(reply["mean"].max()) <= LOSS_CUT
