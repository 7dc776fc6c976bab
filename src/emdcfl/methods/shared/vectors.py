r"""What methods that compare clients by their weights share: Gram matrices of states and updates, and cluster averages.

A client's vector is a part of its state θ (the *scope*), minus an origin: the state it started from gives an update
:math:`\Delta_c`, a common state gives distances between states with little rounding. Everything else follows from the C × C Gram
matrix, so no method forms a second (C, P) matrix.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from emdcfl.core.errors import ConfigError
from emdcfl.core.params import Layout, Scope, average, gram
from emdcfl.core.units import plural
from emdcfl.methods.base import Clustered
from emdcfl.trust import Guard

log = logging.getLogger("emdcfl")


def update_gram(
    layout: Layout,
    thetas: Tensor | Sequence[Tensor],
    origin: Tensor | Sequence[Tensor] | None = None,
    steps: Sequence[float] | None = None,
    scope: Scope = "P",
) -> Tensor:
    r"""Return :math:`G_{ij} = \langle v_i, v_j\rangle` with :math:`v_i` the scope's part of :math:`\theta_i - o_i`, in float64.

    The origin is one state for all, or one for each row. ``steps`` says how far each row's counters have moved from its origin's; the scope
    ``"state"`` alone needs it.
    """
    out = gram(thetas, layout.scope(scope), origin=origin)
    if scope == "state" and layout.counters:
        if steps is None:
            raise ValueError("expected steps with the scope 'state', got None")
        moved = torch.tensor(list(steps), dtype=torch.float64)  # every step adds one to each counter
        out += len(layout.counters) * torch.outer(moved, moved)
    return out


def sets_of(clients: Sequence[str], labels: Mapping[str, int], k: int) -> list[list[str]]:
    """Return the members of each of k clusters, in client order; clients without a label are in none.

    Examples
    --------
    >>> sets_of(["a", "b", "c"], {"a": 1, "c": 1}, 2)
    [[], ['a', 'c']]
    """
    out: list[list[str]] = [[] for _ in range(k)]
    for c in clients:
        if c in labels:
            out[labels[c]].append(c)
    return out


def average_present(
    state: Clustered,
    sets: Sequence[Sequence[str]],
    local: Mapping[str, Tensor],
    previous: Tensor,
    guard: Guard | None = None,
) -> Tensor:
    r"""Return one model per set, :math:`\theta_k = \sum_{c\in S_k} n_c\theta_c / \sum_{c\in S_k} n_c` over this round's members.

    A set none of whose members answered keeps its row of ``previous``; sets beyond its rows are new and have members. With the federation's
    ``guard``, its policy decides how states become one; what is not a state trained in this round goes without.
    """
    if guard is not None:
        local = guard.clip_updates(local, {c: state.start(c) for c in local}, sets)
    merge = average if guard is None else guard.average
    models = []
    for k, members in enumerate(sets):
        present = [c for c in members if c in local]
        models.append(merge([local[c] for c in present], [float(state.n[c]) for c in present]) if present else previous[k])
    return torch.stack(models)


def expect(fine: bool, field: str, expected: str, got: Any) -> None:
    """Raise ``ConfigError`` unless a field of a method is in its range."""
    if not fine:
        raise ConfigError(f"expected method.{field} {expected}, got {got}")


def warn_if_too_short(rounds: int | None, first: int, option: str) -> None:
    """Say that a run ends before the round in which a method first looks for clusters, which its option sets."""
    if rounds is not None and rounds < first:
        short = plural(rounds, "round")
        log.warning("method.%s = %d, and the run has %s: no clusters are found, and all clients share one model", option, first, short)
