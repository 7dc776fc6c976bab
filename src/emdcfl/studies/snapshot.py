"""What distances between clients need of each after its first local training: embeddings on the disk, Gram matrices, angles.

::

    snapshot.npz               clients, groups, Gram matrices of the updates, angles between raw data
    rows/<number>.safetensors  client's train sample and everybody's validation sample, embedded by that client's model; labels

Taken once, it serves every distance, projection, cost, solver and tolerance without training again. A simulation sees raw embeddings;
no server does.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emdcfl.core import tasks
from emdcfl.core.errors import ConfigError, StoreError
from emdcfl.core.federation import Federation
from emdcfl.core.params import Layout, Scope, gram
from emdcfl.data.types import Scenario
from emdcfl.engines.local.sequential import simulated_clients
from emdcfl.methods.shared.subspaces import data_subspace, smallest_angle
from emdcfl.methods.shared.vectors import update_gram
from emdcfl.runs.config import Choice, Config, as_dict
from emdcfl.runs.plan import plan
from emdcfl.runs.store.files import make_folder, read_arrays, read_tensors, remove, write_arrays, write_tensors
from emdcfl.studies.compare import shared_scenario

log = logging.getLogger("emdcfl")

Array = np.ndarray[Any, Any]
SCOPES: dict[str, Scope] = {"parameters": "P", "state": "F"}


@dataclass(frozen=True)
class SnapshotRequest:
    """What a snapshot is taken of: clients of a scenario, after their first local training."""

    config: Config
    """Scenario, network, training and seed; its method does not matter."""
    cap: int = 512
    """Most samples per side."""
    per_group: int | None = None
    """Only the first clients of every group."""
    trained: bool = True
    """Without it every client still holds the initial model, which is a smoke test and nothing else."""

    def key(self) -> str:
        """Return a short hash of everything that decides the content; the engine does not."""
        tables = {k: v for k, v in as_dict(self.config).items() if k not in ("engine", "method")}
        tables["run"] = {"seed": self.config.run.seed}
        text = json.dumps([tables, self.cap, self.per_group, self.trained], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class SnapshotRow:
    """One client's view: its train sample and everybody's validation sample (C, m, d) under its model, with labels."""

    train: Array
    val: Array
    train_labels: Array
    val_labels: Array


@dataclass(frozen=True)
class Snapshot:
    """A snapshot on the disk, with Gram matrices of the updates: of the parameters, of the whole state, of the linear layers."""

    folder: Path
    clients: tuple[str, ...]
    groups: tuple[str, ...] | None
    parameters: Array
    state: Array
    linear: Array
    angles: Array
    notes: tuple[str, ...]

    def row(self, number: int) -> SnapshotRow:
        tensors, _ = read_tensors(_row_path(self.folder, number))
        return SnapshotRow(*(tensors[name].numpy() for name in ("train", "val", "train_labels", "val_labels")))


def _row_path(folder: Path, number: int) -> Path:
    return folder / "rows" / f"{number}.safetensors"


def take(request: SnapshotRequest, folder: Path) -> Snapshot:
    """Take the snapshot in ``folder``, or read the one that is there; what an interruption left is kept, what is damaged is taken again."""
    found = _read(request, folder)
    if found is None:
        _take(request, folder)
        found = _read(request, folder)
    if found is None:
        raise StoreError(f"{folder}: what was just written cannot be read back; is the disk sound? choose another --out")
    return found


def _read(request: SnapshotRequest, folder: Path) -> Snapshot | None:
    """Return the snapshot, or ``None`` where it is missing or a part of it is damaged."""
    path = folder / "snapshot.npz"
    if not path.exists():
        return None
    try:
        arrays = read_arrays(path)
        about = json.loads(bytes(arrays["about"]).decode())
        groups = None if about["groups"] is None else tuple(about["groups"])
        parts = {name: arrays[name] for name in ("parameters", "state", "linear", "angles")}
        found = Snapshot(folder, tuple(about["clients"]), groups, notes=tuple(about["notes"]), **parts)
        key = about["key"]
    except (StoreError, ValueError, KeyError, TypeError) as error:
        log.warning("%s is damaged and taken again (%s)", path, error)
        return None
    if key != request.key():
        raise ConfigError(f"{folder}: holds a snapshot of other settings; choose another --out")
    return found if all(_is_whole(_row_path(folder, number)) for number in range(len(found.clients))) else None


def _is_whole(path: Path) -> bool:
    """Whether a row is there and undamaged; a damaged one is deleted, so that it is taken again."""
    if not path.exists():
        return False
    try:
        tensors, _ = read_tensors(path)
        if {"train", "val", "train_labels", "val_labels"} <= tensors.keys():
            return True
        reason = "parts are missing"
    except StoreError as error:
        reason = str(error)
    log.warning("%s is damaged and taken again (%s)", path, reason)
    remove(path)
    return False


def _take(request: SnapshotRequest, folder: Path) -> None:
    make_folder(folder / "rows")
    config = replace(request.config, method=Choice("fedavg"), run=replace(request.config.run, participants=None))
    planned = plan(config, of_each_group(shared_scenario(config), request.per_group))
    scenario = planned.scenario
    names = [site.name for site in scenario.sites]
    m = min(request.cap, *(len(site.val) for site in scenario.sites))
    if m < 2:
        raise ConfigError(f"{scenario.name}: expected at least 2 validation samples at every client, got {m}")
    with planned.federation() as fed:
        fed.begin(1)
        initial = fed.initial()
        states = fed.train(dict.fromkeys(names, initial)).column("theta") if request.trained else dict.fromkeys(names, initial)
        labels = _labels(planned.config.run.seed, scenario, fed, request.cap, m)
        val: Tensor | None = None
        for number, name in enumerate(names):
            if _is_whole(_row_path(folder, number)):
                continue
            own = fed.run(tasks.embed, {name: {}}, theta=states[name], split="train", cap=request.cap)
            if val is None or request.trained:  # untrained, all rows have one model
                val = fed.run(tasks.embed, {c: {} for c in names}, theta=states[name], split="val", cap=m).stack("embeddings")
            write_tensors(
                _row_path(folder, number), {"train": own[name]["embeddings"], "val": val, **labels[name], **labels[""]}, seal=True
            )
        thetas = [states[name] for name in names]
        grams = {name: update_gram(fed.layout, thetas, initial, scope=scope).numpy() for name, scope in SCOPES.items()}
        grams["linear"] = torch.stack([gram(thetas, where, origin=initial) for where in linear_layers(fed.layout)]).sum(0).numpy()
        bases = fed.run(data_subspace, {name: {} for name in names}).column("basis")
    angles = np.array([[smallest_angle(bases[a], bases[b]) for b in names] for a in names])
    notes = [*scenario.notes, *([] if request.trained else ["smoke test only: the networks were not trained"])]
    groups = None if scenario.groups is None else [scenario.groups[name] for name in names]
    about: Mapping[str, Any] = {"key": request.key(), "clients": names, "groups": groups, "notes": notes}
    text = np.frombuffer(json.dumps(about).encode(), dtype=np.uint8)
    write_arrays(folder / "snapshot.npz", {"about": text, **grams, "angles": angles})


def linear_layers(layout: Layout) -> list[slice]:
    """Return where the weights and biases of linear layers lie in θ: the paper's hypothesis, two layers of its CNN, one of a ResNet."""
    layers = {e.name.rpartition(".")[0] for e in layout.entries if e.trainable and len(e.shape) == 2}
    return [e.slice for e in layout.entries if e.trainable and e.name.rpartition(".")[0] in layers]


def of_each_group(scenario: Scenario, sites: int | None) -> Scenario:
    """Return the scenario with the first ``sites`` of every true group; all of them if that is None."""
    if sites is None or scenario.groups is None:
        return scenario
    seen: Counter[str] = Counter()
    kept = []
    for site in scenario.sites:
        group = scenario.groups[site.name]
        seen[group] += 1
        if seen[group] <= sites:
            kept.append(site)
    groups = {site.name: scenario.groups[site.name] for site in kept}
    scored = tuple(name for name in scenario.scored if name in groups) if scenario.scored else None
    return replace(scenario, sites=tuple(kept), groups=groups, scored=scored)


def _labels(seed: int, scenario: Scenario, fed: Federation, cap: int, m: int) -> dict[str, dict[str, Tensor]]:
    """Labels of the samples ``embed`` draws: the train sample's by client, the validation samples' of all under ``""``."""
    clients = simulated_clients(scenario, list(fed.clients), fed.network(), seed=seed, run="labels", precision="fp32")
    found = {c: {"train_labels": client.site.train.y[client.sample("train", cap)]} for c, client in clients.items()}
    val = torch.stack([client.site.val.y[client.sample("val", m)] for client in clients.values()])
    return {**found, "": {"val_labels": val}}
