"""A thousand clients: how many states are alive at a time is counted, which does not depend on the machine as resident memory would."""

from __future__ import annotations

import weakref

import pytest
import torch
from tests.methods.toy import CLASSES, FEATURES
from tests.tiny import score

from emdcfl.core.federation import Replies
from emdcfl.core.schema import Reply
from emdcfl.core.tasks import Training
from emdcfl.data.types import Preprocess, Scenario, Site, Split
from emdcfl.engines.local import batched
from emdcfl.engines.local.batched import BatchedFederation
from emdcfl.engines.local.sequential import SequentialFederation
from emdcfl.methods import make
from emdcfl.models.recipe import ModelRecipe
from emdcfl.trust import guard

TOGETHER = 50
"""States of a stack."""

WAITING = 4
"""States that an average takes in together."""


def many(clients: int) -> Scenario:
    rng = torch.Generator().manual_seed(0)
    sites = []
    for i in range(clients):
        split = Split(torch.randn(3, FEATURES, generator=rng), torch.randint(0, CLASSES, (3,), generator=rng))
        sites.append(Site(f"site-{i}", split, split, {"test": split}))
    recipe = ModelRecipe("mlp", {"features": FEATURES, "classes": CLASSES, "hidden": [8]})
    return Scenario("many", tuple(sites), tuple(str(c) for c in range(CLASSES)), Preprocess(), recipe)


@pytest.mark.parametrize(("engine", "clients", "limit"), [(SequentialFederation, 100, 2), (BatchedFederation, 1000, TOGETHER + 2)])
def test_a_thousand_clients_never_hold_as_many_states(
    engine: type[SequentialFederation], clients: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed = engine(many(clients), training=Training(local_epochs=1, batch_size=4), device="cpu")
    for bound in ("held", "checked"):
        monkeypatch.setattr(BatchedFederation, bound, TOGETHER * fed.layout.size)
    monkeypatch.setattr(batched, "STACKED", TOGETHER * fed.layout.size)
    monkeypatch.setattr(guard, "TOGETHER", WAITING * fed.layout.size)
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    def note(task: str, client: str, reply: Reply) -> None:
        nonlocal most
        if "theta" in reply:
            alive.add(reply["theta"])
            most = max(most, len(alive))

    fed.observer = note
    method = make("fedavg")
    state = method.step(fed, method.init(fed, fed.begin(0)), fed.begin(1))
    assert 0 < most <= limit + WAITING
    serving = method.serve(state)
    asked: list[torch.Tensor] = []
    monkeypatch.setattr(fed, "run", lambda task, inputs, **_: asked.extend(i["models"] for i in inputs.values()) or Replies())
    score(fed, serving)
    assert len(asked) == clients
    assert {models.data_ptr() for models in asked} == {serving.models.data_ptr()}  # one model for all of them, not a copy for each
