"""The state of EMD-CFL, and which pairs are measured: all unset pairs, or clients against representatives first."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emdcfl.clustering import completed, joined, links
from emdcfl.core.federation import Federation, Round
from emdcfl.methods.base import INFERRED, NOT_COMPARABLE, Clustered, Distances
from emdcfl.methods.emdcfl.comparison import Comparison, Measured, comparable
from emdcfl.methods.emdcfl.proposals import REPRESENTATIVES, choose
from emdcfl.methods.emdcfl.representatives import Pair, by_representatives
from emdcfl.methods.emdcfl.settings import Options
from emdcfl.methods.emdcfl.tolerance import log_what_is_compared
from emdcfl.transport import LOWER

log = logging.getLogger("emdcfl")

SHOWN = 400
"""Most clients whose distances are shown as one matrix of all pairs."""


@dataclass(frozen=True)
class EMDCFLState(Clustered):
    """``Clustered``, and the matrices of ``Distances`` (NaN where a pair is not known yet, ±inf where it was only inferred).

    ``rows``: the representatives that everybody is compared with, where these are not all clients; matrices then have a row for each.
    ``splits``: those that ``benefit.examine`` weighed, by round; None with ``grouping="neighbourhoods"``.
    """

    W: Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    tau: Tensor = field(default_factory=lambda: torch.zeros(0))
    epsilon: Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    kind: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.int8))
    noise_factor: float = 1.0
    splits: list[dict[str, Any]] | None = None
    rows: list[str] = field(default_factory=list)

    @property
    def by_rows(self) -> bool:
        """Whether everybody is compared with representatives, of whom there may be none yet, and not with everybody."""
        return bool(self.rows) or not len(self.W)

    def distances(self) -> Distances:
        """Return the distances for people to read; an entry that was only inferred has no value.

        Of many clients compared with representatives, those among the representatives alone: a sample of all pairs.
        """
        if not len(self.W):  # nobody was compared yet, which one row says as well as all
            unset = torch.full((1, len(self.clients)), torch.nan, dtype=torch.float64)
            return replace(self, rows=self.clients[:1], W=unset, epsilon=unset, kind=torch.zeros(unset.shape, dtype=torch.int8)).distances()
        if self.rows:
            return self._from_rows()
        known = torch.isfinite(self.W)
        W, epsilon = (torch.where(known, x, torch.full_like(x, torch.nan)) for x in (self.W, self.epsilon))
        return Distances(W.numpy(), self.tau.numpy(), epsilon.numpy(), self.kind.numpy(), self.noise_factor, self.splits)

    def _from_rows(self) -> Distances:
        at = {c: i for i, c in enumerate(self.clients)}
        C, rows = len(self.clients), [at[c] for c in self.rows]
        if C > SHOWN:
            W, epsilon, kind = (x[:, rows].numpy() for x in (self.W, self.epsilon, self.kind))
            return Distances(W, self.tau[rows].numpy(), epsilon, kind, self.noise_factor, self.splits, np.array(rows))
        W, epsilon, kind = np.full((C, C), np.nan), np.full((C, C), np.nan), np.zeros((C, C), np.int8)
        W[rows], epsilon[rows], kind[rows] = self.W.numpy(), self.epsilon.numpy(), self.kind.numpy()
        return Distances(W, self.tau.numpy(), epsilon, kind, self.noise_factor, self.splits)

    def linked(self, i: int, j: int) -> bool:
        """Whether both directions of a pair stay under their tolerances."""
        return bool(self.W[i, j] < self.epsilon[i, j]) and bool(self.W[j, i] < self.epsilon[j, i])

    def copied(self) -> EMDCFLState:
        """Return the state with matrices of its own, to be filled."""
        return replace(self, W=self.W.clone(), tau=self.tau.clone(), epsilon=self.epsilon.clone(), kind=self.kind.clone())


def empty_state(fed: Federation, *, by_rows: bool) -> EMDCFLState:
    """Every client holds θ⁰ and is a cluster of its own; W is unset. With ``by_rows`` it will have rows of representatives alone."""
    C = len(fed.clients)
    unset = torch.full((0 if by_rows else C, C), torch.nan, dtype=torch.float64)
    tau, kind = torch.full((C,), torch.nan, dtype=torch.float64), torch.zeros(unset.shape, dtype=torch.int8)
    return EMDCFLState(list(fed.clients), fed.initial(), W=unset, tau=tau, epsilon=unset.clone(), kind=kind)


def compare(options: Options, fed: Federation, state: EMDCFLState, local: Mapping[str, Tensor], round: Round) -> EMDCFLState:
    """Measure the pairs of seen clients whose W is unset, each row under its client's latest local state."""
    if state.by_rows:
        return _from_representatives(options, fed, state, local, round)
    unset = _unset(options, state, again=options.repeated(partial=fed.number not in (None, len(fed.clients))))
    able = comparable(options, fed, [c for c in fed.clients if c in local], warn=True) if unset.any() else {}
    here = [i for i, c in enumerate(state.clients) if c in able]
    if not unset[np.ix_(here, here)].any():
        return state
    if not state.kind.any():
        log_what_is_compared(options)
    comparison = Comparison(options, fed, local, able)
    if options.all_pairs(len(fed.clients)):
        pairs = [(state.clients[i], state.clients[j]) for i, j in np.argwhere(unset)]
        return decided(_filled(state, comparison.measure(pairs)))
    return _with_representatives(comparison, state, round)


