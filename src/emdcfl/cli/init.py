"""``emdcfl init``: a commented config to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from emdcfl.cli.app import app
from emdcfl.core.errors import ConfigError
from emdcfl.runs.config import template


@app.command()
def init(path: Annotated[Path, typer.Argument(help="File to write.")] = Path("emdcfl.toml")) -> None:
    """Write a commented config to start from."""
    if path.exists():
        raise ConfigError(f"{path} exists already; choose another name")
    try:
        path.write_text(template(), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; choose another place") from error
    typer.echo(f"wrote {path}; edit it, then: emdcfl run {path}")
