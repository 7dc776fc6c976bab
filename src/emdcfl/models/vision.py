"""torchvision backbones with a fresh linear head; embedding points as in the paper.

=================  ===============================================  =========
network            embedding                                        width
=================  ===============================================  =========
resnet18           after global average pooling                     512
resnet50           after global average pooling                     2048
efficientnet_b3    after global average pooling, no dropout         1536
vit_b_16           class token after the encoder's final norm       768
convnext_base      after global average pooling, no final norm      1024
=================  ===============================================  =========

Pretrained weights come from ``EMDCFL_WEIGHTS``, ``TORCH_HOME``, from a file, or are downloaded; they are never unpickled as code.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import os
import re
from pathlib import Path
from typing import Any
from urllib.error import URLError

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from emdcfl.core.errors import ModelError
from emdcfl.models.networks import Classifier
from emdcfl.models.recipe import register

IMAGENET = "imagenet"
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZE = 224
_SMALLEST = 32  # the networks halve the size five times


class Backbone(Classifier):
    """A feature extractor, which maps images to ``(N, width)`` or ``(N, width, 1, 1)``, and the linear layer on top of it.

    ``exact`` is the only input size the network takes (vision transformers), if there is one.
    """

    channels_last = True

    def __init__(self, body: nn.Module, width: int, classes: int, *, exact: int | None = None) -> None:
        super().__init__()
        self.body = body
        self.exact = exact
        self.head = nn.Linear(width, classes)

    def embed(self, x: Tensor) -> Tensor:
        if x.dim() != 4 or x.shape[1] != 3:
            raise ModelError(f"the network takes RGB images (N, 3, H, W), got {tuple(x.shape)}: use cnn for grey images")
        if self.exact is not None and tuple(x.shape[2:]) != (self.exact, self.exact):
            raise ModelError(f"the network takes {self.exact}×{self.exact} images, got {x.shape[2]}×{x.shape[3]}: resize to {self.exact}")
        if min(x.shape[2:]) < _SMALLEST:
            raise ModelError(
                f"the network needs images of at least {_SMALLEST}×{_SMALLEST}, got {x.shape[2]}×{x.shape[3]}: resize to {SIZE}"
            )
        z: Tensor = self.body(x)
        return z.flatten(1)


@register
def resnet18(*, classes: int = 10, weights: str | None = IMAGENET) -> nn.Module:
    """ResNet-18 (11,181,642 parameters with 10 classes); ``weights`` is ``"imagenet"``, ``None`` or a file."""
    return Backbone(_network("resnet18", "IMAGENET1K_V1", weights, drop="fc"), 512, classes)


@register
def resnet50(*, classes: int = 10, weights: str | None = IMAGENET) -> nn.Module:
    """ResNet-50; ``weights`` is ``"imagenet"``, ``None`` or a file."""
    return Backbone(_network("resnet50", "IMAGENET1K_V2", weights, drop="fc"), 2048, classes)


@register
def efficientnet_b3(*, classes: int = 10, weights: str | None = IMAGENET) -> nn.Module:
    """EfficientNet-B3 without the dropout before its head; ``weights`` is ``"imagenet"``, ``None`` or a file."""
    net = _network("efficientnet_b3", "IMAGENET1K_V1", weights, drop="classifier")
    return Backbone(nn.Sequential(net.features, net.avgpool), 1536, classes)


@register
def vit_b_16(*, classes: int = 10, weights: str | None = IMAGENET) -> nn.Module:
    """ViT-B/16 at 224×224, published head dropped; ``weights`` is ``"imagenet"``, ``None`` or a file."""
    net = _network("vit_b_16", "IMAGENET1K_V1", weights, drop="heads")
    return Backbone(net, 768, classes, exact=SIZE)


@register
def convnext_base(*, classes: int = 10, weights: str | None = IMAGENET) -> nn.Module:
    """ConvNeXt-Base without the layer norm of its classifier; ``weights`` is ``"imagenet"``, ``None`` or a file."""
    net = _network("convnext_base", "IMAGENET1K_V1", weights, drop="classifier")
    return Backbone(nn.Sequential(net.features, net.avgpool), 1024, classes)


def _network(name: str, edition: str, weights: str | None, *, drop: str) -> Any:
    """Build a torchvision network without its published head, the attribute ``drop``, and load the weights."""
    models = torchvision_models()
    net = getattr(models, name)(weights=None)
    setattr(net, drop, nn.Identity())
    if weights is None:
        return net
    path = imagenet_file(models.get_model_weights(name)[edition].url) if weights == IMAGENET else Path(weights)
    load_backbone(net, load_weights(path), ignore=f"{drop}.", origin=str(path))
    return net


def imagenet_file(url: str) -> Path:
    """Return the local file of published weights; download it when it is neither in ``$EMDCFL_WEIGHTS`` nor in torch's own folder."""
    name = url.rsplit("/", 1)[-1]
    given = os.environ.get("EMDCFL_WEIGHTS")
    path = Path(given).expanduser() / name if given else Path()
    if not path.is_file():
        path = Path(torch.hub.get_dir()) / "checkpoints" / name
    if not path.exists():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(url, str(path), hash_prefix=_hash_in(name), progress=True)
        except (URLError, OSError, RuntimeError) as error:
            raise ModelError(
                f"the ImageNet weights {name} are not in {given or path.parent} and could not be downloaded ({error}): "
                f"put the file there, set EMDCFL_WEIGHTS to its folder, or pass weights=FILE, or weights=None for random weights"
            ) from error
    expected = _hash_in(name)
    if expected and not _sha256(path, path.stat().st_mtime_ns).startswith(expected):
        raise ModelError(f"{path} is damaged: its SHA-256 does not start with {expected}; delete it and run again")
    return path


