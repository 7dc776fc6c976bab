"""Multi-layer perceptron for tables.

Imports torch and the recipe registry only.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from emdcfl.core.errors import ModelError
from emdcfl.models.recipe import register


class MLP(nn.Module):
    """Linear layers with ReLU; the embedding is what leaves the last hidden layer."""

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
        """Return the ``(N, hidden[-1])`` input of the last linear layer; images are flattened."""
        x = x.flatten(1)
        if x.shape[1] != self.features:
            raise ModelError(
                f"the network was built for {self.features} features, got {x.shape[1]}: set the model's features to that of the data"
            )
        z: Tensor = self.body(x)
        return z

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(x))
        return logits


@register
def mlp(*, features: int, classes: int, hidden: Sequence[int] = (64, 64)) -> nn.Module:
    """Build a perceptron with ReLU hidden layers of the given widths."""
    return MLP(features, classes, tuple(hidden))
