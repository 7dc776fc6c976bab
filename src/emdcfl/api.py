"""``fit``: clustered federated learning on data in memory, from Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from emdcfl.core.errors import DataError, StoreError, nearest
from emdcfl.core.tasks import Training
from emdcfl.data.own import defaults, from_arrays
from emdcfl.data.types import Scenario
from emdcfl.engines import make_federation
from emdcfl.methods.base import Distances, Method, Serving
from emdcfl.methods.emdcfl import EMDCFL
from emdcfl.models.recipe import ModelRecipe, recipe_of
from emdcfl.runs.loop import Finished, Observer, play
from emdcfl.runs.outputs import Served, serve_client, write_outputs
from emdcfl.runs.runner import versions
from emdcfl.runs.scoring import MetricsRow, accuracy, agreement
from emdcfl.runs.store.files import json_text, write_file

Clients = Scenario | Sequence[Any] | Mapping[str, Any]


@dataclass(frozen=True)
class Accuracy:
    """Test accuracy: unweighted mean and minimum over clients, and every client's own."""

    mean: float
    worst: float
    clients: dict[str, float]


@dataclass(frozen=True)
class Result:
    """What ``fit`` found.

    Attributes
    ----------
    clusters : dict or None
        Client → cluster; ``None`` for methods without hard clusters.
    accuracy : Accuracy
    distances : Distances or None
        What the clustering was decided on, where the method measures distances.
    ari : float or None
        Agreement with the true groups, where they were given.
    history : list of dict
        One row per round and client.
    """

    scenario: Scenario
    serving: Serving
    history: list[MetricsRow]
    method: Method
    seed: int
    seconds: dict[str, float]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(site.name for site in self.scenario.sites)

    @property
    def clusters(self) -> dict[str, int] | None:
        return None if self.serving.clusters is None else dict(zip(self.names, self.serving.clusters.tolist(), strict=True))

    @property
    def distances(self) -> Distances | None:
        return self.serving.distances

    @property
    def ari(self) -> float | None:
        return agreement(self.serving, self.names, self.scenario.groups)

    @property
    def accuracy(self) -> Accuracy:
        rows = self._last()
        variant = next(iter(self.scenario.sites[0].tests))
        found = accuracy(rows, variant, self.scenario.scored)
        assert found["mean"] is not None
        assert found["worst"] is not None
        return Accuracy(found["mean"], found["worst"], {r["client"]: r["accuracy"][variant] for r in rows if r["accuracy"]})

    @property
    def models(self) -> dict[str, nn.Module]:
        """Client → its network in evaluation mode (of mixtures, the component with the largest weight)."""
        found: dict[str, nn.Module] = {}
        for name in self.names:
            served = self._served(name)
            found[name] = served.module(served.states[int(np.argmax(served.weights))])
        return found

    def predict(self, client: str, x: Any) -> list[str]:
        """Return the class names predicted for raw inputs ``x`` (as given to ``fit``) by what the client is served with."""
        p = self.predict_proba(client, x)
        return [self.scenario.classes[i] for i in p.argmax(1).tolist()]

    def predict_proba(self, client: str, x: Any) -> Tensor:
        """Return class probabilities, one column per entry of ``scenario.classes``."""
        served = self._served(client)
        like = self.scenario.sites[0].train.x
        inputs = torch.as_tensor(np.ascontiguousarray(x)).to(like.dtype)
        if inputs.shape[1:] != like.shape[1:] and inputs.numel() == inputs.shape[0] * like[0].numel():
            inputs = inputs.reshape(-1, *like.shape[1:])  # (N, H, W) for (N, 1, H, W)
        return served.probabilities(inputs)

    def save(self, path: str | Path) -> Path:
        """Write ``summary.json``, ``metrics.jsonl``, ``models/`` and, where there are distances, their arrays and heat map."""
        folder = Path(path)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise StoreError(f"{folder} exists and is not an empty folder; choose another")
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / "metrics.jsonl", [(json_text(row, "metrics.jsonl") + "\n").encode() for row in self.history])
        write_outputs(folder, self.scenario, self.serving, self._summary())
        return folder

    def _summary(self) -> dict[str, Any]:
        clusters = self.clusters
        return {
            "method": self.method.name,
            "scenario": self.scenario.name,
            "seed": self.seed,
            "rounds": self.history[-1]["round"],
            "finished": True,
            "k": int(self.serving.models.shape[0]) if clusters is None else len(set(clusters.values())),
            "ari": self.ari,
            "clients": list(self.names),
            "groups": None if self.scenario.groups is None else [self.scenario.groups[c] for c in self.names],
            "clusters": None if clusters is None else list(clusters.values()),
            "accuracy": {"mean": self.accuracy.mean, "worst": self.accuracy.worst},
            "seconds": {phase: round(value, 3) for phase, value in self.seconds.items()},
            "versions": versions(),
        }

    def _last(self) -> list[MetricsRow]:
        return [row for row in self.history if row["round"] == self.history[-1]["round"]]

    def _served(self, client: str) -> Served:
        if client not in self.names:
            raise DataError(f"there is no client {client!r}: {nearest(client, self.names)}")
        return serve_client(self.scenario, self.serving, self.names.index(client))


