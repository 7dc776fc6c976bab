"""What a node answers: the operator's ``[policy]`` in ``node.toml``. What it does not allow is refused, before any code or data is touched.

The server is not trusted here: each request is checked on its own, and ``releases.py`` counts on disk what was answered in earlier ones.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor

from emdcfl.core.checks import check_options
from emdcfl.core.client import NODE_NEEDS
from emdcfl.core.client import TASKS as KNOWN
from emdcfl.core.errors import ClientError, ConfigError, EmdcflError, nearest
from emdcfl.core.replies import brief
from emdcfl.core.tasks import Training
from emdcfl.data.own.tables import MAX_WORDS
from emdcfl.models import BUILDERS, ModelRecipe

TASKS = ("describe", "train", "test", "evaluate", "reference", "recalibrate", "project", "loss_moments")
REDUCTIONS = ("mean", "argmin_counts")
COSTS = ("cosine", "euclidean")
ALWAYS = ("describe", "train", "test")
PUBLISHED = (None, "imagenet")
"""Initial weights that do not name a file of the node."""

MAX_LIST_LENGTH, MAX_INTEGER = 256, 2**20
"""Of a network's options: what a request may say before the network is counted."""

MAX_COLUMNS = 2**16
"""Of an encoded table."""

MIN_CALIBRATED = 12
"""Samples at which a tolerance is calibrated, at least; what a partner offers has as many."""

MAX_THREADS = 64
MAX_SIZES = 1024
MAX_NAME_LENGTH = 256
"""Of a request: threads, sample sizes at which distances are calibrated, characters of the run's name."""


class PolicyError(ClientError):
    """The node's policy does not allow a request."""


