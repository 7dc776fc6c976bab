"""What a run leaves: ``summary.json``, ``distances.npz``, pictures, ``reading.json``, ``models/``, ``personal/``, and how to load them."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from emdcfl.core.errors import DataError, StoreError, nearest
from emdcfl.core.metric import metric_of
from emdcfl.core.params import make_layout
from emdcfl.methods.base import Distances, Serving
from emdcfl.methods.emdcfl.interpret import read
from emdcfl.models import BUILDERS
from emdcfl.runs.figures import heatmap, margin_plot, png
from emdcfl.runs.scoring import model_names
from emdcfl.runs.served import ModelInfo, Served, served
from emdcfl.runs.store import files
from emdcfl.runs.summary_types import AGAIN, NEEDED, Split, check, check_summary
from emdcfl.runs.summary_types import READING as READING_KEYS
from emdcfl.runs.verdict.what_differs import pictures

if TYPE_CHECKING:
    from emdcfl.runs.result import Result
    from emdcfl.runs.verdict.trained_with import Origin

INDEX = "models/index.json"
PERSONAL = "personal/index.json"
READING = "reading.json"
Read = tuple[ModelInfo, dict[str, torch.Tensor], dict[str, str]]
OFTEN = 1 << 26
"""Numbers in all models together up to which they are written after every round; more are written after the last (the state has them)."""

MAX_NAME_LENGTH = 48
"""Characters of a model's file name: up to four bytes each, and file systems take 255 with what is added."""


def write_outputs(path: Path, result: Result) -> None:
    """Write everything but the state and the metrics, each file in one step."""
    clients, serving, finished = list(result.clients), result.serving, bool(result.summary["finished"])
    if finished or serving.models.numel() <= OFTEN:
        _write_models(path, result.about, serving, clients, result.summary.get("trained_with"))
    else:
        files.remove(path / INDEX)  # models of an earlier round are not this one's
    if "personalized" in result.summary:
        _write_personal(path, result)
    if serving.distances is not None and serving.clusters is not None:
        _write_distances(path, serving.distances, clients, serving.clusters.tolist(), finished=finished)
    write_summary(path, result.summary)
    described = result.summary.get("what_differs") if finished and result.config.engine.name != "flower" else None
    if described and result.scenario is not None:  # where all samples are
        for i, picture in enumerate(pictures(result.scenario, described)):
            files.write_file(path / picture_name(i), [picture])


def picture_name(number: int) -> str:
    """Return the file of the mean image of an entry of ``what_differs``."""
    return f"what-differs-{number}.png"


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    files.write_json(path / "summary.json", summary)


def _write_distances(path: Path, d: Distances, clients: list[str], clusters: list[int], *, finished: bool) -> None:
    arrays = {"W": d.W, "tau": d.tau, "epsilon": d.epsilon, "kind": d.kind, "noise_factor": np.array(d.noise_factor)}
    files.write_arrays(path / "distances.npz", arrays if d.sample is None else {**arrays, "sample": d.sample})
    files.write_json(path / READING, read(d, clients, clusters).as_dict())
    if finished and find_spec("matplotlib") is not None:  # drawing takes longer than a small network's training
        files.write_file(path / "heatmap.png", [png(heatmap(d, d.shown(clients), d.shown(clusters)))])
        if d.splits is None:
            files.write_file(path / "margins.png", [png(margin_plot(d, clients, clusters))])


def _write_models(path: Path, about: ModelInfo, serving: Serving, clients: list[str], trained_with: list[Origin] | None) -> None:
    names = file_names(model_names(serving, clients))
    _write_states(path / "models", about, names, serving.models, [one["sites"] for one in trained_with] if trained_with else None)
    who: dict[str, Any] = {}
    for i, client in enumerate(clients):
        chosen = torch.nonzero(serving.weights[i] > 0).flatten().tolist()
        who[client] = {names[k]: float(serving.weights[i, k]) for k in chosen}
    files.write_json(path / INDEX, {"mix": serving.mix, "models": names, "clients": who})


def _write_personal(path: Path, result: Result) -> None:
    """Write the fine-tuned models that clients kept, and then who has which."""
    kept = ((client, result.personal_state(client)) for client in result.summary["personalized"]["kept"])
    states = {client: theta for client, theta in kept if theta is not None}
    names = file_names([f"client-{client}" for client in states])
    whose = {c: one["sites"] for one in result.summary.get("trained_with") or [] for c in one["serves"]}
    sites = [sorted({*whose[c], c}) for c in states] if whose else None
    _write_states(path / "personal", result.about, names, states.values(), sites)
    files.write_json(path / PERSONAL, {"clients": dict(zip(states, names, strict=True))})


