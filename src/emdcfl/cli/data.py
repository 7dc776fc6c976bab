"""``emdcfl data list | show | check``: scenarios, and the user's own data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from emdcfl.cli.app import AsJson, Scale, answer, app, print_json
from emdcfl.cli.own_data import add_flags, own_data
from emdcfl.cli.show import draw_table, tell
from emdcfl.core.errors import ConfigError, DataError
from emdcfl.runs.watching.progress import terminal

if TYPE_CHECKING:
    from rich.console import Console

    from emdcfl.data.own import FolderReport
    from emdcfl.data.own.checking.page import Block, DataPage

data = typer.Typer(help="List scenarios, and check your own data.", no_args_is_help=True)
app.add_typer(data, name="data")

MAX_ROWS = 24
"""Rows of a table on the terminal; the HTML page has more."""
PREFIX = {"problem": "problem: ", "note": "note: "}


@data.command("list")
def list_(as_json: AsJson = False) -> None:
    """List the scenarios and their options."""
    from emdcfl.data import scenarios

    known = [{"name": n, "summary": scenarios.describe(n), "options": _plain(scenarios.options(n))} for n in scenarios.names()]
    if as_json:
        print_json(known)
        return
    rows = [(str(s["name"]), str(s["summary"]), ", ".join(s["options"])) for s in known]
    terminal().print(draw_table(("scenario", "what it is", "options (--set scenario.OPTION=…)"), rows))


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    """JSON values; a required option has no default."""
    return {k: v if isinstance(v, (str, int, float, bool, list, tuple, type(None))) else "required" for k, v in options.items()}


@data.command()
def show(
    scenario: Annotated[str, typer.Argument(help="See 'emdcfl data list'.")],
    out: Annotated[Path, typer.Option(help="Picture to write.")] = Path("grid.png"),
    scale: Scale = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Set a scenario option, for example --set clients_per_group=3; repeatable.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Draw samples of every group: rows are groups, columns samples of several clients."""
    from emdcfl.cli.run import build_config
    from emdcfl.data import scenarios
    from emdcfl.data.picture import grid

    settings = [s if s.startswith("scenario.") else f"scenario.{s}" for s in set_ or []]
    config = build_config(None, {"scenario": scenario, "scenario.scale": scale}, settings)
    built = scenarios.build(scenario, **config.scenario.options)
    written = str(grid(built, out))
    lines = [*(f"note: {note}" for note in built.notes), f"wrote {written}"]
    answer({"picture": written, "notes": list(built.notes)}, lines, as_json=as_json)


@data.command()
@own_data(after="folder")
def check(
    own: dict[str, Any],
    folder: Annotated[Path, typer.Argument(help="Folder of sites, one table with a client column, or a config that --fix wrote.")],
    html: Annotated[Path | None, typer.Option(help="Also write the page as HTML, to print and sign.", show_default=False)] = None,
    fix: Annotated[
        Path | None, typer.Option(help="Write repairs into this file (TOML), which 'emdcfl run' and this command take.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Report what a run would read from a folder, and every problem in it, on one page to sign."""
    from emdcfl.data.own.checking.check import check_options
    from emdcfl.data.own.checking.page import data_page

    place, options = folder, own
    if folder.suffix == ".toml" and folder.is_file():
        from emdcfl.runs.config import own_files

        recipe = own_files(folder)
        place, options = Path(recipe.pop("path")), recipe | add_flags(recipe, own)
    report = check_options(place, options)
    if fix is None:
        show_report(report, html, as_json=as_json)
        return
    text, repaired = _fix(place, options, fix)
    if as_json:
        print_json(report.as_dict() | {"fix": str(fix)})
    else:
        show_data_page(terminal(), data_page(report))
        _show_fix(terminal(), text, repaired, fix)
    _finish(repaired, html, f", with the repairs in {fix}", as_json=as_json)


def show_data_page(console: Console, page: DataPage) -> None:
    """Print the page, within the width of the terminal; the headline comes last, where a reader looks."""
    tell(console, Text.assemble((page.title, "bold")))
    if page.facts:
        tell(console, " · ".join(f"{name}: {value}" for name, value in page.facts))
    for block in page.blocks:
        if block.kind != "sign":  # nobody signs a terminal
            _show(console, block)
    if not any(block.kind == "problem" for block in page.blocks):  # an error says it otherwise
        console.print()
        console.print(Text(page.headline, "bold"))


def _show(console: Console, block: Block) -> None:
    console.print()
    if block.kind not in PREFIX:
        console.print(Text(block.title, "bold"))
    for sentence in block.sentences:
        tell(console, f"{PREFIX.get(block.kind, '')}{sentence}")
    if not block.rows:
        return
    text = [head for i, head in enumerate(block.heads) if i not in block.right]
    console.print(draw_table(block.heads, block.rows[:MAX_ROWS], left=text))
    if len(block.rows) > MAX_ROWS:
        console.print(f"{len(block.rows) - MAX_ROWS} more with --html FILE or --json")


def show_report(report: FolderReport, html: Path | None, hint: str = "", *, as_json: bool = False) -> None:
    """Print the page and a hint, write the page as HTML where asked, and fail where a run would."""
    from emdcfl.data.own.checking.page import data_page

    if as_json:
        print_json(report.as_dict())
    else:
        show_data_page(terminal(), data_page(report))
        if hint:
            terminal().print(hint, soft_wrap=True)
    _finish(report, html, as_json=as_json)


def _finish(report: FolderReport, html: Path | None, with_: str = "", *, as_json: bool) -> None:
    from emdcfl.data.own.checking.page import headline

    if html is not None:
        from emdcfl.report.page import write_data_page

        write_data_page(report, html)
        if not as_json:
            terminal().print(f"page: {html}", soft_wrap=True)
    if not report.ok and as_json:
        raise typer.Exit(2)
    if not report.ok:
        raise DataError(f"{report.path}: {headline(report)}{with_}")


def _fix(place: Path, options: Mapping[str, Any], out: Path) -> tuple[str, FolderReport]:
    """Write the repairs; return them, and what the check finds with them."""
    from emdcfl.data.own.checking.check import check_options
    from emdcfl.data.own.checking.fix import propose, write_recipe

    if out.exists():
        raise ConfigError(f"{out} exists; choose another file for --fix, or remove it")
    if not out.parent.is_dir():
        raise ConfigError(f"{out}: the folder {out.parent} does not exist; make it first, or choose another --fix")
    repaired, reasons, report = propose(lambda tried: check_options(place, tried), options)
    text = write_recipe(str(place.resolve()), repaired, reasons)
    out.write_text(text, encoding="utf-8")
    return text, report


def _show_fix(console: Console, text: str, report: FolderReport, out: Path) -> None:
    """Print the repairs, and say what the check finds with them."""
    from emdcfl.data.own.checking.page import headline

    console.print()
    console.print(Text(f"repairs in {out}", "bold"))
    console.print(text, soft_wrap=True, end="")
    console.print()
    for problem in report.errors:
        tell(console, f"problem: {problem}")
    if report.ok:
        tell(console, f"with them: {headline(report)}; next: emdcfl data check {out}, then emdcfl run {out}")
