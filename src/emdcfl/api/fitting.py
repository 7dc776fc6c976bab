"""``fit`` and ``load``: one run, from what people hold in Python to a ``Result``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import nn

from emdcfl.api.clients import Clients, Groups, read_clients
from emdcfl.api.result import Result
from emdcfl.core.errors import ConfigError, DataError
from emdcfl.data import scenarios
from emdcfl.data.own.frames import OPTIONS
from emdcfl.data.types import Scenario
from emdcfl.methods.base import METHODS, Method, register
from emdcfl.models.recipe import BUILDERS, ModelRecipe, recipe_of
from emdcfl.runs.config import Choice, Config, config_keys, override
from emdcfl.runs.loop import Observer
from emdcfl.runs.plan import IN_MEMORY, with_facts
from emdcfl.runs.result import load as load_folder
from emdcfl.runs.runner import run
from emdcfl.runs.watching.progress import Live, terminal

DATA_SEED = "scenario.data_seed"
"""The seed of splits, of files as of data in memory: runs with other seeds are tested on the same samples."""

Model = str | ModelRecipe | Callable[[], nn.Module]
Task = Literal["classification", "regression"]


def fit(
    clients: Clients,
    model: Model | None = None,
    method: str | Method = "emdcfl",
    *,
    task: Task | None = None,
    label: str | None = None,
    site: str | None = None,
    rounds: int | None = None,
    seed: int = 0,
    local_epochs: int | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    personalize: Literal["off", "on", "if-it-pays"] | None = None,
    participants: int | None = None,
    hold_out: str | Sequence[str] | None = None,
    groups: Groups = None,
    device: str = "auto",
    workers: int = 1,
    settings: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool = False,
    observer: Observer | None = None,
) -> Result:
    """Find the groups among clients and train one model per group: what ``emdcfl run`` does, on data in memory as well.

    Parameters
    ----------
    clients : list, dict, frame, data set, Scenario, str or path
        One entry per client: ``(X, y)`` arrays or tensors, ``(X, y, group)`` where samples of one group must stay in one split, a pandas
        frame with a label column, ``(frame, y)``, a torch ``Dataset``, a Hugging Face ``Dataset``, or a dict of these under ``train``,
        ``val``, ``test``. Or one frame, ``Dataset`` or ``DatasetDict`` with the column ``site``; a ``flwr_datasets.FederatedDataset``,
        whose partitions are the clients; a built-in scenario by name; a folder of sites, or the file of repairs that ``emdcfl data check
        --fix`` wrote for one. Splits that are not given are drawn with the setting ``"scenario.data_seed"`` (0), the same for every seed.
    model : str or callable, optional
        Name of a built-in network, or a function that returns a fresh ``nn.Module``; its parameters ``classes``, ``channels``, ``size`` and
        ``features`` without a default are given what the data determine. Default: an MLP for tables, a CNN for images.
    method : str or Method
        A method's name, with options as in ``"ifca:k=2"``, or an instance: ``EMDCFL(tolerance=0.03)``. Fields left at their default take
        the scenario's value for them.
    task : "classification" or "regression", optional
        Whether labels are classes or numbers to predict. Default: classes; labels that look like measurements raise an error that asks.
        Regression minimises the squared error, and has R² and RMSE (``Result.regression``) instead of accuracy; ``pacfl``, ``fedsac`` and
        ``fedrc`` need classes.
    label, site : str, optional
        Columns of frames, data sets and tables: the label (default: the first of label, target, class, y), and whose row it is.
    rounds, local_epochs, batch_size, lr, participants : optional
        Default: the scenario's; for data of your own, 5 rounds of 10 epochs in batches of 32 with everybody.
    personalize : "off", "on" or "if-it-pays", optional
        Fine-tune at home after the last round: every client keeps the result, or only where everybody's validation losses promise it a
        gain. ``Result.predict`` then uses what was kept. Default: the scenario's; "if-it-pays" for data of your own.
    hold_out : str or list of str, optional
        Client or clients left out of training; at the end each is placed by unlabelled data and tested (``summary["unseen"]``).
    groups : dict or list, optional
        True groups of clients in memory, where known, to score the result with.
    workers : int
        Worker processes. Above 1, call ``fit`` under ``if __name__ == "__main__":``.
    settings : mapping, optional
        Any other key of a config: ``{"engine.precision": "bf16", "scenario.split": "time:day"}``.
    out : path, optional
        Run directory, written after every round; with ``resume`` an interrupted run in it goes on.
    progress : bool
        Show rounds as they end: a bar on a terminal, lines elsewhere.
    observer : Observer, optional
        Told of every round and reply; instead of ``progress``.

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
    held = None if hold_out is None else [str(name) for name in ([hold_out] if isinstance(hold_out, str | int | np.integer) else hold_out)]
    training = config_keys(rounds=rounds, local_epochs=local_epochs, batch_size=batch_size, lr=lr, personalize=personalize)
    given = training | config_keys(seed=seed, participants=participants, hold_out=held, device=device, workers=workers)
    given |= config_keys(task=task, label=label, client=site) | dict(settings or {})
    config, scenario = configure(clients, model, method, given, groups=groups)
    with Live(terminal()) if progress and observer is None else nullcontext(observer) as watch:
        return Result.of(run(config, None if out is None else Path(out), resume=resume, observer=watch, scenario=scenario))