def _write_states(
    folder: Path, about: ModelInfo, names: list[str], states: Iterable[torch.Tensor], sites: Sequence[Sequence[str]] | None
) -> None:
    """Write one file per state, with the sites whose updates it holds where that is known, and remove the files of others."""
    files.make_folder(folder)
    for i, (name, theta) in enumerate(zip(names, states, strict=True)):
        whose = {} if sites is None else {"trained_with": json.dumps(list(sites[i]), ensure_ascii=False)}
        files.write_tensors(folder / f"{name}.safetensors", about.network.state_dict(theta), about.as_metadata() | whose, seal=True)
    for old in folder.glob("*.safetensors"):
        if old.stem not in names:
            files.remove(old)


def file_names(names: list[str]) -> list[str]:
    """Names that any file system takes, still distinct.

    Examples
    --------
    >>> file_names(["client-a/b", "client-a:b", "client-A_B"])
    ['client-a_b', 'client-a_b~2', 'client-A_B~3']
    """
    safe: dict[str, str] = {}
    for name in names:
        base = re.sub(r"[^\w.-]+", "_", unicodedata.normalize("NFC", name))[:MAX_NAME_LENGTH]
        candidate, n = base, 1
        while candidate.casefold() in safe:  # some file systems do not tell A from a
            n += 1
            candidate = f"{base}~{n}"
        safe[candidate.casefold()] = candidate
    return list(safe.values())


def read_summary(run: Path) -> dict[str, Any]:
    """Read what a run found, checked as far as it is there (``summary_types``)."""
    summary = _read_json(run, "summary.json", f"{run} is not a run directory that has finished a round")
    check_summary(summary, str(run / "summary.json"))
    return summary


def read_reading(run: Path) -> dict[str, Any] | None:
    """Read what a run's distances say about its clusters (``methods.emdcfl.interpret``); None where the method has no distances."""
    if not (run / READING).exists():
        return None
    reading = _read_json(run, READING, f"{run} has no reading")
    check(reading, {**READING_KEYS, **({"splits": list[Split]} if "splits" in reading else {})}, str(run / READING))
    return reading


def _read_json(run: Path, name: str, otherwise: str) -> dict[str, Any]:
    path = run / name
    try:
        return files.unsealed(files.read_json(path), str(path))
    except StoreError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise StoreError(f"{otherwise}: {path.name} is missing; run 'emdcfl run --out {run}' first") from error
        raise StoreError(f"{error}; {AGAIN}") from error


def load_outputs(run: Path, *, trust_model: bool = False) -> dict[str, Any]:
    """Return the fields of a ``Result`` that a run directory holds beside its config and metrics; models are read when asked for."""
    files.refuse_links(run)
    summary, index = read_summary(run), _read_index(run)
    check(summary, {**NEEDED, metric_of(summary).value: dict[str, Any]}, str(run / "summary.json"))
    with _reading_models(run):
        about, _, _ = _read_model(run, index["models"][0], trust_model)
    models = {"source": partial(_load_serving, run, summary, index, about), "personal": partial(_load_personal, run, about)}
    return {"summary": summary, "about": about, **models}


def load_served(run: Path, client: str, *, plain: bool = False, trust_model: bool = False) -> Served:
    """Read the model that one client of a run should use, and no other: its fine-tuned one if it kept one, unless ``plain``."""
    files.refuse_links(run)
    index = _read_index(run)
    if client not in index["clients"]:
        raise DataError(f"{run} has no client {client!r}: {nearest(client, index['clients'])}")
    own = None if plain else _personal_names(run).get(client)
    with _reading_models(run):
        if own is not None:
            about, tensors, _ = _read_model(run, own, trust_model, "personal")
            return Served(about, about.flat(tensors)[None], (1.0,))
        weights: dict[str, float] = index["clients"][client]
        read = [_read_model(run, name, trust_model) for name in weights]
        if all(metadata.get("trained_with") == "[]" for _, _, metadata in read):
            raise DataError(f"{run}: the model of {client!r} is the first one, which nobody trained; choose another client")
        about = read[0][0]
        return served(about, torch.stack([about.flat(tensors) for _, tensors, _ in read]), list(weights.values()), index["mix"])


