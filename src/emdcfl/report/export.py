"""``emdcfl export``: one folder per group that plain torch can load, with a model card, weights, settings and a script that predicts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass
from importlib.resources import files as resources
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from emdcfl.core.errors import ModelError, StoreError
from emdcfl.data.types import Preprocess, Target
from emdcfl.report.card import CARD, card
from emdcfl.report.load_run import read_run
from emdcfl.report.page import run_context
from emdcfl.runs.outputs import file_names
from emdcfl.runs.result import Result, load
from emdcfl.runs.scoring import model_names
from emdcfl.runs.served import Served
from emdcfl.runs.store.files import make_folder, write_file, write_tensors
from emdcfl.runs.verdict.trained_with import untrained

FILES = {"images": "images", "table": "CSV files with the columns of training", "arrays": "`.npy` files"}


@dataclass(frozen=True)
class Export:
    """One model and the clients that should use it."""

    name: str
    title: str
    clients: tuple[str, ...]
    theta: Tensor


class Standalone(nn.Module):
    """Stored samples in; class probabilities out, or numbers in the units of the data as one column."""

    def __init__(self, network: nn.Module, preprocess: Preprocess, target: Target | None) -> None:
        super().__init__()
        self.network, self.preprocess, self.target = network, preprocess, target
        self.register_buffer("mean", torch.tensor(preprocess.mean, dtype=torch.float32))
        self.register_buffer("std", torch.tensor(preprocess.std, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        z = self.preprocess.resized(x)
        shape = (1, -1) + (1,) * (z.dim() - 2)
        mean, std = self.get_buffer("mean").view(shape), self.get_buffer("std").view(shape)
        outputs: Tensor = self.network((z - mean) / std)
        return outputs.softmax(1) if self.target is None else outputs * self.target.std + self.target.mean


def export(folder: Path, out: Path | None = None, *, fine_tuned: bool = False, trust_model: bool = False) -> list[Path]:
    """Write one folder per group of a run directory, and return them; with ``fine_tuned`` also one for every client that kept such a model.

    ``out``, by default ``export`` in the run directory, must not exist yet.
    """
    result, place = load(folder, trust_model=trust_model), folder / "export" if out is None else out
    if result.serving.mix == "predictions":
        raise ModelError(
            f"{result.summary['method']} mixes the predictions of several models for each client; groups of one model can be exported"
        )
    if place.exists():
        raise StoreError(f"{place} exists already; remove it, or choose another --out")
    context = run_context(read_run(folder))
    make_folder(place.parent)
    chosen = [*_groups(result), *(_personal(result) if fine_tuned else ())]
    with TemporaryDirectory(prefix=f".{place.name}-", dir=place.parent) as unfinished:  # all or nothing
        for one in chosen:
            where = Path(unfinished) / "all" / one.name
            make_folder(where)
            _write(where, result, one)
            write_file(where / CARD, [card(folder, context, _about(result, one)).encode("utf-8", "replace")])
        (Path(unfinished) / "all").rename(place)
    return [place / one.name for one in chosen]


def _groups(result: Result) -> Iterator[Export]:
    serving, clients, absent = result.serving, list(result.clients), untrained(result.summary)
    if (serving.weights > 0).sum(1).max() > 1:  # a client's model is an average of several
        for client, safe in zip(clients, file_names([f"client-{c}" for c in clients]), strict=True):
            yield Export(safe, f"the model for {client}", (client,), result.model_of(client, plain=True).states[0])
        return
    names = model_names(serving, clients)
    for row, safe in enumerate(file_names(names)):
        members = tuple(c for i, c in enumerate(clients) if serving.weights[i, row] > 0)
        if members and members[0] not in absent:
            yield Export(safe, names[row].replace("cluster-", "group "), members, serving.models[row])


def _personal(result: Result) -> Iterator[Export]:
    kept = [(c, theta) for c in result.clients if (theta := result.personal_state(c)) is not None]
    for (client, theta), safe in zip(kept, file_names([f"fine-tuned-{c}" for c, _ in kept]), strict=True):
        yield Export(safe, f"the model fine-tuned at {client}", (client,), theta)


def _about(result: Result, one: Export) -> dict[str, Any]:
    """Return what the card says about one model; scores are those of the run's last test."""
    tuned = result.personalized if one.name.startswith("fine-tuned-") else None
    scores = (result.plain if tuned is None else tuned).clients
    known = [scores[c] for c in one.clients if c in scores]
    return {
        "title": one.title,
        "members": list(one.clients),
        "mean": sum(known) / len(known) if known else None,
        "shape": list(result.about.shape),
        "dtype": str(_sample(result).dtype).removeprefix("torch."),
        "files": FILES.get(str(result.about.encoding.get("kind")), FILES["arrays"]),
    }


def _sample(result: Result) -> Tensor:
    """Two stored samples of zeros: images are bytes, tables floats."""
    images = result.about.encoding.get("kind") == "images"
    return torch.zeros(2, *result.about.shape, dtype=torch.uint8 if images else torch.float32)


def _write(where: Path, result: Result, one: Export) -> None:
    about = result.about
    network = deepcopy(Served(about, one.theta[None], (1.0,)).module())
    state = {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}
    network.load_state_dict(state, assign=True)  # tensors of their own, not views of one vector
    write_tensors(where / "model.safetensors", state, {"format": "pt"})
    _write_program(where / "model.pt2", Standalone(network, about.preprocess, about.target).eval(), _sample(result))
    config = {
        **({"classes": about.labels} if about.target is None else {"target": asdict(about.target)}),
        "clients": list(one.clients),
        "input": {"shape": list(about.shape), "dtype": str(_sample(result).dtype).removeprefix("torch.")},
        "preprocess": about.preprocess.as_dict(),
        "model": about.recipe.as_dict(),
        "encoding": dict(about.encoding),
    }
    write_file(where / "config.json", [json.dumps(config, indent=2, ensure_ascii=False).encode() + b"\n"])
    script = resources("emdcfl.report") / "templates" / "predict.py"
    write_file(where / "predict.py", [script.read_text(encoding="utf-8").encode()])


def _write_program(path: Path, model: nn.Module, sample: Tensor) -> None:
    try:
        with torch.no_grad():
            program = torch.export.export(model, (sample,), dynamic_shapes=({0: torch.export.Dim("n", min=1)},))
    except Exception as error:  # the compiler has many ways to reject somebody's network
        raise ModelError(
            f"torch.export cannot trace this network ({str(error).splitlines()[0]}); use its weights in models/ with your own code"
        ) from error
    program._example_inputs = None  # they would be pickled
    with path.open("wb") as file:  # torch cannot open a path that is no UTF-8
        torch.export.save(program, file)
