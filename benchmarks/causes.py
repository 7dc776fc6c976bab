"""Look into some differences from the paper, as far as that is possible without whole runs: a line of JSON per finding.

    EMDCFL_DATA=… python benchmarks/causes.py apart --scenario rotated-mnist --clients 0,1
    EMDCFL_DATA=… python benchmarks/causes.py angles --scenario backdoor-mnist --draws 8
    EMDCFL_DATA=… python benchmarks/causes.py graph --scenario pacs --scale small --rounds 4 --size 96 --methods \\
        "pfedgraph,pfedgraph:since=round:snap=none,pfedgraph:since=round:snap=none:vector_scope=state,pfedgraph:preset=reference"
    python benchmarks/causes.py thresholds --models mlp,small_cnn,cnn --seeds 3
    EMDCFL_DATA=… python benchmarks/causes.py jpeg --scenario rotated-cifar10 --rounds 2 --device cuda
    EMDCFL_DATA=… python benchmarks/causes.py jpeg --scenario backdoor-cifar10 --every --images "encoded again" --rounds 10 --device cuda
    python benchmarks/causes.py batches --sizes 32,16
    EMDCFL_DATA=… python benchmarks/causes.py batches --scenario backdoor-cifar10 --changes "momentum 0,lr 0.001" --sites 2 --device cuda
    EMDCFL_DATA=… python benchmarks/causes.py oscillation --scenario backdoor-cifar10 --rounds 10 --seeds 2
    EMDCFL_DATA=… python benchmarks/causes.py oscillation --scenario backdoor-cifar10 --rounds 6 --seeds 2 --whole --size 32

``apart``: how far two clients' models are from θ⁰ and from each other after local training, FedClust's and CFL's measure; the same from a
loop over ``torch.optim.SGD``, epoch by epoch. ``angles``: PACFL's groups with and without the signs of singular vectors, for
``data_seed`` 0 to N − 1; for Backdoor MNIST also with the split of the paper's public notebook. ``graph``: cosines and weights (FedSaC:
likenesses, too) of pFedGraph or FedSaC round by round, averaged over the client itself, its group and the others, and the mean accuracy of
what clients receive, beside that of one average for all. ``thresholds``: the groups of FedClust
(whole state, last layer) and PACFL on rotated digits, at the paper's thresholds and at ``"auto"``. ``jpeg``: FedAvg among the sites of the
first group (or of all), with images as they are and encoded once more, shifted by 5 pixels so that blocks are others.
``batches``: how far apart local models are after round 1, by batch size or another setting, as in the paper's table of parameter
distances, and the accuracy of their averages.
``oscillation``: FedAvg among the first site of every group, with ``COPY`` images, round by round, as the paper trains and with one setting
changed; by default the last layer alone learns, on embeddings of the network as it begins.
"""

from __future__ import annotations

import argparse
import io
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain, combinations, product
from typing import Any

import numpy as np
import torch
from PIL import Image
from scipy.spatial.distance import squareform
from sklearn.metrics import adjusted_rand_score
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

from bare import sgd
from emdcfl.clustering import cut, first_gap
from emdcfl.core import tasks
from emdcfl.core.keys import global_seed
from emdcfl.core.params import Network, average, cosines, gram, squared_distances
from emdcfl.core.tasks import Training
from emdcfl.data import sources
from emdcfl.data.scenarios.backdoor import ROLES, paint_mnist
from emdcfl.data.scenarios.rotated import balance
from emdcfl.data.split import Indices
from emdcfl.data.transforms import Labels
from emdcfl.data.types import Preprocess, Scenario, Site, Split
from emdcfl.methods.fedsac import FedSaC
from emdcfl.methods.pacfl import PACFL
from emdcfl.methods.shared.graph import GraphOptions, personalise
from emdcfl.methods.shared.subspaces import data_subspace, smallest_angle
from emdcfl.methods.shared.vectors import update_gram
from emdcfl.models.recipe import ModelRecipe
from emdcfl.paper.elements import inside_and_overall
from emdcfl.runs.config import Choice, Config, override
from emdcfl.runs.plan import RunPlan, plan
from emdcfl.runs.result import Result
from emdcfl.runs.runner import run
from emdcfl.studies.compare import parse_methods
from emdcfl.studies.snapshot import linear_layers, of_each_group

