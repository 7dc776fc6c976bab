"""``emdcfl report``: an HTML page of a run or a comparison."""

from __future__ import annotations

import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from emdcfl.cli.app import TrustModel, app
from emdcfl.core.errors import EmdcflError


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="Run directory, or folder of a comparison.")],
    out: Annotated[Path | None, typer.Option(help="File to write.", show_default="report.html in the folder")] = None,
    theory: Annotated[
        bool | None, typer.Option(help="Simulated runs: evaluate what merging clusters could cost.", show_default="where it takes seconds")
    ] = None,
    trust_model: TrustModel = False,
    open_: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
) -> None:
    """Write one self-contained page: verdict, map, heat map, margins, accuracy, cost."""
    from emdcfl.paper.merging import write_merging, write_quick_merging
    from emdcfl.report import write_report
    from emdcfl.runs.result import load

    if theory:
        write_merging(load(folder, trust_model=trust_model))
    elif theory is None and (folder / "summary.json").is_file():
        with suppress(EmdcflError):  # a page needs no models: those of an unfinished run may not be written yet
            write_quick_merging(load(folder, trust_model=trust_model))
    place = write_report(folder, out)
    typer.echo(str(place))
    if open_:
        webbrowser.open(place.resolve().as_uri())
