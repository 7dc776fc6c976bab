"""What a site's training samples are like, in a few numbers: means and spreads of columns, or of features of images, and class shares."""

from __future__ import annotations

import torch
from torch import Tensor

from emdcfl.core.client import EVALUATION_BATCH, Client, task
from emdcfl.core.errors import ClientError
from emdcfl.core.learning.objective import is_regression
from emdcfl.core.schema import Field, Reply

MIN_SAMPLES = 5
"""Training samples below which a mean says too much about single ones; the survey of own files has the same limit."""

IMAGE_FEATURES = ("brightness", "contrast", "upright", "right", "low", "colour", "red", "blue")
"""Of an image with values from 0 to 1: mean and standard deviation of its grey values; the share of its edges that are upright; how far
right and how low the pixels lie that differ from its median, from -1 to 1; how far the colours of a pixel lie apart; by how much red and
blue exceed the mean of the colours."""

PROFILE = {
    "n": Field(int, low=MIN_SAMPLES, high="max_n"),
    "mean": Field(torch.float64, (None,)),
    "sd": Field(torch.float64, (None,), low=0.0),
    "classes": Field(torch.float64, (None,), low=0.0, high=1.0),
}


@task(phase="evaluate", returns=PROFILE)
def profile(client: Client, *, classes: int) -> Reply:
    """Return number, means and standard deviations of the training samples, and the share of each class among them.

    Nothing of it carries noise, so a client whose embeddings leave with noise only does not answer.
    """
    if client.most_epsilon is not None:
        raise ClientError("this node releases with noise only (privacy_epsilon), and a profile has none")
    split = client.site.train
    if len(split) < MIN_SAMPLES:
        raise ClientError(f"client {client.name!r} has {len(split)} training samples, and {MIN_SAMPLES} are needed for a profile")
    if split.x.dim() == 2:
        values = split.x.double()
    else:
        values = torch.cat([image_features(x.float() * client.preprocess.scale) for x in split.x.split(EVALUATION_BATCH)]).double()
    counts = torch.zeros(0) if is_regression(split.y) else torch.bincount(split.y, minlength=classes)
    shares = counts.double() / len(split)
    return {"n": len(split), "mean": values.mean(0), "sd": values.std(0, correction=0), "classes": shares}


def image_features(x: Tensor) -> Tensor:
    """Return ``IMAGE_FEATURES`` of images ``(N, C, H, W)`` with values from 0 to 1.

    Examples
    --------
    >>> stripe = torch.zeros(1, 1, 8, 8)
    >>> stripe[..., 6] = 1.0
    >>> found = dict(zip(IMAGE_FEATURES, image_features(stripe)[0].tolist()))
    >>> found["brightness"], found["upright"], found["right"] > 0.5, abs(found["low"]) < 1e-6
    (0.125, 1.0, True, True)
    """
    grey = x.mean(1)
    flat = grey.flatten(1)
    across, down = (grey.diff(dim=2) ** 2).sum((1, 2)), (grey.diff(dim=1) ** 2).sum((1, 2))
    edges = across + down
    weight = (grey - flat.median(1).values[:, None, None]) ** 2
    total = weight.sum((1, 2)).clamp_min(1e-12)
    places = [torch.linspace(-1, 1, size) if size > 1 else torch.zeros(1) for size in grey.shape[1:]]
    low, right = (weight.sum(2) @ places[0]) / total, (weight.sum(1) @ places[1]) / total
    colours = [x[:, i].mean((1, 2)) - flat.mean(1) for i in (0, 2)] if x.shape[1] == 3 else [torch.zeros(len(x))] * 2
    apart = (x.amax(1) - x.amin(1)).mean((1, 2))
    upright = torch.where(edges > 1e-12, across / edges.clamp_min(1e-12), torch.full_like(edges, 0.5))
    return torch.stack([flat.mean(1), flat.std(1, correction=0), upright, right, low, apart, *colours], dim=1)
