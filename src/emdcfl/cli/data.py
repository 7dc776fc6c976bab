"""``emdcfl data list | show | check``: scenarios, and the user's own data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from emdcfl.cli.app import (
    DateColumns,
    DropColumns,
    GapsOption,
    GroupOption,
    LabelMap,
    MergeLabels,
    MissingMarks,
    OnlyColumns,
    SplitColumn,
    SplitOption,
    app,
)
from emdcfl.cli.show import tell
from emdcfl.core.errors import DataError
from emdcfl.core.units import plural
from emdcfl.runs.progress import terminal

data = typer.Typer(help="Scenarios, and your own data.", no_args_is_help=True)
app.add_typer(data, name="data")


@data.command("list")
def list_(as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False) -> None:
    """List the scenarios and their options."""
    from emdcfl.data import scenarios

    known = [{"name": n, "summary": scenarios.describe(n), "options": _plain(scenarios.options(n))} for n in scenarios.names()]
    if as_json:
        typer.echo(json.dumps(known, indent=2, ensure_ascii=False))
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("scenario", "what it is", "options (--set scenario.OPTION=…)"):
        table.add_column(column, overflow="fold")
    for s in known:
        table.add_row(str(s["name"]), str(s["summary"]), ", ".join(s["options"]))
    terminal().print(table)


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    """JSON values; a required option has no default."""
    return {k: v if isinstance(v, (str, int, float, bool, list, tuple, type(None))) else "required" for k, v in options.items()}


@data.command()
def show(
    scenario: Annotated[str, typer.Argument(help="See 'emdcfl data list'.")],
    out: Annotated[Path, typer.Option(help="Picture to write.")] = Path("grid.png"),
    scale: Annotated[str | None, typer.Option(help="smoke, small or paper, where the scenario has scales.", show_default=False)] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Scenario option, as in --set clients_per_group=3; repeatable.")] = None,
) -> None:
    """Draw samples of every group: rows are groups, columns samples of several clients."""
    from emdcfl.cli.run import build_config
    from emdcfl.data import scenarios
    from emdcfl.data.picture import grid

    settings = [s if s.startswith("scenario.") else f"scenario.{s}" for s in set_ or []]
    config = build_config(None, {"scenario": scenario, "scenario.scale": scale}, settings)
    built = scenarios.build(scenario, **config.scenario.options)
    for note in built.notes:
        typer.echo(f"note: {note}")
    typer.echo(f"wrote {grid(built, out)}")


@data.command()
def check(
    folder: Annotated[Path, typer.Argument(help="Folder of sites, or one table with a client column.")],
    label: Annotated[str | None, typer.Option(help="Label column of tables.", show_default=False)] = None,
    client: Annotated[str | None, typer.Option(help="Client column of one shared table.", show_default=False)] = None,
    split: SplitOption = None,
    split_column: SplitColumn = None,
    group: GroupOption = None,
    merge_labels: MergeLabels = False,
    label_map: LabelMap = None,
    drop: DropColumns = None,
    only: OnlyColumns = None,
    date: DateColumns = None,
    missing: MissingMarks = None,
    gaps: GapsOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Report what a run would read from a folder, and every problem in it."""
    from emdcfl.data.own import check_folder
    from emdcfl.data.own.cleaning import Cleaning
    from emdcfl.data.own.splitting import SplitRule

    rule, cleaning = SplitRule.of(split, split_column, group), Cleaning.of(merge_labels, label_map, drop, only, date, missing, gaps)
    report = check_folder(folder, label=label, client=client, rule=rule, cleaning=cleaning)
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=2, ensure_ascii=False))
        raise typer.Exit(0 if report.ok else 2)
    console = terminal()
    if report.clients:
        table = Table(
            box=box.SIMPLE_HEAD,
            pad_edge=False,
            title=f"{plural(len(report.clients), 'client')} with {report.kind.removesuffix('s')}s",
            title_justify="left",
        )
        for column in ("client", "train", "val", "test", "classes"):
            table.add_column(column, justify="left" if column in ("client", "classes") else "right", overflow="fold")
        for c in report.clients:
            table.add_row(c.name, *(str(c.sizes.get(s, 0)) for s in ("train", "val", "test")), _balance(c.labels))
        console.print(table)
    for note in report.notes:
        tell(console, f"note: {note}")
    for problem in report.errors:
        tell(console, f"problem: {problem}")
    if not report.ok:
        raise DataError(f"{folder}: {plural(len(report.errors), 'problem')} to fix before a run")
    console.print("ready to run; read the notes first" if report.notes else "ready to run")


def _balance(labels: dict[str, int]) -> str:
    """Write the number of samples per class: each where there are few classes, else the range."""
    if len(labels) <= 6:
        return ", ".join(f"{name}: {count}" for name, count in labels.items())
    low, high = min(labels.values()), max(labels.values())
    return f"{len(labels)} classes, {low if low == high else f'{low} to {high}'} samples each"
