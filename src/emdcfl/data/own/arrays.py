"""``from_arrays`` builds a scenario from ``(X, y)`` arrays or torch data sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from emdcfl.core import keys
from emdcfl.core.errors import DataError
from emdcfl.data.own import defaults
from emdcfl.data.own.checking.leaks import leaks
from emdcfl.data.own.cleaning import variant_notes
from emdcfl.data.own.parts import (
    FRACTIONS,
    MIN_SAMPLES,
    MIXED,
    SPLITS,
    Divided,
    Part,
    Raw,
    divide,
    known_only,
    prepare,
    to_site,
    warnings,
    write_notes,
)
from emdcfl.data.own.splitting import GROUP, RANDOM, SplitRule
from emdcfl.data.split import grouped_indices, split_indices
from emdcfl.data.types import Scenario, Site, Split, Target


def from_arrays(
    clients: Sequence[Any] | Mapping[str, Any],
    *,
    groups: Mapping[str, str] | Sequence[str] | None = None,
    model: defaults.Model = None,
    seed: int = 0,
    name: str = "arrays",
    fractions: Sequence[float] = FRACTIONS,
    regression: bool = False,
) -> Scenario:
    """Build a scenario from data in memory.

    Parameters
    ----------
    clients : list or dict
        One entry per client: ``(X, y)`` arrays or tensors, ``(X, y, group)`` where samples of one group must stay in one split, a torch
        ``Dataset`` of ``(x, y)`` pairs, or a dict of these under
        ``train``, ``val``, ``test``. ``X`` is ``(N, F)`` numbers, or images ``(N, H, W)``, ``(N, C, H, W)`` or ``(N, H, W, C)``. A list
        names its clients ``client-1``, ``client-2``, …
    groups : dict or list, optional
        True groups, where known; used only to score the result.
    regression : bool
        y are numbers, standardised with the mean and standard deviation pooled over the clients' training samples.
    """
    listed = clients.items() if isinstance(clients, Mapping) else ((f"client-{i}", entry) for i, entry in enumerate(clients, start=1))
    named = {str(client): entry for client, entry in listed}
    parts = (_of_numbers if regression else _of_classes)(name, named, seed, fractions)
    shape = parts.train[0].shape[1:]
    truth = true_groups(groups, list(named))
    grouping = {"emdcfl": {**defaults.BY_BENEFIT["emdcfl"], "match_classes": False}} if regression else defaults.BY_BENEFIT
    scenario = Scenario(
        name=name,
        sites=parts.sites,
        classes=parts.classes,
        preprocess=defaults.image_preprocess(parts.train, model) if len(shape) == 3 else defaults.pooled_preprocess(parts.train, axes=(0,)),
        model=defaults.recipe(model, shape=shape, classes=len(parts.classes) or 1),
        groups=truth,
        k=len(set(truth.values())) if truth else None,
        defaults=defaults.training(model) | defaults.FINE_TUNING,
        method_defaults=grouping,
        notes=parts.notes,
        target=parts.target,
    )
    random = len(shape) == 1 and parts.divided_at_random
    return replace(scenario, notes=(*scenario.notes, *leaks(scenario, parts.divided, RANDOM))) if random else scenario


@dataclass(frozen=True)
class _Parts:
    """Sites made of arrays, and their training samples; of classes also the samples as they were divided."""

    sites: tuple[Site, ...]
    train: list[NDArray[Any]]
    classes: tuple[str, ...] = ()
    target: Target | None = None
    notes: tuple[str, ...] = ()
    divided: Divided = field(default_factory=dict)
    divided_at_random: bool = False


def _of_classes(name: str, named: Mapping[str, Any], seed: int, fractions: Sequence[float]) -> _Parts:
    raws = [_raw(client, entry) for client, entry in named.items()]
    _same_shape(raws)
    divided, classes, notes = prepare(name, raws, seed, fractions)
    notes += variant_notes(name, raws, files=False)
    sites = tuple(to_site(client, {s: parts[s].x for s in SPLITS}, parts, classes) for client, parts in divided.items())
    random = all(MIXED in raw.parts and not raw.parts[MIXED].by for raw in raws)
    return _Parts(sites, [parts["train"].x for parts in divided.values()], classes, None, tuple(write_notes(notes)), divided, random)


_NO_LABELS = np.empty(0, dtype=str)


def _of_numbers(name: str, named: Mapping[str, Any], seed: int, fractions: Sequence[float]) -> _Parts:
    if len(named) < 2:
        raise DataError(f"{name}: expected at least two clients with samples, got {len(named)}; add another")
    divided = {client: _divided_numbers(client, entry, seed, fractions) for client, entry in named.items()}
    _same_shape([Raw(client, "array", {s: Part(x, _NO_LABELS) for s, (x, _) in parts.items()}) for client, parts in divided.items()])
    y = defaults.pooled_preprocess([parts["train"][1][:, None] for parts in divided.values()], axes=(0,))
    target = Target(y.mean[0], y.std[0])

    def split(x: NDArray[Any], numbers: NDArray[np.float64]) -> Split:
        z = ((numbers - target.mean) / target.std).astype(np.float32)
        return Split(torch.from_numpy(np.ascontiguousarray(x)), torch.from_numpy(z))

    sites = tuple(Site(c, split(*parts["train"]), split(*parts["val"]), {"test": split(*parts["test"])}) for c, parts in divided.items())
    return _Parts(sites, [parts["train"][0] for parts in divided.values()], target=target)


def _divided_numbers(name: str, entry: Any, seed: int, fractions: Sequence[float]) -> dict[str, tuple[NDArray[Any], NDArray[np.float64]]]:
    """Return train, val and test of one client: as given, or drawn at random, with samples of one group in one split."""
    if isinstance(entry, Mapping):
        lacking = set(SPLITS) - set(entry)
        if lacking or set(entry) - set(SPLITS):
            raise DataError(f"client {name!r}: expected the splits train, val and test, got {', '.join(map(str, entry))}")
        return {split: _numbers(name, entry[split])[:2] for split in SPLITS}
    x, y, by = _numbers(name, entry)
    if len(x) < MIN_SAMPLES:
        raise DataError(f"client {name!r} has {len(x)} samples; at least {MIN_SAMPLES} are needed; add some, or leave it out")
    rng = keys.generator(seed, name, 0, "split")
    if by is None:
        rows = split_indices(len(x), fractions, rng)
    else:
        codes = np.unique(by, return_inverse=True)[1].astype(np.int64)
        if codes.max() + 1 < len(fractions):
            raise DataError(f"client {name!r}: expected at least {len(fractions)} groups, one for each split, got {codes.max() + 1}")
        rows = grouped_indices(np.zeros(len(x), np.int64), codes, fractions, rng)
    return {split: (x[part], y[part]) for split, part in zip(SPLITS, rows, strict=True)}


def _numbers(name: str, entry: Any) -> tuple[NDArray[Any], NDArray[np.float64], NDArray[Any] | None]:
    x, y, group = _entry(name, entry)
    if y.shape != (len(x),) or not (np.issubdtype(y.dtype, np.number) and np.isfinite(y).all()):
        raise DataError(f"client {name!r}: expected one finite number per sample to predict, got y of shape {y.shape} and type {y.dtype}")
    return x, y.astype(np.float64), group


def _entry(name: str, entry: Any) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any] | None]:
    """Return X, y and, where given, the group of each sample."""
    if isinstance(entry, torch.utils.data.Dataset):
        pairs = [entry[i] for i in range(len(entry))]  # type: ignore[arg-type]
        if not pairs:
            raise DataError(f"client {name!r}: the data set is empty")
        entry = (np.stack([_array(x) for x, _ in pairs]), np.array([_label(y) for _, y in pairs]))
    if not isinstance(entry, (tuple, list)) or len(entry) not in (2, 3):
        raise DataError(f"client {name!r}: expected (X, y), (X, y, group) or a torch Dataset, got {type(entry).__name__}")
    return _samples(name, _array(entry[0])), _array(entry[1]), None if len(entry) == 2 else _array(entry[2])


def site_from_arrays(name: str, entry: Any, *, like: Scenario, seed: int = 0) -> tuple[Site, tuple[str, ...]]:
    """Build one more site for a scenario, from data in memory; returns it and notes for the user."""
    raw = _raw(name, entry)
    expected = like.sites[0].train.x
    for part in raw.parts.values():
        if tuple(part.x.shape[1:]) != tuple(expected.shape[1:]):
            raise DataError(f"expected samples of shape {tuple(expected.shape[1:])} as at the other sites, got {part.x.shape[1:]}")
    divided, notes = divide(raw, seed), []
    for split in SPLITS:
        divided[split], more = known_only(name, "array", split, divided[split], like.classes)
        notes += more
    notes += warnings(name, "array", divided)
    return to_site(name, {split: divided[split].x for split in SPLITS}, divided, like.classes), tuple(write_notes(notes))


def inputs_like(x: Any, expected: torch.Tensor) -> torch.Tensor:
    """Bring inputs without labels to the form of a run's samples."""
    found = torch.from_numpy(_samples("new", _array(x)))
    if found.shape[1:] != expected.shape[1:]:
        raise DataError(f"expected samples of shape {tuple(expected.shape[1:])} as at the other sites, got {tuple(found.shape[1:])}")
    return found


