"""Models scored for many clients at once; without a GPU, on the host."""

from __future__ import annotations

import pytest
import torch
from tests.methods.toy import TRAINING, toy

from emdcfl.core.client import Client
from emdcfl.core.tasks import Score
from emdcfl.engines.cuda import embedding
from emdcfl.engines.cuda.resident import Samples
from emdcfl.engines.cuda.scoring import SCORED_ALONE, score_together
from emdcfl.engines.local.sequential import SequentialFederation


@pytest.fixture
def fed() -> SequentialFederation:
    return SequentialFederation(toy(n=[40, 30, 50] * 3), training=TRAINING, device="cpu")


def works(fed: SequentialFederation) -> list[tuple[int, Client, Score]]:
    """Clients with different models, one of them shared, at positions that leave gaps."""
    first, shared, last = (fed.initial(i) for i in range(3))
    asked = [(first, shared), (shared,), (last, shared, first)]
    return [(2 * i, client, Score(models, "val")) for i, (client, models) in enumerate(zip(fed._clients.values(), asked, strict=False))]


def test_together_is_as_one_by_one_with_one_load_of_each_model(fed: SequentialFederation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding, "EVALUATION_BATCH", 4)
    monkeypatch.setattr(embedding, "MAX_BATCH", 4)  # the cut goes through the middle of clients
    pieces, loads = works(fed), 0
    expected = {i: work(client) for i, client, work in pieces}
    network = pieces[0][1].network
    load = network.load

    def counted(theta: torch.Tensor) -> None:
        nonlocal loads
        loads += 1
        load(theta)

    monkeypatch.setattr(network, "load", counted)
    found = score_together(pieces, Samples.of([client for _, client, _ in pieces], torch.device("cpu")), network)
    assert found.keys() == expected.keys() and loads == 3
    for i, reply in expected.items():
        torch.testing.assert_close(found[i]["losses"], reply["losses"], rtol=1e-5, atol=1e-6)
        assert torch.equal(found[i]["correct"], reply["correct"])


def test_what_cannot_be_scored_together_is_left_with_a_warning(fed: SequentialFederation, caplog: pytest.LogCaptureFixture) -> None:
    (position, client, work), *_ = works(fed)
    samples = Samples.of([client], torch.device("cpu"))
    assert score_together([(position, client, Score(work.models, "test:test"))], samples, client.network) == {} and not caplog.records
    assert score_together([(position, client, Score((torch.zeros(3),), "val"))], samples, client.network) == {}
    assert SCORED_ALONE in caplog.text
