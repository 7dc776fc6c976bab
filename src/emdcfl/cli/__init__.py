"""The ``emdcfl`` command; each module adds its sub-commands to ``app.py``."""

from __future__ import annotations

import gc
import time

from emdcfl.runs import signals

__all__ = ["STARTED", "main"]

STARTED = time.perf_counter()


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit; see ``emdcfl.cli.app.main``."""
    signals.end_at_once()  # the imports below take seconds, and nothing is saved or started before they are done
    gc.disable()  # until they are done: looking for garbage among what they make takes a tenth of that time
    from emdcfl.cli.app import main as start

    start(arguments)
