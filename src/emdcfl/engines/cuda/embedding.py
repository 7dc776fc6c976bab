"""Embedding for many clients at once: each model is loaded once, and all samples wanted under it pass through together.

C clients compared with each other are C² pairs of a model and a sample. Pair by pair, a GPU spends its time loading models, launching
kernels and waiting for indices. Model by model, indices and matrices are copied in one piece before the first model, and nothing waits.

The embedder works on a stream of its own: the host compares the embeddings of some clients while the GPU computes those of the next.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Thread

import torch
from torch import Tensor

from emdcfl.core.client import EVALUATION_BATCH, Client
from emdcfl.core.params import Network
from emdcfl.core.tasks import Embed
from emdcfl.engines.cuda.resident import Samples
from emdcfl.engines.local.sequential import one_line
from emdcfl.engines.local.staged import Outcome, WorkResult

log = logging.getLogger("emdcfl")

EMBEDDED_ALONE = "embedding client by client"
"""First words of the warning that embeddings are not computed together."""

SPARE = 0.25
"""Part of the GPU memory that stays free. When less is free, embeddings go to the host, and transport copies them back batch by batch."""

WARM_UP_SAMPLES = 5120
"""Most samples of the warm-up: about as many as ten clients embed."""

AT_ONCE = 1 << 27
"""Most numbers of network input in one forward pass; activations are a few times as many."""

MAX_BATCH = 8192
"""Most samples in one forward pass: more are no faster."""

RESIDENT = ("train", "val", "all")
"""Splits that ``Samples`` holds on the GPU."""

Pieces = Sequence[tuple[Client, Embed]]


def groups(works: Pieces) -> list[list[int]]:
    """Return the positions of works that share a model and a matrix; only in evaluation mode, where samples are independent."""
    found: dict[tuple[int, int, int], list[int]] = {}
    for i, (_, work) in enumerate(works):
        if work.mode == "eval" and work.split in RESIDENT:
            found.setdefault((work.state.data_ptr(), work.state.numel(), id(work.matrix)), []).append(i)
    return list(found.values())


@torch.no_grad()
def embed_together(works: Pieces, samples: Samples, network: Network, take: Callable[[list[int], list[Tensor]], None]) -> None:
    """Embed model by model; ``take`` gets the positions of works that share a model and their g(x), times their matrix, on the GPU."""
    together = groups(works)
    if not together:
        return
    client, device = works[together[0][0]][0], samples.x.device
    size = batch_size(client.preprocess(samples.x[:1]).numel())
    index = _sent([_indices(*works[i], samples) for members in together for i in members], device)
    matrices = _matrices([works[members[0]][1].matrix for members in together], device)
    begin = 0
    with client.mode(training=False):  # evaluation does not depend on the client
        for members, matrix in zip(together, matrices, strict=True):
            sizes = [len(works[i][1].indices) for i in members]
            network.load(works[members[0]][1].state)
            embedded = passed(network.embed, client, samples.x, index[begin : begin + sum(sizes)], size)
            begin += sum(sizes)
            if matrix is not None:
                with torch.autocast(device.type, enabled=False):
                    embedded = embedded @ matrix
            take(members, list(embedded.split(sizes)))


def passed(forward: Callable[[Tensor], Tensor], client: Client, x: Tensor, index: Tensor, size: int) -> Tensor:
    """Return what a network computes of chosen samples, in passes of similar size."""
    parts = []
    for chosen in index.tensor_split(max(1, -(-len(index) // size))):
        z = client.preprocess(x.index_select(0, chosen))
        parts.append(forward(z.to(memory_format=torch.channels_last) if z.dim() == 4 else z).float())  # see Samples.batch
    return torch.cat(parts)


def _indices(client: Client, work: Embed, samples: Samples) -> Tensor:
    """Return the indices of a work's samples in ``Samples``."""
    return work.indices + (samples.first[client.name] - (0 if work.split == "train" else len(client.site.val)))


