"""What people hold in Python becomes a scenario: arrays, tensors, frames, torch and Hugging Face data sets, Flower data sets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from emdcfl.core import keys
from emdcfl.core.errors import DataError, nearest
from emdcfl.data import scenarios
from emdcfl.data.own import frames, from_arrays, hub
from emdcfl.data.own.cleaning import read_task
from emdcfl.data.types import Scenario
from emdcfl.models.recipe import ModelRecipe
from emdcfl.runs.config import OWN_FILES, Choice, own_files
from emdcfl.runs.plan import IN_MEMORY

Clients = str | Path | Scenario | Sequence[Any] | Mapping[str, Any] | Any
Groups = Mapping[str, str] | Sequence[str] | None


def read_clients(
    clients: Clients, groups: Groups, model: str | ModelRecipe | None, seed: int, about: Mapping[str, Any]
) -> tuple[Choice, Scenario | None]:
    """Return what the config says of the data, and the data where a config cannot build them or they are built already.

    ``about`` holds the options that describe own files (``frames.OPTIONS``), for files and for frames alike.
    """
    if isinstance(clients, Path) or (isinstance(clients, str) and clients not in scenarios.names()):
        if Path(clients).suffix == ".toml":  # what 'emdcfl data check --fix' wrote
            return Choice(OWN_FILES, {**own_files(clients), **about}), None
        if not Path(clients).exists() and len(Path(clients).parts) == 1:
            raise DataError(f"no such file, folder or scenario: {clients}; {nearest(str(clients), scenarios.names())}")
        return Choice(OWN_FILES, {"path": str(clients), **about}), None
    if isinstance(clients, str | Scenario) and about:
        raise DataError(f"{_named(about)} describes your own data, and a scenario has its own; leave it out")
    if isinstance(clients, str):
        return Choice(clients), None
    if isinstance(clients, Scenario):
        if clients.source is not None:
            return Choice(clients.source[0], clients.source[1]), clients
        return Choice(IN_MEMORY, {"fingerprint": fingerprint(clients)}), clients
    found = hub.entries(clients, about.get("label"), about.get("client"))
    if not isinstance(found, Mapping) and not frames.is_table(found):
        if not isinstance(found, Iterable):
            raise DataError(f"expected clients as a list, a dict, a frame, a data set, a folder or a scenario, got {type(found).__name__}")
        found = list(found)  # a generator yields its clients once
    if frames.is_table(found) or any(map(frames.is_table, found.values() if isinstance(found, Mapping) else found)):
        scenario = frames.from_tables(found, about, model=model, seed=seed, groups=groups)
        return Choice(IN_MEMORY, {"fingerprint": fingerprint(scenario), **about}), scenario
    used = {"task", "label", "client"} if hub.holds_data_sets(clients) else {"task"}
    if unused := {name: value for name, value in about.items() if name not in used}:
        raise DataError(f"{_named(unused)} names a column, but these are arrays; give frames, or leave it out")
    scenario = from_arrays(found, groups=groups, model=model, seed=seed, task=read_task(about.get("task")))
    return Choice(IN_MEMORY, {"fingerprint": fingerprint(scenario), **about}), scenario


def _named(about: Mapping[str, Any]) -> str:
    return "site=" if next(iter(about)) == "client" else f"{next(iter(about))}="


def fingerprint(scenario: Scenario) -> str:
    """Return a short hash of the samples, labels, classes and names of a scenario's sites."""
    parts: list[Any] = [*scenario.classes, repr(scenario.preprocess.as_dict())]
    for site in scenario.sites:
        for name, split in site.splits.items():
            parts += [site.name, name, repr(tuple(split.x.shape)), split.x.contiguous().numpy().tobytes(), split.y.numpy().tobytes()]
    return keys.digest(*parts).hex()[:16]
