from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.methods.toy import TRAINING, play, toy

from emdcfl.engines.local.batched import BatchedFederation
from emdcfl.engines.local.sequential import SequentialFederation
from emdcfl.methods import METHODS, make

SIZES = [96, 80, 77, 96, 33, 50, 96, 96, 12]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_gives_the_models_and_clusters_of_the_reference(name: str) -> None:
    served = []
    for engine in (SequentialFederation, BatchedFederation, BatchedFederation):
        fed = engine(toy(n=SIZES), training=TRAINING, device="cpu")
        served.append(play(fed, make(name), 3)[1])
    reference, fast, again = served
    assert fast.models.shape == reference.models.shape
    torch.testing.assert_close(fast.models, reference.models, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(fast.weights, reference.weights, rtol=1e-4, atol=1e-5)
    assert (fast.clusters is None) == (reference.clusters is None)
    if fast.clusters is not None:
        assert torch.equal(fast.clusters, reference.clusters)
    assert torch.equal(fast.models, again.models)


@pytest.mark.parametrize(("options", "number"), [({}, 4), ({"grouping": "benefit"}, 4), ({"grouping": "benefit"}, None)])
def test_absent_clients_meet_the_same_fate_in_both_engines(options: dict[str, Any], number: int | None) -> None:
    served = []
    for engine in (SequentialFederation, BatchedFederation):
        fed = engine(toy(n=SIZES), training=TRAINING, device="cpu", number=number)
        served.append(play(fed, make("emdcfl", **options), 3)[1])
    assert served[0].clusters.max() > 0
    torch.testing.assert_close(served[1].models, served[0].models, rtol=1e-4, atol=1e-5)
    assert torch.equal(served[1].clusters, served[0].clusters)