def _matrices(wanted: Sequence[Tensor | None], device: torch.device) -> list[Tensor | None]:
    there = [matrix for matrix in wanted if matrix is not None]
    sent = iter(_sent([matrix.flatten() for matrix in there], device).split([matrix.numel() for matrix in there]) if there else [])
    return [None if matrix is None else next(sent).view(matrix.shape) for matrix in wanted]


def _sent(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Concatenate host tensors and copy them to the device without waiting."""
    whole = torch.cat(list(parts))
    return whole.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else whole.to(device)


def batch_size(numbers: int) -> int:
    """Return the samples of a forward pass, given the numbers of one network input."""
    return max(EVALUATION_BATCH, min(MAX_BATCH, AT_ONCE // max(1, numbers)))


class Embedded:
    """Embeddings that a stream computes; asking for them makes the current stream wait, not the host."""

    def __init__(self, z: Tensor, done: torch.cuda.Event) -> None:
        self._z, self._done = z, done

    def result(self) -> Outcome:
        """Return the embeddings as the outcome of a work."""
        if self._z.is_cuda:
            here = torch.cuda.current_stream(self._z.device)
            here.wait_event(self._done)
            self._z.record_stream(here)  # else torch could reuse their memory while this stream reads it
        return {"z": self._z}


class Embedder:
    """Embeds on a stream of its own, with a network that all clients of an engine share.

    ``wanted`` says that a task will need embeddings soon, and there was no warm-up yet.
    """

    def __init__(self, device: torch.device, network: Network) -> None:
        self.device, self.wanted = device, False
        self._network = network
        self._stream = torch.cuda.Stream(device)

    def begin(self, works: Sequence[tuple[int, Client, Embed]], samples: Samples) -> dict[int, WorkResult]:
        """Begin to embed model by model. Works that failed are not in the result; embedding them alone then reports the error."""
        results: dict[int, WorkResult] = {}
        done = torch.cuda.Event()

        def take(members: list[int], found: list[Tensor]) -> None:
            free, total = torch.cuda.mem_get_info(self.device)  # memory that torch holds unused may belong to captured graphs
            kept = [z.cpu() for z in found] if free / total < SPARE else found
            results.update({works[k][0]: Embedded(z, done) for k, z in zip(members, kept, strict=True)})

        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            try:
                embed_together([work[1:] for work in works], samples, self._network, take)
            except Exception as error:  # bad data of a client, or out of memory
                log.warning("%s: %s", EMBEDDED_ALONE, one_line(error))
            done.record(self._stream)
        if len(results) < len(works):  # the remaining works need the network now
            self._stream.synchronize()
        return results

    def settle(self) -> None:
        """Make the current stream wait for all embeddings that were begun: they use the shared network."""
        torch.cuda.current_stream(self.device).wait_stream(self._stream)

    @contextmanager
    def warm_up(self, client: Client, state: Tensor, samples: Samples) -> Iterator[None]:
        """While the block runs, embed a few samples in another thread, once, if wanted; the block must not use the network.

        Afterwards the kernels of embedding are loaded and its memory is allocated.
        """
        if not self.wanted:
            yield
            return
        self.wanted = False
        thread = Thread(target=self._embed_some, args=(client, state, samples), name="emdcfl-warm-up")
        thread.start()
        try:
            yield
        finally:
            thread.join()
            self.settle()

    def _embed_some(self, client: Client, state: Tensor, samples: Samples) -> None:
        with suppress(Exception), torch.cuda.device(self.device), torch.cuda.stream(self._stream):  # the real embedding reports errors
            size = min(WARM_UP_SAMPLES, batch_size(client.preprocess(samples.x[:1]).numel()))
            index = torch.arange(size) % (len(client.site.val) + len(client.site.train))
            width = client.network.layout.embedding_width
            work = Embed(state, "all", index, "eval", torch.zeros(width, width))
            embed_together([(client, work)], samples, self._network, lambda members, found: None)
