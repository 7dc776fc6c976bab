"""Embedding on a stream of its own: the host looks at the embeddings of some clients while the GPU computes those of the next.

May import: client, tasks, embedding, lanes, the sequential and the staged engine.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Thread

import torch
from torch import Tensor

from emdcfl.core.client import Client
from emdcfl.core.tasks import Embed
from emdcfl.engines.cuda.embedding import batch_size, embed_together
from emdcfl.engines.cuda.streams import Samples
from emdcfl.engines.local.sequential import one_line
from emdcfl.engines.local.staged import Outcome, Result

log = logging.getLogger("emdcfl")

EMBEDDED_ALONE = "embedding client by client"
"""How the warning begins that says so."""

SPARE = 0.25
"""Part of the GPU memory that is left free: embeddings beyond it go to the host, where transport fetches them batch by batch."""

REHEARSED = 5120
"""Most samples of a rehearsal: about as many as ten clients show."""


class Embedded:
    """Embeddings that a stream computes; whoever asks for them has its own stream wait, not the host."""

    def __init__(self, z: Tensor, done: torch.cuda.Event) -> None:
        self._z, self._done = z, done

    def result(self) -> Outcome:
        """Return them as a work's outcome."""
        if self._z.is_cuda:
            here = torch.cuda.current_stream(self._z.device)
            here.wait_event(self._done)
            self._z.record_stream(here)  # else their memory could be given away while it is read here
        return {"z": self._z}


class Embedder:
    """A stream that embeds, with the network that all clients of an engine share.

    Attributes
    ----------
    wanted : bool
        Somebody will ask for embeddings soon, and nothing was rehearsed yet.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.wanted = device, False
        self._stream = torch.cuda.Stream(device)

    def begin(self, works: Sequence[tuple[int, Client, Embed]], samples: Samples) -> dict[int, Result]:
        """Begin to embed model by model; what is missing in the result, because that failed, is left to the plain way, which says why."""
        results: dict[int, Result] = {}
        done = torch.cuda.Event()

        def take(members: list[int], found: list[Tensor]) -> None:
            kept = [z.cpu() for z in found] if self._free() < SPARE else found
            results.update({works[k][0]: Embedded(z, done) for k, z in zip(members, kept, strict=True)})

        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            try:
                embed_together([work[1:] for work in works], samples, take)
            except Exception as error:  # a client's bad data, or no memory for so many samples at once
                log.warning("%s: %s", EMBEDDED_ALONE, one_line(error))
            done.record(self._stream)
        if len(results) < len(works):  # the others need the network now
            self._stream.synchronize()
        return results

    def settle(self) -> None:
        """Have the current stream wait for what was begun, even if nobody asked for it: it uses the network."""
        torch.cuda.current_stream(self.device).wait_stream(self._stream)

    @contextmanager
    def rehearsal(self, client: Client, state: Tensor, samples: Samples) -> Iterator[None]:
        """Meanwhile, if it is wanted, embed a few samples once in another thread; nobody else may use the network.

        What embedding runs is loaded then, and the memory it takes is there.
        """
        if not self.wanted:
            yield
            return
        self.wanted = False
        thread = Thread(target=self._rehearse, args=(client, state, samples), name="emdcfl-rehearsal")
        thread.start()
        try:
            yield
        finally:
            thread.join()
            self.settle()

    def _rehearse(self, client: Client, state: Tensor, samples: Samples) -> None:
        with suppress(Exception), torch.cuda.device(self.device), torch.cuda.stream(self._stream):  # said where it is needed
            size = min(REHEARSED, batch_size(client.preprocess(samples.x[:1]).numel()))
            index = torch.arange(size) % (len(client.site.val) + len(client.site.train))
            width = client.network.layout.embedding_width
            work = Embed(state, "all", index, "eval", torch.zeros(width, width))
            embed_together([(client, work)], samples, lambda members, found: None)

    def _free(self) -> float:
        """The part of the GPU memory that nobody holds; what torch holds and does not use may belong to captured graphs."""
        free, total = torch.cuda.mem_get_info(self.device)
        return free / total
