r"""Which groups are nearest to a site that has no labels?

All that is known of it are its inputs. They are embedded by every group's model and compared with the members' embeddings by optimal
transport; how sure the model is of them counts too. The models of the groups that are about as near as the nearest predict together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emdcfl.clustering import members_of
from emdcfl.core import tasks
from emdcfl.core.errors import ConfigError, DataError
from emdcfl.core.federation import Federation
from emdcfl.core.params import Network, find_head
from emdcfl.core.schema import Reply
from emdcfl.core.units import plural
from emdcfl.data.own.site import read_unlabelled
from emdcfl.data.types import Site, Split
from emdcfl.methods.base import Serving
from emdcfl.runs.plan import RunPlan, plan
from emdcfl.runs.result import Result
from emdcfl.runs.served import Served
from emdcfl.runs.store import data_record
from emdcfl.transport import cost_matrix, exact

PLACED_WITH = 400
"""Samples of a site that are compared, at most."""

UNSURE, SURE = 2.0, 0.05
"""A model doubts a site if its predictions there have so many times the entropy of those for its members' unseen data. Entropies (in nats)
below the second number count as that: such models are sure of everything they know."""

TOLD = 0.2
"""Mean entropy (in nats) below which entropies count in units of this: models that are sure of everything may be sure and wrong."""

TEMPERATURE, MIN_WEIGHT = 0.25, 0.01
"""A group has e times less weight than one as large whose misfit is smaller by the first number; below the second, it has none."""

Groups = Mapping[int, tuple[Tensor, list[str]]]
"""Cluster → its model and its members."""


def groups_of(serving: Serving, clients: Sequence[str]) -> Groups:
    """Return every cluster with its model and its members, of a run with hard clusters."""
    assert serving.clusters is not None
    rows = members_of(serving.clusters.tolist())
    return {k: (serving.models[int(serving.weights[at[0]].argmax())], [clients[i] for i in at]) for k, at in rows.items()}


def plan_again(result: Result) -> RunPlan:
    """Return the plan of a finished run that has clusters, with all its clients; its data must still be those it began with."""
    if result.serving.clusters is None:
        raise ConfigError(f"this is a run of {result.config.method.name}, which has no clusters to place a site in; use a run of emdcfl")
    found = plan(result.config, result.scenario, result.folder)
    data_record.check(result.folder, found.whole.fingerprints)
    return replace(found, config=replace(found.config, run=replace(found.config.run, participants=None)))


def with_site(found: RunPlan, new: Site) -> RunPlan:
    if new.name in {site.name for site in found.scenario.sites}:
        raise DataError(f"the run has a client called {new.name!r} already; give the new site another name with --name")
    return replace(found, scenario=replace(found.scenario, sites=(*found.scenario.sites, new), groups=None))


def unlabelled(site: Site) -> Site:
    """Return the site without labels: all it may be placed with in training, and its test splits."""
    x = torch.cat([site.train.x, site.val.x])
    return Site(site.name, Split(x, torch.zeros(len(x), dtype=site.train.y.dtype)), site.val, site.tests)


@dataclass(frozen=True)
class ClusterFit:
    """How well a cluster fits a site without labels, see ``fits``; the smallest ``misfit`` is the nearest."""

    distance: float
    entropy: float
    misfit: float
    unsure: float
    """Entropy in units of that at the members' validation data."""
    weight: float
    """Of the cluster's model in the mixture that serves the site; 0 where it has no part."""


def fits(groups: Groups, fed: Federation, new: Sequence[str]) -> dict[str, dict[int, ClusterFit]]:
    r"""How well every cluster fits sites without labels.

    Under the cluster's model, which embeds all samples,

    .. math:: d_k(c') = \frac{1}{|S_k|}\sum_{c\in S_k} W_1(Z_c, Z_{c'}) - W_1(Z_c, Z^{val}_c)

    with :math:`Z_c` the embedded train samples of a member; the second term is what the member's own unseen data cost, nothing where it
    has no validation data. :math:`H_k(c')` is the mean entropy of the model's predictions: models are surer of data like those they were
    trained on. The misfit is :math:`d_k / \bar W + H_k / \bar H`, each in units of its mean over clusters (of :math:`W_1` for the first,
    as d may be near zero; at least ``TOLD`` for the second). The site is served by a mixture of the models' predictions, with weights

    .. math:: \pi_k \propto |S_k| \exp(-\mathrm{misfit}_k / T)

    so by one model where its group is clearly the nearest. Else a choice is hardly better than chance, and a small group knows too little
    to serve a stranger alone.
    Embeddings are not projected: this runs where the data of all sites are.
    """
    found: dict[str, dict[int, tuple[float, float, float, float]]] = {c: {} for c in new}
    net = fed.network()
    for k, (theta, members) in groups.items():
        wanted: dict[str, Any] = {"theta": theta, "cap": PLACED_WITH}
        train = fed.run(tasks.embed, {c: {} for c in (*members, *new)}, split="train", **wanted)
        val = fed.run(tasks.embed, {c: {} for c in members}, split="val", **wanted)
        kept = {c: val[c] if len(val[c]["embeddings"]) else train[c] for c in members}
        own = float(np.mean([_transport(train[c], kept[c]) for c in members]))
        net.load(theta)
        usual = max(float(np.mean([_entropy(net, kept[c]) for c in members])), SURE)
        for c in new:
            w = float(np.mean([_transport(train[member], train[c]) for member in members]))
            entropy = _entropy(net, train[c])
            found[c][k] = (w, w - own, entropy, entropy / usual)
    sizes = {k: len(members) for k, (_, members) in groups.items()}
    return {c: relative(values, sizes) for c, values in found.items()}