def _raw(name: str, entry: Any) -> Raw:
    if isinstance(entry, Mapping):
        unknown = set(entry) - set(SPLITS)
        if unknown:
            raise DataError(f"client {name!r}: splits must be called train, val, test; got {', '.join(sorted(map(str, unknown)))}")
        return Raw(name, "array", {split: _part(name, value) for split, value in entry.items()})
    return Raw(name, "array", {MIXED: _part(name, entry)}, SplitRule(group="group"))


def _part(name: str, entry: Any) -> Part:
    x, y, group = _entry(name, entry)
    if y.ndim != 1 or len(y) != len(x):
        raise DataError(f"client {name!r}: expected one label per sample, got X of shape {x.shape} and y of shape {y.shape}")
    if np.issubdtype(y.dtype, np.floating):
        if not np.all(np.isfinite(y)) or np.any(y != np.floor(y)):
            raise DataError(
                f"client {name!r}: labels must be classes (integers or text), got fractional numbers or gaps; to predict numbers, say "
                "task='regression'"
            )
        y = y.astype(np.int64)
    by = {} if group is None else {GROUP: np.array([str(value) for value in group.tolist()], dtype=str)}
    if any(len(values) != len(x) for values in by.values()):
        raise DataError(f"client {name!r}: expected one group per sample, got {len(x)} samples and {len(by[GROUP])} groups")
    return Part(x, np.array([str(label) for label in y.tolist()], dtype=str), by)


def _samples(name: str, x: NDArray[Any]) -> NDArray[Any]:
    """Bring to ``(N, F)`` float32 or ``(N, C, H, W)`` uint8 or float32."""
    if not (np.issubdtype(x.dtype, np.number) or x.dtype == np.bool_):
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
    bad = ~np.isfinite(x).reshape(len(x), -1).all(axis=1)
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


def true_groups(groups: Mapping[str, str] | Sequence[str] | None, names: Sequence[str]) -> dict[str, str] | None:
    if groups is None:
        return None
    found = {str(k): str(v) for k, v in groups.items()} if isinstance(groups, Mapping) else dict(zip(names, map(str, groups), strict=False))
    if set(found) != set(names) or len(groups) != len(names):
        raise DataError(f"groups must name every client once: expected {len(names)} ({', '.join(names[:3])}, …), got {len(groups)}")
    return {name: found[name] for name in names}


def _array(value: Any) -> NDArray[Any]:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def _label(value: Any) -> Any:
    return value.item() if isinstance(value, (torch.Tensor, np.generic)) else value
