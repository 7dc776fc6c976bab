from __future__ import annotations

import json
import unicodedata
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.tiny import same_bits, tiny

from emdcfl.core.errors import DataError, StoreError
from emdcfl.core.params import Network
from emdcfl.data.types import Scenario
from emdcfl.methods.base import Distances, Serving
from emdcfl.runs import outputs
from emdcfl.runs.config import Config
from emdcfl.runs.figures import heatmap, png
from emdcfl.runs.outputs import load_served, read_summary
from emdcfl.runs.result import Result
from emdcfl.runs.served import ModelInfo

SCENARIO = tiny(model="tiny_bn")
CLIENTS = [site.name for site in SCENARIO.sites]


def write_outputs(path: Path, scenario: Scenario, serving: Serving, summary: dict[str, object]) -> None:
    clusters = None if serving.clusters is None else serving.clusters.tolist()
    full = {"clients": [site.name for site in scenario.sites], "clusters": clusters, "finished": True, **summary}
    outputs.write_outputs(path, Result(Config(), full, [], ModelInfo.of(scenario), serving))


def models(count: int) -> torch.Tensor:
    return torch.rand(count, Network(SCENARIO.model).layout.size, generator=torch.Generator().manual_seed(count))


def hard(states: torch.Tensor) -> Serving:
    weights = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    return Serving(states, weights, clusters=torch.tensor([0, 0, 1, 1]))


def test_models_come_back_with_classes_and_recipe(tmp_path: Path) -> None:
    states = models(2)
    write_outputs(tmp_path, SCENARIO, hard(states), {"finished": True})
    served = load_served(tmp_path, "site-2")
    assert served.about.classes == tuple("abcd") and served.about.recipe == SCENARIO.model and served.about.shape == (8,)
    net = Network(SCENARIO.model)
    net.load(states[1])
    net.module.eval()
    x = SCENARIO.sites[0].val.x
    torch.testing.assert_close(served.probabilities(x), net.module(x).softmax(1).detach())
    plain = load_file(tmp_path / "models" / "cluster-1.safetensors")
    for name, tensor in net.state_dict(states[1]).items():
        assert same_bits(plain[name], tensor)
    assert plain["1.num_batches_tracked"].dtype == torch.int64
    assert read_summary(tmp_path)["finished"] is True


def test_models_of_clusters_that_are_gone_are_removed(tmp_path: Path) -> None:
    write_outputs(tmp_path, SCENARIO, hard(models(2)), {})
    write_outputs(tmp_path, SCENARIO, Serving(models(1), torch.ones(4, 1), clusters=torch.zeros(4, dtype=torch.int64)), {})
    assert [p.name for p in (tmp_path / "models").glob("*.safetensors")] == ["cluster-0.safetensors"]


@pytest.mark.parametrize("mix", ["parameters", "predictions"])
def test_mixtures_are_mixed_as_they_say(tmp_path: Path, mix: str) -> None:
    states = models(3)
    weights = torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    write_outputs(tmp_path, SCENARIO, Serving(states, weights, mix=mix), {})
    x = SCENARIO.sites[0].val.x
    net = Network(SCENARIO.model)

    def probabilities(theta: torch.Tensor) -> torch.Tensor:
        net.load(theta)
        return net.module.eval()(x).softmax(1).detach()

    if mix == "parameters":
        expected = probabilities((weights[0].double() @ states.double()).float())
    else:
        expected = sum(w * probabilities(theta) for w, theta in zip(weights[0], states, strict=True))
    torch.testing.assert_close(load_served(tmp_path, "site-0").probabilities(x), expected, rtol=1e-4, atol=1e-5)


def test_names_that_no_file_may_have(tmp_path: Path) -> None:
    names = ["a/b", "a:b", "../up", "ü [x]"]
    scenario = replace(SCENARIO, sites=tuple(replace(s, name=n) for s, n in zip(SCENARIO.sites, names, strict=True)), groups=None)
    states = models(4)
    write_outputs(tmp_path, scenario, Serving(states, torch.eye(4)), {})
    files = list((tmp_path / "models").glob("*.safetensors"))
    assert len(files) == 4 and all(f.parent == tmp_path / "models" for f in files)
    for name, theta in zip(names, states, strict=True):
        assert same_bits(load_served(tmp_path, name).states[0], theta)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"not a run directory that has finished a round: summary\.json is missing"):
        read_summary(tmp_path)
    with pytest.raises(StoreError, match=rf"has no models: index\.json is missing; run 'emdcfl run --out {tmp_path}' first"):
        load_served(tmp_path, "site-0")
    write_outputs(tmp_path, SCENARIO, hard(models(2)), {})
    with pytest.raises(DataError, match=r"has no client 'site-9': did you mean 'site-\d'"):
        load_served(tmp_path, "site-9")
    with pytest.raises(DataError, match=r"expected inputs of shape \(8,\), got \(3,\)"):
        load_served(tmp_path, "site-0").probabilities(torch.zeros(2, 3))
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(StoreError, match=r"summary\.json: truncated or damaged"):
        read_summary(tmp_path)
    model = tmp_path / "models" / "cluster-0.safetensors"
    model.write_bytes(model.read_bytes()[:100])
    with pytest.raises(StoreError, match=r"cluster-0\.safetensors: truncated or damaged"):
        load_served(tmp_path, "site-0")


