from __future__ import annotations

import pytest
import torch
from tests.methods.toy import TRAINING, toy

from emdcfl.core.client import Client
from emdcfl.core.tasks import Embed
from emdcfl.engines.cuda.embedding import batch_size, embed_together, groups
from emdcfl.engines.cuda.streams import Samples
from emdcfl.engines.local import embedding
from emdcfl.engines.local.sequential import SequentialFederation


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
    embed_together(pieces, samples, lambda members, embedded: found.append((members, embedded)))
    return found


def test_together_is_as_one_by_one(fed: SequentialFederation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding, "EVALUATION_BATCH", 4)
    monkeypatch.setattr(embedding, "LARGEST", 4)  # the cut goes through the middle of clients
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
