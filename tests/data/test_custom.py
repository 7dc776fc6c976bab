from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.data import standins

from emdcfl.core.errors import ConfigError
from emdcfl.data.scenarios import build


def custom(*partition: dict[str, Any], **options: Any) -> Any:
    return build("custom", source="digits", partition=list(partition), **options)


def test_shifts_compose_and_groups_are_recorded() -> None:
    text = """
    source = "digits"
    clients = 3
    partition = [
        { kind = "rotation", angles = [0, 180] },
        { kind = "noise", sigmas = [0.0, 0.2] },
        { kind = "dirichlet", alpha = 0.5 },
    ]
    """
    scenario = build("custom", **tomllib.loads(text))
    groups = ["rot0+noise0", "rot0+noise0.2", "rot180+noise0", "rot180+noise0.2"]
    assert scenario.k == 4
    assert list(dict.fromkeys(scenario.groups.values())) == groups
    assert [s.name for s in scenario.sites] == [f"{g}-{i}" for g in groups for i in (1, 2, 3)]
    assert sum(len(s.train) + len(s.val) + len(s.tests["test"]) for s in scenario.sites) == 4 * 1797


def test_groups_may_divide_the_samples() -> None:
    scenario = custom({"kind": "rotation", "angles": [0, 90]}, share_samples=False)
    assert sum(len(s.train) + len(s.val) + len(s.tests["test"]) for s in scenario.sites) == 1797


def test_label_groups_do_not_divide_what_they_do_not_share() -> None:
    scenario = custom({"kind": "classes", "groups": [[0, 1], [2, 3]]}, share_samples=False)
    assert {scenario.groups[s.name]: sorted(s.train.y.unique().tolist()) for s in scenario.sites} == {
        "classes01": [0, 1],
        "classes23": [2, 3],
    }
    total = int(np.isin(np.concatenate([s.train.y for s in custom().sites]), [0, 1, 2, 3]).sum())
    assert sum(len(s.train) for s in scenario.sites) == pytest.approx(total, abs=30)


def test_concept_shift_renames_the_same_images() -> None:
    scenario = custom({"kind": "permutation", "count": 2}, clients=1)
    means = [{int(y): site.train.x[site.train.y == y].float().mean(dim=0) for y in site.train.y.unique()} for site in scenario.sites]
    nearest = [min(means[1], key=lambda other: float((means[0][y] - means[1][other]).norm())) for y in sorted(means[0])]
    assert sorted(nearest) == list(range(10))
    assert nearest != list(range(10))


def test_colour_makes_three_channels() -> None:
    scenario = custom({"kind": "colour", "colours": [[1, 0, 0], [0, 0, 1]]})
    assert scenario.model.options == {"classes": 10, "channels": 3, "size": 8}
    assert int(scenario.sites[0].train.x[:, 1:].max()) == 0
    assert int(scenario.sites[-1].train.x[:, :2].max()) == 0


def test_domain_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMDCFL_CACHE", str(tmp_path / "cache"))
    standins.pacs(tmp_path, per_domain=40)
    scenario = build("custom", source="pacs", data_root=str(tmp_path), partition=[{"kind": "domain", "values": ["photo", "sketch"]}])
    assert set(scenario.groups.values()) == {"photo", "sketch"}
    assert scenario.preprocess.size == 224
    assert scenario.model.name == "resnet18"
    assert torch.all(scenario.sites[-1].train.x == 9)
    every = build("custom", source="pacs", data_root=str(tmp_path), partition=[{"kind": "domain"}])
    assert every.k == 4


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        ([{"kind": "rotate", "angles": [0]}], "unknown kind 'rotate' in partition: did you mean 'rotation'"),
        ([{"kind": "rotation", "angle": [0]}], "rotation has no option 'angle': did you mean 'angles'"),
        ([{"kind": "rotation"}], "rotation needs angles"),
        ([{"kind": "rotation", "angles": []}], "at least one setting"),
        ([{"kind": "rotation", "angles": [0, 360]}], "same name"),
        ([{"kind": "rotation", "angles": [0, 45], "expand": True}], "differ in size"),
        ([{"kind": "iid"}, {"kind": "shards"}], "at most one division"),
        ([{"kind": "dirichlet", "beta": 1}], "dirichlet has no option 'beta'"),
        ([{"kind": "domain"}], "no column 'domain'"),
        ([{"kind": "colour", "colours": [[255, 0, 0]]}], "between 0 and 1"),
        ([{"kind": "rotation", "angles": 90}], "custom: rotation.angles must be a list of float, got 90"),
        ([{"kind": "rotation", "angles": [0, float("nan")]}], r"rotation.angles must be a list of float, got \[0, nan\]"),
        ([{"kind": "rotation", "angles": [0, 90], "expand": "no"}], "rotation.expand must be bool"),
        ([{"kind": "classes", "groups": [0, 1]}], "classes.groups must be a list of a list of int"),
        ([{"kind": "classes", "groups": [[0, 1], [9, 10]]}], "classes: expected labels from 0 to 9, got 10"),
        ([{"kind": "dirichlet", "alpha": "0.5"}], "dirichlet.alpha must be float"),
        ([{"kind": "shards", "per_client": 1.5}], "shards.per_client must be int"),
        ([{"kind": "shards", "per_client": 0}], "shards: per_client must be at least 1"),
        ([{"kind": "noise", "sigmas": [0, -0.1]}], "noise: sigmas must not be negative"),
        ([{"kind": "permutation", "count": 0}], "count .* must be at least 1"),
    ],
)
def test_errors(partition: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build("custom", source="digits", partition=partition)


@pytest.mark.parametrize("samples", [0, -5])
def test_no_samples(samples: int) -> None:
    with pytest.raises(ConfigError, match="expected samples >= 1"):
        build("custom", source="digits", samples=samples)


def test_too_many_clients() -> None:
    with pytest.raises(ConfigError, match="has 5 samples; at least 10 are needed"):
        custom(clients=300)
