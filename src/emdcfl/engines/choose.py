"""Which engine ``auto`` stands for: a fixed rule from measurements, so that the same config gives the same engine everywhere.

With a GPU it is the CUDA engine. On a CPU, training many clients at once is faster while a step is small: Python and operator calls
cost about a millisecond per client and step, and a stack of clients pays that once. ``docs/results/tables/performance.md`` has the table.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch
from torch import Tensor, nn

from emdcfl.core.keys import global_seed
from emdcfl.data.types import Scenario

SMALL_STEP = 1.0e7
"""Largest step that is faster in a stack: multiply-adds of one client's forward pass over one batch."""

MIN_CLIENTS = 4
"""With fewer clients, setting up a stack takes longer than it saves."""


def multiply_adds(scenario: Scenario) -> float:
    """Return the multiply-adds of one sample's forward pass, those of linear layers and convolutions."""
    with global_seed(0):
        module = scenario.model.untrained()()
    module.train(False)
    total = 0.0

    def count(layer: nn.Module, _inputs: Any, out: Tensor) -> None:
        nonlocal total
        if isinstance(layer, nn.Linear):
            total += out.numel() * layer.in_features
        elif isinstance(layer, nn.modules.conv._ConvNd):
            total += out.numel() * layer.in_channels // layer.groups * math.prod(layer.kernel_size)

    for layer in module.modules():  # not torch's FlopCounterMode: importing it takes seconds
        layer.register_forward_hook(count)
    sample = next(site.train.x[:1] for site in scenario.sites if len(site.train))
    with torch.no_grad():
        module(scenario.preprocess(sample))
    return total


def choose(scenario: Scenario, *, device: torch.device, batch_size: int, workers: int = 1, participants: int | None = None) -> str:
    """Return the engine for a scenario: ``"cuda"``, ``"batched"`` or ``"sequential"`` (also over several worker processes)."""
    if workers > 1:
        return "sequential"
    if device.type == "cuda":
        return "cuda"
    if (participants or len(scenario.sites)) < MIN_CLIENTS:
        return "sequential"
    batch = min(batch_size, statistics.median(len(site.train) for site in scenario.sites))
    return "batched" if multiply_adds(scenario) * batch <= SMALL_STEP else "sequential"