@dataclass(frozen=True)
class Policy:
    """``[policy]`` of ``node.toml``."""

    methods: list[str] = field(default_factory=list)
    """Methods that the node takes part in. Where some are named, ``tasks`` and ``reductions`` are what they need."""
    tasks: list[str] = field(default_factory=lambda: list(TASKS))
    """Tasks that the node answers; where one of them trains, ``personalize`` is answered too."""
    models: list[str] = field(default_factory=list)
    """Networks beside the built-in ones, as ``"package.module:function"``: the node imports and runs this code."""
    weights: list[str] = field(default_factory=list)
    """Files of initial weights that a request may name."""
    reductions: list[str] = field(default_factory=lambda: list(REDUCTIONS))
    """How losses may be summed up: ``mean``, ``argmin_counts``, ``per_batch``, ``per_sample``."""
    models_at_once: int = 16
    """Most models that one request may score for losses."""
    averages_at_once: int = 64
    """The same for the moments by which groups are decided."""
    projection_ratio: float = 0.9
    """Largest width of a projection over the embedding width."""
    costs: list[str] = field(default_factory=lambda: list(COSTS))
    """Ground costs; ``label-aware`` shows labels to the server."""
    samples: int = 512
    """Most samples a side that are embedded for one comparison."""
    batch_size: int = 8
    """Smallest batch size to train with: a model that one sample changed shows that sample. An epoch's last batch may be smaller."""
    local_epochs: int = 100
    """Most epochs of one training."""
    split_seed: int = 0
    """Seed that divides this site's own files into train, validation and test; requests with another one are refused."""
    columns: list[str] = field(default_factory=list)
    """Columns that a server may be told of and use; empty for all."""
    categorical: list[str] = field(default_factory=list)
    """Columns of numbers whose values the survey may list as words."""
    models_per_round: int = 1
    """Different models of one client (itself, or one partner) that the node embeds its data with, in a round."""
    models_per_run: int = 16
    """The same in a run."""
    partners_per_round: int = 256
    """The same for all partners together, in a round."""
    models_in_all: int = 10_000
    """The same for all clients and runs together."""
    run_names: list[str] = field(default_factory=list)
    """Runs that the node takes part in; empty for any."""
    runs: int = 100
    """How many runs it takes part in."""
    run_days: int = 30
    """Days without a request after which a run is over: its key is deleted, and what was sealed in it cannot be opened any more."""
    requests_per_run: int = 20_000
    """Requests answered in a run."""
    crafted_models: bool = False
    """Whether to release embeddings under models that look made to show the projection (``privacy.crafted``)."""
    parameters: int = 100_000_000
    """Largest network, in parameters."""
    image_size: int = 1024
    """Largest height and width that images are resized to."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.methods if name not in NODE_NEEDS]
        if unknown:
            raise ConfigError(f"policy.methods names {unknown[0]!r}: {nearest(unknown[0], NODE_NEEDS)}")
        if self.methods:
            needs = [NODE_NEEDS[name] for name in self.methods]
            object.__setattr__(self, "tasks", list(dict.fromkeys(chain(ALWAYS, *(need.tasks for need in needs)))))
            object.__setattr__(self, "reductions", list(dict.fromkeys(chain(*(need.reductions for need in needs)))))

    @property
    def answered(self) -> list[str]:
        """The tasks allowed, and ``personalize`` where one of them trains.

        Its reply is that of a training from the same start with the same settings, which the server could ask for as well, and two numbers:
        what it gains in validation loss, and the standard error of that.
        """
        trains = any(name in KNOWN and KNOWN[name].phase == "train" for name in self.tasks)
        return list(dict.fromkeys([*self.tasks, *(["personalize"] if trains else [])]))

    def check(self, task: str, job: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
        """Raise ``PolicyError`` if the node does not answer this request."""
        if task not in self.answered:
            raise self._refuse(f"the task {task!r}", "tasks", task, self.answered)
        _check_job(job)
        self.check_model(job["model"])
        self.check_data(job["data"])
        self._check_preprocess(job["preprocess"], job["data"].get("encoding"))
        if "training" in inputs:
            self._check_training(inputs["training"])
        if task == "train" and inputs.get("sample_weights") is not None:
            raise PolicyError("this node does not train with the server's weight for each sample: it could single out one record")
        if task == "evaluate":
            reduction = inputs.get("reduction", "mean")
            if reduction not in self.reductions:
                raise self._refuse(f"losses as {reduction!r}", "reductions", str(reduction), self.reductions)
            self._check_count(inputs["models"], "models_at_once")
        if task == "loss_moments":
            self._check_count(inputs["models"], "averages_at_once")
        if task in ("test", "personalize"):
            self._check_count(inputs["models"], "models_at_once")
            _check_shares(inputs["weights"])
        if len(inputs.get("sizes", ())) > MAX_SIZES:
            raise PolicyError(f"this node calibrates at most {MAX_SIZES} sample sizes in a request, got {len(inputs['sizes'])}")
        if "sizes" in inputs and "settings" in inputs and inputs["settings"].get("calibrated") is not False:  # labels have a say in these
            _check_sizes(inputs["sizes"])
        if "settings" in inputs:
            self._check_settings(inputs["settings"], _shown(inputs))

    def _refuse(self, what: str, key: str, asked: str, allowed: list[str]) -> PolicyError:
        """Name the key that decides: where methods are named, ``tasks`` and ``reductions`` follow from them."""
        if not self.methods:
            return _refusal(what, key, allowed)
        needs = any(asked in getattr(need, key) for need in NODE_NEEDS.values())
        keys = "policy.methods" if needs else f"policy.{key} in place of policy.methods"
        return PolicyError(f"this node does not allow {what}; it takes part in {', '.join(self.methods)} ({keys} in node.toml)")

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
            found = _parameters(recipe)
        except (EmdcflError, TypeError, ValueError, RuntimeError) as error:
            raise PolicyError(f"the server's model {recipe.name!r} cannot be built: {error}") from error
        if found > self.parameters:
            raise _refusal(f"a network of {found} parameters", "parameters", [f"at most {self.parameters}"])

    def check_data(self, data: Mapping[str, Any]) -> None:
        """Refuse other splits than the node's own, and scenarios that read files or name code of the server's choice."""
        if "scenario" in data and "encoding" in data:
            raise PolicyError("expected a scenario or an encoding of own files, got both; check the server")
        if "scenario" not in data:
            self.check_seed(data["seed"])
            self._check_encoding(data["encoding"])
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

    def check_shape(self, shape: Sequence[Any]) -> None:
        """Bound the shape to which images are resized; it is square, because the middles that others cut out would show a mean image."""
        bounded = len(shape) == 3 and all(type(n) is int and 0 < n <= self.image_size for n in shape) and shape[0] <= 4
        if not bounded or shape[1] != shape[2]:
            raise _refusal(f"images of shape {shape!r}", "image_size", [f"squares of at most {self.image_size}"])

    def check_columns(self, names: Sequence[Any]) -> None:
        """Refuse columns that the operator keeps back, and the same one many times."""
        kept_back = [name for name in names if self.columns and name not in self.columns]
        if kept_back:
            raise _refusal(f"the column {kept_back[0]!r}", "columns", self.columns)
        if len(set(names)) < len(names):
            raise PolicyError("expected each column once; check the server")

    def _check_encoding(self, encoding: Mapping[str, Any]) -> None:
        """Bound what the server says about images and columns before files are read with it."""
        if encoding["kind"] == "images":
            self.check_shape(encoding["shape"])
            return
        if encoding["kind"] != "table":  # as any other kind a table would be taken as it is, with the columns that are kept back
            raise PolicyError(f"expected an encoding of images or of a table, got {brief(repr(encoding['kind']), 40)}; check the server")
        self.check_columns([column["name"] for column in encoding["columns"]])
        for column in encoding["columns"]:
            if "words" not in column and not (math.isfinite(column["mean"]) and math.isfinite(column["std"]) and column["std"] > 0):
                raise PolicyError(f"expected mean and spread of column {column['name']!r} as finite numbers; check the server")
            if "words" not in column and type(column["gaps"]) is not bool:  # a number would be as many columns
                raise PolicyError(f"expected gaps of column {column['name']!r} as true or false; check the server")
            if "words" in column and len(column["words"]) > MAX_WORDS:  # a survey lists no more; every row has a number for each
                raise PolicyError(f"this node encodes a column in at most {MAX_WORDS} words, got {len(column['words'])}")
        if _width(encoding["columns"]) > MAX_COLUMNS:
            raise PolicyError(f"this node encodes a table in at most {MAX_COLUMNS} columns, got {_width(encoding['columns'])}")

    def _check_preprocess(self, preprocess: Mapping[str, Any], encoding: Mapping[str, Any] | None) -> None:
        values = [*preprocess["mean"], *preprocess["std"], preprocess["scale"]]
        size = preprocess["size"]
        if len(values) > 2 * MAX_COLUMNS or not all(math.isfinite(v) for v in values) or not all(v > 0 for v in preprocess["std"]):
            raise PolicyError("expected preprocessing with finite mean and scale, and spread above 0; check the server")
        if size is not None and not (type(size) is int and 0 < size <= self.image_size):
            raise _refusal(f"images resized to {size!r}", "image_size", [f"at most {self.image_size}"])
        if encoding is None:
            return
        each = encoding["shape"][0] if encoding["kind"] == "images" else _width(encoding["columns"])
        if not {len(preprocess["mean"]), len(preprocess["std"])} <= {1, each}:  # more would multiply every sample
            raise PolicyError("expected mean and spread of preprocessing once, or for each channel or column; check the server")

    def _check_training(self, training: Mapping[str, Any]) -> None:
        """Refuse trainings whose result would show single samples, and those without end."""
        asked = {**Training().as_dict(), **training}
        size, epochs = asked["batch_size"], asked["local_epochs"]
        if type(size) is not int or size < self.batch_size:
            raise _refusal(f"training with a batch size of {size!r}", "batch_size", [f"at least {self.batch_size}"])
        if type(epochs) is not int or not 1 <= epochs <= self.local_epochs:
            raise _refusal(f"training for {epochs!r} epochs", "local_epochs", [f"1 to {self.local_epochs}"])

    def check_seed(self, seed: Any) -> None:
        """Refuse to divide the files in another way: two divisions together show which rows are in which part."""
        if type(seed) is not int or seed != self.split_seed:
            raise _refusal(f"splits with seed {seed!r}", "split_seed", [str(self.split_seed)])

    def _check_count(self, models: Any, key: str) -> None:
        most = getattr(self, key)
        rows = isinstance(models, Tensor) and models.ndim == 2
        listed = isinstance(models, (list, tuple)) and len(models) > 0 and all(isinstance(m, Tensor) and m.ndim == 1 for m in models)
        if not (listed if key == "averages_at_once" else rows):
            raise PolicyError("expected models to score as rows of a tensor, averages as a list of states; check the server")
        if len(models) > most:
            raise _refusal(f"losses of {len(models)} models at once", key, [f"at most {most}"])

    def _check_settings(self, settings: Any, shown: Sequence[Any]) -> None:
        if not isinstance(settings, Mapping):
            raise PolicyError("expected the settings of a comparison as a table; check the server")
        if settings.get("exchange") != "peer" and "deposit" not in self.tasks:
            tasks = (
                "names policy.tasks, 'deposit' among them, in place of policy.methods" if self.methods else "adds 'deposit' to policy.tasks"
            )
            raise PolicyError(
                f"this node sends no raw samples or embeddings, got exchange = {settings.get('exchange')!r}; use 'peer', "
                f"or its operator {tasks} in node.toml"
            )
        if settings.get("cost") not in self.costs:
            raise _refusal(f"the cost {settings.get('cost')!r}", "costs", self.costs)
        for name, value, most in (
            ("projection_ratio", settings.get("projection_ratio"), self.projection_ratio),
            ("samples", settings.get("max_samples"), self.samples),
            *(("samples", number, self.samples) for number in shown),
        ):
            if not isinstance(value, (int, float)) or not 0 <= value <= most:  # a NaN is refused too; -1 would be all samples but one
                raise _refusal(f"a comparison with {name} = {value!r}", name, [f"at most {most:g}"])


def read_policy(raw: Mapping[str, Any], where: str) -> Policy:
    """Check the table ``[policy]`` of a file."""
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{where} must be a table, got {raw!r}; write [policy] and its keys below")
    options = check_options(Policy, raw, where)
    both = [key for key in ("tasks", "reductions") if key in options] if options.get("methods") else []
    if both:
        raise ConfigError(f"{where} has methods and {both[0]}, but what the methods need would replace {both[0]}; leave one of the two out")
    return Policy(**options)


def _refusal(what: str, key: str, allowed: list[str]) -> PolicyError:
    return PolicyError(f"this node does not allow {what}; it allows {', '.join(allowed) or 'none'} (policy.{key} in node.toml)")


def _shown(inputs: Mapping[str, Any]) -> list[Any]:
    """Return how many samples a request may show: its size, and for each row the blocks of matched classes."""
    matching = inputs.get("matching") or {"m": {}, "blocks": {}}
    pairs = [(m, matching["blocks"][row]) for row, m in matching["m"].items()]
    return [inputs.get("size") or 0, *(m * blocks if type(m) is int and type(blocks) is int else None for m, blocks in pairs)]


def _width(columns: Sequence[Mapping[str, Any]]) -> int:
    """Numbers in a row of an encoded table."""
    return sum(len(column["words"]) if "words" in column else 1 + column["gaps"] for column in columns)


def _check_sizes(sizes: Sequence[Any]) -> None:
    """Refuse sizes of samples that are small or close together: where a class is new at the next sample, that shows its label."""
    fine = all(type(size) is int and size >= MIN_CALIBRATED for size in sizes)
    if not fine or any(b * b < 2 * a * a for a, b in pairwise(sizes)):  # validation_sizes makes none so close
        raise PolicyError(
            f"this node calibrates tolerances at {MIN_CALIBRATED} samples or more, and at sizes at least √2 apart, got "
            f"{brief(str(sizes), 40)}; a run with smaller sites may set method.tolerance to a number"
        )


def _check_job(job: Mapping[str, Any]) -> None:
    """Refuse a job whose numbers would cost the node more than the work itself."""
    threads, run, seed = job["threads"], job["run"], job["seed"]
    if type(threads) is not int or not 1 <= threads <= MAX_THREADS:
        raise PolicyError(f"this node computes with 1 to {MAX_THREADS} threads, got {threads!r}")
    if not isinstance(run, str) or len(run) > MAX_NAME_LENGTH:
        raise PolicyError(f"expected the run's name as text of at most {MAX_NAME_LENGTH} characters; check the server")
    if type(seed) is not int:
        raise PolicyError(f"expected the run's seed as a whole number, got {brief(repr(seed), 40)}; check the server")


def _check_shares(weights: Any) -> None:
    if not isinstance(weights, Tensor) or not bool((weights >= 0).all()) or not float(weights.sum()) <= 1.001:
        raise PolicyError("expected the shares of a mixture of models between 0 and 1, together 1; check the server")


def _parameters(recipe: ModelRecipe) -> int:
    """How many numbers a network has, counted without memory for them; options that say something absurd are refused first."""
    for name, value in recipe.options.items():
        for item in value if isinstance(value, Sequence) and not isinstance(value, str) else [value]:
            if isinstance(item, int) and abs(item) > MAX_INTEGER:
                raise PolicyError(f"expected options of the model up to {MAX_INTEGER}, got {name} = {item}; check the server")
        if isinstance(value, Sequence) and len(value) > MAX_LIST_LENGTH:
            raise PolicyError(f"expected lists of at most {MAX_LIST_LENGTH} in a model's options, got {len(value)} in {name}")
    bare = {"weights": None} if "weights" in inspect.signature(recipe.builder_function()).parameters else {}
    with torch.device("meta"):
        module = ModelRecipe(recipe.name, {**recipe.options, **bare})()
    return sum(p.numel() for p in module.parameters()) + sum(b.numel() for b in module.buffers())
