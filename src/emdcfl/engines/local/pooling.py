"""Pooling before ReLU, which then passes over fewer numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeGuard

from torch import nn

from emdcfl.models.networks import Classifier


def whole_chains(module: nn.Module) -> Iterator[nn.Sequential]:
    """Yield the ``Sequential`` modules of which nobody sees what lies between their layers.

    These are a network that is one, those of networks of ours, and those inside them; another network may use its layers one by one.

    Examples
    --------
    >>> class Own(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.body = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2))
    >>> len(list(whole_chains(Own()))), len(list(whole_chains(nn.Sequential(Own(), Own().body))))
    (0, 2)
    """
    if isinstance(module, Classifier):
        yield from (m for m in module.modules() if _is_plain(m))
    elif _is_plain(module):
        yield module
        for layer in module:
            yield from whole_chains(layer)


def _is_plain(module: nn.Module) -> TypeGuard[nn.Sequential]:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def pool_first(module: nn.Module) -> None:
    """Exchange a ReLU and the max-pool after it in every chain of layers (``whole_chains``), in place.

    Outputs and gradients stay the same bit for bit, because ReLU keeps the order of numbers.

    Examples
    --------
    >>> layers = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2))
    >>> pool_first(layers)
    >>> [type(layer).__name__ for layer in layers]
    ['MaxPool2d', 'ReLU']
    """
    for layers in list(whole_chains(module)):
        for i in range(len(layers) - 1):
            relu, pool = layers[i], layers[i + 1]
            if type(relu) is nn.ReLU and type(pool) is nn.MaxPool2d and not pool.return_indices:
                layers[i], layers[i + 1] = pool, relu


def halves(pool: nn.MaxPool2d) -> bool:
    """Whether a max-pool has windows of 2×2 pixels, side by side."""
    plain = pool.padding in (0, (0, 0)) and pool.dilation in (1, (1, 1)) and not pool.ceil_mode
    return plain and pool.kernel_size in (2, (2, 2)) and pool.stride in (2, (2, 2))
