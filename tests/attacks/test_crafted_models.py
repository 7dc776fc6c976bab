"""A server sends models made to show the projection R, at which the node looks before it answers, or single samples by their losses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra emdcfl[flower]")

from tests.attacks.hostile import HostileServer, digits, settings
from tests.attacks.test_policy import omega
from tests.attacks.test_releases import KEY, reference
from torch import Tensor

from emdcfl.core.keys import global_seed
from emdcfl.core.params import Network
from emdcfl.models import ModelRecipe
from emdcfl.privacy.crafted import suspicion


def crafted(kind: str) -> Tensor:
    """Models of the digits' network whose last layer is chosen: its outputs are known whatever the sample is, or nearly."""
    with global_seed(0):
        network = Network(digits().model)
    network.load(omega())
    entries = {e.name: e for e in network.layout.entries}
    weight, bias = (entries[name] for name in ("body.6.weight", "body.6.bias"))
    made = omega()
    flat = made[weight.start : weight.stop].view(weight.shape)
    flat[:] = 0
    made[bias.start : bias.stop] = 0
    if kind == "one bias":
        made[bias.start] = 1
    elif kind == "dense biases":
        made[bias.start : bias.stop] = torch.linspace(1, 2, bias.stop - bias.start)
    elif kind == "one unit varies":
        made[bias.start : bias.stop] = 1
        flat[0, :] = 0.01
    return made


@pytest.fixture
def server(tmp_path: Path) -> HostileServer:
    return HostileServer(tmp_path / "home", toml='trust = "relay"')


@pytest.mark.parametrize("kind", ["zero", "one bias", "dense biases", "one unit varies"])
def test_embeddings_under_a_crafted_model_are_not_released(server: HostileServer, kind: str) -> None:
    assert "made to show the projection" in str(reference(server, crafted(kind))["failure"])


@pytest.mark.parametrize("kind", ["zero", "one unit varies"])
def test_no_distance_is_computed_again_under_a_crafted_model(server: HostileServer, kind: str) -> None:
    inputs = {"sizes": [64], "m": {}, "offers": {}, "keys": {}, "settings": settings(match_classes=True)}
    assert "made to show the projection" in server.refused("recalibrate", omega=crafted(kind), **inputs)


@pytest.mark.parametrize("kind", ["one bias", "dense biases"])
@pytest.mark.parametrize("samples", [2, 4, 15])
def test_a_request_for_few_samples_hides_no_crafted_model(server: HostileServer, kind: str, samples: int) -> None:
    inputs = {"partners": {}, "sizes": [samples], "settings": settings(max_samples=samples, calibrated=False)}
    assert "made to show the projection" in server.refused("reference", omega=crafted(kind), **inputs)
    column = {"boxes": {}, "size": samples, "held_out": True, "settings": settings(projection="pair")}
    said = server.ask("project", rows=["row"], omegas={"row": crafted(kind)}, keys={"row": KEY}, **column)
    assert said["reply"]["samples"] == {}


def test_a_unit_that_overflows_hides_no_crafted_model_and_shows_no_sign_of_r(server: HostileServer) -> None:
    made = crafted("dense biases")
    made[4800:4820] = 3e38  # weights of the first unit of the last layer
    inputs = {"boxes": {}, "size": 64, "held_out": True, "settings": settings(projection="pair")}
    reply = server.ask("project", rows=["row"], omegas={"row": made}, keys={"row": KEY}, **inputs)["reply"]
    assert reply["samples"]["row"].isnan().all(), "all overflow here"
    z = np.ones((64, 8))
    z[::2] = np.inf
    assert suspicion(z, X) == "they take 1 different values for 32 different samples"
    z[15:] = np.nan
    assert suspicion(z, X) == "7 of 64 are finite"


def test_few_samples_under_an_honest_model_are_released(server: HostileServer) -> None:
    assert "reply" in server.ask("reference", omega=omega(), partners={}, sizes=[4], settings=settings(max_samples=4, calibrated=False))


def test_a_crafted_model_of_a_partner_costs_that_partner_alone(server: HostileServer) -> None:
    rows = {"honest": omega(), "crafted": crafted("one bias")}
    inputs = {"boxes": {}, "size": 32, "held_out": True, "settings": settings(projection="pair")}
    reply = server.ask("project", rows=list(rows), omegas=rows, keys=dict.fromkeys(rows, KEY), **inputs)["reply"]
    assert list(reply["samples"]) == ["honest"]
    assert "made to show the projection" in reply["refused"]["crafted"]


