"""``emdcfl init`` and ``emdcfl methods``: a commented config to start from, and what to choose from."""

from __future__ import annotations

import inspect
import json
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from emdcfl.cli.app import AsJson, answer, app
from emdcfl.cli.show import draw_table
from emdcfl.core.checks import describe
from emdcfl.core.errors import ConfigError
from emdcfl.methods import METHODS, Method, find
from emdcfl.methods.base import PRESETS, preset_values
from emdcfl.runs.config import template
from emdcfl.runs.watching.progress import terminal


def about(cls: type[Method]) -> dict[str, Any]:
    """Return a method's family, fields with type and default, and docstrings."""
    hints = get_type_hints(cls)
    return {
        "name": cls.name,
        "family": cls.family,
        "needs_k": cls.needs_k,
        "citation": cls.citation,
        "fields": {
            f.name: {"type": describe(hints[f.name]), "default": None if f.default is MISSING else f.default}
            for f in fields(cls)  # type: ignore[arg-type]
        },
        **{preset: dict(preset_values(cls, preset)) for preset in PRESETS},
        "description": inspect.getdoc(inspect.getmodule(cls)) or "",
        "parameters": "\n\n".join(inspect.cleandoc(c.__doc__) for c in cls.__mro__[:-1] if c.__doc__),
    }


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="One method, for its fields and formulas.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """List the methods, or describe one."""
    chosen = [find(name)] if name is not None else [METHODS[key] for key in sorted(METHODS)]
    known = [about(cls) for cls in chosen]
    if as_json:
        typer.echo(json.dumps(known[0] if name is not None else known, indent=2))
        return
    console = terminal()
    if name is None:
        rows = [(m["name"], m["family"], "yes" if m["needs_k"] else "no", m["citation"]) for m in known]
        console.print(draw_table(("method", "family", "needs K", "source"), rows))
        console.print("'emdcfl methods NAME' shows a method's fields and formulas.")
        return
    typer.echo(known[0]["description"])
    typer.echo("\n" + known[0]["parameters"])
    if own := known[0]["fields"]:
        lines = [(key, value["type"], "–" if value["default"] is None else str(value["default"])) for key, value in own.items()]
        console.print()
        console.print(draw_table(("field", "type", "default"), lines, title="Set with --set method.FIELD=VALUE"))
    for preset in PRESETS:
        said = ", ".join(f"{key} = {value}" for key, value in known[0][preset].items())
        console.print(f'preset = "{preset}" {"sets " + said if said else "is the default"}', markup=False, highlight=False)


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="File to write.")] = Path("emdcfl.toml"),
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of configs, for editors, and write nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a commented config to start from."""
    if schema:
        from emdcfl.runs.config_schema import config_schema

        typer.echo(json.dumps(config_schema(), indent=1, sort_keys=True, allow_nan=False))
        return
    if path.exists():
        raise ConfigError(f"{path} exists already; choose another name")
    try:
        path.write_text(template(), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; choose another place") from error
    answer({"config": str(path)}, [f"wrote {path}; edit it, then: emdcfl run {path}"], as_json=as_json)