Finding = dict[str, Any]


def apart(chosen: RunPlan, clients: Sequence[int]) -> Iterator[Finding]:
    """Train clients from θ⁰ for one round's epochs, as an engine does and in a loop by hand."""
    with chosen.federation() as fed:
        names, theta0, trainable, training = [fed.clients[c] for c in clients], fed.initial(), fed.layout.trainable, fed.training
        fed.begin(1)
        trained = [reply["theta"][trainable] for reply in fed.train(dict.fromkeys(names, theta0)).valid.values()]
    yield {"clients": names, "by": "engine", "epochs": training.local_epochs, **_lengths(theta0[trainable], trained)}
    state = Network(chosen.scenario.model).state_dict(theta0)
    start = next(_loop(chosen, 0, state, replace(training, local_epochs=0)))
    loops = [_loop(chosen, c, state, training) for c in clients]
    for epoch, ends in enumerate(zip(*loops, strict=True)):
        yield {"clients": names, "by": "loop", "epochs": epoch, **_lengths(start, ends)}


def _lengths(start: Tensor, ends: Sequence[Tensor]) -> Finding:
    pairs = [(a, b) for i, a in enumerate(ends) for b in ends[i + 1 :]]
    return {"moved": [round(float((e - start).norm()), 3) for e in ends], "apart": [round(float((a - b).norm()), 3) for a, b in pairs]}


def _loop(chosen: RunPlan, client: int, state: Mapping[str, Tensor], training: Training) -> Iterator[Tensor]:
    """Yield the parameters at the start and after every epoch."""
    split, preprocess, net = chosen.scenario.sites[client].train, chosen.scenario.preprocess, chosen.scenario.model()
    net.load_state_dict(state, strict=False)  # BatchNorm's counters stay at zero
    yield parameters_to_vector(net.parameters()).detach().clone()
    order = torch.Generator().manual_seed(client)
    for _ in sgd(net, lambda x, y: cross_entropy(net(preprocess(x)), y), split.x, split.y, training, order):
        yield parameters_to_vector(net.parameters()).detach().clone()


def angles(chosen: RunPlan) -> Iterator[Finding]:
    """Compare PACFL's groups by |cos| and by signed cosines, at the scenario's threshold."""
    method = chosen.method
    assert isinstance(method, PACFL)
    with chosen.federation() as fed:
        options = {"split": method.split, "vectors": method.vectors, "flatten": method.flatten}
        bases = list(fed.run(data_subspace, {c: {} for c in fed.clients}, **options).column("basis").values())
        truth = [chosen.scenario.groups[c] for c in fed.clients]
    for sign in ("abs", "signed"):
        degrees = squareform([smallest_angle(a, b, signed=sign == "signed") for a, b in combinations(bases, 2)])
        threshold = first_gap(degrees, linkage="weighted") if isinstance(method.threshold, str) else method.threshold
        labels = cut(degrees, threshold, linkage="weighted")
        members = [Counter(truth[c] for c in np.flatnonzero(labels == k)) for k in np.unique(labels)]
        yield {"sign": sign, "threshold": threshold, "k": len(members), "ari": adjusted_rand_score(truth, labels), "groups": members}


def draws(chosen: RunPlan, seeds: int) -> Iterator[Finding]:
    """Find ``angles`` for the first values of ``data_seed``, and for the split of the paper's public notebook where it is seeded."""
    for seed in range(seeds):
        one = plan(override(chosen.config, {"scenario.data_seed": seed}))
        yield from ({"draw": seed, **found} for found in angles(one))
    if chosen.scenario.name == "backdoor-mnist":
        one = plan(chosen.config, published(chosen.scenario))
        yield from ({"draw": "published", **found} for found in angles(one))


