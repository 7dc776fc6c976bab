"""The ``emdcfl`` command: its sub-commands, and how errors reach people (one line, exit code 2)."""

from __future__ import annotations

import logging
import signal
import sys
from typing import Annotated, Any, NoReturn

import click
import typer

import emdcfl
from emdcfl.errors import EmdcflError

app = typer.Typer(
    name="emdcfl",
    help="Clustered federated learning that finds the groups by itself.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


INTERRUPTED = 130


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"emdcfl {emdcfl.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """Clustered federated learning that finds the groups by itself."""


class _Stderr(logging.Handler):
    """Warnings as ``warning: …`` on standard error, notes as they are."""

    def emit(self, record: logging.LogRecord) -> None:
        prefix = "warning: " if record.levelno >= logging.WARNING else ""
        print(f"{prefix}{record.getMessage()}", file=sys.stderr)


def _interrupt(*_: Any) -> NoReturn:
    raise KeyboardInterrupt


def _explain(message: str) -> NoReturn:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 2 an error that was explained, 130 interrupted."""
    from emdcfl.cli import compare, data, federation, init, methods, report, reproduce, run, sweep, use  # noqa: F401  each module adds its commands

    log = logging.getLogger("emdcfl")
    if not log.handlers:
        log.addHandler(_Stderr())
    log.setLevel(logging.INFO)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        code = app(args=arguments, standalone_mode=False)
    except EmdcflError as error:
        _explain(str(error))
    except click.ClickException as error:
        if error.format_message().strip():
            _explain(error.format_message())
        sys.exit(2)  # no arguments: the help is on the screen already
    except (KeyboardInterrupt, click.Abort):
        code = INTERRUPTED
    except BrokenPipeError:
        sys.exit(141)
    if code == INTERRUPTED:  # typer turns the key press into this code by itself
        print("stopped; what was finished is saved, continue with --resume", file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)
