"""Convolutional networks: the paper's CNN for 28×28 images, and a small one for 8×8 digits.

Imports torch and the recipe registry only.
"""

from __future__ import annotations

from torch import Tensor, nn

from emdcfl.core.errors import ModelError
from emdcfl.models.recipe import register


class ConvNet(nn.Module):
    """Two 3×3 convolutions, one max-pool, one hidden layer; the embedding is what leaves the hidden layer's ReLU.

    Parameters
    ----------
    channels, classes : int
        Input channels and outputs.
    size : int
        Height and width of the (square) input.
    widths : (int, int)
        Filters of the two convolutions.
    embedding : int
        Width of the hidden layer.
    """

    def __init__(self, channels: int, classes: int, size: int, widths: tuple[int, int], embedding: int) -> None:
        super().__init__()
        first, second = widths
        self.input_shape = (channels, size, size)
        self.body = nn.Sequential(
            nn.Conv2d(channels, first, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(first, second, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(second * (size // 2) ** 2, embedding),
            nn.ReLU(),
        )
        self.head = nn.Linear(embedding, classes)

    def embed(self, x: Tensor) -> Tensor:
        """Return the ``(N, embedding)`` input of the last linear layer."""
        if tuple(x.shape[1:]) != self.input_shape:
            raise ModelError(
                f"the network was built for inputs of shape {self.input_shape}, got {tuple(x.shape[1:])}: "
                "set the model's channels and size to those of the data"
            )
        z: Tensor = self.body(x)
        return z

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(x))
        return logits


@register
def cnn(*, channels: int = 1, classes: int = 10, size: int = 28) -> nn.Module:
    """Build the paper's CNN: 64 and 128 filters, embedding width 128 (3,287,178 parameters for one channel, 28×28 and 10 classes)."""
    return ConvNet(channels, classes, size, (64, 128), 128)


@register
def small_cnn(*, channels: int = 1, classes: int = 10, size: int = 8) -> nn.Module:
    """Build a CNN for small images: 16 and 32 filters, embedding width 64 (38,282 parameters for 8×8 digits)."""
    return ConvNet(channels, classes, size, (16, 32), 64)