def _personal_names(run: Path) -> dict[str, str]:
    """Client → file of the fine-tuned model that it kept; empty for a run without fine-tuning."""
    if not (run / PERSONAL).exists():
        return {}
    index = _read_json(run, PERSONAL, f"{run} has no fine-tuned models")
    check(index, {"clients": dict[str, str]}, str(run / PERSONAL))
    names: dict[str, str] = index["clients"]
    return names


def _load_personal(run: Path, about: ModelInfo, client: str) -> torch.Tensor | None:
    name = _personal_names(run).get(client)
    if name is None:
        return None
    with _reading_models(run):
        return about.flat(files.read_tensors(_model_path(run, name, "personal"))[0])


def _load_serving(run: Path, summary: Mapping[str, Any], index: Mapping[str, Any], about: ModelInfo) -> Serving:
    with _reading_models(run):
        names = list(index["models"])
        models = torch.stack([about.flat(files.read_tensors(_model_path(run, name))[0]) for name in names])
        weights = torch.zeros(len(summary["clients"]), len(names))
        for i, client in enumerate(summary["clients"]):
            for name, weight in index["clients"][client].items():
                weights[i, names.index(name)] = weight
        clusters = summary["clusters"]
        return Serving(models, weights, index["mix"], None if clusters is None else torch.tensor(clusters), load_distances(run))


def load_distances(run: Path) -> Distances | None:
    """Read what a run's clusters were decided on; ``None`` where its method measures no distances."""
    path = run / "distances.npz"
    if not path.exists():
        return None
    arrays = files.read_arrays(path)
    try:
        splits = (read_reading(run) or {}).get("splits")
        W, tau, epsilon, kind, factor = (arrays[name] for name in ("W", "tau", "epsilon", "kind", "noise_factor"))
        return Distances(W, tau, epsilon, kind, float(factor), splits, arrays.get("sample"))
    except KeyError as error:
        raise StoreError(f"{path}: no array {error}; {AGAIN}") from error


def _read_model(run: Path, name: str, trust_model: bool, folder: str = "models") -> Read:
    path = _model_path(run, name, folder)
    tensors, metadata = files.read_tensors(path)
    about = ModelInfo.from_metadata(metadata, path, trust_model=trust_model)
    _check_network(about, sum(tensor.numel() for tensor in tensors.values()), path)
    return about, tensors, metadata


def _check_network(about: ModelInfo, held: int, path: Path) -> None:
    """Refuse a file whose network is larger than its tensors, before memory is taken for it, or does not tell its classes apart."""
    if about.recipe.name in BUILDERS:  # others may not build without memory
        with torch.device("meta"):
            layout = make_layout(about.recipe.untrained()())
        wanted = layout.size
        if layout.outputs != (len(about.classes) or 1):
            raise StoreError(f"{path}: names a network with {layout.outputs} outputs for {len(about.classes)} classes")
        if wanted > held:  # a file may also hold counters that are no part of a state
            raise StoreError(f"{path}: names a network of {wanted} numbers but holds {held}")


def _model_path(run: Path, name: str, folder: str = "models") -> Path:
    if not isinstance(name, str) or Path(name).name != name:  # a name is part of a path
        raise ValueError(f"a model called {name!r}")
    return run / folder / f"{name}.safetensors"


def _read_index(run: Path) -> dict[str, Any]:
    if not (run / INDEX).exists() and (run / "summary.json").exists() and not read_summary(run).get("finished", True):
        raise StoreError(f"{run} has no models yet: as large as they are, they are written after the last round; go on with --resume")
    index = _read_json(run, INDEX, f"{run} has no models")
    check(index, {"mix": str, "models": list[str], "clients": dict[str, dict[str, float]]}, str(run / INDEX))
    served = {client: min(weights.values(), default=0) > 0 for client, weights in index["clients"].items()}
    if not all(served.values()):
        raise StoreError(f"{run / INDEX}: expected models with weights above 0 for {min(served, key=lambda c: served[c])!r}; {AGAIN}")
    return index


@contextmanager
def _reading_models(run: Path) -> Iterator[None]:
    """Whatever the files of models may hold, the error says which run and what to do."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise StoreError(f"{run / 'models'}: not the models of a run ({type(error).__name__}: {error}); {AGAIN}") from error
    except StoreError as error:
        raise StoreError(f"{error}; {AGAIN}") from error
