"""What a run leaves for people: ``summary.json``, ``distances.npz``, pictures, ``reading.json``, ``models/``, and how to read them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from emdcfl.core.errors import DataError, StoreError, nearest
from emdcfl.core.keys import global_seed
from emdcfl.core.params import Network
from emdcfl.data.own import encoding_of
from emdcfl.data.types import Preprocess, Scenario
from emdcfl.methods.base import Serving
from emdcfl.methods.emdcfl.interpret import read
from emdcfl.models import ModelRecipe
from emdcfl.runs.figures import heatmap, margin_plot
from emdcfl.runs.scoring import model_names
from emdcfl.runs.scoring import served as served_states
from emdcfl.runs.store.files import json_text, make_folder, read_tensors, remove, sealed, unsealed, write_arrays, write_file, write_tensors

INDEX = "models/index.json"
READING = "reading.json"
AGAIN = "resume the run to write it again"

OFTEN = 1 << 26
"""Numbers in all models together up to which they are written after every round; more are written after the last (the state has them)."""

LONGEST_NAME = 48
"""Characters of a model's file name: up to four bytes each, and file systems take 255 with what is added."""


def write_outputs(path: Path, scenario: Scenario, serving: Serving, summary: Mapping[str, Any]) -> None:
    """Write everything but the state and the metrics, each file in one step."""
    clients = [site.name for site in scenario.sites]
    if summary.get("finished", True) or serving.models.numel() <= OFTEN:
        _write_models(path, scenario, serving, clients)
    else:
        remove(path / INDEX)  # models of an earlier round are not this one's
    if serving.distances is not None and serving.clusters is not None:
        d, clusters = serving.distances, serving.clusters.tolist()
        drawn_from = [path / "distances.npz", path / READING]
        before = [_content(p) for p in drawn_from]
        write_arrays(drawn_from[0], {"W": d.W, "tau": d.tau, "epsilon": d.epsilon, "kind": d.kind})
        _write_json(drawn_from[1], read(d, clients, clusters).as_dict())
        pictures = {"heatmap.png": heatmap, "margins.png": margin_plot}
        # later rounds rarely move a distance or a cluster, and drawing takes longer than a small network's training
        current = before == [_content(p) for p in drawn_from] and all((path / name).exists() for name in pictures)
        if summary.get("finished", True) or not current:
            for name, draw in pictures.items():
                write_file(path / name, [draw(d, clients, clusters)])
    _write_json(path / "summary.json", summary)


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_file(path, [json_text(sealed(value, path.name), path.name, indent=2).encode() + b"\n"])


def _write_models(path: Path, scenario: Scenario, serving: Serving, clients: list[str]) -> None:
    folder = path / "models"
    make_folder(folder)
    names = _file_names(model_names(serving, clients))
    with global_seed(0):  # building a module draws initial weights, which are then replaced
        network = Network(scenario.model)
    metadata = {
        "classes": json.dumps(list(scenario.classes), ensure_ascii=False),
        "model": json.dumps(scenario.model.as_dict(), sort_keys=True),
        "preprocess": json.dumps(scenario.preprocess.as_dict(), sort_keys=True),
        "input": json.dumps(list(scenario.sites[0].train.x.shape[1:])),
        "encoding": json.dumps(encoding_of(scenario), ensure_ascii=False, sort_keys=True),
    }
    for name, theta in zip(names, serving.models, strict=True):
        write_tensors(folder / f"{name}.safetensors", network.state_dict(theta), metadata, seal=True)
    for old in folder.glob("*.safetensors"):
        if old.stem not in names:
            remove(old)
    who: dict[str, Any] = {}
    for i, client in enumerate(clients):
        chosen = torch.nonzero(serving.weights[i] > 0).flatten().tolist()
        who[client] = {names[k]: float(serving.weights[i, k]) for k in chosen}
    index = {"mix": serving.mix, "clients": who}
    _write_json(path / INDEX, index)


def _file_names(names: list[str]) -> list[str]:
    """Names that any file system takes, still distinct.

    Examples
    --------
    >>> _file_names(["client-a/b", "client-a:b", "client-A_B"])
    ['client-a_b', 'client-a_b~2', 'client-A_B~3']
    """
    safe: dict[str, str] = {}
    for name in names:
        base = re.sub(r"[^\w.-]+", "_", name)[:LONGEST_NAME]
        candidate, n = base, 1
        while candidate.casefold() in safe:  # some file systems do not tell A from a
            n += 1
            candidate = f"{base}~{n}"
        safe[candidate.casefold()] = candidate
    return list(safe.values())


