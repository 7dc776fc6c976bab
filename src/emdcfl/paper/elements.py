"""How each kind of table and figure is made. A handler writes into its context's place and returns how many runs are left undone."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from emdcfl.clustering import links, neighbourhoods
from emdcfl.core.errors import ClientError, ConfigError, DataError
from emdcfl.core.keys import global_seed
from emdcfl.core.params import Network, cosines, squared_distances
from emdcfl.data import picture
from emdcfl.models import ModelRecipe
from emdcfl.paper import plots
from emdcfl.paper.reproduce import Context, find
from emdcfl.runs.config import Config
from emdcfl.studies import sweep, table_files, tables
from emdcfl.studies.compare import compare, configs, describe_failures, shared_scenario
from emdcfl.studies.paper_values import tables as paper_tables
from emdcfl.studies.results import RESULTS, ResultRow, read_results
from emdcfl.studies.snapshot import Snapshot, SnapshotRequest, take

Array = np.ndarray[Any, Any]
PAPER_EPSILON = 0.025
SHORT = {
    "rotated-mnist": "Rot. MNIST",
    "rotated-cifar10": "Rot. CIFAR10",
    "pacs": "PACS",
    "backdoor-mnist": "Bd. MNIST",
    "backdoor-cifar10": "Bd. CIFAR10",
}


def _wanted(context: Context) -> list[Config]:
    wanted = []
    for scenario in context.spec.scenarios:
        base = context.config(scenario)
        shares = context.spec.participants or (None,)
        for share in shares:
            number = None if share is None else max(1, round(share * len(shared_scenario(base).sites)))
            part = replace(base, run=replace(base.run, participants=number))
            wanted += configs(part, context.spec.choices(), context.seeds)
    return wanted


def _run(context: Context) -> tuple[list[ResultRow], int]:
    """Run what the table needs and return its rows; failures are an error once everything else has run."""
    there = {row["config"] for row in _rows(context)}
    outcome = compare(_wanted(context), context.shared, jobs=context.jobs, time_limit=context.time_limit, watch=context.watch)
    wanted = set(outcome.keys)
    rows = [row for row in _rows(context) if row["config"] in wanted]
    context.reused += sum(float(row["seconds"]["total"]) for row in rows if row["config"] in there)
    for row in rows:
        for note in row["notes"]:
            context.note(f"{row['scenario']}, {note}")
    if outcome.left:
        context.note(f"{outcome.left} of {len(wanted)} runs are left by the time limit")
    if outcome.failed:
        raise ClientError(describe_failures(outcome.failed))
    return rows, outcome.left


def _rows(context: Context) -> list[ResultRow]:
    return read_results(context.shared) if (context.shared / RESULTS).exists() else []


def comparison(context: Context) -> int:
    """Write a table of methods × scenarios."""
    rows, left = _run(context)
    if not rows:
        return left
    context.place.mkdir(parents=True, exist_ok=True)
    table = table_files.write_tables(rows, context.place)
    context.write("table.md", _header(context) + table_files.markdown(table))
    context.write("results.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    return left


def _header(context: Context) -> str:
    notes = "".join(f"- {note}\n" for note in context.notes)
    return f"## {context.spec.title}\n\n" + (f"{notes}\n" if notes else "")


def timing(context: Context) -> int:
    """Write the wall time of each method, and its share over Oracle's."""
    rows, left = _run(context)
    heads, lines = ("method", "seconds", "of it transport and embedding", "over Oracle", "paper, hours", "paper, over Oracle"), []
    groups = tables.by_label(rows)
    oracle = _mean_seconds(groups.get("Oracle", []))
    paper = {name: cells[0] for name, cells in paper_tables()["timing"].rows.items()}
    for label, members in groups.items():
        total = _mean_seconds(members)
        extra = float(np.mean([m["seconds"]["transport"] + m["seconds"]["embed"] for m in members]))
        hours = paper.get(members[0]["method"])
        cells = [label, f"{total:.1f}", f"{extra:.1f}", _over(total, oracle)]
        theirs = paper["oracle"]
        cells += ["–", "–"] if hours is None or theirs is None else [f"{hours.mean:.2f}", _over(hours.mean, theirs.mean)]
        lines.append(cells)
    context.note("the paper does not say which data set its hours are of")
    _write_table(context, heads, lines)
    return left


