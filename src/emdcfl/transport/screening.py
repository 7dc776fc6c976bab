r"""Which clients are linked, with as few exact solves as possible. Imports numpy only.

A pair is linked iff both :math:`W_{cc'} = T_{cc'} - \tau_c < \epsilon_{cc'}` and :math:`W_{c'c} < \epsilon_{c'c}`. Certified bounds
(``bounds``) of the transport value T settle most pairs: one direction certainly at or above its tolerance refuses the link, both
certainly below make it. Only what the bounds leave open is solved exactly, so the links are those of solving everything, bit for bit.

Columns may come one by one, in any order; work begins when they arrive and the result does not depend on the order or on the workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emdcfl.core.errors import ConfigError, EmdcflError, nearest
from emdcfl.transport.cost import COSTS
from emdcfl.transport.pairs import Client, Options, PairOutcome, Problem, RowSample, Source
from emdcfl.transport.pool import SolverPool
from emdcfl.transport.queues import DeviceQueue, Queue, ThreadQueue
from emdcfl.transport.solve import SOLVERS


@dataclass(frozen=True)
class Decision:
    """What a screening found, in the order of `clients`.

    Attributes
    ----------
    clients : tuple
        Names or numbers of the clients.
    w : (C, C) float64 array
        Values or bounds of W; NaN where nothing was added. ``links(w, epsilon)`` gives the adjacency.
    kind : (C, C) int8 array
        What each entry is: 0 unknown, 1 exact, 2 a lower bound, 3 an upper bound (``KINDS``).
    linked : (C, C) bool array
        The adjacency, with a true diagonal. A pair with a direction that was never added is not linked.
    exact_solves : int
        Times the solver was run (once per block of a problem that bounds left open).
    pairs : int
        Ordered pairs that were added.
    """

    clients: tuple[Client, ...]
    w: NDArray[np.float64]
    kind: NDArray[np.int8]
    linked: NDArray[np.bool_]
    exact_solves: int
    pairs: int


class Screen:
    """Decide links as samples come in.

    Parameters
    ----------
    pool : SolverPool
        Workers.
    cost, solver, reg, label_weight
        As in :func:`emdcfl.transport.cost.cost_matrix` and :func:`emdcfl.transport.solve.solve`. With Sinkhorn only lower bounds are used:
        its value is never below the exact one, but may lie above an upper bound of it.
    distances : {"needed", "all"}
        "all" solves every problem that is added (for pictures of W without bounds); the links are the same.
    device : torch.device or str, optional
        Where problems are bounded, many at once (a GPU); the links are the same. Left out: on the pool's threads.

    Examples
    --------
    >>> x = np.eye(3)
    >>> with SolverPool(1) as pool:
    ...     screen = Screen(pool)
    ...     for c in ("a", "b"):
    ...         screen.row(c, x, tau=0.0, epsilon=0.025)
    ...     screen.add("a", "b", x)
    ...     screen.add("b", "a", x)
    ...     screen.finish().linked
    array([[ True,  True],
           [ True,  True]])
    """

    def __init__(
        self,
        pool: SolverPool,
        *,
        cost: str = "cosine",
        solver: str = "exact",
        reg: float = 0.1,
        label_weight: float = 1.0,
        distances: str = "needed",
        device: Any = None,
    ) -> None:
        for what, name, valid in (("cost", cost, COSTS), ("solver", solver, SOLVERS), ("distances", distances, ("needed", "all"))):
            if name not in valid:
                raise ConfigError(f"unknown transport {what} {name!r}; {nearest(name, valid)}")
        options = Options(cost, solver, reg, label_weight, distances == "all")
        self._queue = _queue(pool, options, device)
        self._rows: dict[Client, RowSample] = {}
        self._waiting: dict[Client, list[tuple[Client, Any, Any, int, dict[str, Any]]]] = {}
        self._added: set[tuple[Client, Client]] = set()

    def row(self, client: Client, a: Any, *, tau: float, epsilon: float, labels: Any = None) -> None:
        """Give a client's own sample (the source of its whole row), its reference distance and its tolerance."""
        if client in self._rows:
            raise EmdcflError(f"expected one row sample per client, got a second one for {client!r}")
        _check(client, tau, epsilon)
        self._rows[client] = RowSample(Source(a, labels), float(tau), float(epsilon))
        for column, b, column_labels, blocks, special in self._waiting.pop(client, []):
            self._start(client, column, b, column_labels, blocks, special)

    def add(
        self,
        row: Client,
        column: Client,
        b: Any,
        *,
        labels: Any = None,
        epsilon: float | None = None,
        tau: float | None = None,
        a: Any = None,
        blocks: int = 1,
    ) -> None:
        """Give the sample of `column` under the model of `row`; before or after the row's own sample.

        `epsilon`, `tau` and `a` replace the row's tolerance, reference distance and sample for this partner (because its sample is
        smaller, or the pair has a projection of its own). With `blocks` > 1 the sample is cut into that many equal blocks and the
        transport value is their mean.
        """
        if row == column:
            raise EmdcflError(f"expected two different clients, got {row!r} twice; every client is linked to itself")
        if (row, column) in self._added:
            raise EmdcflError(f"expected one sample per ordered pair, got a second one of {column!r} for {row!r}")
        self._added.add((row, column))
        special = {"epsilon": epsilon, "tau": tau, "a": a}
        if row in self._rows:
            self._start(row, column, b, labels, blocks, special)
        else:
            self._waiting.setdefault(row, []).append((column, b, labels, blocks, special))

    def finish(self, clients: Sequence[Client] | None = None) -> Decision:
        """Wait for the work and return the links among `clients` (default: all that were named, sorted)."""
        if self._waiting:
            missing = ", ".join(repr(c) for c in self._waiting)
            raise EmdcflError(f"expected the own sample of every row client, got none for {missing}; call row() for each")
        named = {c for pair in self._added for c in pair} | set(self._rows)
        order = tuple(sorted(named, key=lambda c: (isinstance(c, str), c)) if clients is None else clients)
        index = {c: i for i, c in enumerate(order)}
        if unknown := named - set(index):
            raise EmdcflError(f"expected every added client among those to finish with, got others: {sorted(map(repr, unknown))}")
        return _decision(order, index, *self._queue.finish())

    def _start(self, row: Client, column: Client, b: Any, labels: Any, blocks: int, special: Mapping[str, Any]) -> None:
        own, a = self._rows[row], special["a"]
        tau, epsilon = (getattr(own, name) if special[name] is None else float(special[name]) for name in ("tau", "epsilon"))
        _check(row, tau, epsilon)
        source = own.source if a is None else Source(a, own.source.labels)
        self._queue.add((row, column), Problem(RowSample(source, tau, epsilon), b, labels, blocks))