@dataclass(frozen=True)
class Served:
    """One client's model, or mixture of models, read back from a run directory."""

    classes: tuple[str, ...]
    preprocess: Preprocess
    recipe: ModelRecipe
    shape: tuple[int, ...]
    encoding: Mapping[str, Any]
    states: tuple[dict[str, Tensor], ...]
    weights: tuple[float, ...]

    @torch.no_grad()
    def probabilities(self, x: Tensor) -> Tensor:
        """Return class probabilities of stored-form inputs ``(N, *shape)``."""
        if tuple(x.shape[1:]) != self.shape:
            raise DataError(f"expected inputs of shape {self.shape}, got {tuple(x.shape[1:])}")
        total = torch.zeros(len(x), len(self.classes))
        for state, weight in zip(self.states, self.weights, strict=True):
            module = self.module(state)
            for start in range(0, len(x), 256):
                part = slice(start, start + 256)
                total[part] += weight * module(self.preprocess(x[part])).softmax(1)
        return total

    def module(self, state: Mapping[str, Tensor]) -> nn.Module:
        """Return the network with these weights, in evaluation mode."""
        recipe = self.recipe
        if "weights" in recipe.options:  # what follows replaces them; do not look for the pretrained file again
            recipe = ModelRecipe(recipe.name, {**recipe.options, "weights": None})
        with global_seed(0):
            module = recipe()
        module.load_state_dict(dict(state))
        return module.eval()


def read_summary(run: Path) -> dict[str, Any]:
    """Read ``summary.json`` of a run directory."""
    return _read_json(run / "summary.json", f"{run} is not a run directory that has finished a round")


def read_reading(run: Path) -> dict[str, Any] | None:
    """Read what a run's distances say about its clusters (``methods.reading``); None where the method has no distances."""
    return _read_json(run / READING, f"{run} has no reading") if (run / READING).exists() else None


def _read_json(path: Path, otherwise: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise StoreError(f"{otherwise}: {path.name} is missing; run 'emdcfl run --out {path.parent}' first") from error
    except (OSError, ValueError, RecursionError) as error:
        raise StoreError(f"{path}: truncated or damaged: {error}; {AGAIN}") from error
    if not isinstance(value, dict):
        raise StoreError(f"{path}: expected an object, got {type(value).__name__}; {AGAIN}")
    try:
        return unsealed(value, str(path))
    except StoreError as error:
        raise StoreError(f"{error}; {AGAIN}") from error


def read_served(run: Path, client: str) -> Served:
    """Read what a client of a run is served with."""
    if not (run / INDEX).exists() and (run / "summary.json").exists() and not read_summary(run).get("finished", True):
        raise StoreError(f"{run} has no models yet: as large as they are, they are written after the last round; go on with --resume")
    index = _read_json(run / INDEX, f"{run} has no models")
    try:
        if client not in index["clients"]:
            raise DataError(f"{run} has no client {client!r}: {nearest(client, index['clients'])}")
        weights: dict[str, float] = index["clients"][client]
        read = [read_tensors(run / "models" / f"{name}.safetensors") for name in weights]
        served = _served(read[0][1], tuple(tensors for tensors, _ in read), tuple(weights.values()))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise StoreError(f"{run / 'models'}: not the models of a run ({type(error).__name__}: {error}); {AGAIN}") from error
    except StoreError as error:
        raise StoreError(f"{error}; {AGAIN}") from error
    if index["mix"] == "parameters" and len(read) > 1:
        total = sum(served.weights)
        mixed = {n: sum(s[n].double() * w for s, w in zip(served.states, served.weights, strict=True)) / total for n in served.states[0]}
        state = {n: t.to(served.states[0][n].dtype) for n, t in mixed.items() if isinstance(t, Tensor)}
        return replace(served, states=(state,), weights=(1.0,))
    return served


def _served(about: Mapping[str, str], states: tuple[dict[str, Tensor], ...], weights: tuple[float, ...]) -> Served:
    return Served(
        classes=tuple(json.loads(about["classes"])),
        preprocess=Preprocess.from_dict(json.loads(about["preprocess"])),
        recipe=ModelRecipe.from_dict(json.loads(about["model"])),
        shape=tuple(json.loads(about["input"])),
        encoding=json.loads(about["encoding"]),
        states=states,
        weights=weights,
    )


def serve_client(scenario: Scenario, serving: Serving, client: int) -> Served:
    """Return what client number ``client`` is served with, straight from memory."""
    models, weights = served_states(serving, client)
    with global_seed(0):
        network = Network(scenario.model)
    return Served(
        classes=scenario.classes,
        preprocess=scenario.preprocess,
        recipe=scenario.model,
        shape=tuple(scenario.sites[0].train.x.shape[1:]),
        encoding=encoding_of(scenario),
        states=tuple(network.state_dict(theta) for theta in models),
        weights=tuple(weights.tolist()),
    )


__all__ = ["INDEX", "Served", "read_served", "read_summary", "serve_client", "write_outputs"]
