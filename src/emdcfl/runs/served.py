"""What a client is served with: one model or a mixture, and everything needed to predict with it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NotRequired, TypedDict

import torch
from torch import Tensor, nn

from emdcfl.core.checks import fits_json
from emdcfl.core.errors import DataError
from emdcfl.core.keys import global_seed
from emdcfl.core.params import Network, average
from emdcfl.data.own import encoding_of
from emdcfl.data.own.parts import label_kind
from emdcfl.data.types import LABEL_KINDS, Preprocess, Scenario, Target
from emdcfl.methods.base import Serving
from emdcfl.models import ModelRecipe
from emdcfl.models.recipe import refuse_code

BATCH = 256

MAX_INPUT = 1 << 28
"""Numbers in one sample: more would be taken from memory before an image is read."""


class _Words(TypedDict):
    name: str
    words: list[str]


class _Numbers(TypedDict):
    name: str
    mean: float
    std: float
    gaps: bool


class _Table(TypedDict):
    kind: Literal["table"]
    label: str
    columns: list[_Words | _Numbers]
    missing: NotRequired[list[str]]


class _Images(TypedDict):
    kind: Literal["images"]
    shape: list[int]


class _Arrays(TypedDict):
    kind: Literal["arrays"]


class _Preprocess(TypedDict):
    mean: list[float]
    std: list[float]
    scale: float
    size: int | None


INPUTS: dict[str, Any] = {"classes": list[str], "input": list[int], "encoding": _Table | _Images | _Arrays, "preprocess": _Preprocess}
"""How a model file says what its inputs are; it may come from elsewhere."""


@dataclass(frozen=True)
class ModelInfo:
    """How samples become class probabilities: the network, its inputs and its classes. Stored with every model file."""

    classes: tuple[str, ...]
    preprocess: Preprocess
    recipe: ModelRecipe
    shape: tuple[int, ...]
    """Of a stored sample."""
    encoding: Mapping[str, Any]
    """How a file becomes a stored sample (``Scenario.encoding``)."""
    target: Target | None = None
    """Of regression: what brings outputs back to the units of the data."""
    label_kind: str = "text"
    """What labels were in the user's data (``Scenario.label_kind``)."""

    @classmethod
    def of(cls, scenario: Scenario) -> ModelInfo:
        shape = tuple(scenario.sites[0].train.x.shape[1:])
        return cls(
            scenario.classes, scenario.preprocess, scenario.model, shape, encoding_of(scenario), scenario.target, scenario.label_kind
        )

    @property
    def labels(self) -> list[Any]:
        """The classes as they were in the user's data: numbers, truth values or text."""
        return list(map(LABEL_KINDS[self.label_kind], self.classes))

    @cached_property
    def network(self) -> Network:
        """A network whose weights are to be replaced: pretrained ones are not looked for."""
        with global_seed(0):
            return Network(self.recipe.untrained())

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "network"}  # its weights are views, which a copy would lose

    def as_metadata(self) -> dict[str, str]:
        """Return text values, as a model file stores them."""
        return {
            "classes": json.dumps(list(self.classes), ensure_ascii=False),
            "model": json.dumps(self.recipe.as_dict(), sort_keys=True),
            "preprocess": json.dumps(self.preprocess.as_dict(), sort_keys=True),
            "input": json.dumps(list(self.shape)),
            "encoding": json.dumps(self.encoding, ensure_ascii=False, sort_keys=True),
            **({} if self.target is None else {"target": json.dumps([self.target.mean, self.target.std])}),
            **({} if self.label_kind == "text" else {"labels": self.label_kind}),
        }

    @classmethod
    def from_metadata(cls, stored: Mapping[str, str], where: object, *, trust_model: bool = False) -> ModelInfo:
        """Read what ``as_metadata`` wrote to the file ``where``; only a trusted file may name a model of its own."""
        recipe = ModelRecipe.from_dict(json.loads(stored["model"]))
        if not trust_model:
            refuse_code(recipe.name, where)
        parts = {key: json.loads(stored[key]) for key in INPUTS}
        for key, hint in INPUTS.items():
            if not fits_json(parts[key], hint):
                raise ValueError(f"{key} that no run writes")
        encoding, shape, preprocess = parts["encoding"], tuple(parts["input"]), Preprocess.from_dict(parts["preprocess"])
        known = encoding["kind"] != "images" or tuple(encoding["shape"]) == shape
        if not known or not shape or min(shape) < 1 or math.prod(shape) > MAX_INPUT or not preprocess.suits(shape):
            raise ValueError("inputs that no run has")
        classes = tuple(parts["classes"])
        return cls(
            classes=classes,
            preprocess=preprocess,
            recipe=recipe,
            shape=shape,
            encoding=encoding,
            target=Target(*map(float, json.loads(stored["target"]))) if "target" in stored else None,
            label_kind=label_kind([stored.get("labels", "text")], classes),
        )

    def flat(self, state: Mapping[str, Tensor]) -> Tensor:
        """Return a state dict as a flat state θ."""
        theta = torch.cat([state[entry.name].reshape(-1) for entry in self.network.layout.entries])
        if not bool(theta.isfinite().all()):
            raise ValueError("a model holds numbers that are not finite")
        return theta


