"""pfl-research: ``FederatedAveraging`` over its simulated backend, one process. It takes batches in stored order, without shuffling."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from common import Workload, turn
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

workload = Workload.read()
settings = workload.settings


class Network(nn.Module):
    """The network, with the two functions pfl asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = workload.network()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.inner.train()(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        return {"loss": Weighted(F.cross_entropy(self.inner.eval()(x), y, reduction="sum").item(), len(y))}


class Turns(TrainingProcessCallback):
    """Waits for its turn before every round."""

    def on_train_begin(self, *, model: Any) -> Metrics:
        turn(workload, model.pytorch_model.parameters())
        return Metrics()

    def after_central_iteration(self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int) -> tuple[bool, Metrics]:
        turn(workload, model.pytorch_model.parameters())
        return False, Metrics()


network = Network()
users = [PyTorchTensorDataset(pair, user_id=str(i)) for i, pair in enumerate(workload.clients)]
data = FederatedDataset(lambda user: users[user], get_user_sampler("minimize_reuse", list(range(len(users)))))
FederatedAveraging().run(
    algorithm_params=NNAlgorithmParams(
        central_num_iterations=10**6, evaluation_frequency=10**6, train_cohort_size=len(users), val_cohort_size=0
    ),
    backend=SimulatedBackend(training_data=data, val_data=data, postprocessors=[WeightByDatapoints()]),
    model=PyTorchModel(network, local_optimizer_create=workload.optimiser, central_optimizer=torch.optim.SGD(network.parameters(), lr=1.0)),
    model_train_params=NNTrainHyperParams(
        local_batch_size=settings["batch_size"], local_num_epochs=settings["local_epochs"], local_learning_rate=settings["lr"]
    ),
    callbacks=[Turns()],
)
