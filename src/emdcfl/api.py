"""``fit`` and ``load``: clustered federated learning from Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

from torch import nn

from emdcfl.core import keys
from emdcfl.core.errors import DataError
from emdcfl.data import scenarios
from emdcfl.data.own import from_arrays
from emdcfl.data.types import Scenario
from emdcfl.methods.base import METHODS, Method, register
from emdcfl.models.recipe import BUILDERS, ModelRecipe, recipe_of
from emdcfl.runs.config import Choice, Config, override
from emdcfl.runs.loop import Observer
from emdcfl.runs.plan import IN_MEMORY
from emdcfl.runs.result import Accuracy, Result
from emdcfl.runs.result import load as load_folder
from emdcfl.runs.runner import run

__all__ = ["Accuracy", "Result", "fit", "load"]

Clients = str | Path | Scenario | Sequence[Any] | Mapping[str, Any]
Model = str | ModelRecipe | Callable[[], nn.Module]


def fit(
    clients: Clients,
    model: Model | None = None,
    method: str | Method = "emdcfl",
    *,
    rounds: int | None = None,
    seed: int = 0,
    local_epochs: int | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    personalize: Literal["off", "on", "if-it-pays"] | None = None,
    participants: int | None = None,
    hold_out: Sequence[str] | None = None,
    groups: Mapping[str, str] | Sequence[str] | None = None,
    device: str = "auto",
    workers: int = 1,
    settings: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    observer: Observer | None = None,
) -> Result:
    """Find the groups among clients and train one model per group: what ``emdcfl run`` does, on data in memory as well.

    Parameters
    ----------
    clients : list, dict, Scenario, str or path
        One entry per client: ``(X, y)`` arrays or tensors, ``(X, y, group)`` where samples of one group must stay in one split, a torch
        ``Dataset``, or a dict of these under ``train``, ``val``, ``test`` (splits that are not given are drawn with the seed). Or a
        built-in scenario by name, or a folder of sites.
    model : str or callable, optional
        Name of a built-in network, or a function that returns a fresh ``nn.Module``. Default: an MLP for tables, a CNN for images.
    method : str or Method
        A method's name, or an instance: ``EMDCFL(tolerance=0.03)``. Fields left at their default take the scenario's value for them.
    rounds, local_epochs, batch_size, lr, participants : optional
        Default: the scenario's; for data of your own, 5 rounds of 10 epochs in batches of 32 with everybody.
    personalize : "off", "on" or "if-it-pays", optional
        Fine-tune at home after the last round: every client keeps the result, or only where its validation loss improves by more than
        one standard error. ``Result.predict`` then uses what was kept. Default: "if-it-pays" for data of your own, else "off".
    hold_out : list of str, optional
        Clients left out of training; at the end each is placed by unlabelled data and tested (``summary["unseen"]``).
    groups : dict or list, optional
        True groups of arrays, where known, to score the result with.
    workers : int
        Worker processes. Above 1, call ``fit`` under ``if __name__ == "__main__":``.
    settings : mapping, optional
        Any other key of a config: ``{"engine.precision": "bf16", "scenario.split": "time:day"}``.
    out : path, optional
        Run directory, written after every round; with ``resume`` an interrupted run in it goes on.
    observer : Observer, optional
        Told of every round and reply.

    Returns
    -------
    Result

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
    source, scenario = _data(clients, groups, wanted, seed)
    given: dict[str, Any] = {
        "run.rounds": rounds,
        "run.seed": seed,
        "run.participants": participants,
        "run.hold_out": None if hold_out is None else list(hold_out),
        "training.local_epochs": local_epochs,
        "training.batch_size": batch_size,
        "training.lr": lr,
        "personalize.mode": personalize,
        "engine.device": device,
        "engine.workers": workers,
        **(settings or {}),
    }
    config = replace(Config(scenario=source, method=_choice(method)), model=_model(wanted))
    config = override(config, {key: value for key, value in given.items() if value is not None}, "fit:")
    if isinstance(wanted, ModelRecipe) and scenario is None:
        scenario = scenarios.build(config.scenario.name, **config.scenario.options)
    if scenario is not None and isinstance(wanted, ModelRecipe):
        scenario = replace(scenario, model=wanted)
    return run(config, None if out is None else Path(out), resume=resume, observer=observer, scenario=scenario)


def load(folder: str | Path, *, clients: Clients | None = None, trust_model: bool = False) -> Result:
    """Read a run directory that ``emdcfl run`` or ``Result.save`` wrote.

    Parameters
    ----------
    folder : path
    clients : optional
        The run's data, as given to ``fit``, where they were arrays: needed to place a site, not to predict.
    trust_model : bool
        Whether the directory may name a model ``package.module:function``, whose code then runs. Leave it out for a directory that
        somebody else made.
    """
    found = load_folder(folder, trust_model=trust_model)
    if clients is None:
        return found
    truth = found.summary["groups"]
    groups = None if truth is None else dict(zip(found.clients, truth, strict=True))
    model = found.about.recipe.name
    source, scenario = _data(clients, groups, model if model in BUILDERS else None, found.config.run.seed)
    if source != found.config.scenario:
        raise DataError(f"{folder}: the run had other data than those given; give what 'fit' was given")
    return replace(found, scenario=scenario)


def _data(
    clients: Clients, groups: Mapping[str, str] | Sequence[str] | None, model: str | ModelRecipe | None, seed: int
) -> tuple[Choice, Scenario | None]:
    """Return what the config says of the data, and the data where a config cannot build them or they are built already."""
    if isinstance(clients, Path) or (isinstance(clients, str) and clients not in scenarios.names()):
        return Choice("folder", {"path": str(clients)}), None
    if isinstance(clients, str):
        return Choice(clients), None
    if isinstance(clients, Scenario):
        if clients.source is not None:
            return Choice(clients.source[0], clients.source[1]), clients
        return Choice(IN_MEMORY, {"fingerprint": fingerprint(clients)}), clients
    scenario = from_arrays(clients, groups=groups, model=model, seed=seed)
    return Choice(IN_MEMORY, {"fingerprint": fingerprint(scenario)}), scenario


def _model(wanted: str | ModelRecipe | None) -> Choice | None:
    if wanted is None:
        return None
    return Choice(wanted) if isinstance(wanted, str) else Choice(wanted.name, dict(wanted.options))


def _choice(method: str | Method) -> Choice:
    if isinstance(method, str):
        return Choice(method)
    cls = type(method)
    if METHODS.get(cls.name) is not cls:
        register(cls)
    given = {f.name: getattr(method, f.name) for f in fields(cls)}  # type: ignore[arg-type]
    usual = {f.name: getattr(cls(), f.name) for f in fields(cls)}  # type: ignore[arg-type]
    return Choice(cls.name, {name: value for name, value in given.items() if value != usual[name]})


def fingerprint(scenario: Scenario) -> str:
    """Return a short hash of the samples, labels, classes and names of a scenario's sites."""
    parts: list[Any] = [*scenario.classes, repr(scenario.preprocess.as_dict())]
    for site in scenario.sites:
        splits = {"train": site.train, "val": site.val, **{f"test:{name}": split for name, split in site.tests.items()}}
        for name, split in splits.items():
            parts += [site.name, name, repr(tuple(split.x.shape)), split.x.contiguous().numpy().tobytes(), split.y.numpy().tobytes()]
    return keys.digest(*parts).hex()[:16]
