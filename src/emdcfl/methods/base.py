"""What a method is: a frozen dataclass of hyper-parameters with ``init``, ``step`` and ``serve``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from emdcfl.core.client import NODE_NEEDS, NodeNeeds
from emdcfl.core.errors import ConfigError, nearest
from emdcfl.core.federation import Federation, Round
from emdcfl.trust import Guard

Family = Literal["global", "hard", "soft", "personal", "alone"]

INFERRED, NOT_COMPARABLE = 4, 5
"""Kinds of a distance beside those of ``clustering.pairs``; see ``Distances.kind``."""


@dataclass(frozen=True)
class Distances:
    """What a person may look at to judge a clustering. Matrices are ``(C, C)``, rows and columns in client order, NaN where unset."""

    W: np.ndarray[Any, Any]
    """Distance of each ordered pair: what the column client's data add to the row client's reference distance."""
    tau: np.ndarray[Any, Any]
    """Reference distance of each client, ``(C,)``."""
    epsilon: np.ndarray[Any, Any]
    """Tolerance each entry of W was compared with."""
    kind: np.ndarray[Any, Any]
    """0 unset, 1 exact, 2 lower bound (refused without a solve), 3 upper bound (accepted without a solve), 4 inferred (not compared: it
    follows from a representative; W is NaN), 5 not comparable (the clients share too few classes; W is NaN)."""
    noise_factor: float = 1.0
    """By how much privacy noise divides cosine distances, approximately; 1 without noise."""
    splits: list[dict[str, Any]] | None = None
    """Where validation losses decided instead of tolerances: what each split gains (``methods.emdcfl.benefit``)."""
    sample: np.ndarray[Any, Any] | None = None
    """Of many clients, the matrices show these alone (positions in client order)."""

    def shown(self, of: Sequence[Any]) -> list[Any]:
        """Return what belongs to the clients that the matrices show, of something in client order."""
        return list(of) if self.sample is None else [of[int(i)] for i in self.sample]


@dataclass(frozen=True)
class Serving:
    """Which model each client is tested with and keeps: the one declared rule."""

    models: Tensor
    """(K, P): one state per row."""
    weights: Tensor
    """(C, K): one-hot rows for hard clusters, rows of π for mixtures, the identity for personal models."""
    mix: Literal["parameters", "predictions"] = "parameters"
    """Whether a row of weights averages parameters or class probabilities."""
    clusters: Tensor | None = None
    """(C,): hard membership; ARI exists only where it does."""
    distances: Distances | None = None
    reached: Tensor | None = None
    """(K, C): whether an update of client c went into model k, in any round and also through others' models; None where the method does
    not say."""
    shares: Tensor | None = None
    """(K, C): weight of client c in the last average that model k is."""

    @property
    def k(self) -> int:
        """Number of clusters, or of models where there are none. Clients that never trained are no cluster, if others did."""
        if self.clusters is None:
            return len(self.models)
        known = self.clusters
        if self.reached is not None and self.reached.any():
            known = known[(self.weights[:, self.reached.any(1)] > 0).any(1)]
        return len(set(known.tolist()))


class Method(Protocol):
    """A clustered-learning algorithm. ``State`` is its dataclass of tensors, numbers, strings, and lists and dicts of them.

    A method may also have ``check()``, which raises ``ConfigError`` where settings are out of range or exclude each other. It may declare
    ``node_needs`` (``NodeNeeds``); ``late_updates = True`` if a training that comes after its round may count in a later one, moved to the
    model of that round and with less weight (``engine.phase_deadline``); and field values of its presets: ``original``, of its own paper
    and code, and ``reference``, of the EMD-CFL authors' public comparison code.
    """

    name: ClassVar[str]
    family: ClassVar[Family]
    citation: ClassVar[str]
    State: ClassVar[type]

    def init(self, fed: Federation, round: Round) -> Any:
        """Return the state before round 1."""
        ...

    def step(self, fed: Federation, state: Any, round: Round) -> Any:
        """Run one round and return the new state; the old one is not changed, so that a round can be repeated."""
        ...

    def serve(self, state: Any) -> Serving:
        """Say which model each client is served with."""
        ...


METHODS: dict[str, type[Method]] = {}
AnyMethod = TypeVar("AnyMethod", bound=type)


def register(cls: AnyMethod) -> AnyMethod:
    """Make a method available under its ``name``; a class that is written again, as in a notebook, replaces itself."""
    known = METHODS.setdefault(cls.name, cls)  # type: ignore[attr-defined]
    ours = known.__module__.startswith("emdcfl.") and known.__module__ != cls.__module__
    if ours or known.__qualname__ != cls.__qualname__:
        raise ConfigError(f"{cls.__qualname__}: {known.__qualname__} has the name {known.name!r} already; give the new class another name")
    METHODS[cls.name] = cls  # type: ignore[attr-defined]
    NODE_NEEDS[cls.name] = getattr(cls, "node_needs", NodeNeeds())  # type: ignore[attr-defined]
    return cls


def find(name: str) -> type[Method]:
    if name not in METHODS:
        raise ConfigError(f"unknown method {name!r}: {nearest(name, METHODS)}")
    return METHODS[name]


PRESETS = ("original", "reference")
"""What ``preset`` may be: the method's own paper and code, or the EMD-CFL authors' public comparison code."""


def preset_values(cls: type[Method], preset: str | None) -> Mapping[str, Any]:
    """Return the field values that a preset sets; a method of one's own need not have any."""
    if preset not in (None, *PRESETS):
        raise ConfigError(f"unknown preset {preset!r}; expected 'original' or 'reference', or leave it out")
    values: Mapping[str, Any] = getattr(cls, preset, {}) if preset else {}
    return values


