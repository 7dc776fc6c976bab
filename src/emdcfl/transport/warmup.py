"""What takes long only the first time, done in a thread while clients train. Imports solvers; torch where there is a GPU."""

from __future__ import annotations

from contextlib import suppress
from threading import Thread
from typing import Any

from emdcfl.transport.simplex import network_simplex
from emdcfl.transport.threads import one_blas_thread


def warm_up(device: Any = None) -> Thread:
    """Import the solvers, find their BLAS and, where a GPU will bound problems, have it load what it runs.

    Parameters
    ----------
    device : torch.device, optional
        The GPU.
    """
    thread = Thread(target=_ahead, args=(device,), name="emdcfl-ahead")
    thread.start()
    return thread


def _ahead(device: Any) -> None:
    with suppress(Exception):  # said where it is needed; a run that ends at once may take the interpreter with it meanwhile
        import scipy.optimize  # noqa: F401

        network_simplex()
        with one_blas_thread():
            pass
        if device is not None:
            _bounds(device)


def _bounds(device: Any) -> None:
    """Bound a few problems, with every operation that real ones need, on a stream of their own."""
    import torch

    from emdcfl.engines.cuda import transport_bounds

    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        a, b = (torch.rand(2, 512, 115, device=device, generator=torch.Generator(device).manual_seed(seed)) for seed in (0, 1))
        c = transport_bounds.costs(a, b, cost="cosine")
        low = transport_bounds.minima(c)
        transport_bounds.rounding(c, 115).tolist()
        for lower, upper in transport_bounds.refine(c, low, stages=((0.3, 1), (0.1, 1))):
            torch.stack([lower, upper], 1).tolist()
