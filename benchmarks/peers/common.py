"""What the scripts of all peers share: the workload, the network, and taking turns with ``engines.py``.

Imports torch and numpy only: it runs in environments that know nothing of ``emdcfl``.

A script is started with one argument, the workload (an ``.npz`` file that ``drive.py`` wrote), and talks to its parent by lines: it says
``ready`` at the boundary of a round, reads ``go`` or ``stop``, and plays one round per ``go``. Before it stops it says the mean loss of
its global model over all train data, so that a contestant that computes something else is found out.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

_line = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # what a framework prints must not mix with the turns
torch.set_num_threads(1)

# Two peers import torchvision, whose compiled operators do not load beside a CPU-only torch. Nothing here uses them, but their names must
# exist before torchvision is imported (which is why scripts import this module first).
_operators = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


@dataclass(frozen=True)
class Workload:
    """Everybody's train data, ready for the network, and the settings of local SGD."""

    clients: list[tuple[Tensor, Tensor]]
    settings: Mapping[str, Any]
    initial: list[Tensor]

    @classmethod
    def read(cls, path: str | None = None) -> Workload:
        """Read the file named on the command line (or in ``WORKLOAD``, where a framework starts processes of its own)."""
        path = path or os.environ.get("WORKLOAD") or sys.argv[1]
        os.environ["WORKLOAD"] = str(Path(path).resolve())
        with np.load(path, allow_pickle=False) as file:
            settings = json.loads(str(file["settings"]))
            x, y = torch.from_numpy(file["x"]), torch.from_numpy(file["y"])
            initial = [torch.from_numpy(file[f"parameter {i}"]) for i in range(settings["parameters"])]
        return cls(list(zip(x.split(settings["sizes"]), y.split(settings["sizes"]), strict=True)), settings, initial)

    def network(self) -> nn.Module:
        """Return the network with the initial weights."""
        module = {"mlp": _mlp, "cnn": _cnn}[self.settings["model"]]()
        with torch.no_grad():
            for mine, given in zip(module.parameters(), self.initial, strict=True):
                mine.copy_(given)
        return module

    def optimiser(self, parameters: Iterable[Tensor], **_: Any) -> torch.optim.Optimizer:
        """Return a fresh SGD: momentum is not carried from round to round."""
        s = self.settings
        return torch.optim.SGD(parameters, lr=s["lr"], momentum=s["momentum"], weight_decay=s["weight_decay"])

    @torch.no_grad()
    def loss(self, parameters: Iterable[Any]) -> float:
        """Return the mean cross-entropy of a model over all train data."""
        module = self.network()
        for mine, given in zip(module.parameters(), parameters, strict=True):
            mine.copy_(torch.as_tensor(given))
        total = sum(F.cross_entropy(module(x), y, reduction="sum").item() for x, y in self.clients)
        return total / sum(len(y) for _, y in self.clients)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 64, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 128, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128 * 14 * 14, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def turn(workload: Workload, parameters: Iterable[Any]) -> None:
    """Stand at the boundary of two rounds with this global model: return when the next one may begin; leave when told to stop."""
    kept = [torch.as_tensor(p).detach().clone() for p in parameters]
    _line.write("ready\n")
    if sys.stdin.readline().strip() == "go":
        return
    _line.write(f"{workload.loss(kept)}\n")
    _line.flush()
    os._exit(0)  # frameworks hold threads, servers and exit hooks of their own
