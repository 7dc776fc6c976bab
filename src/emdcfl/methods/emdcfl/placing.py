"""Sites too small for the calibrated tolerance to say where they belong: which group's model they get.

A site with too few validation samples is not compared. Another is compared, but with so little power that it is linked with clients of
several groups, which larger samples tell apart. Both score the groups' models, and one model for all, and get the one with the lowest mean
loss.

Whoever was not compared is served that model but not averaged into it: else a client could choose its group by a claim of few samples.
So no group's model has seen its train data, and it scores with these too: validation data alone are too few to choose by.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emdcfl.core import tasks
from emdcfl.core.federation import Federation
from emdcfl.methods.base import Clustered
from emdcfl.methods.emdcfl.comparison import comparable
from emdcfl.methods.emdcfl.problems import validation_sizes
from emdcfl.methods.emdcfl.settings import Options

MAX_MODELS = 15
"""Groups whose models a site scores, the largest first; with one model for all, as many as a node scores at once by default."""

Sets = list[list[str]]
Labels = dict[str, int]


def ambiguous(m: Any, compared: Any, sizes: Sequence[int]) -> list[int]:
    """Clients that are linked with two others that are not linked with each other, although these were compared with more samples.

    Parameters
    ----------
    m, compared : (C, C) arrays of bool
        Links, and which pairs were compared.
    sizes : sequence of int
        Validation samples each client is compared with.

    Examples
    --------
    >>> linked = np.array([[1, 0, 1], [0, 1, 1], [1, 1, 1]], bool)
    >>> ambiguous(linked, np.ones((3, 3), bool), [512, 512, 64]), ambiguous(linked, np.ones((3, 3), bool), [64, 64, 64])
    ([2], [])
    """
    apart, own = np.asarray(compared) & ~np.asarray(m), np.asarray(sizes)
    found = []
    for c in range(len(own)):
        larger = np.flatnonzero(np.asarray(m)[c] & (own > own[c]))
        if apart[np.ix_(larger, larger)].any():
            found.append(c)
    return found


@dataclass(frozen=True)
class Unplaced:
    """Clients that distances do not place.

    ``small`` ones were not compared; ``ambiguous`` ones are linked with several groups, and map to the clients they are linked with.
    """

    small: Sequence[str] = ()
    ambiguous: Mapping[str, set[str]] = field(default_factory=dict)


def unplaced(options: Options, fed: Federation, clients: Sequence[str], W: Any, M: Any) -> tuple[Unplaced, Any]:
    """Return the clients that distances do not place, and the links without theirs; all are placed by a fixed tolerance.

    Who has fewer validation samples than ``require_validation`` asks for is not placed either, and stays a cluster of its own.
    """
    if not options.calibrated or options.joining == "keep":
        return Unplaced(), M
    about = fed.describe([c for c in clients if fed.exclusion_reason(c) is None])
    able = comparable(options, fed, list(about))
    required = max(1, options.require_validation)
    small = [c for c in clients if c in about and c not in able and about[c]["m"] >= required]
    m = {c: reply["m"] for c, reply in able.items()}
    own = validation_sizes(m, cap=options.max_samples, at_least=options.min_validation, calibrated=True)
    between = ambiguous(M, ~np.isnan(W), [own.get(c, options.max_samples) for c in clients])
    links = M.copy()
    for i in between:
        links[i], links[:, i] = False, False
        links[i, i] = M[i, i]
    return Unplaced(small, {clients[i]: {clients[int(j)] for j in np.flatnonzero(M[i]) if j != i} for i in between}), links


def place(fed: Federation, state: Clustered, local: Mapping[str, Tensor], sets: Sets, labels: Labels, who: Unplaced) -> tuple[Sets, Labels]:
    """Give clients to the group, or to the model for all, that fits them best.

    Ambiguous ones go only to groups most of which they are linked with. A choice is kept while the groups stay the same. A client that
    does not answer stays a cluster of its own, and so do all where nobody else was compared.

    Parameters
    ----------
    local : mapping
        Latest local states of all clients seen.
    sets, labels : list, dict
        Clusters in which the clients to be placed are alone.
    """
    moved = [c for c in (*who.small, *who.ambiguous) if c in labels]
    alone = {labels[c] for c in moved}
    groups = [list(members) for k, members in enumerate(sets) if k not in alone]
    if not moved or not groups:
        return sets, labels
    everybody = sorted({c for members in groups for c in members}, key=state.clients.index)
    choices = [*groups, everybody] if len(groups) > 1 else groups
    chosen = _chosen_before(state, choices, moved)
    left = [c for c in moved if c not in chosen]
    chosen |= _best(fed, state, local, choices, {c: who.ambiguous.get(c) for c in left}) if len(choices) > 1 else dict.fromkeys(left, 0)
    kept = {k: groups.index(list(members)) for k, members in enumerate(sets) if k not in alone}
    new = {c: kept[k] for c, k in labels.items() if k in kept}
    if len(groups) in chosen.values():
        groups.append(everybody)
    for c in moved:
        if c not in chosen:
            chosen[c] = len(groups)
            groups.append([c])
        elif c in who.ambiguous and chosen[c] < len(kept):
            groups[chosen[c]] = [*groups[chosen[c]], c]
    return groups, {c: chosen[c] if c in chosen else new[c] for c in labels}


def _chosen_before(state: Clustered, choices: Sets, moved: Sequence[str]) -> dict[str, int]:
    """Choices of the last round, for clients whose group then has the same members now, without those that are placed."""
    now = {frozenset(members): k for k, members in enumerate(choices)}
    before = {c: frozenset(state.sets[state.labels[c]]) - set(moved) for c in moved if c in state.labels}
    return {c: now[members] for c, members in before.items() if members in now}


def _best(
    fed: Federation, state: Clustered, local: Mapping[str, Tensor], choices: Sets, clients: Mapping[str, set[str] | None]
) -> dict[str, int]:
    """Ask clients for their validation losses under the choices' models; returns the best choice of each that answers.

    ``clients`` maps a client to those it is linked with, or to None if it was not compared.
    """
    groups = choices[:-1]
    largest = sorted(range(len(groups)), key=lambda k: (-len(groups[k]), k))[:MAX_MODELS]
    scored = [*sorted(largest), len(groups)]
    models = torch.stack([_average(fed, state, local, choices[k]) for k in scored])
    losses = _losses(fed, models, clients)
    best = {}
    for c, mean in losses.items():
        linked, of = clients[c], dict(zip(scored, mean.tolist(), strict=True))
        fitting = [k for k in scored if linked is None or k == len(groups) or 2 * len(linked & {*groups[k]}) > len(groups[k])]
        best[c] = min(fitting, key=lambda k: of[k])
    return best


def _losses(fed: Federation, models: Tensor, clients: Mapping[str, object]) -> dict[str, Tensor]:
    """Return mean losses of clients that answer: of small ones over all their samples, none of which any of these models has seen."""
    asked: dict[str, Any] = {"dims": {"K": len(models)}, "models": models, "reduction": "mean"}
    small = [c for c, linked in clients.items() if linked is None]
    val = fed.run(tasks.evaluate, {c: {} for c in clients}, split="val", **asked).valid if clients else {}
    train = fed.run(tasks.evaluate, {c: {} for c in small if c in val}, split="train", **asked).valid if small else {}
    found = {c: reply["table"].double().flatten() for c, reply in val.items() if c in train or c not in small}
    for c, reply in train.items():
        m, n = val[c]["n"], reply["n"]
        found[c] = (m * found[c] + n * reply["table"].double().flatten()) / (m + n)
    return found


def _average(fed: Federation, state: Clustered, local: Mapping[str, Tensor], members: Sequence[str]) -> Tensor:
    present = [c for c in members if c in local and not fed.guard.ledger.banned(c)]
    return fed.guard.average([local[c] for c in present], [float(state.n[c]) for c in present]) if present else state.theta0
