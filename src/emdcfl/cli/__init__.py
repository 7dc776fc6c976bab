"""The ``emdcfl`` command; each module adds its sub-commands to ``app.py``."""

from __future__ import annotations

import time

from emdcfl.runs import signals

__all__ = ["STARTED", "main"]

STARTED = time.perf_counter()


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit; see ``emdcfl.cli.app.main``."""
    signals.end_at_once()  # the imports below take seconds, and nothing is saved or started before they are done
    from emdcfl.cli.app import main as start

    start(arguments)