def default_options(cls: type[Method]) -> dict[str, Any]:
    """Return a method's options and their defaults."""
    return {f.name: f.default for f in fields(cls)}  # type: ignore[arg-type]


def preset_of(name: str, settings: Mapping[str, Any]) -> str | None:
    """Say which preset a method's complete settings are, whatever else they set; ``None`` for neither.

    Examples
    --------
    >>> preset_of("fedprox", {"mu": 0.01, "prox": "layer_norm"}), preset_of("fedprox", {"mu": 0.01, "prox": "squared"})
    ('reference', None)
    """
    cls = METHODS.get(name)
    if cls is None:
        return None
    usual = default_options(cls)
    for preset in PRESETS:
        values = preset_values(cls, preset)
        given = {key: settings.get(key, usual[key] if wanted is not None else None) for key, wanted in values.items()}
        if values and all(given[key] == wanted or (wanted is None and given[key] == "none") for key, wanted in values.items()):
            return preset
    return None


def make(name: str, **options: Any) -> Method:
    """Build a method from its name and fields; ``preset`` sets what its paper, or the comparison's public code, does; fields win.

    Examples
    --------
    >>> make("emdcfl", tolerance=0.03).tolerance
    0.03
    """
    cls = find(name)
    preset = preset_values(cls, options.pop("preset", None))
    valid = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    for option in options:
        if option not in valid:
            raise ConfigError(f"{name} has no option {option!r}: {nearest(option, [*valid, 'preset'])}")
    return cls(**{**preset, **options})


def told_k(k: int | None, usual: int | None, name: str) -> int:
    """Return the method's own K, else the scenario's; raise where neither is given."""
    chosen = k if k is not None else usual
    if chosen is None:
        raise ConfigError(f"{name} needs the number of clusters, which these data do not give; name it {name}:k=4, or set method.k")
    return chosen


def clusters_wanted(k: int | None, fed: Federation, name: str) -> int:
    """Return K: the method's field, else the scenario's."""
    chosen = told_k(k, fed.k, name)
    if not 1 <= chosen <= len(fed.clients):
        raise ConfigError(f"expected method.k between 1 and {len(fed.clients)} (the number of clients), got {chosen}")
    return chosen


def initial_models(k: int | None, fed: Federation, name: str) -> Tensor:
    """Return the K initial models (K, P); for pretrained networks only the heads differ."""
    return torch.stack([fed.initial(i) for i in range(clusters_wanted(k, fed, name))])


@dataclass(frozen=True)
class Clustered:
    """State shared by the hard methods: who averages with whom, and what came out.

    A client that never took part holds ``theta0`` and is alone.
    """

    clients: list[str]
    """All clients, in client order."""
    theta0: Tensor
    """(P,): the common initial model θ⁰."""
    sets: list[list[str]] = field(default_factory=list)
    """Members each cluster model averages over; sets of distinct clusters may overlap (neighbourhoods)."""
    labels: dict[str, int] = field(default_factory=dict)
    """Client → index of its set; clients never seen are missing."""
    models: Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    """(K, P): one model per set."""
    n: dict[str, int] = field(default_factory=dict)
    """Train sizes of the clients seen."""
    latest: dict[str, Tensor] = field(default_factory=dict)
    """Last local state of the clients seen, kept only where somebody may miss a round."""
    shares: Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    """(K, C): weight of every client in the last average of each set; columns in client order."""
    reached: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.bool))
    """(K, C): clients whose updates each model holds, from any round: a member's state holds those of the model it was trained from."""
    lineage: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.bool))
    """(C, C): the same for the clients' last local states."""

    def start(self, client: str) -> Tensor:
        """Return the model a client trains from: its cluster's, or θ⁰ the first time."""
        return self.models[self.labels[client]] if client in self.labels else self.theta0