def relative(values: Mapping[int, tuple[float, float, float, float]], sizes: Mapping[int, int]) -> dict[int, ClusterFit]:
    if not values:
        return {}
    w, _, h, _ = np.mean(list(values.values()), axis=0)
    w, h = max(float(w), 1e-12), max(float(h), TOLD)
    misfit = {k: d / w + entropy / h for k, (_, d, entropy, _) in values.items()}
    weight = _weights(misfit, sizes)
    return {k: ClusterFit(d, entropy, misfit[k], unsure, weight[k]) for k, (_, d, entropy, unsure) in values.items()}


def _weights(misfit: Mapping[int, float], sizes: Mapping[int, int]) -> dict[int, float]:
    logits = np.array([np.log(sizes[k]) - misfit[k] / TEMPERATURE for k in misfit])
    weights = np.exp(logits - logits.max())
    weights[weights < MIN_WEIGHT * weights.sum()] = 0.0
    return dict(zip(misfit, (weights / weights.sum()).tolist(), strict=True))


def mixture(groups: Groups, fit: Mapping[int, ClusterFit]) -> tuple[Tensor, Tensor]:
    chosen = [k for k in fit if fit[k].weight > 0]
    if not chosen:
        raise DataError("the models of this run give no finite numbers for this site, so it is near none; check its files and the run")
    return torch.stack([groups[k][0] for k in chosen]), torch.tensor([fit[k].weight for k in chosen])


def _transport(a: Reply, b: Reply) -> float:
    return float(exact(cost_matrix(*(reply["embeddings"].double().numpy() for reply in (a, b)), cost="cosine")).value)


@torch.no_grad()
def _entropy(net: Network, reply: Reply) -> float:
    outputs = find_head(net.module)(reply["embeddings"].to(net.device)).double()
    if outputs.shape[1] == 1:  # a number: distances alone decide
        return 1.0
    p = outputs.softmax(1)
    return float(-(p * p.clamp_min(1e-12).log()).sum(1).mean())


@dataclass(frozen=True)
class NearestCluster:
    """Where a site without labels belongs: clusters with their members and fit, the nearest first, and the mixture that serves it."""

    site: str
    candidates: list[tuple[int, list[str], ClusterFit]]
    model: Served = field(repr=False)

    @property
    def cluster(self) -> int:
        return self.candidates[0][0]

    def verdict(self) -> str:
        (cluster, _, fit), *others = self.candidates
        then = f"; the next, cluster {others[0][0]}, has {others[0][2].misfit:.2f}" if others else ""
        nearest = f"{self.site} is nearest to cluster {cluster}, with misfit {fit.misfit:.2f}{then}; "
        if fit.weight < 1:
            together = sum(candidate.weight > 0 for _, _, candidate in self.candidates)
            nearest += f"{plural(together, 'model')} predict together, by weight; "
        if fit.unsure > UNSURE:
            doubt = f"cluster {cluster}'s model is {fit.unsure:.1f} times as unsure here as at its members: it may fit badly"
            return f"{nearest}{doubt}; test it with some labels before use"
        return f"{nearest}only labels can show whether that fits"

    def as_dict(self) -> dict[str, Any]:
        found = [{"cluster": k, "members": members, **asdict(fit)} for k, members, fit in self.candidates]
        return {"site": self.site, "cluster": self.cluster, "verdict": self.verdict(), "candidates": found}


def place_unlabelled(result: Result, site: Any, *, name: str | None = None) -> NearestCluster:
    """Find the nearest clusters of a finished run for a site without labels.

    The site is a folder of images or a table, read as the run's own files were; a frame, where it was given tables; or inputs ``X``, if
    these were arrays. Its name is by default ``new:`` and the folder's.
    """
    if isinstance(site, (str, Path)):
        return nearest_cluster(result, read_unlabelled(Path(site), encoding=result.about.encoding), name or f"new:{Path(site).stem}")
    return nearest_cluster(result, result.inputs(site), name or "new")


def nearest_cluster(result: Result, x: Tensor, chosen: str) -> NearestCluster:
    """Find the nearest clusters for inputs as the run stores samples."""
    found = plan_again(result)
    if not len(x):
        raise DataError(f"expected samples of {chosen} to place it by, got none; give at least one row or image")
    nothing = Split(x, torch.zeros(len(x), dtype=torch.int64))
    groups = groups_of(result.serving, result.clients)
    with with_site(found, Site(chosen, nothing, nothing, {})).federation() as fed:
        fed.begin(1)
        near = fits(groups, fed, [chosen])[chosen]
    models, weights = mixture(groups, near)
    model = Served(result.about, models, tuple(weights.tolist()))
    return NearestCluster(chosen, [(k, groups[k][1], near[k]) for k in sorted(near, key=lambda k: near[k].misfit)], model)
