"""The scenario ``nodes``: the clients are the connected nodes, each with files of its own."""

from __future__ import annotations

from emdcfl.data.scenarios.registry import scenario
from emdcfl.data.types import Scenario
from emdcfl.engines.flower.session import current
from emdcfl.engines.flower.survey import survey_nodes

NODES = "nodes"


@scenario(NODES, "the connected nodes, each with files of its own (Flower only; see docs/guide/deploy.md)")
def nodes(
    *,
    clients: list[str] | None = None,
    label: str | None = None,
    data_seed: int = 0,
    size: int | None = None,
    model: str | None = None,
) -> Scenario:
    """Ask the connected nodes about their files.

    Parameters
    ----------
    clients : list of str, optional
        Names of the clients of the run; by default those on the server's list of keys or, if it is empty, all that are connected.
    label : str, optional
        Label column of tables.
    data_seed : int
        Seed of the splits.
    size : int, optional
        Height and width of images.
    model : str, optional
        Name of the network.
    """
    return survey_nodes(current().connected, NODES, clients=clients, label=label, data_seed=data_seed, size=size, model=model)
