"""Embeddings of really trained clients, made once and cached outside the repository: the cases of ``transport.py``.

Every client trains briefly from one initial model; its train sample and every partner's validation sample are embedded by its model and
projected by its own R, as in a run.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from emdcfl.core.tasks import Training
from emdcfl.data import scenarios
from emdcfl.data.types import Scenario, Site, Split
from emdcfl.engines import make_federation
from emdcfl.models.recipe import ModelRecipe
from emdcfl.transport import cost_matrix, dual_variance, exact, projected_width, projection

Pair = tuple[int, int]


@dataclass(frozen=True)
class Case:
    """Projected samples of C clients: what the server of EMD-CFL holds after round 1."""

    name: str
    rows: dict[int, np.ndarray[Any, Any]]
    columns: dict[Pair, np.ndarray[Any, Any]]
    own: dict[int, np.ndarray[Any, Any]]
    tau: dict[int, float]
    variance: dict[int, float]
    labels: dict[int, np.ndarray[Any, Any]]
    truth: list[int]


def cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    path = Path(base) / "emdcfl" / "benchmarks"
    path.mkdir(parents=True, exist_ok=True)
    return path


def digits(per_group: int = 2) -> Case:
    """Rotated digits at the sizes they have, trained as a run trains them."""
    build = partial(scenarios.build, "rotated-digits", clients_per_group=per_group)
    return _cached({"case": "digits", "per_group": per_group}, Training(10, 32, 0.02), build)


def mnist(per_group: int = 10, size: int = 512, epochs: int = 3, model: str = "small_cnn") -> Case:
    """Rotated MNIST: 40 clients in 4 groups, 512 train and 512 validation images each."""
    chosen = {"per_group": per_group, "size": size, "model": model}
    return _cached({"case": "mnist", **chosen}, Training(epochs, 32, 0.02), partial(_mnist, **chosen))


def _mnist(per_group: int, size: int, model: str) -> Scenario:
    full = scenarios.build("rotated-mnist", data_root=os.environ["EMDCFL_DATA"])
    sites = []
    for i, site in enumerate(full.sites):
        if i % 10 < per_group:
            train, val = (Split(split.x[:size], split.y[:size]) for split in (site.train, site.val))
            sites.append(Site(site.name, train, val, site.tests))
    assert full.groups is not None
    recipe = ModelRecipe(model, {"channels": 1, "classes": 10, "size": 28})
    return replace(full, sites=tuple(sites), model=recipe, groups={s.name: full.groups[s.name] for s in sites})


def _cached(key: dict[str, Any], training: Training, build: Callable[[], Scenario]) -> Case:
    about = {**key, "training": training.as_dict(), "arrays": 2}
    path = cache_dir() / f"{key['case']}-{hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:12]}.npz"
    if not path.exists():
        print(f"training the clients of {key} once, cached in {path}", file=sys.stderr)
        partly = path.with_suffix(".part.npz")
        np.savez(partly, **_embed(build(), training))
        partly.replace(path)
    with np.load(path, allow_pickle=False) as read:
        every = read["columns"]
        columns = {(r, c): block for r, row in enumerate(every) for c, block in enumerate(row) if r != c}
        own = {c: every[c][c] for c in range(len(every))}
        rows, tau, variance, labels = (dict(enumerate(read[name])) for name in ("rows", "tau", "variance", "labels"))
        return Case(key["case"], rows, columns, own, tau, variance, labels, read["truth"].tolist())


def _embed(scenario: Scenario, training: Training) -> dict[str, Any]:
    with make_federation(scenario, engine="sequential", device="cpu", training=training, seed=0) as fed:
        fed.begin(1)
        start = fed.initial()
        theta = fed.train(dict.fromkeys(fed.clients, start)).column("theta")
        clients = fed._clients  # type: ignore[attr-defined]  # no public way to embed client by client
        n, m = (min(len(getattr(s, split)) for s in scenario.sites) for split in ("train", "val"))
        d = fed.layout.embedding_width
        rows, columns, tau, variance = [], [], [], []
        for name, client in clients.items():
            r = projection(client.secret.derive("projection", client.run, name), d, projected_width(0.9, d))

            def embed(of: str, split: str, size: int, name: str = name, r: Any = r) -> Any:
                other = clients[of]
                return other.embeddings(theta[name], split, other.sample(split, size)).numpy() @ r

            rows.append(embed(name, "train", n))
            columns.append([embed(other, "val", m) for other in clients])
            plan = exact(cost_matrix(rows[-1], columns[-1][len(rows) - 1]), duals=True)
            tau.append(plan.value)
            variance.append(dual_variance(plan.g))
        labels = [client.split("val").y[client.sample("val", m)].numpy() for client in clients.values()]
    assert scenario.groups is not None
    order = list(dict.fromkeys(scenario.groups.values()))
    truth = np.array([order.index(scenario.groups[s.name]) for s in scenario.sites])
    arrays = {"rows": rows, "columns": columns, "tau": tau, "variance": variance, "labels": labels, "truth": truth}
    return {name: np.array(values) for name, values in arrays.items()}
