"""A regression at every site of a table, logistic or linear, to see whether a network is worth it. It needs all data on one machine."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from emdcfl.core.keys import generator
from emdcfl.core.learning import objective
from emdcfl.core.metric import Metric
from emdcfl.data.types import Scenario, Site
from emdcfl.runs.scoring import TESTED, MetricsRow, as_row

STRENGTHS = (0.01, 0.1, 1.0, 10.0)
"""Inverse strengths of the penalty to choose from; validation data decide."""

MAX_ROWS = 20_000
"""Training rows of a site that are used; drawn at random where there are more."""


def is_table(scenario: Scenario) -> bool:
    """Whether samples are rows of a table."""
    return scenario.sites[0].train.x.dim() == 2


def regression_rows(scenario: Scenario, sites: Sequence[Site], round: int, seed: int) -> list[MetricsRow]:
    """Fit and test one regression per site; rows as a test of the round makes them."""
    return [{"round": round, "client": site.name, "cluster": None, "train_loss": None, **_tested(scenario, site, seed)} for site in sites]


def most_frequent(sites: Sequence[Site]) -> dict[str, list[float]]:
    """Return how often every site's most frequent training class is right on its test samples (those of the first variant)."""
    tests = [next(iter(site.tests.values())).y for site in sites]
    guesses = [site.train.y.bincount(minlength=1).argmax() for site in sites]
    right = [float((y == guess).double().mean()) if len(y) else 0.0 for y, guess in zip(tests, guesses, strict=True)]
    return {"sites": right, "tested": [len(y) for y in tests]}


def training_mean(sites: Sequence[Site]) -> dict[str, list[float]]:
    """Return the R² of answering the mean of every site's training numbers, with its standard error (first test variant)."""
    tests = [next(iter(site.tests.values())).y for site in sites]
    errors = [(y.double() - site.train.y.double().mean()) ** 2 for site, y in zip(sites, tests, strict=True)]
    pairs = list(zip(errors, tests, strict=True))
    return {
        "sites": [objective.r_squared(e, y) for e, y in pairs],
        "errors": [objective.r_squared_error(e, y) for e, y in pairs],
        "tested": [len(y) for y in tests],
    }


def _tested(scenario: Scenario, site: Site, seed: int) -> dict[str, Any]:
    model = _fitted(scenario, site, seed)
    scores = objective.tested(site, lambda variant: (_predicted(model, scenario, site.tests[variant].x), site.tests[variant].y))
    return as_row(scores, TESTED[Metric.ACCURACY if scenario.target is None else Metric.R2])


def _fitted(scenario: Scenario, site: Site, seed: int) -> Any:
    """Return the regression (ridge, of numbers) with the lowest validation loss, or the only class of the train split."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression, Ridge

    x, y = site.train.x, site.train.y
    if len(y) > MAX_ROWS:
        chosen = torch.from_numpy(generator(seed, site.name, 0, "regression per site").permutation(len(y))[:MAX_ROWS])
        x, y = x[chosen], y[chosen]
    numbers = scenario.target is not None
    if not numbers and len(y.unique()) < 2:
        return int(y[0])
    inputs, best, least = _inputs(scenario, x), None, np.inf
    for strength in STRENGTHS if len(site.val) else (1.0,):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # a fit that needs more steps is still a fit
            one = Ridge(alpha=1 / strength) if numbers else LogisticRegression(C=strength, max_iter=300)
            model = one.fit(inputs, y.numpy())
        loss = float(objective.mixed_losses(_predicted(model, scenario, site.val.x), site.val.y).mean()) if len(site.val) else 0.0
        if loss < least:
            best, least = model, loss
    return best


def _inputs(scenario: Scenario, x: Tensor) -> NDArray[np.float32]:
    return np.asarray(scenario.preprocess(x).numpy())


def _predicted(model: Any, scenario: Scenario, x: Tensor) -> Tensor:
    """Return class probabilities, or the predicted numbers as one column."""
    if scenario.target is not None:
        return torch.from_numpy(np.asarray(model.predict(_inputs(scenario, x)) if len(x) else (), dtype=np.float64))[:, None]
    p = torch.zeros(len(x), len(scenario.classes), dtype=torch.float64)
    if isinstance(model, int):
        p[:, model] = 1.0
    elif len(x):
        p[:, model.classes_] = torch.from_numpy(model.predict_proba(_inputs(scenario, x))).double()
    return p
