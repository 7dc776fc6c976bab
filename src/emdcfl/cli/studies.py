"""``emdcfl reproduce`` and ``emdcfl sweep``: what the paper shows."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from emdcfl.cli.app import AsJson, Device, Jobs, Scale, TimeLimit, app, print_json
from emdcfl.cli.compare import ComparisonProgress, print_tables
from emdcfl.cli.run import build_config
from emdcfl.cli.show import draw_table
from emdcfl.core.errors import ClientError, ConfigError, EmdcflError, nearest
from emdcfl.paper import plots
from emdcfl.paper.reproduce import SCALES, Context, find, listing, reproduce, specs
from emdcfl.runs.config import Config, override
from emdcfl.runs.store.files import write_file
from emdcfl.runs.watching.progress import terminal
from emdcfl.studies.compare import parse_seeds, shared_scenario
from emdcfl.studies.results import RESULTS, read_results
from emdcfl.studies.snapshot import SnapshotRequest, take
from emdcfl.studies.sweep import EPSILONS, RATIOS, Setting, sweep, write_sweep
from emdcfl.studies.tables import build


@app.command("reproduce")
def reproduce_(
    names: Annotated[list[str] | None, typer.Argument(help="Labels of the paper, or all; see --list.", show_default=False)] = None,
    scale: Annotated[str, typer.Option(help="smoke (only a test that it runs), small or paper.")] = "small",
    seeds: Annotated[str | None, typer.Option(help="Seeds, for example 0,1,2.", show_default="0; at paper scale 0,1,2")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the results. Tables share the runs and embeddings in it.")] = Path("runs/reproduce"),
    jobs: Jobs = 1,
    time_limit: TimeLimit = None,
    device: Device = None,
    precision: Annotated[str, typer.Option(help="fp32, tf32 or bf16, for training; see engine.precision.")] = "fp32",
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Start larger networks without pretrained weights: for smoke tests only.")
    ] = False,
    list_: Annotated[bool, typer.Option("--list", help="List the labels, and how long each took on which machine.")] = False,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only what was written.")] = False,
) -> None:
    """Make tables and figures of the paper at any scale. Results already in --out are not made again."""
    if list_:
        _list(out, as_json=as_json)
        return
    if not names:
        raise ConfigError("expected the label of a table or figure, or all, got none; 'emdcfl reproduce --list' names them")
    if scale not in SCALES:
        raise ConfigError(f"unknown scale {scale!r}: {nearest(scale, SCALES)}")
    console = terminal()
    numbers = SCALES[scale].seeds if seeds is None else tuple(parse_seeds(seeds))
    engine = override(Config(), {"engine.device": device or "auto", "engine.precision": precision}).engine
    made = []
    failed: dict[str, str] = {}
    started = time.monotonic()
    for spec in list(specs().values()) if names == ["all"] else [find(name) for name in names]:
        left = None if time_limit is None else time_limit - (time.monotonic() - started)
        with ComparisonProgress(console, quiet=quiet or as_json) as screen:
            context = Context(spec, SCALES[scale], out, numbers, engine, jobs, left, random_weights, watch=screen)
            context.say = (lambda text: None) if quiet or as_json else (lambda text: console.print(text, soft_wrap=True))
            try:
                about = reproduce(context)
            except EmdcflError as error:
                failed[spec.name] = str(error)
                print(f"warning: {spec.name}: {error}", file=sys.stderr)
                continue
        made.append(about)
        if not as_json:
            if RESULTS in about["files"] and not quiet:
                print_tables(console, build(read_results(context.place)))
            files = ", ".join(name for name in about["files"] if name != "about.json")
            console.print(f"{spec.name} ({scale}, {about['seconds']:.0f} s): {context.place}: {files}", soft_wrap=True)
            for note in about["notes"]:
                console.print(f"  note: {note}", soft_wrap=True)
    if as_json:
        print_json(made)
    if failed:
        name, reason = next(iter(failed.items()))
        raise ClientError(f"{len(failed)} of {len(made) + len(failed)} could not be made: {', '.join(failed)} ({name}: {reason})")


def _list(out: Path, *, as_json: bool) -> None:
    rows = listing(out)
    if as_json:
        print_json(rows)
        return
    places = list(dict.fromkeys(t["hardware"] for row in rows for t in row["took"]))
    lines = []
    for row in rows:
        took = [
            f"{t['scale']} {t['seconds']:.{0 if t['seconds'] >= 10 else 1}f} s ({places.index(t['hardware']) + 1})" for t in row["took"]
        ]
        lines.append((row["label"], row["title"], "\n".join(took) or "–"))
    console = terminal()
    console.print(draw_table(("label", "what it is", "took"), lines))
    for number, place in enumerate(places, 1):
        console.print(f"({number}) on {place}", highlight=False)


def _numbers(text: str, option: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [math.nan]
    if not all(map(math.isfinite, found)):
        raise ConfigError(f"{option} {text}: expected numbers with commas between, as in 0.1,0.5,0.9")
    return found


@app.command("sweep")
def sweep_(
    scenario: Annotated[str, typer.Option(help="See 'emdcfl data list'.")] = "rotated-digits",
    out: Annotated[Path, typer.Option(help="Folder of the embeddings and results.")] = Path("runs/sweep"),
    ratios: Annotated[str, typer.Option(help="Widths of the projection, as shares of the embedding's width.")] = ",".join(map(str, RATIOS)),
    epsilons: Annotated[
        str, typer.Option(help="Tolerances, as in 0.01,0.025.", show_default=f"{len(EPSILONS)} from {EPSILONS[0]:g} to {EPSILONS[-1]:g}")
    ] = ",".join(f"{e:g}" for e in EPSILONS),
    costs: Annotated[str, typer.Option(help="cosine, euclidean, label-aware.")] = "cosine",
    solvers: Annotated[str, typer.Option(help="exact, sinkhorn.")] = "exact,sinkhorn",
    reg: Annotated[float, typer.Option(help="Regularisation of Sinkhorn.")] = 0.1,
    samples: Annotated[int, typer.Option(min=2, metavar="N", help="Largest number of samples per client in a distance.")] = 512,
    seed: Annotated[int, typer.Option(help="The same seed gives the same results.")] = 0,
    scale: Scale = None,
    device: Device = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Set any key of a config, for example --set training.local_epochs=5; repeatable.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train every client once, keep the embeddings, and measure distances in many ways. Later calls train nothing."""
    config = build_config(None, {"scenario": scenario, "scenario.scale": scale, "run.seed": seed, "engine.device": device}, set_ or [])
    settings = [
        Setting(ratio, cost.strip(), solver.strip(), reg, seed)
        for cost in costs.split(",")
        for solver in solvers.split(",")
        for ratio in _numbers(ratios, "--ratios")
    ]
    console = terminal()
    if shared_scenario(config).groups is None:  # said before anybody trains
        raise ConfigError(f"{scenario}: expected a scenario with true groups, which tolerances are measured by, got one without")
    request = SnapshotRequest(config, samples)
    snapshot = take(request, out / "snapshots" / request.key())
    for note in () if as_json else snapshot.notes:
        console.print(f"note: {note}", soft_wrap=True)
    records, failed, tolerances = [], [], _numbers(epsilons, "--epsilons")
    for setting in settings:  # one that a solver gives up on must not cost the others
        try:
            records.append({"scenario": config.scenario.name, **sweep(snapshot, setting, tolerances)})
        except EmdcflError as error:
            failed.append(f"{setting.name}: {error}")
    if not records:
        raise EmdcflError(failed[0])
    write_sweep(records, out)
    kinds = list(dict.fromkeys((r["cost"], r["solver"]) for r in records))
    maps = [(f"{cost}, {solver}", [r for r in records if (r["cost"], r["solver"]) == (cost, solver)]) for cost, solver in kinds]
    write_file(out / "ari.png", [plots.ari_maps(maps, title=f"ARI on {config.scenario.name}")])
    if as_json:
        print_json(records)
    else:
        heads = ("cost", "solver", "ratio", "ARI 1 for", "ARI, auto", "median tau")
        rows = [(r["cost"], r["solver"], f"{r['ratio']:g}", right_tolerances(r), f"{r['auto']:.2f}", f"{r['tau']:.4f}") for r in records]
        console.print(draw_table(heads, rows, left=("cost", "solver")))
        console.print("auto: samples as drawn; a run matches their classes and tells more apart", soft_wrap=True)
        console.print(f"maps and numbers in {out}: ari.png, sweep.csv, sweep.json", soft_wrap=True)
    if failed:
        raise EmdcflError(f"{len(failed)} of {len(settings)} settings have no distances ({'; '.join(failed)})")


def right_tolerances(record: dict[str, object]) -> str:
    """Say for which tolerances the true groups come out.

    Examples
    --------
    >>> right_tolerances({"low": 0.01, "high": 0.05}), right_tolerances({"low": 0.06, "high": 0.05})
    ('0.0100 < ε ≤ 0.0500', 'none')
    """
    low, high = record["low"], record["high"]
    if isinstance(low, float) and isinstance(high, float):
        return f"{low:.4f} < ε ≤ {high:.4f}" if low < high else "none"
    return f"ε > {low:.4f}" if isinstance(low, float) else f"ε ≤ {high:.4f}" if isinstance(high, float) else "any"
