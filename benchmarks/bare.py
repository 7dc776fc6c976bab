"""FedAvg written by hand, which the engines are compared with, and a scenario of given samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from emdcfl.core.tasks import Training
from emdcfl.data.types import Preprocess, Scenario, Site, Split
from emdcfl.models.recipe import ModelRecipe


def scenario(name: str, x: Tensor, y: Tensor, *, clients: int, samples: int, recipe: ModelRecipe, preprocess: Preprocess) -> Scenario:
    """Deal samples out to clients, beginning again where they run out."""
    sites = []
    for c in range(clients):
        chosen = torch.arange(c * samples, (c + 1) * samples) % len(y)
        split = Split(x[chosen], y[chosen])
        sites.append(Site(f"client-{c}", split, split, {"test": split}))
    return Scenario(name, tuple(sites), tuple(str(k) for k in range(10)), preprocess, recipe)


def mean_loss(world: Scenario, module: torch.nn.Module, device: str) -> float:
    """Return a model's mean cross-entropy over the train data of all clients."""
    module.train(False)
    total = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for site in world.sites:
            for x, y in zip(site.train.x.split(256), site.train.y.split(256), strict=True):
                logits = module(world.preprocess(x.to(device))).float().cpu()
                total += F.cross_entropy(logits, y, reduction="sum")
    return total.item() / sum(len(site.train) for site in world.sites)


def sgd(
    net: torch.nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    y: Tensor,
    training: Training,
    order: torch.Generator | None = None,
) -> Iterator[None]:
    """Train a module as one would by hand; yields after every epoch."""
    optimiser = torch.optim.SGD(net.parameters(), lr=training.lr, momentum=training.momentum, weight_decay=training.weight_decay)
    for _ in range(training.local_epochs):
        for batch in torch.randperm(len(y), generator=order, device=y.device).split(training.batch_size):
            optimiser.zero_grad()
            loss(x[batch], y[batch]).backward()
            optimiser.step()
        yield


class Bare:
    """A module, torch.optim.SGD, an average of state dicts; in torch's default precision, or under bfloat16 autocast (``low``)."""

    def __init__(self, world: Scenario, training: Training, *, device: str = "cpu", low: bool = False) -> None:
        torch.manual_seed(0)
        self.world, self.training, self.device, self.low = world, training, device, low
        self.net = world.model().to(device)
        self.theta = {k: v.clone() for k, v in self.net.state_dict().items()}
        self.data = [(s.train.x.to(device), s.train.y.to(device)) for s in world.sites]

    def __call__(self, _: int) -> None:
        net, training = self.net, self.training
        total = sum(len(y) for _, y in self.data)
        mean = {k: torch.zeros_like(v) for k, v in self.theta.items()}
        for x, y in self.data:
            net.load_state_dict(self.theta)
            for _ in sgd(net, self._loss, x, y, training):
                pass
            for k, v in net.state_dict().items():
                if v.is_floating_point():  # not BatchNorm's counters
                    mean[k] += v * (len(y) / total)
        self.theta = mean
        if self.device != "cpu":
            torch.cuda.synchronize()

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        if not self.low:  # no context manager, so that the loop is as fast as one written by hand
            return F.cross_entropy(self.net(self.world.preprocess(x)), y)
        with torch.autocast(self.device, dtype=torch.bfloat16):
            return F.cross_entropy(self.net(self.world.preprocess(x)), y)

    def processor(self) -> float:
        return time.process_time()

    def loss(self) -> float:
        self.net.load_state_dict(self.theta)
        return mean_loss(self.world, self.net, self.device)
