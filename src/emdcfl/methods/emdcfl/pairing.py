"""Which pairs EMD-CFL measures, and where the results go: all unset pairs, or clients against representatives first."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from emdcfl.core.federation import Federation, Round
from emdcfl.methods.base import Clustered, Distances
from emdcfl.methods.emdcfl.comparison import Comparison, Measured, Pair, comparable
from emdcfl.methods.emdcfl.interpret import doubts
from emdcfl.methods.emdcfl.representatives import by_representatives

if TYPE_CHECKING:
    from emdcfl.methods.emdcfl.algorithm import EMDCFL

log = logging.getLogger("emdcfl")

INFERRED = 4
"""Kind of an entry that was not compared but follows from a representative: W is -inf (accepted) or inf (refused)."""


@dataclass(frozen=True)
class EMDCFLState(Clustered):
    """``Clustered``, and the matrices of ``Distances`` (NaN where a pair is not known yet, ±inf where it was only inferred)."""

    W: Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    tau: Tensor = field(default_factory=lambda: torch.zeros(0))
    epsilon: Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    kind: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.int8))
    shrunk: float = 1.0

    def distances(self) -> Distances:
        """Return what a person may look at; an entry that was only inferred has no value."""
        known = torch.isfinite(self.W)
        W, epsilon = (torch.where(known, x, torch.full_like(x, torch.nan)) for x in (self.W, self.epsilon))
        return Distances(W.numpy(), self.tau.numpy(), epsilon.numpy(), self.kind.numpy(), self.shrunk)


def empty_state(fed: Federation) -> EMDCFLState:
    """Everybody holds θ⁰ and is alone; W is unset."""
    C = len(fed.clients)
    unset = torch.full((C, C), torch.nan, dtype=torch.float64)
    return EMDCFLState(
        list(fed.clients), fed.initial(), W=unset, tau=unset[:, 0].clone(), epsilon=unset.clone(), kind=torch.zeros(C, C, dtype=torch.int8)
    )


def compare(method: EMDCFL, fed: Federation, state: EMDCFLState, local: Mapping[str, Tensor], round: Round) -> EMDCFLState:
    """Measure what is unset among the clients seen, each row under its client's latest local state."""
    pairs = _unset(method, state)
    able = comparable(method, fed, [c for c in fed.clients if c in local], say=True) if pairs else {}
    if not any(c in able and d in able for c, d in pairs):
        return state
    if not state.kind.any():
        _say_tolerance(method)
    comparison = Comparison(method, fed, local, able)
    if method.pairing == "all":
        return _filled(state, comparison.measure(pairs))
    return _with_representatives(comparison, state, round)


def warn_of_doubts(state: EMDCFLState, labels: Mapping[str, int]) -> None:
    """Say why the clusters should not be called certain, where there is a reason."""
    clusters = [labels.get(c, -1 - i) for i, c in enumerate(state.clients)]  # clients never seen are alone
    for doubt in doubts(state.distances(), state.clients, clusters):
        log.warning("%s", doubt)


def _say_tolerance(method: EMDCFL) -> None:
    """Say once what a calibrated tolerance leaves out, unless samples as drawn were asked for."""
    if method.tolerance != "auto" or not method.match_classes:
        return
    if method.unmatched:
        log.warning(
            "tolerance auto: with %s samples stay as drawn, which tells less than equal class counts; look at the doubts of the clusters%s",
            " and ".join(method.unmatched),
            ", or choose method.tolerance = 0.025, the paper's" if method.plain else "",
        )
    else:
        log.info("tolerance auto: samples of equal class counts are compared, so class frequencies alone part nobody (match_classes)")


def _unset(method: EMDCFL, state: EMDCFLState) -> list[Pair]:
    """Ordered pairs (row, column) of seen clients to measure now: both directions, if one of them is unset."""
    seen = [(i, c) for i, c in enumerate(state.clients) if c in state.n]
    unset = torch.isnan(state.W) | torch.isnan(state.W.T) | (method.recompute == "every-round")
    return [(c, d) for i, c in seen for j, d in seen if (i != j or not method.force_diagonal) and bool(unset[i, j])]


def _with_representatives(comparison: Comparison, state: EMDCFLState, round: Round) -> EMDCFLState:
    at = {c: i for i, c in enumerate(state.clients)}
    seen = [c for c in state.clients if c in state.n]
    new = [c for c in seen if all(bool(torch.isnan(state.W[at[c], at[d]])) for d in seen if d != c)]
    groups: dict[int, list[str]] = {}
    for c in seen:
        if c not in new:
            groups.setdefault(state.labels[c], []).append(c)
    known = [c for members in groups.values() for c in members]
    measured = {}
    for c in known:
        for d in known:
            if c < d and bool(torch.isfinite(state.W[at[c], at[d]])):
                measured[c, d] = _linked(state, at[c], at[d])

    def ask(pairs: Sequence[Pair]) -> dict[Pair, bool | None]:
        nonlocal state
        state = _filled(state, comparison.measure([way for c, d in pairs for way in ((c, d), (d, c))]))
        return {(c, d): None if bool(torch.isnan(state.W[at[c], at[d]])) else _linked(state, at[c], at[d]) for c, d in pairs}

    found = by_representatives(new, list(groups.values()), ask, round.generator("representatives"), measured=measured)
    if found.contradictions:
        log.warning(
            "links are no union of cliques: %d of %d spot checks contradict; %d clients were compared with their whole groups, "
            "but links inferred for others may be wrong; pairing = 'all' compares everybody",
            found.contradictions,
            found.checks,
            len(found.concerned),
        )
    state = _copied(state)
    for (c, d), linked in found.inferred().items():
        here = at[c], at[d]
        if bool(torch.isnan(state.W[here])):
            state.W[here], state.epsilon[here], state.kind[here] = -torch.inf if linked else torch.inf, 0.0, INFERRED
    return state


def _linked(state: EMDCFLState, i: int, j: int) -> bool:
    return bool(state.W[i, j] < state.epsilon[i, j]) and bool(state.W[j, i] < state.epsilon[j, i])


def _copied(state: EMDCFLState) -> EMDCFLState:
    return replace(state, W=state.W.clone(), tau=state.tau.clone(), epsilon=state.epsilon.clone(), kind=state.kind.clone())


def _filled(state: EMDCFLState, found: Measured) -> EMDCFLState:
    where = {c: i for i, c in enumerate(state.clients)}
    new = _copied(state)
    for c, value in found.tau.items():
        new.tau[where[c]] = value
    for (c, d), entry in found.entries.items():
        at = where[c], where[d]
        new.W[at], new.epsilon[at], new.kind[at] = entry.W, entry.epsilon, entry.kind
    return new
