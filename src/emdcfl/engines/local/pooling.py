"""Pooling before ReLU, which then passes over fewer numbers."""

from __future__ import annotations

from torch import nn


def pool_first(module: nn.Module) -> None:
    """Exchange a ReLU and the max-pool after it in every ``Sequential``, in place.

    Outputs and gradients stay the same bit for bit, because ReLU keeps the order of numbers.

    Examples
    --------
    >>> layers = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2))
    >>> pool_first(layers)
    >>> [type(layer).__name__ for layer in layers]
    ['MaxPool2d', 'ReLU']
    """
    for layers in [m for m in module.modules() if type(m) is nn.Sequential]:
        for i in range(len(layers) - 1):
            relu, pool = layers[i], layers[i + 1]
            if type(relu) is nn.ReLU and type(pool) is nn.MaxPool2d and not pool.return_indices:
                layers[i], layers[i + 1] = pool, relu


def halves(pool: nn.MaxPool2d) -> bool:
    """Whether a max-pool has windows of 2×2 pixels, side by side."""
    plain = pool.padding in (0, (0, 0)) and pool.dilation in (1, (1, 1)) and not pool.ceil_mode
    return plain and pool.kernel_size in (2, (2, 2)) and pool.stride in (2, (2, 2))
