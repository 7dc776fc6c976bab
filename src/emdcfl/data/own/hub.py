"""Data sets of Hugging Face's ``datasets`` and of ``flwr_datasets``: one entry per client, as ``from_arrays`` and ``frames`` read them.

Neither library is imported: a data set is known by what it can do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from emdcfl.core.errors import DataError
from emdcfl.data.own.arrays import has_gaps
from emdcfl.data.own.formats.client_tables import LABEL_NAMES
from emdcfl.data.own.frames import is_hub, is_table
from emdcfl.data.own.parts import rows_of
from emdcfl.data.own.splitting import by_split


def entries(clients: Any, label: str | None, site: str | None) -> Any:
    """Bring data sets to one entry per client; tables with a site column, and what is no data set, stay as they are."""
    if _is_federated(clients):
        if site is not None:
            raise DataError("the partitions of a federated data set are its sites; leave site= out, or use a NaturalIdPartitioner")
        clients = _partitions(clients)
    elif is_hub(clients) or (isinstance(clients, Mapping) and is_table(clients)):
        parts = clients.values() if isinstance(clients, Mapping) else [clients]
        if site is None or not any(map(_array_columns, parts)):
            return clients
        clients = _by_site(clients, site)
    if isinstance(clients, Mapping):
        return {name: hub_entry(entry, label) for name, entry in clients.items()}
    return [hub_entry(entry, label) for entry in clients] if isinstance(clients, list | tuple) else clients


def holds_data_sets(clients: Any) -> bool:
    """Whether some client's data, or a split of them, are such a data set."""
    inside = clients.values() if isinstance(clients, Mapping) else clients if isinstance(clients, list | tuple) else [clients]
    return _is_federated(clients) or any(is_hub(one) or (isinstance(one, Mapping) and holds_data_sets(one)) for one in inside)


def _is_federated(clients: Any) -> bool:
    return hasattr(clients, "load_partition") and hasattr(clients, "partitioners")


def _partitions(federated: Any) -> dict[str, Any]:
    splits = list(federated.partitioners)
    first = federated.load_partition(0, splits[0])  # some partitioners count only once they have the data
    found: dict[str, Any] = {}
    for i in range(int(federated.partitioners[splits[0]].num_partitions)):
        parts = {split: first if (i, split) == (0, splits[0]) else federated.load_partition(i, split) for split in splits}
        found[f"partition-{i}"] = parts[splits[0]] if len(splits) == 1 else parts
    return found


def _by_site(clients: Any, site: str) -> dict[str, Any]:
    """Divide a data set, or its splits, by the site column."""
    if isinstance(clients, Mapping):
        found: dict[str, Any] = {}
        for split, part in clients.items():
            for name, rows in _by_site(part, site).items():
                found.setdefault(name, {})[split] = rows
        return found
    if site not in clients.column_names:
        raise DataError(f"the data set has no site column {site!r}; it has {', '.join(clients.column_names)}")
    if has_gaps(clients[site]):
        raise DataError(f"expected a site for every row, got gaps in {site!r}; leave those rows out")
    rest = clients.remove_columns([site])
    return {name: rest.select(rows) for name, rows in rows_of(np.array([str(name) for name in clients[site]])).items()}


def hub_entry(value: Any, label: str | None) -> Any:
    """Return a Hugging Face data set of images or vectors, or one per split, as ``(X, y)``; anything else as it is."""
    if isinstance(value, Mapping):
        return {split: hub_entry(part, label) for split, part in by_split(value, "the data set").items()}
    arrays = _array_columns(value)
    if not arrays:
        return value
    column = label or next((name for name in LABEL_NAMES if name in value.column_names), None)
    if len(arrays) > 1 or column is None or column not in value.column_names:
        found = ", ".join(value.column_names)
        raise DataError(f"expected a data set with one column of images or vectors and a label, got {found}; select columns, name label=")
    words = getattr(value.features[column], "names", None)
    y = np.asarray(value.with_format("numpy")[column][:])
    if words is not None:  # of a sample without a label, the number is below 0
        y = np.array([words[int(code)] if code is not None and code >= 0 else None for code in y.tolist()])
    return _stacked(value, arrays[0]), y


def _array_columns(value: Any) -> list[str]:
    """Return the columns of images or vectors; none of what is no Hugging Face data set."""
    kinds = ("Image", "Sequence", "List", "LargeList", "Array2D", "Array3D")
    features = value.features.items() if is_hub(value) else ()
    return [name for name, feature in features if type(feature).__name__ in kinds or isinstance(feature, list)]


def _stacked(value: Any, column: str) -> np.ndarray[Any, Any]:
    found = [np.asarray(sample) for sample in value.with_format(None)[column]]
    shapes = {sample.shape for sample in found}
    if len(shapes) > 1:
        raise DataError(f"column {column!r} holds samples of {len(shapes)} shapes, such as {sorted(shapes)[:2]}; resize them with map()")
    return np.stack(found)