def distances(w: np.ndarray, epsilon: float) -> Distances:
    c = len(w)
    return Distances(w, np.zeros(c), np.full((c, c), epsilon), (~np.isnan(w)).astype(np.int8))


@pytest.mark.parametrize("epsilon", [0.025, 0.0])
def test_the_heat_map_takes_any_matrix(epsilon: float, recwarn: pytest.WarningsRecorder) -> None:
    w = np.array([[np.nan, -0.01, 0.3], [0.02, np.nan, np.nan], [0.0, 9.0, np.nan]])
    first, again, other = (png(heatmap(distances(w, epsilon), ["a", "b", "c"], clusters)) for clusters in ([0, 0, 1], [0, 0, 1], [0, 1, 0]))
    assert first.startswith(b"\x89PNG") and len(first) > 5000
    assert first == again != other
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]


@pytest.mark.parametrize("matrix", [np.full((3, 3), np.nan), np.linspace(0, 1, 70 * 70).reshape(70, 70)], ids=["nothing known", "many"])
def test_the_heat_map_takes_any_size(matrix: np.ndarray) -> None:
    names = [str(i) for i in range(len(matrix))]
    assert png(heatmap(distances(matrix, 0.025), names, [0] * len(names))).startswith(b"\x89PNG")


W = np.array([[np.nan, 0.01], [0.02, np.nan]])
PAIR = replace(SCENARIO, sites=SCENARIO.sites[:2], groups=None)
ONE_CLUSTER = Serving(models(1), torch.ones(2, 1), clusters=torch.tensor([0, 0]), distances=distances(W, 0.025))


def test_distances_are_written_beside_the_picture(tmp_path: Path) -> None:
    write_outputs(tmp_path, PAIR, ONE_CLUSTER, {"x": 1})
    with np.load(tmp_path / "distances.npz") as d:
        assert np.array_equal(d["W"], W, equal_nan=True) and set(d.files) == {"W", "tau", "epsilon", "kind", "noise_factor"}
    assert json.loads((tmp_path / "models" / "index.json").read_text())["clients"]["site-1"] == {"cluster-0": 1.0}


def test_many_large_models_are_written_with_the_last_round_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_outputs(tmp_path, SCENARIO, hard(models(2)), {"finished": False})
    assert (tmp_path / "models" / "cluster-0.safetensors").exists()
    monkeypatch.setattr("emdcfl.runs.outputs.OFTEN", models(2).numel() - 1)
    write_outputs(tmp_path, SCENARIO, hard(models(2)), {"finished": False})
    assert read_summary(tmp_path)["finished"] is False
    with pytest.raises(StoreError, match=r"has no models yet: .* go on with --resume"):
        load_served(tmp_path, "site-0")
    write_outputs(tmp_path, SCENARIO, hard(models(2)), {"finished": True})
    assert load_served(tmp_path, "site-0").weights == (1.0,)


@pytest.mark.slow
def test_pictures_are_drawn_after_the_last_round_and_again_when_they_were_damaged(tmp_path: Path) -> None:
    pictures = [tmp_path / "heatmap.png", tmp_path / "margins.png"]
    write_outputs(tmp_path, PAIR, ONE_CLUSTER, {"finished": False})
    assert not any(p.exists() for p in pictures)
    write_outputs(tmp_path, PAIR, ONE_CLUSTER, {"finished": True})
    drawn = [p.read_bytes() for p in pictures]
    for p in pictures:
        p.write_bytes(b"damaged")
    write_outputs(tmp_path, PAIR, ONE_CLUSTER, {"finished": True})
    assert [p.read_bytes() for p in pictures] == drawn


def test_file_names_fit_any_file_system_and_differ(tmp_path: Path) -> None:
    names = ["x" * 300, "x" * 299 + "y", "ü" * 200, "a/b", "A:b", "..", "서울", unicodedata.normalize("NFD", "서울")]
    files = outputs.file_names([f"client-{name}" for name in names])
    assert len({unicodedata.normalize("NFC", name).casefold() for name in files}) == len(names), "macOS has one file for both spellings"
    for name in files:
        (tmp_path / f"{name}.safetensors.new").write_text(name)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(f"{name}.safetensors.new" for name in files)
