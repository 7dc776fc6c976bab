"""A network that costs next to nothing at any image size, for runs that only show that the code works (``--scale smoke``)."""

from __future__ import annotations

from torch import Tensor, nn

from emdcfl.models.recipe import register


class SmokeModel(nn.Module):
    """Images averaged to 16×16, two small convolutions, an embedding of 64."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.AdaptiveAvgPool2d(16),
            nn.Conv2d(channels, 8, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(256, 64),
            nn.ReLU(),
        )
        self.head = nn.Linear(64, classes)

    def embed(self, x: Tensor) -> Tensor:
        """Return the ``(N, 64)`` input of the last linear layer."""
        z: Tensor = self.body(x)
        return z

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(x))
        return logits


@register
def smoke_model(*, classes: int = 10, channels: int = 3) -> nn.Module:
    """Build a network for images of any size."""
    return SmokeModel(channels, classes)