def configure(
    clients: Clients, model: Model | None, method: str | Method, given: Mapping[str, Any], *, groups: Groups = None
) -> tuple[Config, Scenario | None]:
    """Return the config that arguments describe, and the data where the config cannot build them.

    ``given`` holds keys of a config; ``None`` is not given.
    """
    if isinstance(model, str) and model in METHODS:
        raise ConfigError(f"expected a model, got the method {model!r}; write method={model!r}")
    wanted = None if model is None else recipe_of(model)
    settings = {key: value.item() if isinstance(value, np.generic) else value for key, value in given.items() if value is not None}
    about = {name: settings.pop(f"scenario.{name}") for name in OPTIONS if f"scenario.{name}" in settings}
    about |= {name: str(about[name]) for name in ("label", "client") if name in about}  # pandas numbers the columns of an array
    source, scenario = read_clients(clients, groups, wanted, settings.get(DATA_SEED, 0), about)
    if source.name == IN_MEMORY and not isinstance(clients, Scenario) and (split_with := settings.pop(DATA_SEED, 0)):
        source = replace(source, options={**source.options, "data_seed": split_with})
    if groups is not None and (source.name != IN_MEMORY or isinstance(clients, Scenario)):
        raise ConfigError("groups= tells the true groups of data in memory, got files or a scenario; leave it out")
    unused = next((key for key in settings if key.startswith("scenario.") and source.name == IN_MEMORY), None)
    if unused is not None:
        raise ConfigError(f"{unused} is for files and built-in scenarios, but the data are in memory; prepare them before 'fit'")
    config = replace(Config(scenario=source, method=as_choice(method)), model=_model(wanted))
    config = override(config, settings, "fit")
    if isinstance(wanted, ModelRecipe):
        if scenario is None:
            scenario = scenarios.build(config.scenario.name, **config.scenario.options)
        if config.model == _model(wanted):  # else the settings say more of it
            wanted = with_facts(scenario, wanted)
            config = replace(config, model=_model(wanted))
        scenario = replace(scenario, model=wanted)
    return config, scenario


def load(folder: str | Path, *, clients: Clients | None = None, trust_model: bool = False) -> Result:
    """Read a run directory that ``emdcfl run`` or ``Result.save`` wrote.

    Parameters
    ----------
    folder : path
    clients : optional
        The run's data, as given to ``fit``, where they were in memory: needed to place a site, not to predict.
    trust_model : bool
        Whether the directory may name a model ``package.module:function``, whose code then runs. Leave it out for a directory that
        somebody else made.
    """
    found = Result.of(load_folder(folder, trust_model=trust_model))
    if clients is None:
        return found
    truth = found.summary["groups"]
    groups = None if truth is None else dict(zip(found.clients, truth, strict=True))
    model = found.about.recipe.name
    about = {name: value for name, value in found.config.scenario.options.items() if name in OPTIONS}
    split_with = {name: value for name, value in found.config.scenario.options.items() if name == "data_seed"}
    seed = split_with.get("data_seed", 0)
    source, scenario = read_clients(clients, groups, model if model in BUILDERS else None, seed, about)
    if replace(source, options={**source.options, **split_with}) != found.config.scenario:
        raise DataError(f"{folder}: the run had other data than those given; give what 'fit' was given")
    return replace(found, scenario=scenario)


def _model(wanted: str | ModelRecipe | None) -> Choice | None:
    if wanted is None:
        return None
    return Choice(wanted) if isinstance(wanted, str) else Choice(wanted.name, dict(wanted.options))


def as_choice(method: str | Method) -> Choice:
    """Return how a config names a method."""
    if isinstance(method, str):
        return override(Config(), {"method": method}).method
    cls = type(method)
    if not hasattr(cls, "State"):
        raise ConfigError(f"expected a method's name or an instance, as in 'emdcfl' or EMDCFL(tolerance=0.03), got {method!r}")
    if not (hasattr(cls, "name") and is_dataclass(cls)):
        raise ConfigError(f"expected a method's class to be a dataclass with a name (name: ClassVar[str]), got {cls.__name__}; add them")
    if METHODS.get(cls.name) is not cls:
        register(cls)
    try:
        usual = cls()
    except TypeError as error:
        raise ConfigError(f"expected a default for every field of {cls.__name__}, got {error}") from error
    given = {f.name: getattr(method, f.name) for f in fields(cls)}
    return Choice(cls.name, {name: value for name, value in given.items() if value != getattr(usual, name)})
