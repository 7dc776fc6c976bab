"""What stands behind differences from the paper, on digits."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from tests.data import standins

from emdcfl.core.params import Network
from emdcfl.data.scenarios.registry import build
from emdcfl.data.types import Preprocess, Scenario, Site, Split
from emdcfl.methods.fedsac import FedSaC
from emdcfl.models.recipe import ModelRecipe
from emdcfl.runs.config import Choice, Config, override
from emdcfl.runs.loop import play
from emdcfl.runs.plan import RunPlan, plan

TWO_GROUPS = {"groups": 2, "clients_per_group": 2}


@pytest.fixture
def causes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")  # it is a script
    return importlib.import_module("causes")


def chosen(method: str, **scenario: int) -> RunPlan:
    config = Config(scenario=Choice("rotated-digits", scenario), method=Choice(method))
    return plan(override(config, {"engine.name": "sequential", "engine.device": "cpu", "training.local_epochs": 4}))


def test_the_engine_trains_as_a_loop_by_hand_does(causes: ModuleType) -> None:
    engine, *loop = causes.apart(chosen("fedavg", **TWO_GROUPS), [0, 1, 2])
    assert [found["epochs"] for found in loop] == list(range(5))
    assert loop[0]["moved"] == [0.0] * 3
    assert engine["epochs"] == loop[-1]["epochs"]
    assert engine["moved"] == pytest.approx(loop[-1]["moved"], rel=0.2)  # other batches
    for found in (engine, loop[-1]):
        same, *others = found["apart"]  # clients 0 and 1 are of one group, 2 is not
        assert same < min(others)


def test_angles_do_not_depend_on_signs_here(causes: ModuleType) -> None:
    found = list(causes.angles(chosen("pacfl")))
    assert [f["sign"] for f in found] == ["abs", "signed"]
    assert [(f["k"], f["ari"]) for f in found] == [(4, 1.0), (4, 1.0)]
    assert sorted(len(members) for members in found[0]["groups"]) == [1, 1, 1, 1]


def test_the_published_draw_holds_out_a_tenth_of_each_site(causes: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    standins.mnist(tmp_path, train=101)
    monkeypatch.setenv("EMDCFL_DATA", str(tmp_path))
    ours = build("backdoor-mnist")
    drawn, again = (causes.published(ours) for _ in range(2))
    for role in range(3):
        sites = drawn.sites[10 * role : 10 * role + 10]
        assert [len(site.val) for site in sites] == [10] * 9 + [11]  # of 100 and, in the last, 110 images
        images = {x.numpy().tobytes() for site in sites for x in site.val.x}
        assert len(images) > 95  # of 101: a site's images are its own, and few stand-ins are alike
    for site, same, other in zip(drawn.sites, again.sites, ours.sites, strict=True):
        assert torch.equal(site.val.x, same.val.x)
        assert site.train is other.train


def test_thresholds_are_found_on_digits_and_not_under_the_name_of_another_scenario(
    causes: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["causes", "thresholds", "--scenario", "pacs"])
    with pytest.raises(SystemExit):
        causes.main()
    assert "rotated-digits" in capsys.readouterr().err


def test_weights_of_a_graph_add_up_and_are_those_of_the_method(causes: ModuleType) -> None:
    plan_ = chosen("fedsac", **TWO_GROUPS)
    method = plan_.method
    assert isinstance(method, FedSaC)
    first, second = causes.graph(plan_, 2)
    for found in (first, second):
        assert sum(found["weight"].values()) == pytest.approx(1.0, abs=0.01)
        assert found["cosine"]["group"] > found["cosine"]["others"]
    with plan_.federation() as fed:
        *_, last = play(fed, method, rounds=1, evaluate_every=1)
        x = method.weights(fed.layout, last.state, method.train(fed, last.state, fed.begin(2)))
    assert second["weight"]["self"] == pytest.approx(float(x.diagonal().mean()), abs=0.001)


def labels_apart() -> Scenario:
    """Two sites with labels 0 and 1, one with 2 and 3; what all samples share is longer than what tells them apart."""
    rng = np.random.default_rng(0)
    sites = []
    for name, first, n in (("low-1", 0, 80), ("low-2", 0, 80), ("high-1", 2, 40)):
        y = torch.from_numpy(rng.integers(2, size=n) + first)
        x = 4 + torch.nn.functional.one_hot(y, 24) * 3 + torch.from_numpy(rng.normal(size=(n, 24)))
        split = Split(x.float(), y)
        sites.append(Site(name, split, split, {"test": split}))
    groups = {"low-1": "low", "low-2": "low", "high-1": "high"}
    layer = ModelRecipe("torch.nn:Linear", {"in_features": 24, "out_features": 4})
    return Scenario("labels apart", tuple(sites), ("0", "1", "2", "3"), Preprocess(), layer, groups=groups, scored=("low-1", "low-2"))


def test_one_model_oscillates_between_labels_by_its_momentum_along_what_all_share(
    causes: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {name: causes.CHANGES[name] for name in ("nothing", "momentum 0", causes.CENTRED)}
    monkeypatch.setattr(causes, "CHANGES", few)
    config = Config(scenario=Choice("labels apart"), method=Choice("fedavg"))
    settings = {"engine.name": "sequential", "engine.device": "cpu", "run.rounds": 4, "training.batch_size": 16, "training.lr": 0.01}
    _, shared, *found = causes.oscillation(plan(override(config, settings), labels_apart()), None, 1, whole=False)
    assert shared["of the mean"] > shared["squared length"] / 2
    assert shared["cosine"] > 0.9
    scores = {of["changed"]: of["test"] for of in found}
    assert max(scores["nothing"][1::2]) < 0.5 < min(scores["nothing"][::2])
    assert min(scores["momentum 0"]) > 0.8
    assert min(scores[causes.CENTRED]) > 0.8


def test_a_copy_has_the_first_site_of_every_group_and_embeddings_of_its_first_samples(
    causes: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(causes, "COPY", {"train": 20, "val": 10, "test": 10})
    scenario = chosen("fedavg", **TWO_GROUPS).scenario
    copy = causes.few(scenario, None)
    assert [site.name for site in copy.sites] == [scenario.sites[0].name, scenario.sites[2].name]
    found = causes.embedded(copy)
    net = Network(copy.model)
    for site, whole in zip(found.sites, scenario.sites[::2], strict=True):
        assert [len(split) for split in site.splits.values()] == [20] + [10] * (len(site.splits) - 1)
        assert site.train.x.shape[1] == net.layout.embedding_width
        assert torch.equal(site.train.y, whole.train.y[:20])
    assert found.sites[0].train.x.equal(causes.embedded(copy).sites[0].train.x)


def test_encoding_images_again_keeps_the_patch_of_a_backdoor(causes: ModuleType) -> None:
    images = torch.randint(256, (4, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    again = causes._encoded(Split(images, torch.zeros(4, dtype=torch.int64)), 75, causes.PATCH).x
    assert torch.equal(again[:, :, :3, :3], images[:, :, :3, :3])
    assert (again != images).float().mean() > 0.5
