"""fluke: ``FedAVG``. Clients that are not persistent forget model and optimiser after a round, so that momentum is fresh."""

from __future__ import annotations

from typing import Any

from common import Workload, turn
from fluke import DDict, FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.data import FastDataLoader
from fluke.utils import FederationObserver

workload = Workload.read()
settings = workload.settings


class Dealt:
    """Stands in for fluke's splitter: the data are dealt out already."""

    def assign(self, n_clients: int, batch_size: int) -> Any:
        loaders = [FastDataLoader(x, y, num_labels=10, batch_size=batch_size, shuffle=True) for x, y in workload.clients]
        return (loaders, [None] * n_clients), None


class Turns(FederationObserver):
    """Waits for its turn before every round."""

    def start_round(self, round: int, global_model: Any) -> None:
        turn(workload, global_model.parameters())


FlukeENV().set_device("cpu")
FlukeENV().set_inmemory(True)
FlukeENV().set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
FlukeENV().set_save_options(path=None, save_every=0, global_only=True)
optimizer = {"name": "SGD", "lr": settings["lr"], "momentum": settings["momentum"], "weight_decay": settings["weight_decay"]}
algorithm = FedAVG(
    len(workload.clients),
    Dealt(),
    DDict(
        client=DDict(
            batch_size=settings["batch_size"],
            local_epochs=settings["local_epochs"],
            loss="CrossEntropyLoss",
            optimizer=DDict(optimizer),
            scheduler=DDict(name="StepLR", step_size=1, gamma=1),
            persistency=False,
        ),
        server=DDict(weighted=True),
        model=workload.network(),
    ),
)
algorithm.set_callbacks(Turns())
algorithm.run(10**6, 1.0)