@dataclass(frozen=True)
class Served:
    """One client's model, or mixture of models, as flat states with their weights."""

    about: ModelInfo
    states: Tensor
    weights: tuple[float, ...]

    @torch.no_grad()
    def probabilities(self, x: Tensor) -> Tensor:
        """Return class probabilities of stored-form inputs ``(N, *shape)``; of regression, the predicted numbers as one column."""
        if tuple(x.shape[1:]) != self.about.shape:
            raise DataError(f"expected inputs of shape {self.about.shape}, got {tuple(x.shape[1:])}")
        target = self.about.target
        total, network = torch.zeros(len(x), len(self.about.classes) or 1), self.about.network
        network.module.eval()
        for state, weight in zip(self.states, self.weights, strict=True):
            network.load(state)
            for start in range(0, len(x), BATCH):
                part = slice(start, start + BATCH)
                outputs = network(self.about.preprocess(x[part]))
                total[part] += weight * (outputs.softmax(1) if target is None else outputs)
        return total if target is None else total * target.std + target.mean

    def module(self) -> nn.Module:
        """Return a network of its own in evaluation mode; of a mixture, the model with the largest weight."""
        with global_seed(0):
            network = Network(self.about.recipe.untrained())
        network.load(self.states[max(range(len(self.weights)), key=self.weights.__getitem__)])
        return network.module.eval()


def mixed(models: Tensor, weights: Tensor, mix: str) -> tuple[Tensor, Tensor]:
    """Return the states a row of weights stands for, and their weights in the mixture of predictions."""
    chosen = torch.nonzero(weights > 0).flatten().tolist()
    if len(chosen) == 1:
        return models[chosen[0] : chosen[0] + 1], torch.ones(1)  # a view: there is one for every client
    if mix == "predictions":
        every = len(chosen) == len(models)
        return models if every else models[chosen], weights[chosen] / weights[chosen].sum()
    return average([models[k] for k in chosen], [float(weights[k]) for k in chosen])[None], torch.ones(1)


def served_to(serving: Serving, clients: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    """Client → the ``models`` it is served with, and their ``weights`` in the mixture of predictions."""
    rows = (mixed(serving.models, row, serving.mix) for row in serving.weights)
    return {client: {"models": models, "weights": weights} for client, (models, weights) in zip(clients, rows, strict=True)}


def served(about: ModelInfo, models: Tensor, weights: Tensor | Sequence[float], mix: str) -> Served:
    """Return what a row of weights over some models serves."""
    states, shares = mixed(models, torch.as_tensor(weights), mix)
    return Served(about, states, tuple(shares.tolist()))
