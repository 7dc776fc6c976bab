"""What can be set in EMD-CFL, which settings go together, and what of them travels to the clients.

``Options`` are the fields of the method. ``CompareSettings`` is the part of them that a client needs. It travels as a plain dict, which a
client checks: it does not trust the server. ``SWITCHED_OFF`` and ``REFUSED`` say which settings do not go together and why; the
server's config errors and the client's refusals both come from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Any, Literal, get_args, get_type_hints

from emdcfl.core.checks import fits
from emdcfl.core.client import Client
from emdcfl.core.errors import ClientError, ConfigError
from emdcfl.privacy.noise import DELTA, gaussian_sigma
from emdcfl.transport import projected_width

Projection = Literal["row", "pair", "paper", "fresh"]
Cost = Literal["cosine", "euclidean", "label-aware"]
Solver = Literal["exact", "sinkhorn"]
Exchange = Literal["peer", "server-samples"]
Mode = Literal["eval", "train"]
PAPER_TOLERANCE = 0.025

ALL_PAIRS, ALL_PAIRS_BY_BENEFIT = 256, 64
"""Most clients of which ``pairing="auto"`` compares every pair."""


@dataclass(frozen=True)
class Options:
    r"""Options of EMD-CFL.

    Parameters
    ----------
    grouping : "neighbourhoods" or "benefit", optional
        Which question the groups answer. ``"neighbourhoods"`` (the paper): whose data follow the same law? Links under the tolerance.
        ``"benefit"``: who trains better together? W proposes groups, the members' validation losses decide (``benefit.py``), unless the
        tolerance is a number. Default: ``"benefit"`` for data of one's own, natural sites and ``digit-sites``, else the
        paper's.
    evidence : float
        With ``grouping="benefit"``: standard errors by which a split must lower the members' validation loss.
    tolerance : float or "auto"
        The tolerance :math:`\epsilon`. ``"auto"``: each client calibrates its own threshold locally (``transport.calibration``);
        clients with too few validation samples for that (about 13 to 35, by the number of clients) are not compared. A number
        holds for all pairs; the paper keeps 0.025 for most experiments, which is ``tolerance=0.025``.
    alpha : float
        Family-wise error of ``tolerance="auto"`` over all ordered pairs.
    match_classes : bool
        With ``tolerance="auto"``: partners draw their samples with the class counts of the row client's validation sample, which it
        seals for them. W then compares what the classes look like, not how frequent they are. ``SWITCHED_OFF`` says with which
        settings samples stay as drawn.
    average_blocks : bool, optional
        With ``tolerance="auto"``: average W over as many equal blocks of the partner's data, train and validation, as ``max_samples``
        hold. More power for small clients. On where classes are matched, unless switched off. Elsewhere switch it on only if validation
        samples are plain random draws: a split stratified by class is less noisy than a random block, which biases W upwards.
    projection_ratio : float
        Width of the projection over the embedding width; the paper uses 0.9.
    projection : "row", "pair", "paper" or "fresh"
        One R per row client, for τ too: its noise cancels. ``"pair"``: one R per pair, and τ under each. ``"paper"``: one R per pair, and
        one unprojected τ per client, as the paper writes it. ``"fresh"``: one R per ordered pair, and τ under a square one (the authors'
        public code). Projection shortens transport distances, so that the last two link a little more readily.
    max_samples : int
        Most samples a side in a transport problem; the paper uses 512. A client draws them once for all pairs, and not for each pair
        again as the authors' public code does.
    min_validation : int
        With a fixed tolerance, clients with fewer validation samples are compared with a warning and do not lower the common sample
        size. A value below what ``tolerance="auto"`` asks for lowers that too.
    require_validation : int
        Clients that claim fewer validation samples are not compared and stay clusters of their own. 64 is sensible where clients are not
        trusted: a calibrated tolerance refuses little at few samples, so that a false claim would gain links.
    cost : "cosine", "euclidean" or "label-aware"
        Ground cost. ``"label-aware"`` adds ``label_weight`` where labels differ: it sees concept shift and shows the labels to the server.
    label_weight : float
        What a different label costs, in units of the cosine distance.
    solver : "exact" or "sinkhorn"
    sinkhorn_reg : float
        Entropic regularisation; the paper uses 0.1.
    pairing : "auto", "all" or "representatives"
        Compare every pair, or everybody with few representatives: O(C) exchanges. By neighbourhoods these are one member per known
        cluster, with spot checks (``representatives.py``); by benefit, clients far apart, whose distances propose groups
        (``proposals.py``). ``"auto"`` compares every pair of up to 64 clients by benefit, and of up to 256 by neighbourhoods.
    exchange : "peer" or "server-samples"
        Models travel to the partners, or every client deposits a raw sample with the server once, which embeds it under each model: O(C)
        models on the wire instead of O(C²), but the server sees those samples and unprojected embeddings.
    joining : "regroup" or "keep"
        When clients appear in later rounds: take the neighbourhoods of all links again (the paper), or keep the clusters; a newcomer
        then joins the one whose compared members it is all linked with, or founds one.
    force_diagonal : bool
        Link every client with itself whatever its own distance says. Off in the authors' public code.
    recompute : "once", "if-partial" or "every-round"
        Measure a pair once, or all known pairs in every round. ``"if-partial"``: in every round under partial participation, once
        otherwise, as the authors' public code does.
    aggregate : "latest" or "participants"
        Under partial participation: average every member's latest local state, or only this round's.
    distances : "needed" or "all"
        Solve only what bounds leave open (the links are bit-identical; entries that were only bounded are marked), or every pair. By
        benefit ``"needed"`` solves every pair too, but on a GPU large ones stay lower bounds where these are within 5 % of W.
    embedding_mode : "eval" or "train"
        Mode of the network while embedding. ``"train"`` (batch statistics, dropout) is what the authors' public code does.
    privacy_epsilon, privacy_delta : float
        :math:`(\varepsilon, \delta)` per record and per release of Gaussian noise on the projected embeddings, ``[privacy]`` in a config
        (``privacy_budget.py``, ``docs/explanation/noise.md``). ``None``: no noise.
    """

    grouping: Literal["neighbourhoods", "benefit"] | None = None
    evidence: float = 3.0
    tolerance: float | Literal["auto"] = "auto"
    alpha: float = 0.005
    match_classes: bool = True
    average_blocks: bool | None = None
    projection_ratio: float = 0.9
    projection: Projection = "row"
    max_samples: int = 512
    min_validation: int = 64
    require_validation: int = 0
    cost: Cost = "cosine"
    label_weight: float = 1.0
    solver: Solver = "exact"
    sinkhorn_reg: float = 0.1
    pairing: Literal["auto", "all", "representatives"] = "auto"
    exchange: Exchange = "peer"
    joining: Literal["regroup", "keep"] = "regroup"
    force_diagonal: bool = True
    recompute: Literal["once", "if-partial", "every-round"] = "once"
    aggregate: Literal["latest", "participants"] = "latest"
    distances: Literal["needed", "all"] = "needed"
    embedding_mode: Mode = "eval"
    privacy_epsilon: float | None = None
    privacy_delta: float = DELTA

    @property
    def calibrated(self) -> bool:
        """Whether clients calibrate their tolerances."""
        return self.tolerance == "auto" and not self.by_benefit

    @property
    def threshold(self) -> float | Literal["auto"]:
        """What W is compared with: the tolerance, or the paper's where groups do not depend on it."""
        return PAPER_TOLERANCE if self.by_benefit else self.tolerance

    @property
    def by_benefit(self) -> bool:
        """Whether validation losses decide about groups: a number for the tolerance asks for the paper's rule."""
        return self.grouping == "benefit" and self.tolerance == "auto"

    def all_pairs(self, clients: int) -> bool:
        """Whether every pair of so many clients is compared."""
        if self.pairing != "auto":
            return self.pairing == "all"
        few = clients <= (ALL_PAIRS_BY_BENEFIT if self.by_benefit else ALL_PAIRS)
        return few or self.recompute != "once" or not self.force_diagonal

    def repeated(self, *, partial: bool) -> bool:
        """Whether all known pairs are measured again in every round, under ``partial`` participation or not."""
        return self.recompute == "every-round" or (self.recompute == "if-partial" and partial)

    @property
    def noisy(self) -> bool:
        """Whether embeddings are released with privacy noise; an infinite ε asks for none."""
        return self.privacy_epsilon is not None and not math.isinf(self.privacy_epsilon)

    @property
    def matched(self) -> bool:
        """Whether partners draw samples with a row client's class counts."""
        return self.calibrated and self.match_classes and not self.unmatched

    @property
    def unmatched(self) -> list[str]:
        """The settings with which classes are not matched, in words."""
        return [rule.second.describe(self) for rule in SWITCHED_OFF if rule.first == MATCHING and rule.second.applies(self)]

    @property
    def several_blocks(self) -> bool:
        """Whether W is a mean over blocks."""
        wanted = self.matched if self.average_blocks is None else self.average_blocks
        return self.calibrated and wanted and not any(rule.first == BLOCKS and rule.second.applies(self) for rule in SWITCHED_OFF)

    @property
    def papers_distances(self) -> bool:
        """Whether the paper's tolerance fits the distances: cosines, without labels or noise."""
        return self.cost == "cosine" and not self.noisy

    def check(self) -> None:
        """Raise ``ConfigError`` if a setting is out of range or does not go with another."""
        if fault := _fault(self):
            raise ConfigError(f"expected method.{fault}")
        for rule in REFUSED:
            if rule.violated(self):
                raise ConfigError(f"expected method.{rule.describe(self)}; leave one of them out")


