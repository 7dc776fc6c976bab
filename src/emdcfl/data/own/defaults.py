"""Default network, preprocessing, training, fine-tuning and grouping for the user's own data."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emdcfl.data.types import Preprocess, Target
from emdcfl.models import BUILDERS
from emdcfl.models.recipe import ModelRecipe
from emdcfl.models.vision import IMAGENET_MEAN, IMAGENET_STD

TRAINING = {"rounds": 5, "local_epochs": 10, "batch_size": 32, "lr": 0.02}
PRETRAINED_TRAINING = {"rounds": 5, "local_epochs": 5, "batch_size": 32, "lr": 0.003}
FINE_TUNING = {"personalize": "if-it-pays"}
BY_BENEFIT: dict[str, dict[str, Any]] = {"emdcfl": {"grouping": "benefit"}}
"""Nobody constructed these sites, so the question is who trains better together, not whose data follow the same law."""

SMALL = 16

Model = str | ModelRecipe | None


def is_pretrained(model: Model) -> bool:
    """Whether the network takes ImageNet weights, and hence RGB at 224×224."""
    name = model.name if isinstance(model, ModelRecipe) else model
    return name in BUILDERS and "weights" in inspect.signature(BUILDERS[name]).parameters


def recipe(model: Model, *, shape: Sequence[int], classes: int) -> ModelRecipe:
    """Fill in what the data determine (channels, size, features, classes) for a network given by name; choose one where none is given."""
    if isinstance(model, ModelRecipe):
        return model
    name = model or ("mlp" if len(shape) == 1 else "small_cnn" if shape[-1] <= SMALL else "pooled_cnn")
    parameters = inspect.signature(ModelRecipe(name).builder_function()).parameters
    return ModelRecipe(name, {key: value for key, value in facts(shape, classes).items() if key in parameters})


def facts(shape: Sequence[int], classes: int) -> dict[str, Any]:
    """Return what data of a shape determine of a network: ``classes``, ``features`` and, of images, ``channels`` and ``size``."""
    image = {"channels": int(shape[0]), "size": int(shape[-1])} if len(shape) == 3 else {}
    return {"classes": classes, "features": int(np.prod(shape)), **image}


def training(model: Model) -> dict[str, Any]:
    """Default rounds, epochs, batch size and step size."""
    return dict(PRETRAINED_TRAINING if is_pretrained(model) else TRAINING)


def method_defaults(target: Target | None) -> dict[str, dict[str, Any]]:
    """Hyper-parameters of methods; numbers to predict have no classes to match."""
    return BY_BENEFIT if target is None else {"emdcfl": {**BY_BENEFIT["emdcfl"], "match_classes": False}}


def image_preprocess(train: Sequence[NDArray[Any]], model: Model) -> Preprocess:
    """Standardise channels with statistics pooled over the clients' training images, or with ImageNet's for a pretrained network."""
    scale = 1 / 255 if train[0].dtype == np.uint8 else 1.0
    if is_pretrained(model):
        return Preprocess(mean=IMAGENET_MEAN, std=IMAGENET_STD, scale=scale)
    return pooled_preprocess(train, axes=(0, 2, 3), scale=scale)


def pooled_preprocess(train: Sequence[NDArray[Any]], *, axes: tuple[int, ...], scale: float = 1.0) -> Preprocess:
    """Mean and standard deviation over ``axes`` from each client's count, sum and sum of squares."""
    counts = [int(np.prod([x.shape[axis] for axis in axes])) for x in train]
    sums = [x.sum(axis=axes, dtype=np.float64) for x in train]
    squares = [np.square(x, dtype=np.float64).sum(axis=axes) for x in train]
    return standardisation(counts, sums, squares, scale)


def standardisation(
    counts: Sequence[int], sums: Sequence[NDArray[np.float64]], squares: Sequence[NDArray[np.float64]], scale: float
) -> Preprocess:
    """Standardise by the pooled means of values and of their squares, times ``scale``; what does not vary is only centred."""
    count = float(sum(counts))
    mean = np.sum([total * scale for total in sums], axis=0) / count
    square = np.sum([total * scale**2 for total in squares], axis=0) / count
    variance = np.maximum(square - mean**2, 0)
    std = np.where(variance > 1e-12 * np.maximum(1, mean**2), np.sqrt(variance), 1.0)
    return Preprocess(mean=tuple(mean.tolist()), std=tuple(std.tolist()), scale=scale)
