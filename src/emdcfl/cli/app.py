"""The ``emdcfl`` command: sub-commands, exit codes, and errors as one line."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import sys
from collections.abc import Iterable
from typing import Annotated, Any, NoReturn

import click
import typer

import emdcfl
from emdcfl.core.errors import ConfigError, EmdcflError
from emdcfl.core.units import escaped
from emdcfl.runs import signals

app = typer.Typer(
    name="emdcfl",
    help="Clustered federated learning that finds the groups by itself.",
    no_args_is_help=True,
    suggest_commands=False,  # click suggests one already
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


TrustModel = Annotated[
    bool, typer.Option("--trust-model", help="If the run directory names a Python function as its model, trust and run it.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.", show_default="auto")]
Jobs = Annotated[int, typer.Option(min=1, metavar="N", help="Runs at a time, each in a process of its own.")]
Scale = Annotated[str | None, typer.Option(help="Size of the scenario, if it has sizes: smoke, small or paper.", show_default=False)]
TimeLimit = Annotated[float | None, typer.Option(help="Start no further run after this many seconds.", show_default=False)]


def answer(found: Any, lines: Iterable[str], *, as_json: bool) -> None:
    """Print what a command found, as JSON or as lines for people."""
    if as_json:
        print_json(found)
    else:
        typer.echo(escaped("\n".join(lines), keep="\n\t"))


def print_json(found: Any) -> None:
    text = json.dumps(found, indent=2, ensure_ascii=False)
    typer.echo(text.encode("utf-8", "backslashreplace").decode())  # a path may hold bytes that are no text: JSON has an escape for them


USER_ERROR = 2
INTERRUPTED = 130
TERMINATED = 143
"""Exit codes: a user error, Ctrl-C, SIGTERM. After the last two ``--resume`` continues the run."""


def complete_methods(incomplete: str) -> list[str]:
    """Complete names of methods; after commas and in ``+ft`` too."""
    from emdcfl.methods import METHODS

    done, comma, last = incomplete.rpartition(",")
    return [f"{done}{comma}{name}" for name in sorted(METHODS) if name.startswith(last)]


def complete_scenarios(incomplete: str) -> list[str]:
    from emdcfl.data import scenarios

    return [name for name in sorted(scenarios.names()) if name.startswith(incomplete)]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"emdcfl {emdcfl.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """Clustered federated learning that finds the groups by itself."""


def needs_flower() -> None:
    """Say how to install Flower, where it is missing."""
    try:
        import flwr  # noqa: F401
    except ImportError as error:
        raise ConfigError("this needs Flower, which is not installed; install it with: pip install 'emdcfl[flower]'") from error


class _Stderr(logging.Handler):
    """Warnings as ``warning: …`` on standard error, notes as they are."""

    def emit(self, record: logging.LogRecord) -> None:
        prefix = "warning: " if record.levelno >= logging.WARNING else ""
        print(f"{prefix}{escaped(record.getMessage(), keep=chr(10))}", file=sys.stderr)


def say_error(message: str) -> None:
    print(f"error: {escaped(' '.join(message.split()))}", file=sys.stderr)


def _explain(message: str) -> NoReturn:
    say_error(message)
    sys.exit(USER_ERROR)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 2 a user error, 130 interrupted (Ctrl-C), 143 terminated (SIGTERM)."""
    # huge pages: states and activations are megabytes each, and allocating them in pages of 4 KiB costs more than adding them up
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch reads it on import, here and in worker processes
    os.environ["MPLBACKEND"] = "agg"  # commands draw to files; "!emdcfl" in a notebook inherits a backend that its environment may lack
    given = sys.argv[1:] if arguments is None else arguments
    from emdcfl.cli import federation, node  # noqa: F401  each module adds its commands

    if given[:1] not in (["federation"], ["node"]):  # which do without torch
        from emdcfl.cli import compare, data, run, start, studies, use  # noqa: F401
    gc.enable()

    log = logging.getLogger("emdcfl")
    if not log.handlers:
        log.addHandler(_Stderr())
    log.setLevel(logging.INFO)
    signals.install()
    try:
        code = app(args=arguments, prog_name="emdcfl", standalone_mode=False)
    except EmdcflError as error:
        _explain(str(error))
    except click.ClickException as error:
        if error.format_message().strip():
            context = error.ctx if isinstance(error, click.UsageError) else None
            _explain(error.format_message().rstrip(".") + (f"; see '{context.command_path} --help'" if context is not None else ""))
        sys.exit(2)  # no arguments: the help is on the screen already
    except (KeyboardInterrupt, click.Abort):
        code = INTERRUPTED
    except BrokenPipeError:
        sys.exit(141)
    except OSError as error:  # a full or read-only disk, or a file without read permission
        _explain(f"{error.filename or 'input/output'}: {error.strerror or error}; fix the problem and retry")
    if code == INTERRUPTED:  # typer turns the key press into this code by itself
        if signals.received() == signal.SIGTERM:
            code = TERMINATED
        print(
            "stopped; finished work is saved: continue with --resume (run) or the same command (compare, sweep, reproduce)",
            file=sys.stderr,
        )
    sys.exit(code if isinstance(code, int) else 0)
