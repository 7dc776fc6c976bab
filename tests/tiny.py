"""The scenario of the core's tests: two groups of two sites, small enough for a run in a fraction of a second.

Importing this module registers it as ``tiny``, so that a config, a worker process or a child script can name it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tests.methods.toy import CLASSES, FEATURES, samples
from torch import Tensor, nn

from emdcfl.core.client import Client
from emdcfl.core.codec import raw
from emdcfl.core.federation import Federation
from emdcfl.core.keys import NodeSecret, generator, global_seed
from emdcfl.core.params import Network
from emdcfl.core.tasks import Training
from emdcfl.data.scenarios.registry import scenario
from emdcfl.data.types import Preprocess, Scenario, Site
from emdcfl.engines.local import SequentialFederation
from emdcfl.methods.base import Distances, Serving
from emdcfl.models.recipe import ModelRecipe, register
from emdcfl.runs.config import Choice, Config, RunConfig
from emdcfl.runs.loop import NoOpObserver
from emdcfl.runs.scoring import MetricsRow, RoundTest, Untested

AnyFederation = TypeVar("AnyFederation", bound=Federation)
TRAINING = Training(local_epochs=2, batch_size=16, lr=0.05, momentum=0.9, weight_decay=1e-4)


@scenario("tiny", "two groups of points on a turned circle; for tests")
def tiny(
    *,
    groups: int = 2,
    clients_per_group: int = 2,
    n: Sequence[int] = (80,),
    val: Sequence[int] = (70,),
    test: int = 40,
    model: str = "mlp",
    sort: bool = False,
) -> Scenario:
    """Build it; ``n`` and ``val`` are repeated over the clients, ``sort`` orders the validation samples by class."""
    sites, truth = [], {}
    for i in range(groups * clients_per_group):
        name, group = f"site-{i}", i // clients_per_group
        counts = {"train": n[i % len(n)], "val": val[i % len(val)], "test": test}
        draw = {split: samples(size, group, generator(7, name, 0, split)) for split, size in counts.items()}
        if sort:
            order = draw["val"].y.sort(stable=True).indices
            draw["val"] = type(draw["val"])(draw["val"].x[order], draw["val"].y[order])
        sites.append(Site(name, draw["train"], draw["val"], {"test": draw["test"]}))
        truth[name] = f"group-{group}"
    options = {"features": FEATURES, "classes": CLASSES} | ({"hidden": [8]} if model == "mlp" else {})
    return Scenario(
        "tiny",
        tuple(sites),
        tuple("abcd"[:CLASSES]),
        Preprocess(),
        ModelRecipe(model, options),
        groups=truth,
        k=groups,
        defaults={"rounds": 3, "local_epochs": 2, "batch_size": 16, "lr": 0.05},
    )


@register
def tiny_bn(*, features: int, classes: int) -> nn.Module:
    """Build a network with BatchNorm."""
    return nn.Sequential(nn.Linear(features, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, classes))


@register
def tiny_untracked(*, features: int, classes: int) -> nn.Module:
    """Build a network whose BatchNorm keeps no running statistics."""
    return nn.Sequential(nn.Linear(features, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.ReLU(), nn.Linear(6, classes))


@register
def tiny_dropout(*, features: int, classes: int) -> nn.Module:
    """Build a network that draws from torch's global generator while it trains."""
    return nn.Sequential(nn.Linear(features, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, classes))


def federation(scenario_: Scenario | None = None, *, participants: int | None = None, **options: Any) -> SequentialFederation:
    """Build a sequential federation."""
    options = {"training": TRAINING, "device": "cpu", "number": participants, **options}
    return SequentialFederation(tiny() if scenario_ is None else scenario_, **options)


def client(scenario_: Scenario | None = None, index: int = 0, *, seed: int = 0, precision: str = "fp32") -> Client:
    """Build one client with a network of its own."""
    chosen = tiny() if scenario_ is None else scenario_
    with global_seed(1):
        network = Network(chosen.model)
    site = chosen.sites[index]
    return Client(site, network, chosen.preprocess, seed=seed, secret=NodeSecret.simulated(seed, site.name), precision=precision)


def config(*, method: str = "emdcfl", rounds: int = 3, seed: int = 0, participants: int | None = None, **options: Any) -> Config:
    """Build a config of the tiny scenario; options go to the method.

    The tolerance lies well between the groups, whatever projection the name of the run leads to.
    """
    options = {"tolerance": 0.08, **options} if method == "emdcfl" else options
    return Config(
        run=RunConfig(seed=seed, rounds=rounds, participants=participants), scenario=Choice("tiny"), method=Choice(method, options)
    )


def score(fed: Federation, serving: Serving, losses: Mapping[str, float] | None = None) -> list[MetricsRow]:
    """Test every client now with what it is served."""
    return RoundTest(fed, serving, Untested(fed.index, dict(losses or {}), fed.guard.ledger.excluded)).rows()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors agree in type, shape and every bit."""
    return a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)


def same(a: Any, b: Any) -> bool:
    """Whether two values agree in type, structure and every bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return same_bits(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if is_dataclass(a):
        return all(same(getattr(a, field.name), getattr(b, field.name)) for field in fields(a))
    return bool(a.tobytes() == b.tobytes()) if isinstance(a, np.ndarray) else repr(a) == repr(b)


class Stop(BaseException):
    """Somebody pressed a key."""


class StopAfter(NoOpObserver):
    """An observer that stops a run when the round after this one begins."""

    def __init__(self, index: int) -> None:
        self.index = index

    def begin(self, index: int, total: int, participants: tuple[str, ...]) -> None:
        if index > self.index:
            raise Stop


def tamper(fed: AnyFederation, change: Callable[[str, str, Any], Any]) -> AnyFederation:
    """Have every reply changed on its way to the server, by ``change(task, client, reply)``; return the federation."""
    honest = fed._dispatch

    def dispatch(info: Any, inputs: Any, common: Any) -> Any:
        for client, reply in honest(info, inputs, common):
            yield client, change(info.name, client, reply)

    fed._dispatch = dispatch  # type: ignore[method-assign]
    return fed


def sketch(distances: Distances, *shown: object) -> str:
    """Say what a picture would show."""
    return repr((distances, shown))


SKETCHES: dict[str, Any] = {"heatmap": sketch, "margin_plot": sketch, "png": str.encode}
"""What draws in ``runs.outputs``, and takes two thirds of a small run's time, where a test is not about pictures."""


def contents(run: Path) -> dict[str, Any]:
    """Return every file of a run directory as something to compare, without the times, the lock and the page that shows the times."""
    found: dict[str, Any] = {}
    for path in sorted(p for p in run.rglob("*") if p.is_file() and p.name not in (".lock", "report.html")):
        name = path.relative_to(run).as_posix()
        found[name] = path.read_bytes()
        if name == "summary.json":
            found[name] = {k: v for k, v in json.loads(found[name]).items() if k not in ("seconds", "sha256")}
        elif name.startswith("state/round-"):
            body = json.loads(found[name])["body"]
            body["value"]["m"]["extra"]["m"].pop("seconds")
            found[name] = body
    return found


def forge_round(path: Path, body: Mapping[str, Any]) -> None:
    """Write a round's file with a checksum that fits."""
    text = json.dumps(body, separators=(",", ":"), allow_nan=False)
    path.write_text(f'{{"sha256":"{sha256(text.encode()).hexdigest()}","body":{text}}}\n')


if __name__ == "__main__":  # the command line, with the tiny scenario known to it
    from emdcfl.cli import main

    main(sys.argv[1:])