AnyClustered = TypeVar("AnyClustered", bound=Clustered)


def average_sets(
    state: AnyClustered,
    sets: list[list[str]],
    labels: dict[str, int],
    local: Mapping[str, Tensor],
    *,
    keep: bool,
    members: Literal["latest", "participants"] = "latest",
    guard: Guard | None = None,
) -> AnyClustered:
    r"""Return the state with every cluster's model :math:`\theta_k = \sum_{c\in S_k} n_c\theta_c / \sum_{c\in S_k} n_c`.

    ``local`` are this round's states; together with ``state.latest``, which ``keep`` updates, they cover every member seen. With
    ``members`` "participants" only this round's states are averaged, and a cluster without any keeps its model. The federation's ``guard``
    looks at this round's updates, averages under its policy, and leaves out whoever is quarantined for the run.
    """
    guard = guard or Guard()
    local = guard.clip_updates(local, {c: state.start(c) for c in local}, [sets[labels[c]] for c in local])
    known = {**state.latest, **local}
    source = local if members == "participants" else known
    models = torch.empty(len(sets), state.theta0.shape[0])  # filled row by row: a list and its stack would be held at once
    at, lineage = {c: i for i, c in enumerate(state.clients)}, _lineage(state, local)
    shares, reached = torch.zeros(len(sets), len(at)), torch.zeros(len(sets), len(at), dtype=torch.bool)
    for i, members_of_set in enumerate(sets):
        present = [c for c in members_of_set if c in source and not guard.ledger.banned(c)]
        if present:
            n, columns = [float(state.n[c]) for c in present], [at[c] for c in present]
            models[i] = guard.average([source[c] for c in present], n)
            shares[i, columns], reached[i] = torch.tensor(guard.shares(n)), lineage[columns].any(0)
        else:
            owner = next(c for c, label in labels.items() if label == i)
            models[i] = state.start(owner)
            if owner in state.labels and len(state.reached):
                reached[i] = state.reached[state.labels[owner]]
    state = replace(state, shares=shares, reached=reached, lineage=lineage if keep else torch.zeros(0, 0, dtype=torch.bool))
    return replace(state, sets=sets, labels=labels, models=models, latest=dict(known) if keep else {})


def _lineage(state: Clustered, local: Mapping[str, Tensor]) -> Tensor:
    """Return whose updates each client's last local state holds: its own, and those of the model that it was trained from."""
    C = len(state.clients)
    lineage = state.lineage.clone() if len(state.lineage) else torch.zeros(C, C, dtype=torch.bool)
    for i, c in enumerate(state.clients):
        if c in local:
            lineage[i] = state.reached[state.labels[c]] if c in state.labels and len(state.reached) else False
            lineage[i, i] = True
    return lineage


def serve_clusters(state: Clustered, distances: Distances | None = None) -> Serving:
    """Serve every client its cluster's model, and θ⁰ to those never seen, each in a cluster of its own."""
    unseen = [c for c in state.clients if c not in state.labels]
    models = torch.cat([state.models.view(-1, state.theta0.shape[0]), state.theta0[None]]) if unseen else state.models
    weights = torch.zeros(len(state.clients), models.shape[0])
    numbers: dict[object, int] = {}
    clusters = []
    for i, c in enumerate(state.clients):
        row = state.labels.get(c, models.shape[0] - 1)
        weights[i, row] = 1.0
        clusters.append(numbers.setdefault(state.labels.get(c, c), len(numbers)))
    more = len(models) - len(state.models)  # θ⁰ holds nobody's updates
    reached, shares = (F.pad(rows, (0, 0, 0, more)) if len(rows) else None for rows in (state.reached, state.shares))
    return Serving(models, weights, clusters=torch.tensor(clusters), distances=distances, reached=reached, shares=shares)


class ClusteredMethod:
    """A method whose state is ``Clustered``: every client is served its cluster's model."""

    family: ClassVar[Family] = "hard"
    State: ClassVar[type] = Clustered

    def serve(self, state: Clustered) -> Serving:
        return serve_clusters(state)
