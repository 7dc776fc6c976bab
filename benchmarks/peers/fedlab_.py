"""FedLab: FedAvg with the serial trainer of its standalone mode.

FedLab makes one optimiser for all clients, whose momentum would pass from one to the next; ``train`` is overridden to make a fresh
one, as its documentation suggests for other training loops.
"""

from __future__ import annotations

from typing import Any

from common import Workload, turn
from fedlab.contrib.algorithm.fedavg import FedAvgSerialClientTrainer, FedAvgServerHandler
from fedlab.contrib.dataset.basic_dataset import BaseDataset, FedDataset
from fedlab.core.standalone import StandalonePipeline
from torch.utils.data import DataLoader

workload = Workload.read()


class Data(FedDataset):
    """The workload as a FedLab data set."""

    def get_dataloader(self, id: int, batch_size: int, type: str = "train") -> Any:
        return DataLoader(BaseDataset(*workload.clients[id]), batch_size=batch_size, shuffle=True)


class Trainer(FedAvgSerialClientTrainer):
    """Local SGD with fresh momentum."""

    def train(self, model_parameters: Any, train_loader: Any) -> Any:
        self.optimizer = workload.optimiser(self._model.parameters())
        return super().train(model_parameters, train_loader)


class Pipeline(StandalonePipeline):
    """The standalone loop, waiting for its turn after every round."""

    def evaluate(self) -> None:
        turn(workload, self.handler.model.parameters())


handler = FedAvgServerHandler(workload.network(), global_round=10**6, sample_ratio=1.0)
trainer = Trainer(workload.network(), len(workload.clients))
trainer.setup_dataset(Data())
trainer.setup_optim(workload.settings["local_epochs"], workload.settings["batch_size"], workload.settings["lr"])
pipeline = Pipeline(handler, trainer)
pipeline.evaluate()
pipeline.main()
