"""``from_arrays`` builds a scenario from ``(X, y)`` arrays or torch data sets."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from emdcfl.core.errors import DataError
from emdcfl.data.own import defaults
from emdcfl.data.own.checking.leaks import leaks
from emdcfl.data.own.cleaning import CLASSIFICATION, REGRESSION, check_classes, variant_notes
from emdcfl.data.own.notes import write_notes
from emdcfl.data.own.parts import MIXED, SPLITS, Part, Raw, assemble, prepare
from emdcfl.data.own.site import new_site
from emdcfl.data.own.splitting import GROUP, RANDOM, SplitRule
from emdcfl.data.types import Scenario, Site


def from_arrays(
    clients: Sequence[Any] | Mapping[str, Any],
    *,
    groups: Mapping[str, str] | Sequence[str] | None = None,
    model: defaults.Model = None,
    seed: int = 0,
    name: str = "arrays",
    task: str | None = None,
) -> Scenario:
    """Build a scenario from data in memory, one entry per client; a list names its clients ``client-1``, ``client-2``, …

    An entry is ``(X, y)`` arrays or tensors, ``(X, y, group)`` where samples of one group must stay in one split, a torch ``Dataset`` of
    ``(x, y)`` pairs, or a dict of these under ``train``, ``val``, ``test``. ``X`` is ``(N, F)`` numbers, or images ``(N, H, W)``,
    ``(N, C, H, W)`` or ``(N, H, W, C)``. True ``groups`` only score the result.
    """
    raws = [_raw(client, entry, task) for client, entry in named_clients(clients).items()]
    _same_shape(raws)
    divided, classes, notes = prepare(name, raws, seed)
    notes += variant_notes(name, raws, files=False)
    train = [parts["train"].x for parts in divided.values()]
    shape = train[0].shape[1:]
    preprocess = defaults.image_preprocess(train, model) if len(shape) == 3 else defaults.pooled_preprocess(train, axes=(0,))
    arrays = {client: {split: parts[split].x for split in SPLITS} for client, parts in divided.items()}
    scenario = assemble(name, arrays, divided, classes, preprocess, model, notes=tuple(write_notes(notes)))
    scenario = with_truth(scenario, groups)
    random = len(shape) == 1 and all(MIXED in raw.parts and not raw.parts[MIXED].by for raw in raws)
    return replace(scenario, notes=(*scenario.notes, *leaks(scenario, divided, RANDOM))) if random else scenario


def named_clients(clients: Sequence[Any] | Mapping[Any, Any]) -> dict[str, Any]:
    """Return every client's entry by its name as text; a list names its clients ``client-1``, ``client-2``, …"""
    if not isinstance(clients, Mapping):
        return {f"client-{i}": entry for i, entry in enumerate(clients, start=1)}
    named = {str(name): entry for name, entry in clients.items()}
    if len(named) < len(clients):
        raise DataError(f"expected {len(clients)} clients of different names, got {len(named)}: {', '.join(named)}; rename one")
    return named


def site_from_arrays(name: str, entry: Any, *, like: Scenario, seed: int = 0) -> tuple[Site, tuple[str, ...]]:
    """Build one more site for a scenario, from data in memory; returns it and notes for the user."""
    if like.encoding.get("kind") == "table":  # whose rows are standardised
        raise DataError(f"client {name!r}: expected a frame with the columns that the run was trained on, got {type(entry).__name__}")
    raw = _raw(name, entry, CLASSIFICATION if like.target is None else REGRESSION)
    expected = like.sites[0].train.x
    for part in raw.parts.values():
        if tuple(part.x.shape[1:]) != tuple(expected.shape[1:]):
            raise DataError(f"expected samples of shape {tuple(expected.shape[1:])} as at the other sites, got {part.x.shape[1:]}")
    return new_site(raw, {"kind": "arrays"}, like.classes, (), target=like.target, seed=seed)


def inputs_like(x: Any, shape: Sequence[int]) -> torch.Tensor:
    """Bring inputs without labels, given as to ``from_arrays`` or flattened, to the form of a run's samples of this shape."""
    found = torch.from_numpy(np.ascontiguousarray(_samples("new", x)))
    if found.dim() == 2 and found.shape[1] == math.prod(shape):
        found = found.reshape(-1, *shape)
    if tuple(found.shape[1:]) != tuple(shape):
        raise DataError(f"expected samples of shape {tuple(shape)} as at the other sites, got {tuple(found.shape[1:])}")
    return found


def _raw(name: str, entry: Any, task: str | None) -> Raw:
    if isinstance(entry, Mapping):
        unknown = set(entry) - set(SPLITS)
        if unknown:
            raise DataError(f"client {name!r}: splits must be called train, val, test; got {', '.join(sorted(map(str, unknown)))}")
        return Raw(name, "array", {split: _part(name, value, task) for split, value in entry.items()})
    return Raw(name, "array", {MIXED: _part(name, entry, task)}, SplitRule(group="group"))


