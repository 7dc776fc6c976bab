from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

from emdcfl.core.errors import ModelError
from emdcfl.core.keys import global_seed
from emdcfl.models import BUILDERS, ModelRecipe, vision

WIDTHS = {"resnet18": 512, "resnet50": 2048, "efficientnet_b3": 1536, "vit_b_16": 768, "convnext_base": 1024}


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(("channels", "parameters"), [(1, 3_287_178), (3, 3_288_330)])
def test_cnn_of_the_paper(channels: int, parameters: int) -> None:
    with global_seed(0):
        module = ModelRecipe("cnn", {"channels": channels})()
    assert count(module) == parameters
    assert module.embed(torch.zeros(2, channels, 28, 28)).shape == (2, 128)
    assert not list(module.buffers())
    norm = torch.cat([p.detach().flatten() for p in module.parameters()]).norm()
    assert float(norm) == pytest.approx(10.5, abs=0.3)


@pytest.mark.parametrize(
    ("recipe", "shape", "width"),
    [
        (ModelRecipe("small_cnn"), (1, 8, 8), 64),
        (ModelRecipe("cnn", {"channels": 3, "size": 32, "classes": 7}), (3, 32, 32), 128),
        (ModelRecipe("pooled_cnn", {"channels": 3, "size": 50}), (3, 50, 50), 128),
        (ModelRecipe("mlp", {"features": 5, "classes": 3, "hidden": [20, 10]}), (5,), 10),
    ],
)
def test_forward_is_the_head_of_the_embedding(recipe: ModelRecipe, shape: tuple[int, ...], width: int) -> None:
    module = recipe()
    x = torch.rand(4, *shape)
    z = module.embed(x)
    assert z.shape == (4, width)
    assert torch.equal(module(x), module.head(z))


def test_same_seed_same_weights() -> None:
    states = []
    for seed in (0, 0, 1):
        with global_seed(seed):
            states.append(torch.cat([p.detach().flatten() for p in ModelRecipe("small_cnn")().parameters()]))
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


@pytest.mark.slow
@pytest.mark.parametrize("name", WIDTHS)
def test_backbones(name: str) -> None:
    module = ModelRecipe(name, {"classes": 10, "weights": None})().eval()
    with torch.no_grad():
        z = module.embed(torch.rand(1, 3, 224, 224))
        assert z.shape == (1, WIDTHS[name])
        assert module(torch.rand(1, 3, 224, 224)).shape == (1, 10)
    linear = [m for m in module.modules() if isinstance(m, nn.Linear)]
    assert linear[-1] is module.head
    if name == "resnet18":
        assert count(module) == 11_181_642
        assert sum(isinstance(m, nn.BatchNorm2d) for m in module.modules()) == 20
    assert not any(p.shape == (1000,) for p in module.parameters())


def test_wrong_input_sizes_say_so() -> None:
    with pytest.raises(ModelError, match=r"built for inputs of shape \(1, 28, 28\), got \(3, 28, 28\)"):
        ModelRecipe("cnn")()(torch.zeros(1, 3, 28, 28))
    with pytest.raises(ModelError, match="built for 5 features, got 6"):
        ModelRecipe("mlp", {"features": 5, "classes": 2})()(torch.zeros(1, 6))
    net = ModelRecipe("resnet18", {"weights": None})()
    with pytest.raises(ModelError, match="takes RGB images"):
        net(torch.zeros(1, 1, 224, 224))
    with pytest.raises(ModelError, match="at least 32×32, got 28×28"):
        net(torch.zeros(1, 3, 28, 28))
    with pytest.raises(ModelError, match="at least one hidden layer"):
        ModelRecipe("mlp", {"features": 5, "classes": 2, "hidden": []})()


def test_vision_transformer_takes_one_size() -> None:
    from emdcfl.models.vision import Backbone

    with pytest.raises(ModelError, match="takes 224×224 images, got 64×64"):
        Backbone(nn.Flatten(), 4, 2, exact=224)(torch.zeros(1, 3, 64, 64))


def test_recipes_are_json_and_find_builders() -> None:
    recipe = ModelRecipe("cnn", {"channels": 3})
    assert ModelRecipe.from_dict(recipe.as_dict()) == recipe
    assert ModelRecipe("resnet18", {"classes": 3, "weights": "imagenet"}).untrained().options == {"classes": 3, "weights": None}
    assert recipe.untrained() is recipe
    with pytest.raises(ModelError, match="did you mean 'resnet18'"):
        ModelRecipe("resnet81")()
    with pytest.raises(ModelError, match="does not take these options"):
        ModelRecipe("cnn", {"chanels": 3})()
    assert {"mlp", "cnn", *WIDTHS} <= set(BUILDERS)


