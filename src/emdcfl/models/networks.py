"""Networks that train from scratch: the paper's CNN, a small one for 8×8 digits, one for own images, a perceptron for tables.

``smoke_model`` costs next to nothing at any image size, for runs that only show that the code works (``--scale smoke``).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from emdcfl.core.errors import ModelError
from emdcfl.models.recipe import register


class Classifier(nn.Module):
    """A network with a linear ``head`` on top of an embedding."""

    head: nn.Linear
    channels_last = False
    """Whether images may come with the channels of a pixel side by side (``x.view`` fails on such), which is faster on the CPU."""

    def embed(self, x: Tensor) -> Tensor:
        """Return the input of the head, ``(N, width)``."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(x))
        return logits


class ConvNet(Classifier):
    """Blocks of 3×3 convolutions, each block with a max-pool after it, and one hidden layer, whose ReLU gives the embedding.

    ``blocks`` lists the filters of the convolutions, block by block; the input is square, ``size`` pixels wide.
    """

    channels_last = True

    def __init__(self, channels: int, classes: int, size: int, blocks: Sequence[Sequence[int]], embedding: int) -> None:
        super().__init__()
        self.input_shape = (channels, size, size)
        layers: list[nn.Module] = []
        for widths in blocks:
            for width in widths:
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
                channels = width
            layers.append(nn.MaxPool2d(2))
            size //= 2
        self.body = nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * size**2, embedding), nn.ReLU())
        self.head = nn.Linear(embedding, classes)

    def embed(self, x: Tensor) -> Tensor:
        if tuple(x.shape[1:]) != self.input_shape:
            raise ModelError(
                f"the network was built for inputs of shape {self.input_shape}, got {tuple(x.shape[1:])}: "
                "set the model's channels and size to those of the data"
            )
        z: Tensor = self.body(x)
        return z


class MLP(Classifier):
    """Linear layers with ReLU; the embedding is the output of the last hidden layer. Images are flattened."""

    def __init__(self, features: int, classes: int, hidden: Sequence[int]) -> None:
        super().__init__()
        if not hidden:
            raise ModelError("an mlp needs at least one hidden layer (its output is the embedding), got hidden = []")
        self.features = features
        layers: list[nn.Module] = []
        width = features
        for units in hidden:
            layers += [nn.Linear(width, units), nn.ReLU()]
            width = units
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(width, classes)

    def embed(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        if x.shape[1] != self.features:
            raise ModelError(
                f"the network was built for {self.features} features, got {x.shape[1]}: set the model's features to that of the data"
            )
        z: Tensor = self.body(x)
        return z


@register
def cnn(*, channels: int = 1, classes: int = 10, size: int = 28) -> nn.Module:
    """Build the paper's CNN: 64 and 128 filters, embedding width 128 (3,287,178 parameters for one channel, 28×28 and 10 classes)."""
    return ConvNet(channels, classes, size, [(64, 128)], 128)


@register
def small_cnn(*, channels: int = 1, classes: int = 10, size: int = 8) -> nn.Module:
    """Build a CNN for small images: 16 and 32 filters, embedding width 64 (38,282 parameters for 8×8 digits)."""
    return ConvNet(channels, classes, size, [(16, 32)], 64)


@register
def pooled_cnn(*, channels: int = 1, classes: int = 10, size: int = 28) -> nn.Module:
    """Build a CNN that halves images after every convolution until 8×8 is reached: 32, 64, 64, … filters, embedding width 128.

    With one channel, 28×28 and 10 classes it has 421,642 parameters, and 4 million multiply-adds a sample where ``cnn`` has 61 million.
    """
    blocks = [[32]]
    while size >> len(blocks) > 8:
        blocks.append([64])
    return ConvNet(channels, classes, size, blocks, 128)


@register
def mlp(*, features: int, classes: int, hidden: Sequence[int] = (64, 64)) -> nn.Module:
    """Build a perceptron with ReLU hidden layers of the given widths."""
    return MLP(features, classes, tuple(hidden))


class SmokeModel(Classifier):
    """Images averaged to 16×16, two small convolutions, an embedding of 64."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        inside = ConvNet(channels, classes, 16, [(8,), (16,)], 64)
        self.body = nn.Sequential(nn.AdaptiveAvgPool2d(16), *inside.body)
        self.head = inside.head

    def embed(self, x: Tensor) -> Tensor:
        z: Tensor = self.body(x)
        return z


@register
def smoke_model(*, classes: int = 10, channels: int = 3) -> nn.Module:
    """Build a network for images of any size."""
    return SmokeModel(channels, classes)
