"""A node: one client's data and secret on its own machine. Each message may be handled by a new process.

A node's *home* is a folder::

    node.toml            what it serves, and how
    secret.key           32 random bytes, mode 600; drawn on first use, never sent
    partners.toml        fingerprints of the partners' keys (trust = "first-use" or "pinned")
    state/site/…         this site's samples as the network takes them, so that files are decoded once
    state/<run>/…        the run's key, and a count of what it has released in this run
    state/released.json  what it has released in all (``releases.py``)
    state/log.jsonl      what it released and refused, in words (``log.py``)

The *job* comes with every request: the run's name, seed and precision, the network's recipe, the preprocessing, and how data are read.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from emdcfl.core.checks import check_options
from emdcfl.core.client import TASKS, Client
from emdcfl.core.errors import ConfigError
from emdcfl.core.keys import NodeSecret, global_seed
from emdcfl.core.params import Network
from emdcfl.data.own.cleaning import CLEANING, REGRESSION, Cleaning
from emdcfl.data.own.splitting import SplitRule
from emdcfl.data.types import Preprocess, Site
from emdcfl.engines.flower.node import log as node_log
from emdcfl.engines.flower.node.data import read_site
from emdcfl.engines.flower.node.policy import Policy, read_policy
from emdcfl.engines.flower.node.releases import Releases
from emdcfl.engines.local.sequential import pick_device
from emdcfl.models.recipe import ModelRecipe
from emdcfl.privacy.exchange import load_secret
from emdcfl.privacy.keylist import KeyList, KeyTrust


class Node(Protocol):
    """What the task server needs of a node."""

    name: str
    secret: NodeSecret
    partners: KeyList
    details: bool

    def permit(self, task: str, round: int, job: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
        """Raise ``PolicyError`` if the node's operator does not allow a request."""

    def client(self, job: Mapping[str, Any]) -> Client:
        """Return the client for a run."""

    def keep(self, client: Client) -> None:
        """Store what the node must remember of the client's partners."""

    def note(self, kind: str, request: Any, answer: Mapping[str, Any], *, refused: bool) -> None:
        """Log for the node's owner what was asked and answered."""


@dataclass(frozen=True)
class NodeConfig:
    """``node.toml``."""

    name: str | None = None
    """The client's name in every run, for ``emdcfl node serve``."""
    superlink: str | None = None
    """Address and port of the SuperLink, for the same."""
    data: str = "scenario"
    """Folder or table of this site (own-data formats), relative to the node's home; or ``"scenario"``: this client's share of a built-in
    scenario, for trials."""
    label: str | None = None
    """Label column of a table, if this site calls it by another name than the others."""
    split: str | None = None
    """This and the next two: how this site's files are split, as in ``run --data``; the server has no say in it."""
    split_column: str | None = None
    group: str | None = None
    merge_labels: bool | None = None
    """This and the next six: how this site's files are repaired, as in ``run --data``. Columns left out here are neither named to the
    server nor used."""
    label_map: str | None = None
    drop: list[str] | None = None
    only: list[str] | None = None
    date: list[str] | None = None
    missing: list[str] | None = None
    gaps: str | None = None
    task: str | None = None
    """``classification`` where labels are classes although they look like measurements."""
    device: str = "auto"
    """``auto``, ``cpu``, ``cuda`` or ``cuda:N``."""
    trust: KeyTrust = "pinned"
    """How partners' keys that the server relays are checked: ``relay``, ``first-use`` or ``pinned`` (``privacy.keylist``)."""
    enrol: bool = False
    """With ``first-use``: whether partners with new names are accepted. Set it while the federation forms, and not afterwards."""
    privacy_epsilon: float | None = None
    """Embeddings leave this node only with noise of this ε per release (δ = 1e-5) or more noise than that, whatever the server asks for."""
    details: bool = False
    """Whether the server may read the text of unexpected errors; it could quote data. The node's log has it either way."""
    policy: Policy = field(default_factory=Policy)
    """What this node answers; the table ``[policy]``."""

    def __post_init__(self) -> None:
        if self.privacy_epsilon is not None and not self.privacy_epsilon > 0:
            raise ConfigError(f"node.toml: privacy_epsilon must be above 0, got {self.privacy_epsilon}")
        if self.task == REGRESSION:
            raise ConfigError("node.toml: expected task = classification, got regression: a federation of nodes predicts classes")
        _ = self.rule, self.cleaning  # what makes no sense is told at once

    @property
    def rule(self) -> SplitRule:
        return SplitRule.of(self.split, self.split_column, self.group)

    @property
    def cleaning(self) -> Cleaning:
        return Cleaning.of(**{name: getattr(self, name) for name in CLEANING})


class HomeNode:
    """A node with a home folder."""

    def __init__(self, name: str, home: str | Path) -> None:
        self.name, self.home = name, Path(home)
        self.config = read_config(self.home / "node.toml")
        self.secret = load_secret(self.home / "secret.key")
        # a list that is pinned and still empty lets the node answer what needs no partner
        trust, enrol = self.config.trust, self.config.trust == "first-use" and self.config.enrol
        self.partners = KeyList(self.home / "partners.toml", "relay" if trust == "relay" else "first-use", enrol=enrol)
        self.details = self.config.details
        self._made: tuple[Mapping[str, Any], Client, Tensor] | None = None  # one message may hold several tasks

    @property
    def data(self) -> Path:
        return self.home / self.config.data

    def permit(self, task: str, round: int, job: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
        """Check a request against the policy, and count what it releases."""
        self.config.policy.check(task, job, inputs)
        Releases(self.home / "state", str(job["run"])).admit(self.config.policy, task, round, job, inputs)

    def note(self, kind: str, request: Any, answer: Mapping[str, Any], *, refused: bool) -> None:
        node_log.note(self.home / "state", kind, request, answer, refused=refused)

    def client(self, job: Mapping[str, Any]) -> Client:
        """Return the client of a run; its network is as new for each task, so that none meets what another one left in it."""
        if self._made is None or self._made[0] != job:
            made = self._make(job)
            self._made = job, made, made.network.theta.detach().clone()
        _, client, weights = self._made
        client.network.load(weights)
        return client

    def _make(self, job: Mapping[str, Any]) -> Client:
        """Build the client: its site and a network."""
        site, preprocess = self._site(job), Preprocess.from_dict(job["preprocess"])
        with global_seed(0):
            network = Network(ModelRecipe.from_dict(job["model"]), pick_device(self.config.device))
        seed, run, precision = int(job["seed"]), str(job["run"]), str(job["precision"])
        client = Client(site, network, preprocess, seed=seed, secret=self.secret, run=run, precision=precision)
        client.most_epsilon = self.config.privacy_epsilon
        counted = Releases(self.home / "state", run)
        client.session, client.projections = counted.session(), counted.projections()
        client.checks_models = not self.config.policy.crafted_models
        client.withheld = frozenset(TASKS) - set(self.config.policy.answered)
        return client

    def _site(self, job: Mapping[str, Any]) -> Site:
        return read_site(self.name, self.home, self.config, job["data"])

    def keep(self, client: Client) -> None:
        Releases(self.home / "state", client.run).keep_projections(client.projections or {})


def read_config(path: Path) -> NodeConfig:
    """Read ``node.toml``; a missing file means the defaults."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return NodeConfig()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot read the node's config: {error}") from error
    policy = read_policy(raw.pop("policy", {}), f"{path}: policy")
    return NodeConfig(**check_options(NodeConfig, raw, f"{path}: node"), policy=policy)
