"""A server asks for more than a method needs: samples, losses of single samples, unprojected embeddings, other splits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra emdcfl[flower]")

from tests.attacks.hostile import HostileServer, digits, settings
from torch import Tensor

from emdcfl.core.keys import global_seed
from emdcfl.core.params import Network


def states(number: int) -> Tensor:
    with global_seed(0):
        network = Network(digits().model)
    return network.theta.detach().clone().expand(number, -1).contiguous()


def omega() -> Tensor:
    with global_seed(0):
        network = Network(digits().model)
    return network.theta.detach()[network.layout.embedding].clone()


@pytest.fixture
def server(tmp_path: Path) -> HostileServer:
    return HostileServer(tmp_path / "home", toml='trust = "relay"')


def test_losses_of_single_samples_under_64_models(server: HostileServer) -> None:
    assert "policy.reductions" in server.refused("evaluate", models=states(64), split="train", reduction="per_sample")
    assert "policy.reductions" in server.refused("evaluate", models=states(1), reduction="per_batch")
    assert "policy.models_at_once" in server.refused("evaluate", models=states(17), reduction="mean")
    assert server.ask("evaluate", models=states(2), reduction="mean")["reply"]["table"].shape == (2, 1)


@pytest.mark.parametrize("models", [[[0.0]], torch.zeros(3), None])
def test_models_in_another_form_do_not_pass_uncounted(server: HostileServer, models: Any) -> None:
    server.refused("evaluate", models=models)


@pytest.mark.parametrize(
    ("task", "inputs"),
    [
        ("data_subspace", {"split": "train", "vectors": 3, "flatten": "sample"}),
        ("embed", {"split": "train"}),
        ("deposit", {"size": 8, "held_out": True}),
        ("train_and_basis", {}),
        ("em_step", {}),
        ("no such task", {}),
    ],
)
def test_tasks_that_hand_out_data_are_refused(server: HostileServer, task: str, inputs: dict[str, Any]) -> None:
    request = {"task": task, "round": 1, "client": server.name, "job": {}, "inputs": inputs}
    assert "policy.tasks" in server.send("describe", request)["failure"]


def test_a_task_that_the_operator_allows_is_answered(tmp_path: Path) -> None:
    server = HostileServer(tmp_path / "home", toml='[policy]\ntasks = ["embed"]')
    assert len(server.ask("embed", theta=omega(), cap=4)["reply"]["embeddings"]) == 4
    assert "policy.tasks" in server.refused("train", theta=states(1)[0], training={})
    assert "policy.tasks" in server.refused("personalize", models=states(1), weights=torch.ones(1), training={}, always=True)


def test_a_node_that_trains_also_fine_tunes(tmp_path: Path) -> None:
    server = HostileServer(tmp_path / "home", toml='[policy]\ntasks = ["train"]')
    inputs = {"models": states(1), "weights": torch.ones(1), "training": {"local_epochs": 1}, "always": True}
    assert server.ask("personalize", **inputs)["reply"].keys() == {"kept", "theta"}


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"exchange": "server-samples"}, "policy.tasks"),
        ({"exchange": None}, "policy.tasks"),
        ({"projection_ratio": 1.0}, "policy.projection_ratio"),
        ({"projection_ratio": float("nan")}, "policy.projection_ratio"),
        ({"projection_ratio": "0.9"}, "policy.projection_ratio"),
        ({"projection": "none"}, "projection"),
        ({"cost": "label-aware"}, "policy.costs"),
        ({"max_samples": 10**6}, "policy.samples"),
    ],
)
def test_a_reference_that_would_show_more_is_refused(server: HostileServer, changed: dict[str, Any], key: str) -> None:
    assert key in server.refused("reference", omega=omega(), partners={}, sizes=[16], settings=settings(**changed))


def test_settings_that_are_no_table_or_missing_are_refused(server: HostileServer) -> None:
    server.refused("reference", omega=omega(), partners={}, sizes=[16], settings=[])
    server.refused("reference", omega=omega(), partners={}, sizes=[16])


def test_a_larger_sample_than_allowed_is_refused(server: HostileServer) -> None:
    inputs = {"rows": [], "boxes": {}, "held_out": False, "omegas": {}, "keys": {}, "settings": settings()}
    assert "policy.samples" in server.refused("project", size=10**6, **inputs)


def test_weights_that_single_out_one_training_sample_are_refused(server: HostileServer) -> None:
    weights = torch.zeros(len(digits().sites[0].train))
    weights[7] = 1
    assert "single out" in server.refused("train", theta=states(1)[0], training={}, sample_weights=weights)


@pytest.mark.parametrize("seed", [1, -1, True, 0.0, "0", None])
def test_another_split_of_the_sites_own_files_is_refused(tmp_path: Path, seed: Any) -> None:
    server = HostileServer(tmp_path / "home", toml='data = "table.csv"')
    data = {"encoding": {}, "classes": [], "seed": seed}
    assert "policy.split_seed" in server.refused("describe", job={"data": data})
