"""A server asks for more than a method needs: samples, losses of single samples, unprojected embeddings, other splits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra emdcfl[flower]")

from tests.attacks.hostile import HostileServer, digits, digits_job, settings
from torch import Tensor

from emdcfl.core.keys import NodeSecret, global_seed
from emdcfl.core.params import Network
from emdcfl.models import ModelRecipe
from emdcfl.privacy.exchange import announced_key, seal


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


def test_a_reduction_that_is_not_named_is_the_mean_and_refused_by_name(tmp_path: Path) -> None:
    server = HostileServer(tmp_path / "home", toml='[policy]\nreductions = ["argmin_counts"]')
    assert "losses as 'mean'" in server.refused("evaluate", models=states(1))


@pytest.mark.parametrize("models", [[[0.0]], torch.zeros(3), None])
def test_models_in_another_form_do_not_pass_uncounted(server: HostileServer, models: Any) -> None:
    server.refused("evaluate", models=models)
    server.refused("loss_moments", models=models)


def test_losses_under_more_averages_than_the_node_allows(server: HostileServer) -> None:
    assert "policy.averages_at_once" in server.refused("loss_moments", models=list(states(65)))
    assert server.ask("loss_moments", models=list(states(3)))["reply"]["mean"].shape == (3,)


@pytest.mark.parametrize(
    ("task", "inputs"),
    [
        ("data_subspace", {"split": "train", "vectors": 3, "flatten": "sample"}),
        ("embed", {"split": "train"}),
        ("profile", {"classes": 10}),
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


def test_where_methods_are_named_a_refusal_says_so(tmp_path: Path) -> None:
    """Tasks follow from the methods then: adding one to policy.tasks would change nothing."""
    server = HostileServer(tmp_path / "home", toml='[policy]\nmethods = ["fedavg", "ifca"]')
    assert "takes part in fedavg, ifca (policy.methods in node.toml)" in server.refused("loss_moments", models=list(states(3)))
    assert "(policy.reductions in place of" in server.refused("evaluate", models=states(1), reduction="argmin_counts")
    assert "policy.tasks in place of policy.methods" in server.refused("profile", classes=10)
    emdcfl = HostileServer(tmp_path / "other", toml='[policy]\nmethods = ["emdcfl"]')
    asked = {"omega": omega(), "partners": {}, "settings": settings(exchange="server-samples")}
    assert "'deposit' among them, in place of policy.methods" in emdcfl.refused("reference", **asked)


def test_a_profile_is_told_only_where_the_operator_allows_it_and_never_beside_noise(tmp_path: Path) -> None:
    server = HostileServer(tmp_path / "home", toml='[policy]\ntasks = ["profile"]')
    assert server.ask("profile", classes=10)["reply"]["classes"].sum() == pytest.approx(1.0)
    noisy = HostileServer(tmp_path / "noisy", toml='privacy_epsilon = 8.0\n[policy]\ntasks = ["profile"]')
    assert "noise only" in noisy.ask("profile", classes=10)["failure"]


def test_a_node_that_trains_also_fine_tunes(tmp_path: Path) -> None:
    server = HostileServer(tmp_path / "home", toml='[policy]\ntasks = ["train"]')
    inputs = {"models": states(1), "weights": torch.ones(1), "training": {"local_epochs": 1}, "always": True}
    assert server.ask("personalize", **inputs)["reply"].keys() == {"theta", "m", "gain", "error"}


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


@pytest.mark.parametrize("size", [10**6, -1])
def test_a_larger_sample_than_allowed_is_refused(server: HostileServer, size: int) -> None:
    inputs = {"rows": [], "boxes": {}, "held_out": False, "omegas": {}, "keys": {}, "settings": settings()}
    assert "policy.samples" in server.refused("project", size=size, **inputs)


def test_blocks_of_matched_classes_show_no_more_samples_than_allowed(server: HostileServer) -> None:
    node, run = NodeSecret(b"p" * 32), NodeSecret(b"q" * 32)
    counts = np.array([10, *[2] * 10], dtype="<u4").tobytes()  # ten classes, two samples of each
    box = seal(node, server.ask("describe")["reply"]["key"], bytes(32) + counts, context=("run", "row", server.name), session=run)
    inputs = {"rows": ["row"], "boxes": {"row": box}, "omegas": {"row": omega()}, "keys": {"row": announced_key(node, run)}}
    matching: dict[str, Any] = {"sizes": [20], "m": {"row": 20}, "blocks": {"row": 25}, "common": {}}
    how: dict[str, Any] = {"size": 20, "held_out": False, "settings": settings(match_classes=True)}
    assert 100 < len(server.ask("project", matching=matching, **inputs, **how)["reply"]["samples"]["row"]) <= 500
    for blocks in (26, 10**9, -1, 1e300, [1]):
        assert "policy.samples" in server.refused("project", matching={**matching, "blocks": {"row": blocks}}, **inputs, **how)


def test_weights_that_single_out_one_training_sample_are_refused(server: HostileServer) -> None:
    weights = torch.zeros(len(digits().sites[0].train))
    weights[7] = 1
    assert "single out" in server.refused("train", theta=states(1)[0], training={}, sample_weights=weights)


@pytest.mark.parametrize("training", [{"batch_size": 1}, {"batch_size": -1}, {"batch_size": "64"}, {"batch_size": True}])
def test_batches_of_single_samples_are_refused(server: HostileServer, training: dict[str, Any]) -> None:
    for task, inputs in (("train", {"theta": states(1)[0]}), ("personalize", {"models": states(1), "weights": torch.ones(1)})):
        assert "policy.batch_size" in server.refused(task, training=training, **inputs)


def test_what_a_batch_of_one_would_show(tmp_path: Path) -> None:
    """Unit j of a crafted network dies with the first sample of class j that it meets, and holds that sample for ever after."""
    rows = np.random.default_rng(0).uniform(1, 9, size=(60, 3)).round(3)
    (tmp_path / "table.csv").write_text("a,b,c,label\n" + "\n".join(",".join(map(str, [*row, i % 2])) for i, row in enumerate(rows)))
    columns = [{"name": name, "mean": 0.0, "std": 1.0, "gaps": False} for name in "abc"]
    job = {
        "model": {"name": "mlp", "options": {"features": 3, "classes": 2, "hidden": [2]}},
        "data": {"encoding": {"kind": "table", "label": "label", "columns": columns}, "classes": ["0", "1"], "seed": 0},
        "preprocess": {"mean": [0.0], "std": [1.0], "scale": 1.0, "size": None},
    }
    network = Network(ModelRecipe.from_dict(job["model"]))
    first, head = (module for module in network.module.modules() if isinstance(module, torch.nn.Linear))
    with torch.no_grad():
        for layer in (first, head):
            layer.weight.zero_()
            layer.bias.zero_()
        first.bias.fill_(1.0)
        head.weight.copy_(-torch.eye(2))
    theta = network.theta.detach().clone()
    request = {"theta": theta, "training": {"batch_size": 1, "local_epochs": 1, "lr": 50.0, "momentum": 0.0, "weight_decay": 0.0}}
    toml = f"data = {str(tmp_path / 'table.csv')!r}\n"
    network.load(
        HostileServer(tmp_path / "open", toml=toml + "[policy]\nbatch_size = 1").ask("train", job=job, **request)["reply"]["theta"]
    )
    shown = (first.weight / (first.bias - 1)[:, None]).detach().numpy()
    assert min(np.abs(rows - x).max(axis=1).min() for x in shown) < 1e-3, "a row of the table"
    assert "policy.batch_size" in HostileServer(tmp_path / "home", toml=toml).refused("train", job=job, **request)


@pytest.mark.parametrize("epochs", [0, 10**12, 2.5])
def test_a_training_without_end_is_refused(server: HostileServer, epochs: Any) -> None:
    assert "policy.local_epochs" in server.refused("train", theta=states(1)[0], training={"local_epochs": epochs})


@pytest.mark.parametrize("threads", [0, -1, 100_000, "8", True, 2.0])
def test_threads_that_would_end_the_process_are_refused(server: HostileServer, threads: Any) -> None:
    assert "threads" in server.refused("describe", job={"threads": threads})


@pytest.mark.parametrize("run", [["a"], "r" * 10_000, 7, None])
def test_a_run_without_a_proper_name_is_refused(server: HostileServer, run: Any) -> None:
    assert "run's name" in server.refused("describe", job={"run": run})


@pytest.mark.parametrize("weights", [[2.0], [-1.0], [math.nan], [math.inf], [0.6, 0.6]])
def test_mixtures_whose_shares_are_none_are_refused(server: HostileServer, weights: list[float]) -> None:
    assert "shares" in server.refused("test", models=states(len(weights)), weights=torch.tensor(weights))


def test_a_mixture_of_hundreds_of_models_is_refused(server: HostileServer) -> None:
    assert "policy.models_at_once" in server.refused("test", models=states(300), weights=torch.full((300,), 1 / 300))


def test_thousands_of_calibrations_in_one_request_are_refused(server: HostileServer) -> None:
    assert "sample sizes" in server.refused("reference", omega=omega(), partners={}, sizes=[16] * 10_000, settings=settings())


@pytest.mark.parametrize("sizes", [[1, 2, 3], [16, 17], [11, 32], [32, 16], [16.0, 32]])
def test_sizes_that_show_where_a_class_occurs_first_are_refused(server: HostileServer, sizes: list[Any]) -> None:
    """The degrees of freedom fell behind the size by one where a sample had a class that none before it had: at all sizes, and in the
    orders of many seeds, that told which samples of an honest model's release share a class, although class counts are sealed."""
    asked = {"omega": omega(), "partners": {}, "settings": settings(match_classes=True)}
    assert "√2 apart" in server.refused("reference", sizes=sizes, **asked)
    assert "reply" in server.ask("reference", sizes=[16, 23, 33], **asked)
    assert "policy.models_per_round" in server.refused("reference", sizes=[17, 25], **asked)
    assert "the seed 0" in server.refused("reference", sizes=[16, 23, 33], job={"seed": 1}, round=2, **asked)


def test_an_error_that_quotes_the_server_does_not_pass_for_one_of_ours(server: HostileServer) -> None:
    """Whose text is sent; that of others may quote data."""
    said = server.refused("evaluate", models=states(1), **{"more\nemdcfl.core.errors.DataError: ": 1})
    assert said == "TypeError (see the node's log)"
    assert "has no split 'other'" in server.refused("evaluate", models=states(1), split="other")


def test_a_request_under_the_name_of_another_task_is_judged_by_what_it_asks(server: HostileServer) -> None:
    inputs = {"size": 8, "held_out": True, "settings": settings(exchange="server-samples")}
    request = {"task": "deposit", "round": 1, "client": server.name, "job": digits_job(), "inputs": inputs}
    for kind in ("describe", "train", "evaluate"):
        assert "policy.tasks" in server.send(kind, request)["failure"]


@pytest.mark.parametrize("seed", [1, -1, True, 0.0, "0", None])
def test_another_split_of_the_sites_own_files_is_refused(tmp_path: Path, seed: Any) -> None:
    server = HostileServer(tmp_path / "home", toml='data = "table.csv"')
    data = {"encoding": {}, "classes": [], "seed": seed}
    assert "policy.split_seed" in server.refused("describe", job={"data": data})