def keep_clusters(state: EMDCFLState, clients: Sequence[str], W: Any, M: Any) -> tuple[list[list[str]], dict[str, int]]:
    """Keep the clusters there are, and add newcomers to those they are linked with (``joining="keep"``)."""
    found, members = joined(np.where(np.isnan(W), np.nan, M), [state.labels.get(c, -1) for c in clients])
    before = [*state.sets, *([] for _ in range(len(members) - len(state.sets)))]
    sets = [[*old, *(clients[j] for j in new if clients[j] not in old)] for old, new in zip(before, members, strict=True)]
    return sets, {c: int(label) for c, label in zip(clients, found, strict=True)}


def decided(state: EMDCFLState) -> EMDCFLState:
    """Link clients that cannot be compared if their links with others agree more often than not (``clustering.completed``)."""
    open_ = (state.kind == NOT_COMPARABLE).numpy()
    if not open_.any():
        return state
    W, epsilon = state.W.numpy(), state.epsilon.numpy()
    known = np.where(np.isnan(W) | open_, np.nan, links(W, epsilon))
    linked = torch.from_numpy(completed(known) & open_)
    new = state.copied()
    new.W[torch.from_numpy(open_)] = torch.inf
    new.W[linked] = -torch.inf
    return new


def _unset(options: Options, state: EMDCFLState, *, again: bool) -> np.ndarray[Any, Any]:
    """Mark ordered pairs (row, column) of seen clients to measure now: both directions, if one of them is unset, or all again."""
    unknown = [c not in state.n for c in state.clients]
    unset = np.isnan(state.W.numpy()) | again
    unset = unset | unset.T
    unset[unknown], unset[:, unknown] = False, False
    if options.force_diagonal:
        np.fill_diagonal(unset, False)
    return np.asarray(unset)