def load_weights(path: str | Path) -> dict[str, Tensor]:
    """Read a state dictionary from a ``.pth`` (tensors only) or ``.safetensors`` file."""
    path = Path(path)
    if not path.is_file():
        raise ModelError(f"no such weights file: {path}")
    return dict(_load(str(path), path.stat().st_mtime_ns))


@functools.lru_cache(maxsize=1)  # a run builds the same network once per client and cluster
def _load(path: str, mtime_ns: int) -> dict[str, Tensor]:
    try:
        state: Any = load_file(path) if path.endswith(".safetensors") else torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # any reader error means the same to the user
        raise ModelError(f"cannot read weights from {path}: {str(error).splitlines()[0]}") from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ModelError(f"{path} holds no state dictionary of tensors: save it with torch.save(model.state_dict(), FILE)")
    return state


def load_backbone(module: nn.Module, state: dict[str, Tensor], *, ignore: str, origin: str) -> None:
    """Load all but the keys that start with ``ignore`` (the published head); anything else missing or of another shape is an error."""
    state = {key: value for key, value in state.items() if not key.startswith(ignore)}
    # Files from before torch 0.4.1 have no batch counters; ours then stay at zero.
    own = {key: value for key, value in module.state_dict().items() if key in state or not key.endswith("num_batches_tracked")}
    for key, value in own.items():
        if key not in state:
            raise ModelError(f"{origin} has no tensor {key!r}: these are not weights of this network")
        if state[key].shape != value.shape:
            raise ModelError(f"{origin}: {key!r} has shape {tuple(state[key].shape)}, the network needs {tuple(value.shape)}")
    module.load_state_dict({key: state[key] for key in own}, strict=False)


def _hash_in(name: str) -> str | None:
    match = re.search(r"-([0-9a-f]{8,})\.", name)
    return match.group(1) if match else None


@functools.lru_cache(maxsize=8)
def _sha256(path: Path, mtime_ns: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_NOT_LOADED = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def torchvision_models() -> Any:
    """Import and return ``torchvision.models``, also beside a build of torch that torchvision's compiled operators do not fit.

    The operators (``nms`` and friends, for object detection) are built against one build of torch. Where they do not load, importing
    torchvision fails, as it registers shape functions for two that do not exist. The networks here use none: only then are their names
    declared without an implementation, and calling one is still an error.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        raise ModelError("this network needs torchvision: install the extra with  pip install 'emdcfl[vision]'")
    if not _compiled_operators_load(Path(spec.origin).parent):
        _declare_missing_operators()
    try:
        return importlib.import_module("torchvision.models")
    except (ImportError, RuntimeError) as error:
        raise ModelError(f"torchvision does not fit torch {torch.__version__}: {str(error).splitlines()[0]}") from error


def _compiled_operators_load(folder: Path) -> bool:
    if hasattr(torch.ops.torchvision, "nms"):
        return True
    for file in sorted(folder.glob("_C*.so")) + sorted(folder.glob("_C*.pyd")):
        try:
            torch.ops.load_library(str(file))
        except (OSError, ImportError):
            continue
        return True
    return False


@functools.cache  # once, and the declarations live as long as the library, which the cache keeps
def _declare_missing_operators() -> torch.library.Library:
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _NOT_LOADED:
        library.define(schema)
    return library