@dataclass(frozen=True)
class CompareSettings:
    """What a client must know to take part in a comparison: a part of the options, under the same names."""

    projection: Projection
    projection_ratio: float
    max_samples: int
    cost: Cost
    label_weight: float
    solver: Solver
    sinkhorn_reg: float
    exchange: Exchange
    embedding_mode: Mode
    match_classes: bool
    calibrated: bool
    privacy_epsilon: float | None
    privacy_delta: float

    @classmethod
    def of(cls, options: Options) -> CompareSettings:
        """Return what clients are sent."""
        shared = {f.name: getattr(options, f.name) for f in fields(cls)}
        epsilon = options.privacy_epsilon if options.noisy else None
        return cls(**{**shared, "match_classes": options.matched, "privacy_epsilon": epsilon})

    @classmethod
    def from_dict(cls, sent: Mapping[str, Any]) -> CompareSettings:
        """Return the settings a server sent, or raise ``ClientError`` if they are not valid or do not go together."""
        names = cls.__dataclass_fields__.keys()
        if not isinstance(sent, Mapping) or sent.keys() != names:
            raise ClientError(f"expected settings named {', '.join(sorted(names))}, got {', '.join(map(str, sent)) or 'none'}")
        plain = all(isinstance(value, (str, int, float, type(None))) for value in sent.values())
        return (_sent if plain else _sent.__wrapped__)(**sent)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def noisy(self) -> bool:
        """Whether embeddings are released with privacy noise; an infinite ε asks for none."""
        return self.privacy_epsilon is not None and not math.isinf(self.privacy_epsilon)

    @property
    def sigma(self) -> float:
        """Standard deviation of the privacy noise."""
        assert self.privacy_epsilon is not None
        return _sigma(self.privacy_epsilon, self.privacy_delta)

    @property
    def projection_scope(self) -> Literal["row", "pair", "paper", "fresh", "none"]:
        """What a projection R belongs to; none where the server embeds samples itself and nothing is projected."""
        return self.projection if self.exchange == "peer" else "none"

    @property
    def labelled(self) -> bool:
        """Whether labels travel beside the samples."""
        return self.cost == "label-aware"

    def width(self, d: int) -> int:
        """Width in which embeddings of width d travel."""
        return projected_width(self.projection_ratio if self.exchange == "peer" else 1.0, d)