def _from_representatives(options: Options, fed: Federation, state: EMDCFLState, local: Mapping[str, Tensor], round: Round) -> EMDCFLState:
    """Bound W from a few representatives to every client seen; newcomers are compared with those there are, which may become more."""
    at = {c: i for i, c in enumerate(state.clients)}
    seen = [c for c in state.clients if c in local]
    new = [c for c in seen if not state.rows or bool(torch.isnan(state.W[:, at[c]]).all())]
    if not new:
        return state
    able = comparable(options, fed, seen, warn=True)
    comparison = Comparison(options, fed, local, able)
    columns = [c for c in seen if c in able]
    tau, W, rows = state.tau.clone(), state.W, list(state.rows)
    if rows:
        found = comparison.measure_rows(rows, [c for c in new if c in able])
        W = torch.where(torch.isnan(W), torch.from_numpy(found.W), W)

    def measure(positions: Sequence[int]) -> Any:
        nonlocal W, tau
        found = comparison.measure_rows([columns[i] for i in positions], columns)
        W = torch.cat([W, torch.from_numpy(found.W)])
        tau = torch.where(torch.isnan(found.tau), tau, found.tau)
        return found.W[:, [at[c] for c in columns]]

    if len(columns) > 1 and len(rows) < REPRESENTATIVES:
        where = {c: i for i, c in enumerate(columns)}
        before = [where[c] for c in rows if c in where]
        chosen, _ = choose(measure, len(columns), round.generator("representatives"), before, W[:, [at[c] for c in columns]].numpy())
        rows += [columns[i] for i in chosen[len(before) :]]
    answered = [i for i in range(len(rows)) if bool(torch.isfinite(W[i]).any())]
    W, rows = W[answered], [rows[i] for i in answered]
    kind = torch.where(torch.isnan(W), 0, LOWER).to(torch.int8)
    epsilon = torch.where(torch.isnan(W), torch.nan, float(options.threshold))
    return replace(state, W=W, tau=tau, epsilon=epsilon, kind=kind, rows=rows)


def _with_representatives(comparison: Comparison, state: EMDCFLState, round: Round) -> EMDCFLState:
    at = {c: i for i, c in enumerate(state.clients)}
    seen = [c for c in state.clients if c in state.n]
    W = state.W.numpy().copy()
    np.fill_diagonal(W, np.nan)
    fresh = np.isnan(W).all(axis=1)
    new = [c for c in seen if fresh[at[c]]]
    groups: dict[int, list[str]] = {}
    for c in seen:
        if not fresh[at[c]]:
            groups.setdefault(state.labels[c], []).append(c)
    measured = {(state.clients[i], state.clients[j]): state.linked(i, j) for i, j in np.argwhere(np.triu(np.isfinite(W)))}

    def ask(pairs: Sequence[Pair]) -> dict[Pair, bool | None]:
        nonlocal state
        state = _filled(state, comparison.measure([way for c, d in pairs for way in ((c, d), (d, c))]))
        return {(c, d): None if bool(torch.isnan(state.W[at[c], at[d]])) else state.linked(at[c], at[d]) for c, d in pairs}

    found = by_representatives(new, list(groups.values()), ask, round.generator("representatives"), measured=measured)
    if found.contradictions:
        log.warning(
            "links are no union of cliques: %d of %d spot checks contradict; %d clients were compared with their whole groups, "
            "but links inferred for others may be wrong; pairing = 'all' compares every pair",
            found.contradictions,
            found.checks,
            len(found.concerned),
        )
    state = state.copied()
    follows = torch.from_numpy(found.inferred(state.clients))
    open_ = torch.isnan(state.W) & (follows >= 0)
    open_.fill_diagonal_(False)
    state.W[open_] = torch.where(follows[open_] == 1, -torch.inf, torch.inf).double()
    state.epsilon[open_], state.kind[open_] = 0.0, INFERRED
    return state


def _filled(state: EMDCFLState, found: Measured) -> EMDCFLState:
    where = {c: i for i, c in enumerate(state.clients)}
    new = state.copied()
    for c, value in found.tau.items():
        new.tau[where[c]] = value
    for (c, d), entry in found.entries.items():
        at = where[c], where[d]
        new.W[at], new.epsilon[at], new.kind[at] = entry.W, entry.epsilon, entry.kind
    for c, d in found.undecided:
        for at in ((where[c], where[d]), (where[d], where[c])):
            new.W[at], new.epsilon[at], new.kind[at] = torch.inf, 0.0, NOT_COMPARABLE
    return new
