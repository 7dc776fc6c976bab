"""What a node answers: the operator's ``[policy]`` in ``node.toml``. What it does not allow is refused, before any code or data is touched.

The server is not trusted here: each request is checked on its own, and ``Releases`` counts on disk what was answered in earlier ones.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from emdcfl.core.checks import check_options
from emdcfl.core.client import TASKS as KNOWN
from emdcfl.core.errors import ClientError, ConfigError, EmdcflError
from emdcfl.core.keys import digest
from emdcfl.models import BUILDERS, ModelRecipe

TASKS = ("describe", "train", "test", "evaluate", "reference", "recalibrate", "project", "loss_moments")
REDUCTIONS = ("mean", "argmin_counts")
COSTS = ("cosine", "euclidean")
PUBLISHED = (None, "imagenet")
"""Initial weights that do not name a file of the node."""

OWN = "*"
"""Whose model ``reference`` embeds with, in the count of releases."""


class PolicyError(ClientError):
    """The node's policy does not allow a request."""


@dataclass(frozen=True)
class Policy:
    """``[policy]`` of ``node.toml``.

    Attributes
    ----------
    tasks : list of str
        Tasks that the node answers; where one of them trains, ``personalize`` is answered too.
    models : list of str
        Networks beside the built-in ones, as ``"package.module:function"``: the node imports and runs this code.
    weights : list of str
        Files of initial weights that a request may name.
    reductions : list of str
        How losses may be summed up: ``mean``, ``argmin_counts``, ``per_batch``, ``per_sample``.
    models_at_once, averages_at_once : int
        Most models that one request may score: for losses, and for the moments by which groups are decided.
    projection_ratio : float
        Largest width of a projection over the embedding width.
    costs : list of str
        Ground costs; ``label-aware`` shows labels to the server.
    samples : int
        Most samples a side that are embedded for one comparison.
    split_seed : int
        Seed that divides this site's own files into train, validation and test; requests with another one are refused.
    categorical : list of str
        Columns of numbers whose values the survey may list as words.
    models_per_round, models_per_run : int
        Different models of one client (itself, or one partner) that the node embeds its data with, in a round and in a run.
    partners_per_round : int
        The same for all partners together, in a round.
    """

    tasks: list[str] = field(default_factory=lambda: list(TASKS))
    models: list[str] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)
    reductions: list[str] = field(default_factory=lambda: list(REDUCTIONS))
    models_at_once: int = 16
    averages_at_once: int = 64
    projection_ratio: float = 0.9
    costs: list[str] = field(default_factory=lambda: list(COSTS))
    samples: int = 512
    split_seed: int = 0
    categorical: list[str] = field(default_factory=list)
    models_per_round: int = 1
    models_per_run: int = 16
    partners_per_round: int = 256

    @property
    def answered(self) -> list[str]:
        """The tasks allowed, and ``personalize`` where one of them trains.

        Its reply is that of a training from the same start with the same settings, which the server could ask for as well, and one bit:
        whether the validation loss improved.
        """
        trains = any(name in KNOWN and KNOWN[name].phase == "train" for name in self.tasks)
        return list(dict.fromkeys([*self.tasks, *(["personalize"] if trains else [])]))

    def check(self, task: str, job: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
        """Raise ``PolicyError`` if the node does not answer this request."""
        if task not in self.answered:
            raise _refusal(f"the task {task!r}", "tasks", self.answered)
        self.check_model(job["model"])
        self.check_data(job["data"])
        if task == "train" and inputs.get("sample_weights") is not None:
            raise PolicyError("this node does not train with the server's weight for each sample: it could single out one record")
        if task == "evaluate":
            if inputs.get("reduction", "mean") not in self.reductions:
                raise _refusal(f"losses as {inputs['reduction']!r}", "reductions", self.reductions)
            self._check_count(inputs["models"], "models_at_once")
        if task == "loss_moments":
            self._check_count(inputs["models"], "averages_at_once")
        if "settings" in inputs:
            self._check_settings(inputs["settings"], inputs.get("size"))

    def check_model(self, model: Mapping[str, Any]) -> None:
        """Refuse a network whose code the operator did not choose, before anything of it is imported."""
        recipe = ModelRecipe.from_dict(model)
        if not isinstance(recipe.name, str) or (recipe.name not in BUILDERS and recipe.name not in self.models):
            raise _refusal(f"the model {recipe.name!r}", "models", [*BUILDERS, *self.models])
        weights = recipe.options.get("weights")
        if weights not in PUBLISHED and weights not in self.weights:
            raise _refusal(f"initial weights of {weights!r}", "weights", self.weights)
        try:
            check_options(recipe.builder_function(), recipe.options, f"the server's model {recipe.name!r}")
        except EmdcflError as error:
            raise PolicyError(str(error)) from error

    def check_data(self, data: Mapping[str, Any]) -> None:
        """Refuse other splits than the node's own, and scenarios that read files or name code of the server's choice."""
        if "scenario" not in data:
            self.check_seed(data["seed"])
            return
        from emdcfl.data import scenarios  # imports every source of data, which other nodes do not need

        name, options = data["scenario"], data["options"]
        if name == "nodes" or "path" in scenarios.options(name):
            raise PolicyError(f"this node does not serve scenario {name!r}, which reads files; its operator sets data in node.toml")
        if options.get("data_root") is not None:
            raise PolicyError("this node does not read a data folder of the server's choice; set EMDCFL_DATA at the node")
        model = options.get("model")
        if model is not None and model not in BUILDERS and model not in self.models:
            raise _refusal(f"the model {model!r}", "models", [*BUILDERS, *self.models])

    def check_seed(self, seed: Any) -> None:
        """Refuse to divide the files in another way: two divisions together show which rows are in which part."""
        if type(seed) is not int or seed != self.split_seed:
            raise _refusal(f"splits with seed {seed!r}", "split_seed", [str(self.split_seed)])

    def _check_count(self, models: Any, key: str) -> None:
        most = getattr(self, key)
        if not isinstance(models, Tensor) or models.ndim != 2:
            raise PolicyError("expected the models to score as rows of a tensor; check the server")
        if len(models) > most:
            raise _refusal(f"losses of {len(models)} models at once", key, [f"at most {most}"])

    def _check_settings(self, settings: Any, size: Any) -> None:
        if not isinstance(settings, Mapping):
            raise PolicyError("expected the settings of a comparison as a table; check the server")
        if settings.get("exchange") != "peer" and "deposit" not in self.tasks:
            raise PolicyError(
                f"this node sends no raw samples or embeddings, got exchange = {settings.get('exchange')!r}; use 'peer', "
                "or its operator adds 'deposit' to policy.tasks in node.toml"
            )
        if settings.get("cost") not in self.costs:
            raise _refusal(f"the cost {settings.get('cost')!r}", "costs", self.costs)
        for name, value, most in (
            ("projection_ratio", settings.get("projection_ratio"), self.projection_ratio),
            ("samples", settings.get("max_samples"), self.samples),
            ("samples", 0 if size is None else size, self.samples),
        ):
            if not isinstance(value, (int, float)) or not value <= most:  # a NaN is refused too
                raise _refusal(f"a comparison with {name} = {value!r}", name, [f"at most {most:g}"])


def read_policy(raw: Mapping[str, Any], where: str) -> Policy:
    """Check the table ``[policy]`` of a file."""
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{where} must be a table, got {raw!r}; write [policy] and its keys below")
    return Policy(**check_options(Policy, raw, where))


def _refusal(what: str, key: str, allowed: list[str]) -> PolicyError:
    return PolicyError(f"this node does not allow {what}; it allows {', '.join(allowed) or 'none'} (policy.{key} in node.toml)")


class Releases:
    """How many different models a node has embedded its data with in a run, kept in a small file.

    A model chosen for it shows a row of a projection R; as many as R has rows show all of it. So the count holds for all
    requests of a run, across rounds, processes and restarts.

    Parameters
    ----------
    path : Path
        The file, in the run's folder of the node's state.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def admit(self, policy: Policy, task: str, round: int, job: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
        """Record under which models a request embeds the node's data, or raise ``PolicyError`` if there are too many."""
        if task == "recalibrate" or (task == "reference" and not inputs.get("again", False)):
            wanted, task = {OWN: _print(inputs["omega"], job, inputs)}, "reference"
        elif task == "project":
            wanted = {str(row): _print(inputs["omegas"][row], job, inputs) for row in inputs["rows"]}
        else:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self.path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # messages may be separate processes
            known = self._read()
            _add(known.setdefault(task, {}), wanted, round, policy)
            temporary = self.path.with_suffix(".tmp")
            temporary.write_text(json.dumps(known), encoding="utf-8")
            temporary.replace(self.path)

    def _read(self) -> dict[str, dict[str, dict[str, int]]]:
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            return {task: {whose: dict(prints) for whose, prints in mine.items()} for task, mine in found.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise PolicyError("this node cannot read what it has released in this run; its operator restores releases.json") from error


def _add(known: dict[str, dict[str, int]], wanted: Mapping[str, str], round: int, policy: Policy) -> None:
    """Add the models wanted in a round to those known, by client; each is counted in the round that asked for it first."""
    for whose, print_ in wanted.items():
        models = known.setdefault(whose, {})
        models.setdefault(print_, round)
        client = "itself" if whose == OWN else f"client {whose!r}"
        _limit(list(models.values()).count(round), f"models of {client} in round {round}", "models_per_round", policy.models_per_round)
        _limit(len(models), f"models of {client} in this run", "models_per_run", policy.models_per_run)
    now = sum(first == round for models in known.values() for first in models.values())
    _limit(now, f"partners' models in round {round}", "partners_per_round", policy.partners_per_round)


def _limit(count: int, what: str, key: str, most: int) -> None:
    if count > most:
        raise PolicyError(
            f"this node embeds its data with at most {most} {what}, got {count}: start a run with another run.seed, "
            f"or its operator raises policy.{key} in node.toml"
        )


def _print(omega: Any, job: Mapping[str, Any], inputs: Mapping[str, Any]) -> str:
    """Digest of a model and of what decides which samples are embedded and how."""
    if not isinstance(omega, Tensor):
        raise PolicyError("expected an embedding model as a tensor; check the server")
    data = omega.detach().cpu().contiguous().numpy().tobytes()
    return digest(data, job["seed"], json.dumps(dict(inputs["settings"]), sort_keys=True, default=str)).hex()[:32]
