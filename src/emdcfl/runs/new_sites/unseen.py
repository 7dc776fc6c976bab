"""Sites that were held out of training: each is placed with its unlabelled data, and tested with the models of the nearest groups.

Beside it stand one model for all (FedAvg on the same sites), and the best and the worst group, which only somebody with labels could know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from emdcfl.core import tasks
from emdcfl.core.metric import Metric, metric_of, score_of
from emdcfl.core.schema import Reply
from emdcfl.core.units import plural, some
from emdcfl.runs.loop import Observer
from emdcfl.runs.new_sites.nearest import ClusterFit, Groups, fits, groups_of, mixture, unlabelled
from emdcfl.runs.outputs import write_summary
from emdcfl.runs.plan import RunPlan, plan
from emdcfl.runs.result import Result
from emdcfl.runs.runner import run
from emdcfl.runs.verdict.baselines import not_tuned, one_for_all
from emdcfl.runs.watching.trackers import Tracking

UNSEEN = {"placed": "nearest groups", "one": "one model for all", "best": "best group", "worst": "worst group"}
"""What a held-out site is tested with → what tables call it."""

_last: list[tuple[Any, Tensor]] = []
"""The last model for all, behind what it was trained from: the runs of a comparison on the same sites share it."""


def score_unseen(result: Result, planned: RunPlan, observer: Observer | None = None) -> Result:
    """Place and test the sites held out; returns the result with ``summary["unseen"]``, and writes that to its run directory.

    Methods without clusters have nothing to place a site in; of these only those with one model for all are tested.
    """
    groups = {} if result.serving.clusters is None else groups_of(result.serving, result.clients)
    if not groups and planned.method.family != "global":
        return result
    while isinstance(observer, Tracking):  # it follows this run, not the one for all beside it
        observer = observer.then
    one = result.serving.models[0] if not groups else _one_for_all(result, planned, observer)
    notes = list(dict.fromkeys([*result.summary["notes"], *_unknown_classes(planned)]))
    summary = {**result.summary, "notes": notes, "unseen": _test(planned, groups, one)}
    if result.folder is not None:
        write_summary(result.folder, summary)
    return replace(result, summary=summary)


def _unknown_classes(planned: RunPlan) -> list[str]:
    """Name the held-out sites that have classes no site trained on: no model can predict them, however well the site is placed."""
    if planned.whole.target is not None:
        return []
    known = torch.cat([site.train.y for site in planned.scenario.sites]).unique()
    notes = []
    for site in planned.held:
        y = next(iter(site.tests.values())).y
        unknown = y[~torch.isin(y, known)]
        if len(unknown):
            shown = some([repr(planned.whole.classes[i]) for i in unknown.unique().tolist()])
            what = f"{len(unknown)} of {plural(len(y), 'test sample')} of the held-out site {site.name!r}"
            notes.append(f"{what} have a class that no site trained on ({shown}): every model is wrong there")
    return notes


def _one_for_all(result: Result, planned: RunPlan, observer: Observer | None) -> Tensor:
    if result.folder is not None:  # where ``run_baselines`` looks for it, too
        place = result.folder / "baselines" / "fedavg"
        return run(one_for_all(planned.config), place, resume=True, observer=observer, scenario=planned.whole).serving.models[0]
    baseline = plan(not_tuned(planned.config, "fedavg"), planned.whole)
    made_from = baseline.key, planned.whole.model, dict(planned.whole.fingerprints)  # two functions, as networks, may have one name
    if not _last or _last[0][0] != made_from:
        _last[:] = [(made_from, run(baseline, observer=observer).serving.models[0])]
    return _last[0][1]


def _test(planned: RunPlan, groups: Groups, one: Tensor) -> dict[str, Any]:
    held = [site.name for site in planned.held]
    sites = (*planned.scenario.sites, *map(unlabelled, planned.held))
    config = replace(planned.config, run=replace(planned.config.run, participants=None))
    truth = planned.whole.groups or {}
    with replace(planned, config=config, scenario=replace(planned.scenario, sites=sites, groups=None)).federation() as fed:
        fed.begin(1)
        near = fits(groups, fed, held)
        served: dict[int | str, dict[str, tuple[Tensor, Tensor]]] = {"one": dict.fromkeys(held, (one[None], torch.ones(1)))}
        served |= {k: dict.fromkeys(held, (theta[None], torch.ones(1))) for k, (theta, _) in groups.items()}
        served["placed"] = {site: mixture(groups, fit) for site, fit in near.items() if fit}
        tested: dict[int | str, dict[str, float | None]] = {}
        for name, at in served.items():
            replies = fed.run(tasks.test, {site: {"models": models, "weights": weights} for site, (models, weights) in at.items()})
            tested[name] = {site: _score(replies[site]) for site in at}
    found: list[dict[str, Any]] = []
    metric = (Metric.ACCURACY if planned.whole.target is None else Metric.R2).value
    for site in planned.held:
        fit = near[site.name]
        cluster = min(fit, key=lambda k: fit[k].misfit) if fit else None
        own = [score for k in groups if (score := tested[k][site.name]) is not None]
        found.append(
            {
                "site": site.name,
                "group": truth.get(site.name),
                "cluster": cluster,
                "alike": _alike(site.name, groups, fit, truth),
                "misfits": {str(k): round(f.misfit, 6) for k, f in fit.items()},
                metric: {
                    "placed": tested["placed"].get(site.name),
                    "one": tested["one"][site.name],
                    "best": max(own, default=None),
                    "worst": min(own, default=None),
                },
                "samples": len(next(iter(site.tests.values()))),
            }
        )
    return {"sites": found, metric: mean_scores(found)}


def _score(reply: Reply) -> float | None:
    """Return the score of a test in its main variant; None where no samples stand behind it."""
    variant, score = next(iter(score_of(reply).items()))
    return float(score) if reply["n"][variant] > 0 else None


def _alike(site: str, groups: Groups, fit: Mapping[int, ClusterFit], truth: Mapping[str, str]) -> float | None:
    """Return the share of members that are of the site's true group, by the weights of their clusters.

    None where groups are not known, or nobody of the site's group trained: then no group is right.
    """
    if not fit or site not in truth or all(truth[c] != truth[site] for _, members in groups.values() for c in members):
        return None
    return round(sum(fit[k].weight * float(np.mean([truth[c] == truth[site] for c in groups[k][1]])) for k in fit), 9)


def mean_scores(sites: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Unweighted means over held-out sites."""
    known = {key: [value for site in sites if (value := score_of(site)[key]) is not None] for key in UNSEEN}
    return {key: float(np.mean(values)) if values else None for key, values in known.items()}


def unseen_sentence(unseen: Mapping[str, Any]) -> str:
    mean, metric = score_of(unseen), metric_of(unseen)
    told = ", ".join(f"{name} {metric.text(mean[key])}" for key, name in UNSEEN.items() if mean[key] is not None)
    return f"{plural(len(unseen['sites']), 'site')} held out of training, placed by unlabelled data: mean {metric.label} of {told}"