def test_own_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = types.ModuleType("mine")
    mine.net = lambda width=3: nn.Linear(width, 2)  # type: ignore[attr-defined]
    mine.number = lambda: 5  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mine", mine)
    assert isinstance(ModelRecipe("mine:net", {"width": 4})(), nn.Linear)
    with pytest.raises(ModelError, match=r"must return a torch\.nn\.Module, got int"):
        ModelRecipe("mine:number")()
    with pytest.raises(ModelError, match="cannot import model 'mine:nothing'"):
        ModelRecipe("mine:nothing")()


def test_weights_from_files(tmp_path: Path) -> None:
    torch.manual_seed(0)
    source = ModelRecipe("resnet18", {"weights": None})().body
    path = tmp_path / "w.pth"
    torch.save({**source.state_dict(), "fc.weight": torch.zeros(1000, 512), "fc.bias": torch.zeros(1000)}, path)
    loaded = ModelRecipe("resnet18", {"weights": str(path), "classes": 4})()
    assert torch.equal(loaded.body.conv1.weight, source.conv1.weight)
    torch.save({"conv1.weight": torch.zeros(1)}, path)
    with pytest.raises(ModelError, match=r"conv1\.weight' has shape \(1,\), the network needs \(64, 3, 7, 7\)|has no tensor"):
        ModelRecipe("resnet18", {"weights": str(path)})()
    path.write_bytes(b"rubbish")
    with pytest.raises(ModelError, match="cannot read weights"):
        ModelRecipe("resnet18", {"weights": str(path)})()
    with pytest.raises(ModelError, match="no such weights file"):
        ModelRecipe("resnet18", {"weights": str(tmp_path / "none.pth")})()


def test_published_weights_are_looked_for_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    url = "https://example.invalid/net-0123abcd.pth"

    def offline(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(torch.hub, "download_url_to_file", offline)
    with pytest.raises(
        ModelError, match=r"weights net-0123abcd\.pth are not in .* could not be downloaded \(no network\): put the file there"
    ):
        vision.imagenet_file(url)
    (tmp_path / "checkpoints" / "net-0123abcd.pth").write_bytes(b"cut off")
    with pytest.raises(ModelError, match="is damaged"):
        vision.imagenet_file(url)
    sound = tmp_path / "checkpoints" / "net-ba7816bf.pth"
    sound.write_bytes(b"ab")
    with pytest.raises(ModelError, match="delete it and run again"):
        vision.imagenet_file(f"https://example.invalid/{sound.name}")
    sound.unlink()
    sound.write_bytes(b"abc")
    assert vision.imagenet_file(f"https://example.invalid/{sound.name}") == sound  # in the same process
    own = tmp_path / "own" / "net-edeaaff3.pth"  # the name holds the start of the file's SHA-256
    own.parent.mkdir()
    own.write_bytes(b"abc")
    monkeypatch.setenv("EMDCFL_WEIGHTS", str(own.parent))
    with pytest.raises(ModelError, match=r"own.*is damaged"):
        vision.imagenet_file(f"https://example.invalid/{own.name}")
    own = own.rename(own.with_name("net-ba7816bf.pth"))
    assert vision.imagenet_file(f"https://example.invalid/{own.name}") == own


DOGS, ELEPHANTS = range(151, 269), (101, 385, 386)
"""ImageNet's class numbers; its three kinds of elephant are tusker (101), Indian (385) and African elephant (386)."""


@pytest.mark.slow
def test_imagenet_weights_know_dogs_and_elephants(
    data_dir: Path, weights_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights and the preprocessing together: 100 photos of PACS, published 1000-class head."""
    import numpy as np

    from emdcfl.data import sources
    from emdcfl.data.scenarios.rotated import IMAGENET

    monkeypatch.setenv("EMDCFL_CACHE", str(tmp_path))
    state = vision.load_weights(weights_dir / "resnet18-f37072fd.pth")
    net = ModelRecipe("resnet18", {"classes": 1000, "weights": str(weights_dir / "resnet18-f37072fd.pth")})().eval()
    net.head.load_state_dict({"weight": state["fc.weight"], "bias": state["fc.bias"]})
    table = sources.table("pacs", "train", data_dir)
    photos = table.columns["domain"] == table.vocabularies["domain"].index("photo")
    chosen = [np.flatnonzero(photos & (table.labels == table.classes.index(name)))[:50] for name in ("dog", "elephant")]
    source = table.load(np.concatenate(chosen))
    with torch.no_grad():
        predicted = torch.cat([net(IMAGENET(x)).argmax(dim=1) for x in torch.from_numpy(source.images).split(25)]).tolist()
    right = sum(p in (DOGS if name == "dog" else ELEPHANTS) for p, name in zip(predicted, ["dog"] * 50 + ["elephant"] * 50, strict=True))
    assert right >= 75