def fit(
    clients: Clients,
    model: str | ModelRecipe | Callable[[], nn.Module] | None = None,
    method: Method | None = None,
    *,
    rounds: int | None = None,
    seed: int = 0,
    local_epochs: int | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    participants: int | None = None,
    groups: Mapping[str, str] | Sequence[str] | None = None,
    device: str = "auto",
    workers: int = 1,
    observer: Observer | None = None,
) -> Result:
    """Find the groups among clients and train one model per group.

    Parameters
    ----------
    clients : list, dict or Scenario
        One entry per client: ``(X, y)`` arrays or tensors, a torch ``Dataset``, or a dict of these under ``train``, ``val``, ``test``.
        Where the splits are not given they are drawn with the seed.
    model : str or callable, optional
        Name of a built-in network, or a function that returns a fresh ``nn.Module``. Default: an MLP for tables, a CNN for images.
    method : Method, optional
        ``EMDCFL()`` by default.
    rounds, local_epochs, batch_size, lr : optional
        Defaults fit small data sets: 5 rounds of 10 epochs, batches of 32.
    groups : dict or list, optional
        True groups where known, to score the result with.
    workers : int
        Worker processes. Above 1, call ``fit`` under ``if __name__ == "__main__":``.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> def site(sign):
    ...     x = rng.normal(size=(300, 8)).astype("float32") + 2 * sign
    ...     return x, (sign * x[:, 0] > 2).astype(int)
    >>> result = fit({"a": site(1), "b": site(1), "c": site(-1), "d": site(-1)}, rounds=2)
    >>> result.clusters
    {'a': 0, 'b': 0, 'c': 1, 'd': 1}
    """
    wanted = None if model is None else recipe_of(model)
    if isinstance(clients, Scenario):
        shape = tuple(clients.sites[0].train.x.shape[1:])
        scenario = clients if wanted is None else replace(clients, model=defaults.recipe(wanted, shape=shape, classes=len(clients.classes)))
    else:
        scenario = from_arrays(clients, groups=groups, model=wanted, seed=seed)
    given = {"local_epochs": local_epochs, "batch_size": batch_size, "lr": lr}
    known = {k: v for k, v in scenario.defaults.items() if k in given} | {k: v for k, v in given.items() if v is not None}
    total = rounds or int(scenario.defaults.get("rounds", 10))
    chosen = method or EMDCFL()
    options: dict[str, Any] = {"training": Training(**known), "seed": seed, "number": participants, "device": device}
    history: list[MetricsRow] = []
    with make_federation(scenario, workers=workers, **options) as fed:
        last: Finished | None = None
        for last in play(fed, chosen, rounds=total, observer=observer):
            history += last.rows
        assert last is not None
        return Result(scenario, last.serving, history, chosen, seed, dict(fed.clock.seconds))
