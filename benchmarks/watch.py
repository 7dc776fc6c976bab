"""Whoever measures time must not measure a fallback: a warning that the GPU engine goes on more slowly ends the measurement.

    with refusing_fallbacks():
        …

Imports the names of those warnings from the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from emdcfl.engines.cuda.engine import FALLBACKS


class FallbackError(RuntimeError):
    """The engine gave up on what was to be measured."""


class _Watch(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        said = record.getMessage()
        if said.startswith(FALLBACKS):
            raise FallbackError(said)


@contextmanager
def refusing_fallbacks() -> Iterator[None]:
    """Raise ``FallbackError`` from inside the engine where it warns of a fallback, whatever level the log has."""
    log, watch = logging.getLogger("emdcfl"), _Watch(logging.WARNING)
    before = log.level
    if not log.isEnabledFor(logging.WARNING):
        log.setLevel(logging.WARNING)
    log.addHandler(watch)
    try:
        yield
    finally:
        log.removeHandler(watch)
        log.setLevel(before)
