"""Embedding for many clients at once, and the embedder with CUDA streams that do nothing."""

from __future__ import annotations

import logging
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tests.methods.toy import TRAINING, toy

from emdcfl.core.client import Client
from emdcfl.core.tasks import Embed
from emdcfl.data.types import Scenario
from emdcfl.engines.cuda import embedding
from emdcfl.engines.cuda.embedding import EMBEDDED_ALONE, Embedder, batch_size, embed_together, groups
from emdcfl.engines.cuda.engine import CudaFederation
from emdcfl.engines.cuda.resident import Samples
from emdcfl.engines.local import staged
from emdcfl.engines.local.sequential import SequentialFederation
from emdcfl.engines.local.staged import Outcome, WorkResult
from emdcfl.methods.emdcfl import EMDCFL
from emdcfl.methods.emdcfl.client import tasks as emdcfl_client


@pytest.fixture
def fed() -> SequentialFederation:
    return SequentialFederation(toy(n=[40, 30, 50] * 3), training=TRAINING, device="cpu")


def works(fed: SequentialFederation) -> list[tuple[Client, Embed]]:
    """Every client's samples under two models, one of them only the embedding part."""
    whole, part = fed.initial(0), fed.initial(1)[fed.layout.embedding]
    clients = list(fed._clients.values())
    plain = [(c, Embed(state, split, c.sample(split, 11))) for c in clients for state in (whole, part) for split in ("train", "val")]
    matrix = torch.randn(fed.layout.embedding_width, 3, generator=torch.Generator().manual_seed(0))
    both = [torch.randperm(len(c.site.val) + len(c.site.train), generator=torch.Generator().manual_seed(1))[:11] for c in clients]
    return plain + [(c, Embed(part, "all", index, "eval", matrix)) for c, index in zip(clients, both, strict=True)]


def embedded_together(pieces: list[tuple[Client, Embed]], samples: Samples) -> list[tuple[list[int], list[torch.Tensor]]]:
    found: list[tuple[list[int], list[torch.Tensor]]] = []
    embed_together(pieces, samples, pieces[0][0].network, lambda members, embedded: found.append((members, embedded)))
    return found


@pytest.mark.slow
def test_together_is_as_one_by_one(fed: SequentialFederation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding, "EVALUATION_BATCH", 4)
    monkeypatch.setattr(embedding, "MAX_BATCH", 4)  # the cut goes through the middle of clients
    pieces, samples = works(fed), Samples.of(list(fed._clients.values()), torch.device("cpu"))
    assert sorted(len(members) for members in groups(pieces)) == [9, 18, 18]
    found = embedded_together(pieces, samples)
    assert [members for members, _ in found] == groups(pieces)
    for members, embedded in found:
        for k, z in zip(members, embedded, strict=True):
            client, work = pieces[k]
            assert z.shape == (11, fed.layout.embedding_width if work.matrix is None else 3)
            torch.testing.assert_close(z, work(client)["z"], rtol=1e-5, atol=1e-5)


def test_in_low_precision_the_projection_is_not(fed: SequentialFederation) -> None:
    for client in fed._clients.values():
        client.precision = "bf16"
    pieces, samples = works(fed), Samples.of(list(fed._clients.values()), torch.device("cpu"))
    for members, embedded in embedded_together(pieces, samples):
        for k, z in zip(members, embedded, strict=True):
            assert z.dtype == torch.float32
            client, work = pieces[k]
            torch.testing.assert_close(z, work(client)["z"], rtol=2e-2, atol=2e-2)


def test_batch_statistics_are_not_mixed_between_clients(fed: SequentialFederation) -> None:
    client, work = works(fed)[0]
    assert groups([(client, Embed(work.state, "train", work.indices, "train"))]) == []


def test_what_lies_elsewhere_is_embedded_alone(fed: SequentialFederation) -> None:
    client, work = works(fed)[0]
    assert groups([(client, Embed(work.state, "test:test", work.indices))]) == []


def test_large_inputs_pass_in_smaller_batches() -> None:
    assert batch_size(784) == 8192
    assert 512 < batch_size(3 * 224 * 224) < 1024
    assert batch_size(1 << 30) == embedding.EVALUATION_BATCH


class Stream:
    """Records calls."""

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


def outcome(result: WorkResult) -> Outcome:
    assert not isinstance(result, (dict, Exception))
    return result.result()


def test_every_work_is_answered_under_its_own_number(cpu: torch.device, fed: SequentialFederation) -> None:
    samples = Samples.of(list(fed._clients.values()), cpu)
    pieces = [(3 * k, client, work) for k, (client, work) in enumerate(works(fed))]
    found = Embedder(cpu, next(iter(fed._clients.values())).network).begin(pieces, samples)
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
    one = Embedder(cpu, next(iter(fed._clients.values())).network)
    with caplog.at_level(logging.WARNING, logger="emdcfl"):
        found = one.begin([(0, client, good), (1, client, bad), (2, client, other)], samples)
    assert list(found) == [0]
    assert caplog.records[0].getMessage().startswith(EMBEDDED_ALONE)
    stream: Any = one._stream
    assert stream.asked == ["wait_stream", "synchronize"]


def test_a_warm_up_takes_place_once_and_hides_its_errors(
    cpu: torch.device,
    fed: SequentialFederation,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []

    def warmed_up(*_: Any) -> None:
        seen.append(threading.current_thread().name)
        raise MemoryError

    monkeypatch.setattr(embedding, "embed_together", warmed_up)
    samples, client = Samples.of(list(fed._clients.values()), cpu), next(iter(fed._clients.values()))
    one = Embedder(cpu, next(iter(fed._clients.values())).network)
    one.wanted = True
    for _ in range(2):
        with one.warm_up(client, torch.zeros(fed.layout.size), samples):
            pass
    assert seen == ["emdcfl-warm-up"]


class Pretended(CudaFederation):
    """The CUDA engine's client batches and embeddings on a CPU; clients train one after the other."""

    def __init__(self, scenario: Scenario, **options: Any) -> None:
        SequentialFederation.__init__(self, scenario, **options)
        self._capturable, self._low, self._tf32, self._deterministic, self._streams = False, False, False, True, []

    def transport_queue(self) -> None:  # type: ignore[override]
        return None


@pytest.mark.parametrize("projection", ["row", "pair", "fresh"])
def test_comparing_in_client_batches_equals_the_reference(cpu: torch.device, monkeypatch: pytest.MonkeyPatch, projection: Any) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 31))
    monkeypatch.setattr(staged, "MIN_GROUP", 2)
    monkeypatch.setattr(emdcfl_client, "ROWS_AT_ONCE", 2)
    method, states = EMDCFL(projection=projection, tolerance=0.025), []
    for engine in (SequentialFederation, Pretended):
        with engine(toy(groups=2, per_group=4, n=60), training=TRAINING, device="cpu") as one:
            states.append(method.step(one, method.init(one, one.begin(0)), one.begin(1)))
    plain, batched = states
    assert plain.labels == batched.labels
    torch.testing.assert_close(batched.W, plain.W, rtol=1e-4, atol=1e-4, equal_nan=True)