def test_an_owner_who_wants_to_may_allow_them(tmp_path: Path) -> None:
    server = HostileServer(tmp_path / "home", toml='trust = "relay"\n[policy]\ncrafted_models = true')
    assert "reply" in reference(server, crafted("one bias"))


def test_two_requests_for_losses_show_a_row_of_a_table_unless_the_owner_refuses_them(tmp_path: Path) -> None:
    """The privacy page says so: a model that answers all samples but one alike makes the mean that one's."""
    rows = np.random.default_rng(0).normal(50, 10, size=(400, 3)).round(2)
    (tmp_path / "table.csv").write_text("a,b,c,label\n" + "\n".join(",".join(map(str, [*row, i % 2])) for i, row in enumerate(rows)))
    columns = [{"name": name, "mean": 0.0, "std": 1.0, "gaps": False} for name in "abc"]
    job = {
        "model": {"name": "mlp", "options": {"features": 3, "classes": 2, "hidden": [3, 1]}},
        "data": {"encoding": {"kind": "table", "label": "label", "columns": columns}, "classes": ["0", "1"], "seed": 0},
        "preprocess": {"mean": [0.0], "std": [1.0], "scale": 1.0, "size": None},
    }
    network = Network(ModelRecipe.from_dict(job["model"]))
    first, second, head = (module for module in network.module.modules() if isinstance(module, torch.nn.Linear))

    def shown(column: int, above: float) -> Tensor:
        """Its loss is log 2, but softplus(± column / 50) of samples whose first column lies above a threshold."""
        with torch.no_grad():
            network.theta.zero_()
            first.weight[:2, 0], first.weight[2, column] = 1e3, 1
            first.bias[:2] = torch.tensor([0.0, -1.0]) - 1e3 * above
            second.weight[0], second.bias[0] = torch.tensor([1e3, -1e3, 1.0]), -1e3
            head.weight[0, 0] = 1 / 50
        return network.theta.clone()

    toml, thresholds = f"data = {str(tmp_path / 'table.csv')!r}\n", np.linspace(60, 80, 64)
    server, alike = HostileServer(tmp_path / "home", toml=toml), float(torch.tensor(2.0).log())
    said = server.ask("loss_moments", job=job, models=[shown(0, t) for t in thresholds])["reply"]
    highest = thresholds[np.flatnonzero((said["mean"].numpy() - alike) * said["n"] > 1e-3)[-1]]
    said = server.ask("loss_moments", job=job, models=[shown(column, highest) for column in range(3)])["reply"]
    row = 50 * np.abs(np.log(np.expm1((said["mean"].numpy() - alike) * said["n"] + alike)))
    assert np.abs(rows - row).max(axis=1).min() < 1e-3
    careful = HostileServer(tmp_path / "careful", toml=toml + "[policy]\nmethods = ['fedavg']")
    assert "policy.methods" in careful.refused("loss_moments", job=job, models=[shown(0, highest)])


RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 12))


@pytest.mark.parametrize(
    ("z", "said"),
    [
        (np.eye(16)[RNG.integers(16, size=64)], "different values"),
        (np.eye(64), "single unit"),
        (np.eye(64) * 5 + 1e-3 * np.abs(RNG.normal(size=(64, 64))), "single unit"),
        (np.sign(X[:, :3]) @ RNG.normal(size=(3, 32)), "different values"),
        (np.concatenate([X[:, :1], np.ones((64, 31))], axis=1), "units vary"),
    ],
)
def test_known_vectors_single_units_and_constants_are_noticed(z: np.ndarray, said: str) -> None:  # type: ignore[type-arg]
    assert said in str(suspicion(z, X))


def test_honest_embeddings_pass_also_of_repeated_samples_and_narrow_networks() -> None:
    for width in (2, 4, 8, 64):
        z = np.maximum(0, X @ RNG.normal(size=(12, width)) + 0.5)
        assert suspicion(z, X) is None
    few = X[RNG.integers(3, size=64)]  # a table with three different rows
    assert suspicion(np.maximum(0, few @ RNG.normal(size=(12, 16)) + 0.5), few) is None