def published(scenario: Scenario) -> Scenario:
    """Give the sites of Backdoor MNIST the validation images that the paper's public notebook draws with NumPy's ``RandomState(0)``."""
    rng = np.random.RandomState(0)
    train, test = (sources.load("mnist", part) for part in ("train", "test"))

    def shuffled(labels: Labels) -> Indices:
        rows = balance(labels)
        return rng.permutation(rows[np.argsort(labels[rows], kind="stable")])

    def deal(rows: Indices, labels: Labels) -> list[Indices]:
        classes = [rng.permutation(rows[labels[rows] == label]) for label in range(10)]
        slices = [np.split(own, len(own) // 10 * np.arange(1, 10)) for own in classes]
        return [rng.permutation(np.concatenate(parts)) for parts in zip(*slices, strict=True)]

    pools = [shuffled(part.labels) for part in (train, test)]
    mixed = [[rng.permutation(rows) for _ in ROLES] for rows in pools]
    held_out = []
    for role, train_rows, test_rows in zip(ROLES, *mixed, strict=True):
        sites = deal(train_rows, train.labels)
        deal(test_rows, test.labels)
        for rows in sites:
            held = np.random.RandomState(0).permutation(rows)[: -(-len(rows) // 10)]
            rng.permutation(len(rows) - len(held))  # there the notebook draws the half of the train images that a site keeps
            y = train.labels[held]
            held_out.append(Split(torch.from_numpy(paint_mnist(role, train.images[held], y, "train")), torch.from_numpy(y)))
    return replace(scenario, sites=tuple(replace(site, val=val) for site, val in zip(scenario.sites, held_out, strict=True)))


def graph(chosen: RunPlan, rounds: int) -> Iterator[Finding]:
    """Play pFedGraph or FedSaC, and average what its weights come from by who is meant."""
    method = chosen.method
    assert isinstance(method, GraphOptions)
    groups = [chosen.scenario.groups[site.name] for site in chosen.scenario.sites]
    own, mates = np.eye(len(groups), dtype=bool), np.array([[a == b for b in groups] for a in groups])
    who = {"self": own, "group": mates & ~own, "others": ~mates}
    with chosen.federation() as fed:
        names, split = list(fed.clients), f"test:{next(iter(chosen.scenario.sites[0].tests))}"
        state = method.init(fed, fed.begin(0))
        for index in range(1, rounds + 1):
            trained = method.train(fed, state, fed.begin(index))
            s, x = method.cosines(fed.layout, state, trained), method.weights(fed.layout, state, trained)
            found = {"cosine": (s.numpy(), "mean"), "weight": (x.numpy(), "sum")}
            if isinstance(method, FedSaC):
                found["likeness"] = method.likeness(trained).numpy(), "mean"
            one = average(trained.models, trained.shares.tolist())
            state = personalise(state, trained, x, method.aggregate)
            models = {c: {"models": torch.stack([state.start(c), one])} for c in names}
            scores = fed.run(tasks.evaluate, models, dims={"K": 2}, split=split).stack("accuracy").mean(0)
            yield {
                "settings": asdict(chosen.config.method),
                "round": index,
                "clients": len(groups),
                **{name: _by(values, who, how) for name, (values, how) in found.items()},
                "accuracy": round(float(scores[0]), 3),
                "accuracy of one average": round(float(scores[1]), 3),
            }


def _by(values: np.ndarray[Any, Any], who: dict[str, np.ndarray[Any, Any]], how: str) -> dict[str, float]:
    """Average a matrix over its parts; weights are summed within a row first."""
    return {name: round(float(values[part].mean() if how == "mean" else (values * part).sum(1).mean()), 3) for name, part in who.items()}


def thresholds(models: Sequence[str], seeds: int) -> Iterator[Finding]:
    """Cut the clients of one, two and four rotations, of two or four sites each, at a fixed threshold and at one that follows the data."""
    for model, seed, sites in product(models, range(seeds), (2, 4)):
        scenario = Choice("rotated-digits", {"clients_per_group": sites, "data_seed": seed})
        settings = {"run.seed": seed, "engine.name": "sequential", "engine.device": "cpu"}
        chosen = plan(override(Config(scenario=scenario, method=Choice("fedavg"), model=Choice(model)), settings))
        with chosen.federation() as fed:
            fed.begin(1)
            theta0 = fed.initial()
            trained = list(fed.train(dict.fromkeys(fed.clients, theta0)).column("theta").values())
            bases = list(fed.run(data_subspace, {c: {} for c in fed.clients}).column("basis").values())
            truth = [chosen.scenario.groups[c] for c in fed.clients]
            grams = {name: update_gram(fed.layout, trained, theta0, scope=scope) for name, scope in (("state", "F"), ("last layer", "H"))}
        found = {f"fedclust, {name}": (squared_distances(G).sqrt().numpy(), 5.0, "complete") for name, G in grams.items()}
        if model == models[0]:  # no model is involved
            angle = [[0.0 if a is b else smallest_angle(a, b) for b in bases] for a in bases]
            found["pacfl"] = np.array(angle), 12.0, "weighted"
        for (measure, (d, fixed, linkage)), groups in product(found.items(), (1, 2, 4)):
            if (C := groups * sites) > 2:
                cuts = {"fixed": fixed, "auto": first_gap(d[:C, :C], linkage=linkage)}
                right = {name: adjusted_rand_score(truth[:C], cut(d[:C, :C], at, linkage=linkage)) == 1 for name, at in cuts.items()}
                yield {"model": model, "seed": seed, "sites": sites, "groups": groups, "measure": measure, "right": right}


AS_THEY_ARE, AGAIN = "as they are", "encoded again"
PATCH = 3
"""Pixels of the side of a backdoor's patch."""


def jpeg(chosen: RunPlan, images: Sequence[str], *, every: bool, quality: int = 75) -> Iterator[Finding]:
    """Train the first group's sites together, or ``every`` site, before and after one more pass of JPEG; accuracy by round and test."""
    scenario = chosen.scenario
    groups = scenario.groups or {}
    sites = [site for site in scenario.sites if every or groups[site.name] == groups[scenario.sites[0].name]]
    for name in images:
        of = sites
        if name == AGAIN:
            kept = PATCH if scenario.name.startswith("backdoor") else 0
            of = [Site.from_splits(s.name, {part: _encoded(x, quality, kept) for part, x in s.splits.items()}) for s in sites]
        part = replace(scenario, sites=tuple(of), groups={site.name: groups[site.name] for site in of})
        done = run(plan(chosen.config, part), None)
        accuracy = done.summary["accuracy"]
        yield {
            "images": name,
            "sites": len(of),
            "quality": quality,
            "accuracy": accuracy["mean"],
            "low": accuracy["low"],
            "high": accuracy["high"],
            "by round": _by_round(done, part),
        }


def _by_round(done: Result, scenario: Scenario) -> dict[str, list[float]]:
    """Return the mean accuracy of the sites that are scored, of every test by round."""
    rows = [row for row in done.history if row["client"] in (scenario.scored or scenario.groups or ())]
    return {
        test: [
            round(float(np.mean([row["accuracy"][test] for row in rows if row["round"] == index])), 3)
            for index in sorted({row["round"] for row in rows})
        ]
        for test in scenario.sites[0].tests
    }


def _encoded(split: Split, quality: int, kept: int, shift: int = 5) -> Split:
    """Encode images once more, but for ``kept`` pixels in the corner: a backdoor's patch is painted after decoding."""
    images = []
    for x in split.x.permute(0, 2, 3, 1).numpy():
        file = io.BytesIO()
        Image.fromarray(np.roll(x, (shift, shift), (0, 1))).save(file, "JPEG", quality=quality)
        images.append(np.roll(np.asarray(Image.open(file)), (-shift, -shift), (0, 1)))
        images[-1][:kept, :kept] = x[:kept, :kept]
    return Split(torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous(), split.y)


def batches(chosen: RunPlan, variants: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Train every client for one round by each variant; distances within true groups and overall, accuracy of averages."""
    groups = chosen.scenario.groups or {}
    for settings in variants:
        with plan(override(chosen.config, settings), chosen.scenario).federation() as fed:
            names, theta0 = list(fed.clients), fed.initial()
            labels = np.unique([groups[c] for c in names], return_inverse=True)[1]
            fed.begin(1)
            trained = list(fed.train(dict.fromkeys(names, theta0)).column("theta").values())
            linear = torch.stack([gram(trained, where, origin=theta0) for where in linear_layers(fed.layout)]).sum(0)
            parts = {"hypothesis": linear, "full model": update_gram(fed.layout, trained, theta0, scope="F")}
            apart = {name: inside_and_overall(squared_distances(G).sqrt().numpy(), labels) for name, G in parts.items()}
            means = [torch.stack([trained[c] for c in np.flatnonzero(labels == k)]).mean(0) for k in range(labels.max() + 1)]
            states = torch.stack([*means, torch.stack(trained).mean(0)])
            scores = fed.evaluate(names, states, split=f"test:{next(iter(chosen.scenario.sites[0].tests))}").stack("accuracy").numpy()
        grouped = scores[np.arange(len(names)), labels].mean()
        yield {"settings": settings, **apart, "accuracy in groups": float(grouped), "accuracy of one model": float(scores[:, -1].mean())}


COPY = {"train": 256, "val": 16, "test": 160}
"""Images of a site of ``oscillation``: few, so that a CPU can do it."""

SHORT = {"training.local_epochs": 3, "training.batch_size": 32}
"""How the whole network trains there."""

CENTRED = "centred embeddings"

CHANGES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "momentum 0": {"training.momentum": 0.0},
    "lr 0.001": {"training.lr": 0.001},
    "FedProx of the public code": {"method.name": "fedprox", "method.prox": "layer_norm"},
    "momentum 0.5": {"training.momentum": 0.5},
    "lr 0.1, momentum 0": {"training.lr": 0.1, "training.momentum": 0.0},
    "3 epochs": {"training.local_epochs": 3},
    "30 epochs": {"training.local_epochs": 30},
    "batches of 16": {"training.batch_size": 16},
    "batches of 128": {"training.batch_size": 128},
    "weight decay 0.01": {"training.weight_decay": 0.01},
    CENTRED: {},
}
"""Name → settings of ``oscillation``."""

WHOLE = 4
"""How many of them are tried with the whole network, too."""


def oscillation(chosen: RunPlan, size: int | None, seeds: int, *, whole: bool) -> Iterator[Finding]:
    """Play FedAvg on a small copy with one setting changed at a time; with the last layer alone, first say how alike embeddings are."""
    copy, changes = few(chosen.scenario, size), CHANGES
    if whole:
        changes = {name: SHORT | CHANGES[name] for name in list(CHANGES)[:WHOLE]}
    else:
        own = embeddings(copy, batch_statistics=True)
        yield {"statistics": "of batches", **_shared({site.name: own(site.train.x) for site in copy.sites})}
        copy = embedded(copy)
        yield {"statistics": "of ImageNet", **_shared({site.name: site.train.x for site in copy.sites})}
    for seed, (name, settings) in product(range(seeds), changes.items()):
        part = _centred(copy) if name == CENTRED else copy
        config = override(replace(chosen.config, model=None), {"run.seed": seed, **settings})
        found = _by_round(run(plan(config, part), None), part)
        yield {"trained": "all" if whole else "last layer", "changed": name, "seed": seed, **found}


def few(scenario: Scenario, size: int | None) -> Scenario:
    """Keep the first site of every group and its first images, at ``size`` pixels if given."""

    def cut_to(site: Site) -> Site:
        n = {name: COPY[name.split(":")[0]] for name in site.splits}
        return Site.from_splits(site.name, {name: Split(split.x[: n[name]], split.y[: n[name]]) for name, split in site.splits.items()})

    part = of_each_group(scenario, 1)
    return sized(replace(part, sites=tuple(map(cut_to, part.sites))), size)


def sized(scenario: Scenario, size: int | None) -> Scenario:
    """Show images at ``size`` pixels, if given."""
    return replace(scenario, preprocess=replace(scenario.preprocess, size=size)) if size else scenario


def embeddings(scenario: Scenario, *, batch_statistics: bool = False) -> Callable[[Tensor], Tensor]:
    """Return what embeds images by the network as it begins; BatchNorm takes its own statistics, or those of batches as in training."""
    with global_seed(0):
        net = Network(scenario.model)
    net.module.train(batch_statistics)

    @torch.no_grad()
    def embed(images: Tensor) -> Tensor:
        return torch.cat([net.embed(scenario.preprocess(x)) for x in images.split(64)])

    return embed


def embedded(scenario: Scenario) -> Scenario:
    """Return the same sites with embeddings for images, and a linear layer for a network."""
    embed = embeddings(scenario)
    sites = [Site.from_splits(s.name, {name: Split(embed(split.x), split.y) for name, split in s.splits.items()}) for s in scenario.sites]
    options = {"in_features": sites[0].train.x.shape[1], "out_features": len(scenario.classes)}
    return replace(scenario, sites=tuple(sites), preprocess=Preprocess(), model=ModelRecipe("torch.nn:Linear", options))


def _shared(z: Mapping[str, Tensor]) -> Finding:
    """Return the mean squared length of embeddings, how much of it their site's mean has, and the least cosine of two sites' means."""
    means = torch.stack([x.mean(0) for x in z.values()]).double()
    length, of_mean = torch.cat(list(z.values())).square().sum(1).mean(), means.square().sum(1).mean()
    return {
        "squared length": round(float(length)),
        "of the mean": round(float(of_mean)),
        "cosine": round(float(cosines(means @ means.T).min()), 3),
    }


def _centred(scenario: Scenario) -> Scenario:
    mean = torch.cat([site.train.x for site in scenario.sites]).mean(0)
    return replace(scenario, preprocess=Preprocess(mean=tuple(mean.tolist())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("finding", choices=("apart", "angles", "graph", "thresholds", "jpeg", "batches", "oscillation"))
    parser.add_argument("--scenario", default="rotated-digits")
    parser.add_argument("--scale", default="paper")
    parser.add_argument("--draws", type=int, default=1, help="with angles: how many values of data_seed")
    parser.add_argument("--clients", default="0,1", help="with apart: numbers of the clients")
    parser.add_argument("--rounds", type=int, default=1, help="with graph, jpeg and oscillation: rounds to play")
    parser.add_argument("--device", default="cpu", help="with jpeg and batches: cpu or cuda")
    parser.add_argument("--images", choices=(AS_THEY_ARE, AGAIN), help="with jpeg: only these")
    parser.add_argument("--every", action="store_true", help="with jpeg: every site, not only those of the first group")
    parser.add_argument("--sizes", default="128,64,32", help="with batches: batch sizes")
    parser.add_argument("--changes", help=f"with batches: other settings instead, of {', '.join(map(repr, CHANGES))}")
    parser.add_argument("--sites", type=int, help="with batches: only so many sites of every true group")
    parser.add_argument("--models", default="mlp", help="with thresholds: networks")
    parser.add_argument("--seeds", type=int, default=1, help="with thresholds and oscillation: how many seeds")
    parser.add_argument("--whole", action="store_true", help="with oscillation: train the whole network")
    parser.add_argument("--size", type=int, help="with graph and oscillation: pixels of an image")
    parser.add_argument("--methods", default="pfedgraph,fedsac", help="with graph: pfedgraph and fedsac, with options after colons")
    args = parser.parse_args()
    if args.finding == "thresholds" and args.scenario != "rotated-digits":
        parser.error(f"thresholds are found on rotated-digits, got --scenario {args.scenario}; leave it out")
    options = {} if args.scenario == "rotated-digits" else {"scale": args.scale}
    config = Config(scenario=Choice(args.scenario, options), method=Choice("pacfl" if args.finding == "angles" else "fedavg"))
    cuda = {"engine.name": "cuda", "engine.precision": "bf16", "engine.compile": "yes" if args.finding == "jpeg" else "no"}
    engine = {**(cuda if args.device == "cuda" else {"engine.name": "sequential"}), "engine.device": args.device}
    chosen = plan(override(config, {**engine, **({"run.rounds": args.rounds} if args.finding in ("jpeg", "oscillation") else {})}))
    findings: dict[str, Callable[[], Iterator[Finding]]] = {
        "apart": lambda: apart(chosen, [int(c) for c in args.clients.split(",")]),
        "angles": lambda: draws(chosen, args.draws),
        "graph": lambda: chain.from_iterable(
            graph(plan(replace(chosen.config, method=method), sized(chosen.scenario, args.size)), args.rounds)
            for method in parse_methods(args.methods)
        ),
        "thresholds": lambda: thresholds(args.models.split(","), args.seeds),
        "jpeg": lambda: jpeg(chosen, [args.images] if args.images else [AS_THEY_ARE, AGAIN], every=args.every),
        "oscillation": lambda: oscillation(chosen, args.size, args.seeds, whole=args.whole),
        "batches": lambda: batches(
            replace(chosen, scenario=of_each_group(chosen.scenario, args.sites)),
            [CHANGES[name] for name in args.changes.split(",")]
            if args.changes
            else [{"training.batch_size": int(size)} for size in args.sizes.split(",")],
        ),
    }
    for found in findings[args.finding]():
        print(json.dumps({"scenario": args.scenario, **options, **found}), flush=True)


if __name__ == "__main__":
    main()