def _queue(pool: SolverPool, options: Options, device: Any) -> Queue:
    if device is None or options.all:
        return ThreadQueue(pool, options)
    from emdcfl.engines.cuda.transport_device import Device

    return DeviceQueue(pool, options, Device(device, options))


def decide(
    rows: Mapping[Client, Any],
    columns: Mapping[tuple[Client, Client], Any],
    *,
    tau: Mapping[Client, float],
    epsilon: float | Mapping[Client, float],
    pool: SolverPool,
    **options: Any,
) -> Decision:
    """Decide all links at once.

    Parameters
    ----------
    rows : mapping of client to (n, p) array
        Each client's own sample under its own model.
    columns : mapping of (row, column) to (m, p) array
        The column client's sample under the row client's model.
    tau, epsilon : mapping of client to float
        Reference distance and tolerance of each row client (the tolerance may be one number for all).
    pool : SolverPool
        Workers.
    **options
        As for :class:`Screen`.

    Examples
    --------
    >>> x, y = np.eye(2), np.array([[1.0, 1.0], [1.0, 1.0]])
    >>> with SolverPool(1) as pool:
    ...     found = decide({0: x, 1: y}, {(0, 1): y, (1, 0): x}, tau={0: 0.0, 1: 0.0}, epsilon=0.025, pool=pool)
    >>> found.linked.tolist(), found.exact_solves
    ([[True, False], [False, True]], 0)
    """
    screen = Screen(pool, **options)
    for client, a in rows.items():
        screen.row(client, a, tau=tau[client], epsilon=epsilon[client] if isinstance(epsilon, Mapping) else epsilon)
    for (row, column), b in columns.items():
        screen.add(row, column, b)
    return screen.finish(tuple(rows))


def _check(client: Client, tau: float, epsilon: float) -> None:
    if not (np.isfinite(tau) and np.isfinite(epsilon)):
        raise EmdcflError(f"expected a finite tau and tolerance from client {client!r}, got tau={tau} and epsilon={epsilon}")


def _decision(
    order: tuple[Client, ...], index: Mapping[Client, int], entries: Mapping[tuple[Client, Client], PairOutcome], solves: int
) -> Decision:
    size = len(order)
    w, kind = np.full((size, size), np.nan), np.zeros((size, size), dtype=np.int8)
    accepts = np.zeros((size, size), dtype=bool)
    for (row, column), entry in entries.items():
        i, j = index[row], index[column]
        w[i, j], kind[i, j], accepts[i, j] = entry.value, entry.kind, bool(entry.accepts)
    linked = accepts & accepts.T
    np.fill_diagonal(linked, True)
    return Decision(order, w, kind, linked, solves, len(entries))
