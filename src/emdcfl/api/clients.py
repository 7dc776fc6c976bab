"""What people hold in Python becomes a scenario: arrays, tensors, frames, torch and Hugging Face data sets, Flower data sets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from emdcfl.core import keys
from emdcfl.core.errors import DataError, nearest
from emdcfl.data import scenarios
from emdcfl.data.own import frames, from_arrays
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
    found = _entries(clients, about)
    if _is_tables(found):
        scenario = frames.from_tables(found, about, model=model, seed=seed, groups=groups)
        return Choice(IN_MEMORY, {"fingerprint": fingerprint(scenario), **about}), scenario
    kept = {name: value for name, value in about.items() if name != "task" and (name not in ("label", "client") or not _is_hub(clients))}
    if kept:
        raise DataError(f"{_named(kept)} names a column, but these are arrays; give frames, or leave it out")
    scenario = from_arrays(found, groups=groups, model=model, seed=seed, task=read_task(about.get("task")))
    return Choice(IN_MEMORY, {"fingerprint": fingerprint(scenario), **about}), scenario


def _named(about: Mapping[str, Any]) -> str:
    return "site=" if next(iter(about)) == "client" else f"{next(iter(about))}="


def _is_tables(found: Any) -> bool:
    if frames.is_table(found):
        return True
    entries = found.values() if isinstance(found, Mapping) else found
    return any(frames.is_table(entry) for entry in entries)


def _is_hub(clients: Any) -> bool:
    inside = clients.values() if isinstance(clients, Mapping) else clients if isinstance(clients, list | tuple) else [clients]
    return _is_federated(clients) or any(frames.is_hub(one) or (isinstance(one, Mapping) and _is_hub(one)) for one in inside)


def _is_federated(clients: Any) -> bool:
    return hasattr(clients, "load_partition") and hasattr(clients, "partitioners")


def _entries(clients: Any, about: Mapping[str, Any]) -> Any:
    """Bring Flower and Hugging Face data sets to one entry per client; others are such entries already."""
    label, site = about.get("label"), about.get("client")
    if _is_federated(clients):
        if site is not None:
            raise DataError("the partitions of a federated data set are its sites; leave site= out, or use a NaturalIdPartitioner")
        clients = _partitions(clients)
    whole = frames.is_hub(clients) or (isinstance(clients, Mapping) and frames.is_table(clients))
    if whole and site is not None:
        apart = _apart(clients, site)
        sample = next(iter(apart.values()))
        return {name: frames.hub_entry(entry, label) for name, entry in apart.items()} if _has_arrays(sample, label) else clients
    if whole:
        return clients
    if isinstance(clients, Mapping):
        return {name: frames.hub_entry(entry, label) if _is_hub([entry]) else entry for name, entry in clients.items()}
    if isinstance(clients, list | tuple) and _is_hub(clients):
        return [frames.hub_entry(entry, label) for entry in clients]
    if not isinstance(clients, Iterable):
        raise DataError(f"expected clients as a list, dict, frame, data set, scenario or path, got {type(clients).__name__}")
    return clients


def _has_arrays(entry: Any, label: str | None) -> bool:
    found = frames.hub_entry(entry, label)
    return isinstance(found, tuple) or (isinstance(found, Mapping) and any(isinstance(part, tuple) for part in found.values()))


def _apart(clients: Any, site: str) -> dict[str, Any]:
    """Divide a data set, or its splits, by the site column; frames are divided elsewhere."""
    if isinstance(clients, Mapping):
        found: dict[str, Any] = {}
        for split, part in clients.items():
            for name, rows in _apart(part, site).items():
                found.setdefault(name, {})[split] = rows
        return found
    if not frames.is_hub(clients):
        return {"": clients}
    if site not in clients.column_names:
        raise DataError(f"the data set has no site column {site!r}; it has {', '.join(clients.column_names)}")
    rows_of: dict[str, list[int]] = {}
    for row, name in enumerate(clients[site]):
        rows_of.setdefault(str(name), []).append(row)
    rest = clients.remove_columns([site])
    return {name: rest.select(rows) for name, rows in sorted(rows_of.items())}


def _partitions(federated: Any) -> dict[str, Any]:
    splits = list(federated.partitioners)
    first = federated.load_partition(0, splits[0])  # some partitioners count only once they have the data
    found: dict[str, Any] = {}
    for i in range(int(federated.partitioners[splits[0]].num_partitions)):
        parts = {split: first if (i, split) == (0, splits[0]) else federated.load_partition(i, split) for split in splits}
        found[f"partition-{i}"] = parts[splits[0]] if len(splits) == 1 else parts
    return found


def fingerprint(scenario: Scenario) -> str:
    """Return a short hash of the samples, labels, classes and names of a scenario's sites."""
    parts: list[Any] = [*scenario.classes, repr(scenario.preprocess.as_dict())]
    for site in scenario.sites:
        for name, split in site.splits.items():
            parts += [site.name, name, repr(tuple(split.x.shape)), split.x.contiguous().numpy().tobytes(), split.y.numpy().tobytes()]
    return keys.digest(*parts).hex()[:16]