def _write_table(context: Context, heads: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    context.write("table.md", _header(context) + table_files.markdown_table(heads, lines))


def _over(value: float, base: float) -> str:
    return f"{100 * (value / base - 1):+.0f} %" if base else "–"


def _mean_seconds(rows: Sequence[ResultRow]) -> float:
    return float(np.mean([row["seconds"]["total"] for row in rows])) if rows else 0.0


def models(context: Context) -> int:
    """Write embedding widths as the networks have them, and the learning rates used, beside the paper's."""
    rates = {m["name"]: float(m["lr"]) for m in find("hparams_flex").models}
    ours: dict[str, tuple[str, float | None]] = {
        "cnn": ("cnn", _rate(context, "rotated-mnist")),
        "resnet18 on cifar10": ("resnet18", _rate(context, "rotated-cifar10")),
        "resnet18 on pacs": ("resnet18", _rate(context, "pacs")),
        **{name: (name, rate) for name, rate in rates.items()},
    }
    lines = []
    for name, (width, rate) in paper_tables()["model_details"].rows.items():
        assert width is not None and rate is not None
        model, own_rate = ours[name]
        shown = "–" if own_rate is None else f"{own_rate:g}"
        lines.append((name, str(_width(model)), f"{width.mean:g}", shown, f"{rate.mean:g}"))
    _write_table(context, ("network", "dim(Z)", "paper", "learning rate", "paper"), lines)
    return 0


def _width(model: str) -> int:
    options: dict[str, Any] = {} if model == "cnn" else {"weights": None}
    with global_seed(0), torch.device("meta"):  # shapes are all that is wanted
        return Network(ModelRecipe(model, options), "meta").layout.embedding_width


def _rate(context: Context, scenario: str) -> float | None:
    """Read the learning rate off the scenario, where its data are there to build it."""
    try:
        return float(shared_scenario(replace(context, scale=replace(context.scale, name="smoke")).config(scenario)).defaults["lr"])
    except DataError as error:
        context.note(f"no learning rate for {scenario}: {error}")
        return None


def parameters(context: Context) -> int:
    """Write mean L2 distances between local models, inside the clusters found and overall, for the linear layers and for everything."""
    heads = ["data set"]
    for what in ("hypothesis", "full model"):
        heads += [f"{what}, clusters", "paper", f"{what}, overall", "paper"]
    lines = []
    for scenario in context.spec.scenarios:
        snapshot = context.snapshot(scenario)
        matrix = sweep.measure(snapshot, sweep.Setting(seed=context.seeds[0]))
        labels, _ = neighbourhoods(links(matrix.W, PAPER_EPSILON))
        paper = paper_tables()["distance_comparison"].rows[scenario]
        numbers: list[float | None] = []
        for gram in (snapshot.linear, snapshot.state):
            numbers += [*inside_and_overall(_l2(gram), labels)]
        line = [scenario]
        for own, theirs in zip(numbers, paper, strict=True):
            line += ["–" if own is None else f"{own:.2f}", "–" if theirs is None else theirs.text()]
        lines.append(line)
    context.note("hypothesis: the linear layers, two of the CNN, one of ResNet18; full model: with BatchNorm's statistics")
    context.note(f"distances after the first local training; clusters at the paper's tolerance of {PAPER_EPSILON}")
    _write_table(context, heads, lines)
    return 0


def inside_and_overall(distances: Array, labels: Array) -> tuple[float | None, float]:
    """Return the mean distance over pairs of one cluster, and over all pairs; ``None`` where every client is alone.

    Examples
    --------
    >>> inside_and_overall(np.array([[0.0, 1, 3], [1, 0, 5], [3, 5, 0]]), np.array([0, 0, 1]))
    (1.0, 3.0)
    """
    upper = np.triu(np.ones(distances.shape, dtype=bool), 1)
    same = upper & (labels[:, None] == labels[None, :])
    return float(distances[same].mean()) if same.any() else None, float(distances[upper].mean())


def _l2(gram: Array) -> Array:
    return np.asarray(squared_distances(torch.from_numpy(gram)).sqrt().numpy())


MEASURES: dict[str, tuple[str, Callable[[Snapshot, int], Array]]] = {
    "emd": ("W: transport distance less the row client's own", lambda s, seed: sweep.measure(s, sweep.Setting(seed=seed)).W),
    "parameters": ("L2 distance of the trainable parameters after the first local training", lambda s, seed: _l2(s.parameters)),
    "updates": ("1 − cosine of the first updates", lambda s, seed: 1 - np.asarray(cosines(torch.from_numpy(s.parameters)).numpy())),
    "angles": ("smallest angle between subspaces of the raw data, degrees", lambda s, seed: s.angles),
}


def matrices(context: Context) -> int:
    """Draw a distance between clients on every data set (or for every network)."""
    if context.spec.measure not in MEASURES:
        raise ConfigError(f"{context.spec.name}: unknown measure {context.spec.measure!r}")
    label, of = MEASURES[context.spec.measure]
    panels, arrays = [], {}
    for title, snapshot in _snapshots(context):
        matrix = of(snapshot, context.seeds[0])
        panels.append(plots.Panel(title, matrix, snapshot.groups))
        arrays[title] = {"clients": list(snapshot.clients), "groups": list(snapshot.groups or []), "matrix": np.round(matrix, 6).tolist()}
    context.write("figure.png", plots.matrices(panels, label=label, title=_title(context)))
    context.write("data.json", json.dumps({"measure": label, "panels": arrays}) + "\n")
    return 0


def _snapshots(context: Context) -> list[tuple[str, Snapshot]]:
    found = []
    for scenario in context.spec.scenarios:
        for model in context.spec.models or (None,):
            title = SHORT.get(scenario, scenario) if model is None else str(model["name"])
            found.append((title, context.snapshot(scenario, model)))
    return found


def _title(context: Context) -> str:
    smoke = any("smoke test only" in note for note in context.notes)
    return context.spec.title + (" (smoke test only)" if smoke else "")


def ari_sweep(context: Context) -> int:
    maps, records = [], []
    for title, snapshot in _snapshots(context):
        for solver in context.spec.solvers:
            settings = [sweep.Setting(ratio, solver=solver, seed=context.seeds[0]) for ratio in context.scale.ratios]
            found = [sweep.sweep(snapshot, setting) for setting in settings]
            maps.append((f"{title}, {solver}", found))
            records += [{"scenario": title, **record} for record in found]
    context.write("figure.png", plots.ari_maps(maps, title=_title(context), columns=len(context.spec.solvers) if len(maps) > 2 else 2))
    sweep.write_sweep(records, context.place)
    return 0


def examples(context: Context) -> int:
    context.place.mkdir(parents=True, exist_ok=True)
    picture.grid(shared_scenario(context.config(context.spec.scenarios[0])), context.place / "figure.png")
    return 0


def overview(context: Context) -> int:
    """Draw the algorithm's steps on a small federation."""
    request = SnapshotRequest(context.config("rotated-digits"))
    snapshot = take(request, context.shared / "snapshots" / request.key())
    matrix = sweep.measure(snapshot, sweep.Setting(seed=context.seeds[0]))
    linked = links(matrix.W, matrix.automatic())
    labels, _ = neighbourhoods(linked)
    row = snapshot.row(0)
    others = [0, 1, len(snapshot.clients) // 4, len(snapshot.clients) // 2]
    stacked = np.concatenate([row.train, *(row.val[i] for i in dict.fromkeys(others))])
    _, _, axes = np.linalg.svd(stacked - stacked.mean(0), full_matrices=False)
    points = [(snapshot.clients[i], (row.val[i] - stacked.mean(0)) @ axes[:2].T) for i in dict.fromkeys(others)]
    panel = plots.Panel("W", matrix.W, snapshot.groups)
    context.write("figure.png", plots.overview(points, panel, linked, labels.tolist(), snapshot.clients))
    return 0


HANDLERS: dict[str, Callable[[Context], int]] = {
    "comparison": comparison,
    "timing": timing,
    "models": models,
    "parameters": parameters,
    "overview": overview,
    "matrices": matrices,
    "examples": examples,
    "sweep": ari_sweep,
}
