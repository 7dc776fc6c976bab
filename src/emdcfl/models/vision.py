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
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from emdcfl.core.errors import ModelError
from emdcfl.models import weights as stored
from emdcfl.models._torchvision import torchvision_models
from emdcfl.models.networks import Classifier
from emdcfl.models.recipe import register

IMAGENET = "imagenet"
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZE = 224
_SMALLEST = 32  # the networks halve the size five times


class Backbone(Classifier):
    """A feature extractor and the linear layer on top of it.

    Parameters
    ----------
    body : Module
        Maps images to ``(N, width)``, or to ``(N, width, 1, 1)``.
    exact : int or None
        The only input size the network takes (vision transformers), if there is one.
    """

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
    return _resnet("resnet18", "IMAGENET1K_V1", 512, classes, weights)


@register
def resnet50(*, classes: int = 10, weights: str | None = IMAGENET) -> nn.Module:
    """ResNet-50; ``weights`` is ``"imagenet"``, ``None`` or a file."""
    return _resnet("resnet50", "IMAGENET1K_V2", 2048, classes, weights)


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


def _resnet(name: str, edition: str, width: int, classes: int, weights: str | None) -> nn.Module:
    return Backbone(_network(name, edition, weights, drop="fc"), width, classes)


def _network(name: str, edition: str, weights: str | None, *, drop: str) -> Any:
    """Build a torchvision network without its published head, the attribute ``drop``, and load the weights."""
    models = torchvision_models()
    net = getattr(models, name)(weights=None)
    setattr(net, drop, nn.Identity())
    if weights is None:
        return net
    path = stored.imagenet_file(models.get_model_weights(name)[edition].url) if weights == IMAGENET else Path(weights)
    stored.load_backbone(net, stored.load(path), ignore=f"{drop}.", origin=str(path))
    return net
