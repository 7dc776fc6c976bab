"""A federation small enough to run in about a second: three groups whose inputs differ and whose tasks get in each other's way.

Every sample shows its class as a point on a circle and its group as an offset. The circle of group g is turned by 120° · g, so that
what is class 0 in one group lies among classes of the others: a model for one group is easy, a small model for all of them is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from emdcfl.core import tasks
from emdcfl.core.client import TaskInfo
from emdcfl.core.federation import Failure, Federation, Inputs
from emdcfl.core.keys import generator
from emdcfl.core.schema import Reply
from emdcfl.core.tasks import Training
from emdcfl.data.types import Preprocess, Scenario, Site, Split
from emdcfl.engines.local.sequential import SequentialFederation
from emdcfl.methods import Method, Serving, make
from emdcfl.models.recipe import ModelRecipe

CLASSES = 4
FEATURES = 8
TRAINING = Training(local_epochs=4, batch_size=32, lr=0.1, momentum=0.9, weight_decay=1e-6)
BRIEF = Training(local_epochs=1, batch_size=16, lr=0.05)
MORE_STEPS = replace(TRAINING, batch_size=16, lr=0.05)


def samples(n: int, group: int, rng: np.random.Generator, *, noise: float = 0.35, offset: float = 1.5) -> Split:
    """Draw n samples of a group, classes in turn."""
    y = np.arange(n) % CLASSES
    angle = 2 * np.pi * (y / CLASSES + group / 3)
    x = noise * rng.standard_normal((n, FEATURES))
    x[:, 0] += np.cos(angle)
    x[:, 1] += np.sin(angle)
    x[:, 2 + group % (FEATURES - 2)] += offset
    return Split(torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y.astype(np.int64)))


def toy(groups: int = 3, per_group: int | Sequence[int] = 3, n: int | Sequence[int] = 96, seed: int = 0, **shape: float) -> Scenario:
    """Build the scenario.

    Parameters
    ----------
    groups : number of groups
    per_group : clients in each group, one number for all or one per group
    n : training samples, one number for all or one per client; validation and test splits have 64 and 200
    seed : of the data alone
    **shape : ``noise`` and ``offset`` of ``samples``
    """
    members = [per_group] * groups if isinstance(per_group, int) else list(per_group)
    truth = [g for g, size in enumerate(members) for _ in range(size)]
    sizes = [n] * len(truth) if isinstance(n, int) else list(n)
    sites = []
    for i, (group, size) in enumerate(zip(truth, sizes, strict=True)):
        name = f"site-{i}"
        draw = [
            samples(count, group, generator(seed, name, 0, split), **shape)
            for split, count in (("train", size), ("val", 64), ("test", 200))
        ]
        sites.append(Site(name, draw[0], draw[1], {"test": draw[2]}))
    return Scenario(
        "toy",
        tuple(sites),
        tuple(str(c) for c in range(CLASSES)),
        Preprocess(),
        ModelRecipe("mlp", {"features": FEATURES, "classes": CLASSES, "hidden": [8]}),
        groups={site.name: str(g) for site, g in zip(sites, truth, strict=True)},
        k=groups,
    )


class FlakyFederation(SequentialFederation):
    """A sequential federation in which named clients fail in given rounds, whatever they are asked."""

    def __init__(self, scenario: Scenario, *, fails: Mapping[str, int | Sequence[int]], **options: Any) -> None:
        super().__init__(scenario, **options)
        self.fails = {c: (rounds,) if isinstance(rounds, int) else tuple(rounds) for c, rounds in fails.items()}

    def _dispatch(self, info: TaskInfo, inputs: Mapping[str, Inputs], common: Inputs) -> Iterator[tuple[str, Reply | Failure]]:
        for name, reply in super()._dispatch(info, inputs, common):
            yield name, Failure(name, info.name, self.index, "out on purpose") if self.index in self.fails.get(name, ()) else reply


def federation(
    scenario: Scenario | None = None,
    *,
    seed: int = 0,
    participants: int | None = None,
    on_failure: str = "stop",
    fails: Mapping[str, int | Sequence[int]] | None = None,
    training: Training = TRAINING,
) -> SequentialFederation:
    """Build the clients of a scenario, some of them failing if so asked."""
    options: dict[str, Any] = {"training": training, "seed": seed, "number": participants, "on_failure": on_failure, "device": "cpu"}
    scenario = toy() if scenario is None else scenario
    return SequentialFederation(scenario, **options) if fails is None else FlakyFederation(scenario, fails=fails, **options)


def history(fed: Federation, method: Method, rounds: int) -> list[Any]:
    """Run a method for some rounds and return its states, that of ``init`` first."""
    states = [method.init(fed, fed.begin(0))]
    for index in range(1, rounds + 1):
        states.append(method.step(fed, states[-1], fed.begin(index)))
    return states


def play(fed: SequentialFederation, method: Method, rounds: int) -> tuple[Any, Serving]:
    """Run a method for some rounds."""
    state = history(fed, method, rounds)[-1]
    return state, method.serve(state)


def run(
    name: str,
    scenario: Scenario | None = None,
    rounds: int = 5,
    seed: int = 0,
    participants: int | None = None,
    on_failure: str = "stop",
    fails: Mapping[str, int | Sequence[int]] | None = None,
    training: Training = TRAINING,
    **options: Any,
) -> tuple[SequentialFederation, Method, Any, Serving]:
    """Run a method on the toy and return the federation, the method, its last state, and what it serves."""
    fed = federation(scenario, seed=seed, participants=participants, on_failure=on_failure, fails=fails, training=training)
    method = make(name, **options)
    state, serving = play(fed, method, rounds)
    return fed, method, state, serving


def accuracies(fed: SequentialFederation, serving: Serving) -> np.ndarray[Any, Any]:
    """Test accuracy of every client under the serving rule, in client order."""
    inputs = {}
    for client, row in zip(fed.clients, serving.weights, strict=True):
        used = row.nonzero().flatten()
        models, weights = serving.models[used], row[used]
        if serving.mix == "parameters":
            models, weights = (weights.double() @ models.double()).float()[None], torch.ones(1)
        inputs[client] = {"models": models, "weights": weights}
    fed.index += 1  # a flaky client may fail in the last round, and is tested all the same
    replies = fed.run(tasks.test, inputs)
    fed.index -= 1
    return np.array([replies[c]["accuracy"]["test"] for c in fed.clients])


def truth(fed: SequentialFederation) -> list[str]:
    """True groups in client order."""
    assert fed.truth is not None
    return [fed.truth[c] for c in fed.clients]
