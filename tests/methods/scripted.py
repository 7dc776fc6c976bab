"""A federation whose clients move by a given vector instead of training, so that what a method must do with it is known exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tests.methods.toy import toy
from torch import Tensor, nn

from emdcfl.core.client import TaskInfo
from emdcfl.core.federation import Failure, Federation, Inputs
from emdcfl.core.schema import Reply
from emdcfl.core.tasks import Training
from emdcfl.data.types import Scenario
from emdcfl.models.recipe import ModelRecipe

Move = Callable[[str, int, Tensor], Tensor]


def batch_norm_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))


def batch_norm_toy(**options: Any) -> Scenario:
    """The toy with a network that has BatchNorm."""
    return replace(toy(**options), model=ModelRecipe("tests.methods.scripted:batch_norm_mlp"))


class Scripted(Federation):
    """Clients named a, b, c, … that answer ``train`` with θ + move(client, round, θ).

    Parameters
    ----------
    move : callable
    n, steps : train sizes and step counts, by client; 10 and 1 where nothing is said
    absent : mapping
        Round → the clients that fail in it.
    """

    def __init__(
        self,
        clients: Sequence[str],
        move: Move,
        *,
        n: Mapping[str, int] | None = None,
        steps: Mapping[str, int] | None = None,
        absent: Mapping[int, str] | None = None,
        factory: Callable[[], nn.Module] = batch_norm_mlp,
        **options: Any,
    ) -> None:
        options = {"training": Training(), "on_failure": "continue", "quorum": 0.0, **options}
        super().__init__(list(clients), factory, **options)
        self.move, self.n, self.steps, self.absent = move, n or {}, steps or {}, absent or {}
        self.asked: list[tuple[int, str, Tensor]] = []

    def _dispatch(self, info: TaskInfo, inputs: Mapping[str, Inputs], common: Inputs) -> Iterator[tuple[str, Reply | Failure]]:
        for c, own in inputs.items():
            if c in self.absent.get(self.index, ""):
                yield c, Failure(c, info.name, self.index, "absent on purpose")
            elif info.name == "describe":
                yield c, {"n": self.n.get(c, 10), "m": 5, "key": bytes(32)}
            else:
                self.asked.append((self.index, c, own["theta"]))
                theta = own["theta"] + self.move(c, self.index, own["theta"])
                yield c, {"theta": theta, "n": self.n.get(c, 10), "loss": 0.0, "steps": self.steps.get(c, 1)}


PROBE = Scripted("z", lambda client, round, theta: theta)
"""A federation to ask for its layout and initial model."""


def at(fed: Federation, *values: float) -> Tensor:
    """A vector that is zero but for the first trainable entries."""
    out = torch.zeros(fed.layout.size)
    out[fed.layout.trainable.start : fed.layout.trainable.start + len(values)] = torch.tensor(values)
    return out


def direct(fed: Federation, theta: Tensor, steps: float, scope: str) -> np.ndarray[Any, Any]:
    """The vector a scope means, written out."""
    part = fed.layout.scope("F" if scope == "state" else scope)  # type: ignore[arg-type]
    counters = [steps] * len(fed.layout.counters) if scope == "state" else []
    return np.concatenate([theta[part].double().numpy(), counters])