@lru_cache(maxsize=16, typed=True)  # one server sends the same to every client; typed, because True is no 1
def _sent(**values: Any) -> CompareSettings:
    """Return settings that are valid and go together, or raise ``ClientError``."""
    settings = CompareSettings(**values)
    if fault := _fault(settings):
        raise ClientError(f"expected the server's setting {fault}")
    for rule in (*SWITCHED_OFF, *REFUSED):
        if rule.violated(settings):
            raise ClientError(f"expected the server's setting {rule.describe(settings)}; see docs/explanation/noise.md")
    return settings


def accepted(client: Client, sent: Mapping[str, Any], *, matching: bool = False) -> CompareSettings:
    """Return the settings a server sent to a client, or refuse them: also those that the node's operator does not allow.

    With ``matching`` the request is to match classes, which the settings must say.
    """
    settings, most = CompareSettings.from_dict(sent), client.most_epsilon
    if matching and not settings.match_classes:
        raise ClientError("expected a request to match classes only with match_classes in the server's settings, got one without")
    if settings.exchange == "server-samples" and "deposit" in client.withheld:
        raise ClientError(f"client {client.name!r} sends no raw samples or embeddings, got exchange = 'server-samples'; use 'peer'")
    if most is not None and (not settings.noisy or settings.sigma < _sigma(most, DELTA)):
        asked = f"({settings.privacy_epsilon:g}, {settings.privacy_delta:g})" if settings.noisy else "none"
        raise ClientError(
            f"client {client.name!r} sends embeddings only with privacy noise of epsilon {most:g} or less (delta {DELTA:g}), "
            f"got a request with {asked}; set privacy.epsilon"
        )
    return settings


