"""The options that describe the user's own data, for every command that reads them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer


def _option(help: str, default: str | bool = False) -> Any:
    return typer.Option(help=help, show_default=default)


def _options(
    label: Annotated[str | None, _option("Own tables: the label column.")] = None,
    client: Annotated[str | None, _option("Own data in one table: the client column.")] = None,
    task: Annotated[
        str | None,
        _option(
            "Own tables: classification, or regression where labels are numbers to predict.",
            "classification, and asks where labels look like measurements",
        ),
    ] = None,
    split: Annotated[str | None, _option("Own tables: random, or time:COLUMN (oldest rows train, newest test).", "random")] = None,
    split_column: Annotated[str | None, _option("Own tables: the column that says train, val or test.")] = None,
    group: Annotated[
        str | None,
        _option(
            "Own data: rows with the same value of this column (a patient, machine, document) stay in one split; "
            "for images a regular expression of file names."
        ),
    ] = None,
    merge_labels: Annotated[
        bool,
        typer.Option("--merge-labels", help="Own data: labels that differ only in capitals and spaces ('BENIGN ', benign) are one."),
    ] = False,
    label_map: Annotated[str | None, _option("Own data: labels to rename, OLD=NEW,… as in 0=benign,1=malignant.")] = None,
    drop: Annotated[str | None, _option("Own tables: columns A,B,… that are no features.")] = None,
    only: Annotated[str | None, _option("Own tables: the columns A,B,… that are features.")] = None,
    date: Annotated[
        str | None, _option("Own tables: columns A,B:FORMAT,… to read as dates (days since 1970), as in visit,born:%d/%m/%Y.")
    ] = None,
    missing: Annotated[str | None, _option("Own tables: further marks of missing values, as in -999,refused.")] = None,
    gaps: Annotated[
        str | None, _option("Own tables: mean (a missing number becomes the pooled mean, and a column says so) or drop-rows.", "mean")
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
