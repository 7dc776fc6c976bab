"""``folder``: the user's own files as a scenario, so that a run on them has a config like any other."""

from __future__ import annotations

from emdcfl.data.own import load_folder
from emdcfl.data.scenarios.registry import scenario
from emdcfl.data.types import Scenario


@scenario("folder", "your own files: path = a folder of images or tables, one client each (see docs/tutorials/own-data.md)")
def folder(
    *,
    path: str,
    label: str | None = None,
    client: str | None = None,
    data_seed: int = 0,
    size: int | None = None,
    model: str | None = None,
) -> Scenario:
    """Read a folder; see ``emdcfl.data.own.load_folder``.

    Parameters
    ----------
    path : str
        Folder or table.
    label, client : str, optional
        Columns of tables.
    data_seed : int
        Seed of the splits.
    size : int, optional
        Height and width of images.
    model : str, optional
        Name of the network, which may decide the size of images.
    """
    return load_folder(path, label=label, client=client, seed=data_seed, size=size, model=model)