_sigma = lru_cache(maxsize=16)(gaussian_sigma)  # one search per run, not one per matrix


class OneOf:
    """A setting with one of some values."""

    def __init__(self, name: str, *values: object, words: str = "") -> None:
        self.name, self.values, self.words = name, values, words

    def applies(self, settings: object) -> bool:
        """Whether the settings have it; a client does not know all of the server's."""
        return getattr(settings, self.name, None) in self.values

    def describe(self, settings: object) -> str:
        """Name it for people."""
        return self.words or f"{self.name} = {getattr(settings, self.name)!r}"


@dataclass(frozen=True)
class Rule:
    """Two choices that do not go together, and why."""

    first: OneOf
    second: OneOf
    reason: str

    def violated(self, settings: object) -> bool:
        """Whether both choices are made."""
        return self.first.applies(settings) and self.second.applies(settings)

    def describe(self, settings: object) -> str:
        """Say what is wrong, after "expected "."""
        return f"{self.second.name} to go with {self.first.describe(settings)}, got {self.second.describe(settings)}: {self.reason}"


MATCHING = OneOf("match_classes", True)
BLOCKS = OneOf("average_blocks", True)
NOISE = OneOf("noisy", True, words="privacy noise")
LABELS = OneOf("cost", "label-aware")
DEPOSITS = OneOf("exchange", "server-samples")
BATCHES = OneOf("embedding_mode", "train")
REPRESENTATIVES = OneOf("pairing", "representatives")
REPEATED = OneOf("recompute", "every-round", "if-partial")

SWITCHED_OFF = (
    Rule(MATCHING, OneOf("projection", "pair", "paper", "fresh"), "class counts travel with the seed of a row's projection"),
    Rule(MATCHING, LABELS, "the server sees labels, and would see the class counts"),
    Rule(MATCHING, DEPOSITS, "one deposited sample serves all partners"),
    Rule(MATCHING, REPEATED, "the models have then seen the partners' train data"),
    Rule(MATCHING, NOISE, "partners would choose which records are released, and more of them"),
    Rule(BLOCKS, REPEATED, "the models have then seen the partners' train data"),
)
"""The server switches the first choice off where the second is made. A client refuses both together."""

REFUSED = (
    Rule(NOISE, LABELS, "labels travel without noise"),
    Rule(NOISE, DEPOSITS, "the server sees raw samples"),
    Rule(NOISE, OneOf("projection", "paper"), "τ would be computed from embeddings without noise"),
    Rule(NOISE, BATCHES, "a record changes the embeddings of its whole batch"),
    Rule(DEPOSITS, BATCHES, "the server embeds deposited samples in eval mode"),
    Rule(REPRESENTATIVES, OneOf("force_diagonal", False), "a client must be linked with itself"),
    Rule(REPRESENTATIVES, REPEATED, "links that were inferred are not measured again"),
)
"""Server and client refuse both choices together."""

RANGES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "evidence": (lambda v: 0 < v < math.inf, "above 0"),
    "tolerance": (lambda v: v == "auto" or math.isfinite(v), "a number or 'auto'"),
    "alpha": (lambda v: 0 < v < 1, "between 0 and 1"),
    "projection_ratio": (lambda v: 0 < v <= 1, "in (0, 1]"),
    "max_samples": (lambda v: v >= 2, "at least 2"),
    "min_validation": (lambda v: v >= 1, "at least 1"),
    "require_validation": (lambda v: v >= 0, "at least 0"),
    "label_weight": (lambda v: 0 <= v < math.inf, "at least 0"),
    "sinkhorn_reg": (lambda v: 0 < v < math.inf, "above 0"),
    "privacy_epsilon": (lambda v: v is None or v > 0, "above 0, or left out for no noise"),
    "privacy_delta": (lambda v: 0 < v < 1, "between 0 and 1"),
}


def _fault(settings: Options | CompareSettings) -> str | None:
    """Say which setting has a wrong type or lies out of its range, after "expected "."""
    hints = get_type_hints(type(settings))
    for name in (f.name for f in fields(settings)):
        hint, value = hints[name], getattr(settings, name)
        fine, expected = RANGES.get(name, (lambda v: True, " or ".join(map(repr, get_args(hint))) or "true or false"))
        if not (fits(value, hint) and fine(value)):
            return f"{name} {expected}, got {value}"
    return None