def _part(name: str, entry: Any, task: str | None) -> Part:
    if isinstance(entry, torch.utils.data.Dataset):
        if not hasattr(entry, "__len__"):
            raise DataError(f"client {name!r}: expected a data set with a length, got {type(entry).__name__}; collect its samples first")
        samples = [entry[i] for i in range(len(entry))]
        if not samples:
            raise DataError(f"client {name!r}: the data set is empty")
        if not all(isinstance(sample, (tuple, list)) and len(sample) == 2 for sample in samples):
            raise DataError(f"client {name!r}: expected a data set of (x, y) pairs, got other samples; wrap it in one that returns pairs")
        entry = [_array(name, x) for x, _ in samples], [y.item() if isinstance(y, (torch.Tensor, np.generic)) else y for _, y in samples]
    if not isinstance(entry, (tuple, list)) or len(entry) not in (2, 3):
        raise DataError(f"client {name!r}: expected (X, y), (X, y, group) or a torch Dataset, got {type(entry).__name__}")
    x, y = _samples(name, entry[0]), _array(name, entry[1])
    if y.ndim != 1 or len(y) != len(x):
        raise DataError(f"client {name!r}: expected one label per sample, got X of shape {x.shape} and y of shape {y.shape}")
    if has_gaps(entry[1] if isinstance(entry[1], list | tuple) else y.tolist() if y.dtype.kind in "OU" else ()):
        raise DataError(f"client {name!r}: expected a label for every sample, got gaps; fill them in, or leave those samples out")
    kind = type(y[0].item()).__name__ if len(y) and y.dtype.kind in "biuf" else "text"
    numeric = np.issubdtype(y.dtype, np.number)
    if task == REGRESSION and not (numeric and np.isfinite(y).all()):
        raise DataError(f"client {name!r}: expected one finite number per sample to predict, got gaps, infinities or {y.dtype}")
    if task != REGRESSION and numeric:
        check_classes(y, f"client {name!r}: y", task)
    if task != REGRESSION and np.issubdtype(y.dtype, np.floating):
        if not np.all(np.isfinite(y)) or np.any(y != np.floor(y)):
            raise DataError(
                f"client {name!r}: labels must be classes (integers or text), got fractional numbers or gaps; to predict numbers, say "
                "task='regression'"
            )
        y = y.astype(np.int64)
    by = {}
    if len(entry) == 3:
        groups = entry[2] if isinstance(entry[2], list | tuple) else _array(name, entry[2]).tolist()
        if len(groups) != len(x) or has_gaps(groups):
            found = "gaps" if len(groups) == len(x) else f"{len(groups)} groups"
            raise DataError(f"client {name!r}: expected one group per sample, got {len(x)} samples and {found}")
        by = {GROUP: np.array([str(value) for value in groups], dtype=str)}
    labels = y.astype(np.float64) if task == REGRESSION else np.array([str(label) for label in y.tolist()], dtype=str)
    return Part(x, labels, by, kind)


def has_gaps(values: Iterable[Any]) -> bool:
    """Whether one of some values is missing: ``None``, NaN, a blank, or pandas' ``NA``, which cannot be compared."""
    return any(value is None or str(value).strip() in ("", "<NA>") or value != value for value in values)


def _samples(name: str, value: Any) -> NDArray[Any]:
    """Bring to ``(N, F)`` float32 or ``(N, C, H, W)`` uint8 or float32."""
    x = _array(name, value)
    if x.dtype.kind not in "biuf":
        raise DataError(f"client {name!r}: X must hold numbers, got {x.dtype}; encode text first, or write a CSV and use its file")
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and x.shape[1] not in (1, 3) and x.shape[3] in (1, 3):
        x = x.transpose(0, 3, 1, 2)
    elif x.ndim == 4 and x.shape[1] not in (1, 3):
        raise DataError(f"client {name!r}: images need one or three channels, got X of shape {x.shape}")
    elif x.ndim not in (2, 4):
        raise DataError(f"client {name!r}: expected X of shape (N, F), (N, H, W) or (N, C, H, W), got {x.shape}")
    if x.dtype == np.uint8 and x.ndim == 4:
        return x
    x = x.astype(np.float32)
    bad = ~np.isfinite(x).all(axis=tuple(range(1, x.ndim)))
    if bad.any():
        raise DataError(f"client {name!r}: X has missing or infinite values, first in row {int(np.flatnonzero(bad)[0])}: fill or drop them")
    return x


def _same_shape(raws: Sequence[Raw]) -> None:
    arrays = [(raw.name, part.x) for raw in raws for part in raw.parts.values()]
    for name, x in arrays[1:]:
        first, expected = arrays[0]
        if x.shape[1:] != expected.shape[1:] or x.dtype != expected.dtype:
            raise DataError(
                f"all clients need samples of one shape and type: client {first!r} has {expected.shape[1:]} {expected.dtype}, "
                f"client {name!r} has {x.shape[1:]} {x.dtype}"
            )


def with_truth(scenario: Scenario, groups: Mapping[str, str] | Sequence[str] | None) -> Scenario:
    """Return the scenario with the true group of every client, by name or in order, where known."""
    if groups is None:
        return scenario
    names = [site.name for site in scenario.sites]
    found = {str(k): str(v) for k, v in groups.items()} if isinstance(groups, Mapping) else dict(zip(names, map(str, groups), strict=False))
    if set(found) != set(names) or len(groups) != len(names):
        raise DataError(f"groups must name every client once: expected {len(names)} ({', '.join(names[:3])}, …), got {len(groups)}")
    return replace(scenario, groups={name: found[name] for name in names}, k=len(set(found.values())))


def _array(name: str, value: Any) -> NDArray[Any]:
    if np.ma.is_masked(value):
        raise DataError(f"client {name!r}: expected arrays without masked values, got some; fill or drop them")
    try:
        return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    except (TypeError, ValueError) as error:  # rows of different lengths, bfloat16, a sparse tensor
        raise DataError(f"client {name!r}: expected an array, got what NumPy cannot read as one ({error}); convert it") from error
