"""The embedder with streams that do nothing: which works it answers, and what it leaves to the plain way."""

from __future__ import annotations

import logging
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tests.engines.cuda.test_embedding import works
from tests.methods.toy import TRAINING, toy

from emdcfl.core.client import Client
from emdcfl.core.tasks import Embed
from emdcfl.data.types import Scenario
from emdcfl.engines.cuda import embedder
from emdcfl.engines.cuda.embedder import EMBEDDED_ALONE, Embedder
from emdcfl.engines.cuda.engine import CudaFederation
from emdcfl.engines.cuda.streams import Samples
from emdcfl.engines.local import staged
from emdcfl.engines.local.sequential import SequentialFederation
from emdcfl.engines.local.staged import Outcome, Result
from emdcfl.methods.emdcfl import EMDCFL, client


class Stream:
    """Notes what is asked of it."""

    def __init__(self, device: Any = None) -> None:
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.asked.append(name)


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1, 2))
    return torch.device("cpu")


@pytest.fixture
def fed() -> SequentialFederation:
    return SequentialFederation(toy(n=[40, 30, 50] * 3), training=TRAINING, device="cpu")


def outcome(result: Result) -> Outcome:
    assert not isinstance(result, (dict, Exception))
    return result.result()


def test_every_work_is_answered_under_its_own_number(cpu: torch.device, fed: SequentialFederation) -> None:
    samples = Samples.of(list(fed._clients.values()), cpu)
    pieces = [(3 * k, client, work) for k, (client, work) in enumerate(works(fed))]
    found = Embedder(cpu).begin(pieces, samples)
    assert sorted(found) == [i for i, _, _ in pieces]
    for i, who, work in pieces:
        answer = outcome(found[i])
        assert isinstance(answer, dict)
        torch.testing.assert_close(answer["z"], work(who)["z"], rtol=1e-5, atol=1e-5)


def test_what_fails_is_left_out_and_waited_for(cpu: torch.device, fed: SequentialFederation, caplog: pytest.LogCaptureFixture) -> None:
    samples = Samples.of(list(fed._clients.values()), cpu)
    client: Client = next(iter(fed._clients.values()))
    good = Embed(torch.zeros(fed.layout.size), "val", torch.arange(3))
    bad, other = Embed(torch.zeros(3), "val", torch.arange(3)), Embed(torch.zeros(fed.layout.size), "val", torch.arange(3), "train")
    one = Embedder(cpu)
    with caplog.at_level(logging.WARNING, logger="emdcfl"):
        found = one.begin([(0, client, good), (1, client, bad), (2, client, other)], samples)
    assert list(found) == [0]
    assert caplog.records[0].getMessage().startswith(EMBEDDED_ALONE)
    stream: Any = one._stream
    assert stream.asked == ["wait_stream", "synchronize"]


def test_a_rehearsal_takes_place_once_and_hides_its_errors(
    cpu: torch.device,
    fed: SequentialFederation,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []

    def rehearsed(*_: Any) -> None:
        seen.append(threading.current_thread().name)
        raise MemoryError

    monkeypatch.setattr(embedder, "embed_together", rehearsed)
    samples, client = Samples.of(list(fed._clients.values()), cpu), next(iter(fed._clients.values()))
    one = Embedder(cpu)
    one.wanted = True
    for _ in range(2):
        with one.rehearsal(client, torch.zeros(fed.layout.size), samples):
            pass
    assert seen == ["emdcfl-rehearsal"]


class Pretended(CudaFederation):
    """The engine's crews, works and models on their way, on a CPU; trainings go the plain way."""

    def __init__(self, scenario: Scenario, **options: Any) -> None:
        SequentialFederation.__init__(self, scenario, **options)
        self._capturable, self._tf32, self._deterministic, self._lanes = False, False, True, []


@pytest.mark.parametrize("projection", ["row", "pair", "fresh"])
def test_a_comparison_in_crews_is_that_of_the_reference(cpu: torch.device, monkeypatch: pytest.MonkeyPatch, projection: Any) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 31))
    monkeypatch.setattr(staged, "SMALLEST", 2)
    monkeypatch.setattr(client, "ROWS_AT_ONCE", 2)
    method, states = EMDCFL(projection=projection, tolerance=0.025), []
    for engine in (SequentialFederation, Pretended):
        with engine(toy(groups=2, per_group=4, n=60), training=TRAINING, device="cpu") as one:
            states.append(method.step(one, method.init(one, one.begin(0)), one.begin(1)))
    plain, crews = states
    assert plain.labels == crews.labels
    torch.testing.assert_close(crews.W, plain.W, rtol=1e-4, atol=1e-4, equal_nan=True)
