"""Flower: its simulation (Ray) with one core, and its own FedAvg strategy."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from common import Workload, turn
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

workload = Workload.read()
client_app, server_app = ClientApp(), ServerApp()
known: dict[str, Any] = {}


def local() -> tuple[Workload, torch.nn.Module]:
    """Return workload and network of this process, read once."""
    if not known:
        torch.set_num_threads(1)
        known["workload"] = Workload.read(os.environ["WORKLOAD"])
        known["network"] = known["workload"].network()
    return known["workload"], known["network"]


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Local SGD."""
    mine, network = local()
    network.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = mine.clients[int(context.node_config["partition-id"])]
    optimiser = mine.optimiser(network.parameters())
    for _ in range(mine.settings["local_epochs"]):
        for batch in torch.randperm(len(y)).split(mine.settings["batch_size"]):
            optimiser.zero_grad()
            F.cross_entropy(network(x[batch]), y[batch]).backward()
            optimiser.step()
    content = {"arrays": ArrayRecord(network.state_dict()), "metrics": MetricRecord({"num-examples": len(y)})}
    return Message(content=RecordDict(content), reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """FedAvg, waiting for its turn before every round."""

    def wait(index: int, arrays: ArrayRecord) -> None:
        turn(workload, arrays.to_torch_state_dict().values())

    FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=len(workload.clients)).start(
        grid, ArrayRecord(workload.network().state_dict()), num_rounds=10**6, evaluate_fn=wait
    )


if __name__ == "__main__":
    one = {"init_args": {"num_cpus": 1, "include_dashboard": False}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app, client_app, num_supernodes=len(workload.clients), backend_config=one)
