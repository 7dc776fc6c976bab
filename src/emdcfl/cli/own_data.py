"""The options that describe the user's own data, for every command that reads them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Annotated, Any

import typer

PANEL = "Your own data, with --data"
"""Heading of these options in a command's help."""


def _option(help: str, default: str | bool = False) -> Any:
    return typer.Option(help=help, show_default=default, rich_help_panel=PANEL)


def _options(
    label: Annotated[str | None, _option("Tables: the label column.")] = None,
    client: Annotated[str | None, _option("One table: the column that names the site of a row.")] = None,
    leave_out: Annotated[str | None, _option("Leave out the sites A,B,…")] = None,
    task: Annotated[
        str | None,
        _option(
            "Tables: classification, or regression if labels are numbers to predict.",
            "classification; if labels look like measurements, the command stops and asks",
        ),
    ] = None,
    split: Annotated[str | None, _option("Tables: random, or time:COLUMN (oldest rows train, newest test).", "random")] = None,
    split_column: Annotated[str | None, _option("Tables: the column that says train, val or test.")] = None,
    group: Annotated[
        str | None,
        _option(
            "Rows with the same value of this column (a patient, a machine) stay in one split; "
            "for images, files stay together if this regular expression finds the same text in their names."
        ),
    ] = None,
    merge_labels: Annotated[
        bool,
        typer.Option(
            "--merge-labels", help="Labels that differ only in capitals and spaces ('BENIGN ', benign) are one.", rich_help_panel=PANEL
        ),
    ] = False,
    label_map: Annotated[str | None, _option("Rename labels: OLD=NEW,… as in 0=benign,1=malignant.")] = None,
    drop: Annotated[str | None, _option("Tables: leave out the columns A,B,…")] = None,
    only: Annotated[str | None, _option("Tables: use the columns A,B,… and no others.")] = None,
    date: Annotated[
        str | None, _option("Tables: read columns A,B:FORMAT,… as dates (days since 1970), for example visit,born:%d/%m/%Y.")
    ] = None,
    missing: Annotated[str | None, _option("Tables: further marks of missing values, for example -999,refused.")] = None,
    gaps: Annotated[
        str | None,
        _option("Tables: mean (a missing number becomes the mean of all rows, and an extra column marks it) or drop-rows.", "mean"),
    ] = None,
) -> None:
    """Declare the options; this is never called."""


def own_data(*, after: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command these options behind its parameter ``after``; it gets those that were given as its first parameter, a dict."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        added = inspect.signature(_options, eval_str=True).parameters
        _, *own = inspect.signature(command, eval_str=True).parameters.values()

        @wraps(command)
        def run(**given: Any) -> None:
            about = {name: given.pop(name) for name in added}
            command({name: value for name, value in about.items() if value not in (None, False)}, **given)

        place = 1 + [parameter.name for parameter in own].index(after)
        run.__signature__ = inspect.Signature([*own[:place], *added.values(), *own[place:]])  # type: ignore[attr-defined]
        return run

    return decorate


LISTS = ("drop", "date", "missing", "leave_out")
"""Options that flags add to where a config has them already; a flag replaces any other."""


def add_flags(options: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what flags make of a config's options of own files, of those that flags name."""
    from emdcfl.data.own.tables import read_list

    found = dict(given)
    for name in given.keys() & options.keys() & set(LISTS):
        more = read_list(given[name], f"--{name.replace('_', '-')}")
        again = {entry.partition(":")[0] for entry in more} if name == "date" else set(more)
        kept = [entry for entry in read_list(options[name], name) if (entry.partition(":")[0] if name == "date" else entry) not in again]
        found[name] = [*kept, *more]
    return found
