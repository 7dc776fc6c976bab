"""``emdcfl reproduce``: the paper's tables and figures, one command each."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from emdcfl.cli.app import app
from emdcfl.cli.compare import Screen
from emdcfl.cli.show import terminal
from emdcfl.core.errors import ClientError, ConfigError, EmdcflError, nearest
from emdcfl.paper.reproduce import SCALES, Context, chosen, listing, reproduce
from emdcfl.runs.config import Config, override
from emdcfl.studies.compare import parse_seeds


@app.command("reproduce")
def reproduce_(
    names: Annotated[list[str] | None, typer.Argument(help="Labels of the paper, or all; see --list.", show_default=False)] = None,
    scale: Annotated[str, typer.Option(help="smoke (does it run?), small or paper.")] = "small",
    seeds: Annotated[str | None, typer.Option(help="As in 0,1,2.", show_default="0; at paper scale 0,1,2")] = None,
    out: Annotated[Path, typer.Option(help="Folder; runs and embeddings in it are shared.")] = Path("runs/reproduce"),
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time, each in a process of its own.")] = 1,
    time_limit: Annotated[float | None, typer.Option(help="Seconds after which no run begins.", show_default=False)] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    precision: Annotated[str, typer.Option(help="fp32, tf32 or bf16, for training; see engine.precision.")] = "fp32",
    random_weights: Annotated[bool, typer.Option("--random-weights", help="Larger networks start untrained: a smoke test only.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="Say what there is, and how long it took where.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only what was written.")] = False,
) -> None:
    """Make tables and figures of the paper, at any scale; what is there is not made again."""
    if list_:
        _list(out, as_json=as_json)
        return
    if not names:
        raise ConfigError("expected the label of a table or figure, or all, got none; 'emdcfl reproduce --list' names them")
    if scale not in SCALES:
        raise ConfigError(f"unknown scale {scale!r}: {nearest(scale, SCALES)}")
    console = terminal()
    numbers = SCALES[scale].seeds if seeds is None else tuple(parse_seeds(seeds))
    engine = override(Config(), {"engine.device": device, "engine.precision": precision}).engine
    made = []
    failed: dict[str, str] = {}
    for spec in chosen(names):
        with Screen(console, quiet=quiet or as_json) as screen:
            context = Context(spec, SCALES[scale], out, numbers, engine, jobs, time_limit, random_weights, watch=screen)
            context.say = (lambda text: None) if quiet or as_json else (lambda text: console.print(text, soft_wrap=True))
            try:
                about = reproduce(context)
            except EmdcflError as error:
                failed[spec.name] = str(error)
                print(f"warning: {spec.name}: {error}", file=sys.stderr)
                continue
        made.append(about)
        if not as_json:
            files = ", ".join(name for name in about["files"] if name != "about.json")
            console.print(f"{spec.name} ({scale}, {about['seconds']:.0f} s): {context.place}: {files}", soft_wrap=True)
            for note in about["notes"]:
                console.print(f"  note: {note}", soft_wrap=True)
    if as_json:
        typer.echo(json.dumps(made, indent=2, ensure_ascii=False))
    if failed:
        name, reason = next(iter(failed.items()))
        raise ClientError(f"{len(failed)} of {len(made) + len(failed)} could not be made: {', '.join(failed)} ({name}: {reason})")


def _list(out: Path, *, as_json: bool) -> None:
    rows = listing(out)
    if as_json:
        typer.echo(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("label", "what it is", "took"):
        table.add_column(column, overflow="fold")
    for row in rows:
        took = "; ".join(f"{t['scale']} {t['seconds']:.{0 if t['seconds'] >= 10 else 1}f} s on {t['hardware']}" for t in row["took"])
        table.add_row(row["label"], row["title"], took or "–")
    terminal().print(table)
